"""The PEM files of TLS: read, checked, and read again when they change.

Whoever renews a certificate writes files while the server runs, perhaps not all of them at once.
What is served is therefore always a set that was checked as a whole: a set that is wrong is told
once and the one before stays.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import cached_property
from pathlib import Path

from kvledger.errors import SettingRefused

_BEGIN_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_BEGIN_KEY = (
    b"-----BEGIN PRIVATE KEY-----",
    b"-----BEGIN RSA PRIVATE KEY-----",
    b"-----BEGIN EC PRIVATE KEY-----",
)
_BEGIN_LOCKED_KEY = (b"-----BEGIN ENCRYPTED PRIVATE KEY-----", b"Proc-Type: 4,ENCRYPTED")
_END_CERTIFICATE = b"-----END CERTIFICATE-----"
# Keys that gRPC's TLS library serves, by their identifiers in a certificate: RSA, P-256, P-384.
# With any other (Ed25519, P-521), it takes the files and then fails every handshake.
_KEY_KINDS = tuple(
    bytes.fromhex(identifier)
    for identifier in ("06092a864886f70d010101", "06082a8648ce3d030107", "06052b81040022")
)
# No PEM file is larger; a device or a log named by mistake is not read to its end.
_FILE_BYTES_MAX = 1 << 20

_Stamp = tuple[tuple[int, int, int, int] | None, ...]


class CertificateRefused(SettingRefused):
    """Files that cannot be used. `kind` is one word for the log; the message has the option."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


# A certificate whose end is nearer than this, or than this share of its life, should have been
# renewed by now: those of days are renewed at two thirds of them.
_SOON = timedelta(days=14)
_SOON_SHARE = 0.25


@dataclass(frozen=True)
class Validity:
    """From when to when a certificate and its whole chain hold."""

    begins: datetime
    ends: datetime

    def why_not_well(self, now: datetime | None = None) -> str | None:
        """expired, expires_soon or not_yet_valid; None if all is well."""
        now = now or datetime.now(timezone.utc)
        if now >= self.ends:
            return "expired"
        if now < self.begins:
            return "not_yet_valid"
        if self.ends - now < min(_SOON, (self.ends - self.begins) * _SOON_SHARE):
            return "expires_soon"
        return None


@dataclass(frozen=True)
class Certificates:
    """What a set of files held: PEM, checked. `client_ca` asks clients for certificates."""

    chain: bytes
    key: bytes
    client_ca: bytes | None

    @cached_property
    def validity(self) -> Validity:
        """Of the certificate and those that come with it."""
        from cryptography import x509  # takes a while to import, and most servers have no TLS

        found = x509.load_pem_x509_certificates(self.chain)
        return Validity(
            max(certificate.not_valid_before_utc for certificate in found),
            min(certificate.not_valid_after_utc for certificate in found),
        )


