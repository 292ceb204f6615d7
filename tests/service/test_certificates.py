"""The files of TLS: what is refused at the start, and what happens when they change."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from authorities import Files, authority, root
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from kvledger.certificates import CertificateFiles, CertificateRefused, Validity
from kvledger.errors import SettingRefused


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path).write("ours", clients="theirs")


def opened(files: Files) -> CertificateFiles:
    return CertificateFiles(files.cert, files.key, files.client_ca)


def locked(key: bytes) -> bytes:
    """The same key, protected by a passphrase."""
    return serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )


def test_good_files_are_read_whole(files: Files) -> None:
    """A chain that lost its intermediate certificate would fail at some clients only."""
    current = opened(files).current
    assert current.chain == files.cert.read_bytes()
    assert current.key == files.key.read_bytes()
    assert current.client_ca == root("theirs")
    assert CertificateFiles(files.cert, files.key, None).current.client_ca is None


def test_comments_between_certificates_are_no_fault(files: Files) -> None:
    """A bundle with the names of its authorities, as systems have it, would be refused."""
    comment = "\n# Főtanúsítvány\n".encode()
    for path in (files.cert, files.client_ca):
        path.write_bytes(comment + path.read_bytes() + comment + root("others"))
    assert opened(files).current.client_ca == files.client_ca.read_bytes()


@pytest.mark.parametrize("name", ["cert", "client_ca"])
def test_a_chain_that_is_cut_short_is_refused(files: Files, name: str) -> None:
    """A file that is still being written would be served without its last certificate."""
    path: Path = getattr(files, name)
    more = root("others")
    path.write_bytes(path.read_bytes() + more[: len(more) // 2])
    with pytest.raises(CertificateRefused) as refused:
        opened(files)
    assert refused.value.kind == "not_pem"


@pytest.mark.parametrize("name", ["cert", "key", "client_ca"])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [("missing", "missing"), ("folder", "unreadable"), ("text", "not_pem"), ("cut", "not_pem")],
)
def test_a_wrong_file_is_refused_in_one_sentence(
    files: Files, name: str, fault: str, kind: str
) -> None:
    """An operator would be left with a traceback, or with a server that no client can talk to."""
    path: Path = getattr(files, name)
    whole = path.read_bytes()
    path.unlink()
    if fault == "folder":
        path.mkdir()
    elif fault == "text":
        path.write_bytes(b"\xffno certificate\n" * 5)
    elif fault == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CertificateRefused) as refused:
        opened(files)
    assert refused.value.kind == kind
    sentence = str(refused.value)
    assert sentence.startswith(f"--tls-{name.replace('_', '-')} {path}: ")
    assert "\n" not in sentence
    assert isinstance(refused.value, SettingRefused), "the commands would show a traceback"


def test_a_file_that_may_not_be_read_is_refused(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key of another user would end the start with a traceback."""

    def refuse(self: Path, mode: str) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CertificateRefused, match=r"--tls-cert .*: Permission denied") as refused:
        opened(files)
    assert refused.value.kind == "unreadable"


def test_another_certificates_key_is_refused(files: Files) -> None:
    """Every handshake would fail while the server looks healthy."""
    files.key.write_bytes(authority("ours").issue_cert("other").private_key_pem.bytes())
    with pytest.raises(CertificateRefused, match="not the key of the certificate") as refused:
        opened(files)
    assert refused.value.kind == "key_mismatch"


def test_a_key_with_a_passphrase_is_refused(files: Files) -> None:
    """The server would wait at its start for somebody to type."""
    files.key.write_bytes(locked(files.key.read_bytes()))
    with pytest.raises(CertificateRefused, match="passphrase") as refused:
        opened(files)
    assert refused.value.kind == "locked_key"


