"""A file of tenants that a test makes and changes, and a server that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvledger.tenants import editing


class TenantsOfTest:
    """The file; `tokens` has the first token of each name."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tenants.json"
        self.tokens: dict[str, str] = {}

    def add(
        self,
        name: str,
        *,
        roles: Sequence[str] = ("client",),
        certificates: Sequence[str] = (),
    ) -> str:
        """A new tenant's token."""

        def edit(values: dict[str, Any]) -> str | None:
            return editing.add(values, name, roles, certificates, True)

        token = editing.change(self.path, edit, create=True)
        assert token is not None
        self.tokens[name] = token
        return token

    def gateway(self, name: str, *tenants: str) -> None:
        """Lets a tenant act for others."""
        self.change(lambda values: editing.set_list(values, "gateways", name, tenants))

    def change(self, edit: Any) -> Any:
        """Any change that `kvledger tenants` can make."""
        return editing.change(self.path, edit)

    def rotate(self, name: str, grace_seconds: int = 0) -> str:
        """Another token; those before it are good for so much longer."""
        token = self.change(lambda values: editing.rotate(values, name, grace_seconds))
        assert isinstance(token, str)
        return token

    def revoke(self, name: str) -> None:
        """Takes all tokens away."""
        self.change(lambda values: editing.revoke(values, name, None))

    def remove(self, name: str) -> None:
        """Takes the tenant away."""
        self.change(lambda values: editing.remove(values, name))

    def options(self, folder: Path) -> tuple[str, ...]:
        """A server on a unix socket that knows these tenants and serves nobody else."""
        listen = f"unix:{folder / 'kvledger.sock'}"
        return ("--no-dev", "--listen", listen, "--tenants", str(self.path))


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata that shows a token."""
    return (("authorization", f"Bearer {token}"),)