class CertificateFiles:
    """The files and what was last good in them. Belongs to one thread."""

    def __init__(
        self, chain: Path, key: Path, client_ca: Path | None, ca_option: str = "--tls-client-ca"
    ) -> None:
        """Raises CertificateRefused if the files cannot be used as they are.

        `ca_option` is the setting that `client_ca` comes from.
        """
        self._ca_option = ca_option
        self._chain, self._key, self._client_ca = chain, key, client_ca
        self._stamp = self._look()
        self.current = self._read()

    def refresh(self) -> bool:
        """Reads files that changed since; whether `current` is new.

        Raises CertificateRefused once per change, and keeps `current`, if they cannot be used.
        """
        stamp = self._look()
        if stamp == self._stamp:
            return False
        # Taken before reading: what changes meanwhile is seen the next time.
        self._stamp = stamp
        found = self._read()
        new = found != self.current
        self.current = found
        return new

    def _look(self) -> _Stamp:
        """What tells one state of the files from another without reading them."""
        stamps: list[tuple[int, int, int, int] | None] = []
        for path in (self._chain, self._key, self._client_ca):
            found = None
            if path is not None:
                with contextlib.suppress(OSError):
                    status = path.stat()
                    # A renewed file often keeps its size; a secret's link leads to another inode.
                    found = (status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode)
            stamps.append(found)
        return tuple(stamps)

    def _read(self) -> Certificates:
        chain = _pem("--tls-cert", self._chain, (_BEGIN_CERTIFICATE,), "certificate")
        key = _pem("--tls-key", self._key, (*_BEGIN_KEY, *_BEGIN_LOCKED_KEY), "private key")
        if any(mark in key for mark in _BEGIN_LOCKED_KEY):
            raise CertificateRefused(
                "locked_key",
                f"--tls-key {self._key}: the key is protected by a passphrase that nobody can type "
                f"here; give one without",
            )
        _check_pair(self._chain, chain, self._key, key)
        client_ca = None
        if self._client_ca is not None:
            client_ca = _pem(self._ca_option, self._client_ca, (_BEGIN_CERTIFICATE,), "certificate")
            _check_authority(self._ca_option, self._client_ca, client_ca)
        found = Certificates(chain, key, client_ca)
        try:
            _ = found.validity
        except ValueError:
            raise CertificateRefused(
                "unusable", f"--tls-cert {self._chain}: a certificate in it cannot be read"
            ) from None
        return found


def _pem(option: str, path: Path, marks: tuple[bytes, ...], what: str) -> bytes:
    """The bytes of a file that must hold PEM with one of these lines."""
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise CertificateRefused("missing", f"{option} {path}: there is no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or "cannot be read"
        raise CertificateRefused("unreadable", f"{option} {path}: {reason}") from None
    if len(data) > _FILE_BYTES_MAX or not any(mark in data for mark in marks):
        raise CertificateRefused("not_pem", f"{option} {path}: it holds no {what} in PEM")
    return data


def _check_pair(chain_path: Path, chain: bytes, key_path: Path, key: bytes) -> None:
    """Raises CertificateRefused unless the key is the certificate's."""
    _check_authority("--tls-cert", chain_path, chain)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        with _as_file(chain) as chain_name, _as_file(key) as key_name:
            context.load_cert_chain(chain_name, key_name, password=_no_password)
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            raise CertificateRefused(
                "key_mismatch",
                f"--tls-key {key_path}: it is not the key of the certificate in {chain_path}",
            ) from None
        if error.reason in (None, "PEM_LIB"):
            raise CertificateRefused(
                "not_pem", f"--tls-key {key_path}: it holds no private key in PEM"
            ) from None
        reason = error.reason.lower().replace("_", " ")
        raise CertificateRefused(
            "unusable", f"--tls-cert {chain_path} with --tls-key {key_path}: {reason}"
        ) from None
    if not any(identifier in _first(chain) for identifier in _KEY_KINDS):
        raise CertificateRefused(
            "unusable",
            f"--tls-cert {chain_path}: its key is none that gRPC serves: RSA, P-256 and P-384",
        )


def _first(chain: bytes) -> bytes:
    """The server's own certificate, in DER; the chain was found to be good before."""
    start, end = chain.index(_BEGIN_CERTIFICATE), chain.index(_END_CERTIFICATE)
    return ssl.PEM_cert_to_DER_cert(chain[start : end + len(_END_CERTIFICATE)].decode("ascii"))


def _check_authority(option: str, path: Path, data: bytes) -> None:
    """Raises CertificateRefused unless certificates can be read out of PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        with _as_file(data) as name:  # not as text: bundles have comments in every script
            context.load_verify_locations(name)
    except ssl.SSLError:
        raise CertificateRefused(
            "not_pem", f"{option} {path}: it holds no certificate in PEM"
        ) from None


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """A path under which Python's ssl finds exactly the bytes that were read.

    The files may change between two readings, and a key is never written to a disk.
    """
    descriptor = os.memfd_create("kvledger", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _no_password() -> bytes:
    """Keeps OpenSSL from asking the terminal."""
    return b""