def signed(key: Any, files: Files) -> None:
    """Puts a key and a certificate that it signed itself into the files."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(timezone.utc)
    digest = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    certificate = (
        builder.not_valid_before(now).not_valid_after(now + timedelta(days=1)).sign(key, digest)
    )
    files.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


def test_keys_that_grpc_cannot_serve_are_refused(files: Files) -> None:
    """Every handshake would fail while the server looks healthy."""
    for key in (
        ed25519.Ed25519PrivateKey.generate(),
        ec.generate_private_key(ec.SECP521R1()),
        ec.generate_private_key(ec.SECP256K1()),
    ):
        signed(key, files)
        with pytest.raises(CertificateRefused, match="RSA, P-256 and P-384") as refused:
            opened(files)
        assert refused.value.kind == "unusable"


def test_keys_that_grpc_can_serve_are_taken(files: Files) -> None:
    """A certificate as most authorities issue it would be refused."""
    for key in (
        rsa.generate_private_key(65537, 2048),
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP384R1()),
    ):
        signed(key, files)
        assert opened(files).current.chain == files.cert.read_bytes()


def test_a_huge_file_is_not_read(files: Files) -> None:
    """A device named by mistake would fill the memory."""
    with files.cert.open("ab") as file:
        file.write(b"x" * (1 << 20))
    with pytest.raises(CertificateRefused, match="no certificate in PEM"):
        opened(files)


def test_nothing_changes_while_the_files_stay(files: Files) -> None:
    """The log would say every second that a certificate was renewed."""
    found = opened(files)
    assert not found.refresh()
    os.utime(files.cert, (1, 1))
    assert not found.refresh(), "touched, and the same inside"


def test_changed_files_are_taken_over(files: Files) -> None:
    """A renewed certificate would come into force at the next restart, or never."""
    found = opened(files)
    before = found.current
    files.write("ours")
    assert found.refresh()
    assert found.current.chain == files.cert.read_bytes() != before.chain
    files.client_ca.write_bytes(root("others"))
    assert found.refresh()
    assert found.current.client_ca == root("others")


def test_half_a_renewal_keeps_the_old_set_and_is_told_once(files: Files) -> None:
    """Who connects between the two writes would meet a certificate with another one's key."""
    found = opened(files)
    before, key = found.current, files.key.read_bytes()
    files.write("ours")
    new_key = files.key.read_bytes()
    files.key.write_bytes(key)
    with pytest.raises(CertificateRefused) as refused:
        found.refresh()
    assert refused.value.kind == "key_mismatch"
    assert found.current is before
    assert not found.refresh(), "told again without a change"
    files.key.write_bytes(new_key)
    assert found.refresh()
    assert found.current.key == new_key


def test_files_that_vanish_keep_the_old_set(files: Files) -> None:
    """A secret that is replaced by deleting it first would end the server."""
    found = opened(files)
    before = found.current
    files.cert.unlink()
    with pytest.raises(CertificateRefused) as refused:
        found.refresh()
    assert refused.value.kind == "missing"
    assert not found.refresh()
    assert found.current is before


def test_a_link_that_leads_elsewhere_is_a_change(files: Files, tmp_path: Path) -> None:
    """Kubernetes renews a mounted secret by turning one link."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        Files(folder).write("ours")
    link = tmp_path / "data"
    link.symlink_to(one)
    found = CertificateFiles(link / "tls.crt", link / "tls.key", None)
    fresh = tmp_path / "fresh"
    fresh.symlink_to(other)
    fresh.replace(link)
    assert found.refresh()
    assert found.current.chain == (other / "tls.crt").read_bytes()


NOW = datetime(2030, 6, 15, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("begun", "left", "kind"),
    [
        (timedelta(days=300), timedelta(days=30), None),
        (timedelta(days=300), timedelta(days=13), "expires_soon"),
        (timedelta(days=300), timedelta(0), "expired"),
        (timedelta(days=300), timedelta(days=-1), "expired"),
        (timedelta(days=-1), timedelta(days=300), "not_yet_valid"),
        (timedelta(hours=12), timedelta(hours=12), None),
        (timedelta(hours=20), timedelta(hours=4), "expires_soon"),
    ],
)
def test_the_end_of_a_certificate_is_foreseen(
    begun: timedelta, left: timedelta, kind: str | None
) -> None:
    """Clients would be turned away one day; or those of a day be called ending all their life."""
    assert Validity(NOW - begun, NOW + left).why_not_well(NOW) == kind


def test_validity_is_that_of_the_whole_chain(files: Files) -> None:
    """An intermediate certificate that ends first would end the server's without a warning."""
    ends = datetime(2031, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    files.write("ours", ends=ends)
    assert opened(files).current.validity.ends == ends
    own = files.cert.read_bytes()
    earlier = ends - timedelta(days=100)
    files.write("ours", ends=earlier)
    files.cert.write_bytes(files.cert.read_bytes() + own)
    assert opened(files).current.validity.ends == earlier
