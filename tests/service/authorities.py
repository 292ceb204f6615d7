"""Certificates that tests make for themselves."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

import grpc
import trustme


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
