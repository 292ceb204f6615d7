"""Certificates that tests make for themselves."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path

import grpc
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)


@cache
def authority(name: str) -> trustme.CA:
    """A certificate authority; the same one for the same name."""
    return trustme.CA(organization_name=name)


@dataclass
class Files:
    """Where a server finds its certificate, its key and the authorities of its clients."""

    folder: Path

    @property
    def cert(self) -> Path:
        return self.folder / "tls.crt"

    @property
    def key(self) -> Path:
        return self.folder / "tls.key"

    @property
    def client_ca(self) -> Path:
        return self.folder / "clients.crt"

    def write(
        self,
        signed_by: str,
        *,
        clients: str | None = None,
        begins: datetime | None = None,
        ends: datetime | None = None,
    ) -> Files:
        """A new certificate for this machine, and whom it trusts."""
        leaf = authority(signed_by).issue_cert(
            "localhost", "127.0.0.1", not_before=begins, not_after=ends
        )
        self.cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        self.key.write_bytes(leaf.private_key_pem.bytes())
        if clients is not None:
            self.client_ca.write_bytes(root(clients))
        return self

    @property
    def options(self) -> list[str]:
        """What names these files on a command line."""
        named = [f"--tls-cert={self.cert}", f"--tls-key={self.key}"]
        return [*named, f"--tls-client-ca={self.client_ca}"] if self.client_ca.exists() else named


def credentials_of_uri(trusts: str, shows: str, *uris: str) -> grpc.ChannelCredentials:
    """A client whose certificate has URIs for names, as workloads have."""
    signer = x509.load_pem_x509_certificate(root(shows))
    signing = load_pem_private_key(authority(shows).private_key_pem.bytes(), None)
    own = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(timezone.utc)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(signer.subject)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(names, critical=True)
        .sign(signing, hashes.SHA256())  # type: ignore[arg-type]
    )
    key = own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return grpc.ssl_channel_credentials(root(trusts), key, certificate.public_bytes(Encoding.PEM))


def root(name: str) -> bytes:
    """An authority's own certificate, in PEM."""
    return authority(name).cert_pem.bytes()


def credentials(
    trusts: str, shows: str | None = None, *, names: tuple[str, ...] = ("client",), cn: str = ""
) -> grpc.ChannelCredentials:
    """A client that trusts one authority, and shows a certificate signed by another or none."""
    if shows is None:
        return grpc.ssl_channel_credentials(root(trusts))
    leaf = authority(shows).issue_cert(*names, common_name=cn or None)
    chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
    return grpc.ssl_channel_credentials(root(trusts), leaf.private_key_pem.bytes(), chain)
