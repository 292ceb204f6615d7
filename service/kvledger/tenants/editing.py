"""Changes of the file of tenants, each one whole: read, changed, checked, written."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from kvledger.tenants import tenants_file
from kvledger.tenants.tokens import digest, new_token

_Result = TypeVar("_Result")
_Values = dict[str, Any]


class ChangeRefused(Exception):
    """A change that cannot be made. The message is one sentence for the operator."""


def change(path: Path, edit: Callable[[_Values], _Result], *, create: bool = False) -> _Result:
    """Edits what the file holds; nothing is written if that, or the result, is refused.

    Raises ChangeRefused or TenantsRefused. `create` makes the file if there is none.
    """
    try:
        with tenants_file.locked(path):
            if create and not path.exists():
                values: _Values = {"version": 1}
            else:
                values = tenants_file.read(path).model_dump(mode="json", exclude_defaults=True)
                values["version"] = 1
            for part in ("tenants", "groups", "gateways", "removed"):
                values.setdefault(part, {})
            result = edit(values)
            try:
                tenants_file.checked(values)
            except ValidationError as error:
                raise ChangeRefused(tenants_file.sentence(error)) from None
            except ValueError as error:
                raise ChangeRefused(str(error)) from None
            tenants_file.write(path, values)
            return result
    except OSError as error:
        raise ChangeRefused(f"{path}: {error.strerror}") from None


def add(
    values: _Values, name: str, roles: Sequence[str], certificates: Sequence[str], token: bool
) -> str | None:
    """A new tenant; its token, which nobody can read again, if it is to have one."""
    if name in values["tenants"]:
        raise ChangeRefused(f"tenants.{name}: it is there already; rotate gives it a new token")
    row: _Values = {
        # Nothing that its predecessor left is its own.
        "epoch": values["removed"].pop(name, 0) + 1,
        "roles": list(roles),
        "certificates": list(certificates),
        "tokens": [],
    }
    values["tenants"][name] = row
    return _new_token(row) if token else None


def rotate(values: _Values, name: str, grace_seconds: int) -> str:
    """A new token; those before it are good for `grace_seconds` more."""
    row = _row(values, name)
    ends = int(time.time()) + grace_seconds
    kept = []
    for token in row.get("tokens", []):
        before = token.get("expires_at")
        token["expires_at"] = ends if before is None else min(ends, before)
        if token["expires_at"] > time.time():
            kept.append(token)
    if len(kept) >= tenants_file.TOKENS_OF_TENANT_MAX:
        raise ChangeRefused(
            f"tenants.{name}.tokens: {len(kept)} are good, as many as may; wait, revoke some, or "
            f"rotate --at-once"
        )
    row["tokens"] = kept
    return _new_token(row)


def revoke(values: _Values, name: str, token_id: str | None) -> int:
    """Takes one token away, or all; how many went. Certificates stay."""
    row = _row(values, name)
    tokens = row.get("tokens", [])
    row["tokens"] = [each for each in tokens if token_id not in (None, each["id"])]
    gone = len(tokens) - len(row["tokens"])
    if not gone:
        raise ChangeRefused(f"tenants.{name}.tokens: there is none to revoke, or not by that id")
    return gone


def remove(values: _Values, name: str) -> None:
    """Takes a tenant away, from groups and gateways too; its epoch is remembered."""
    values["removed"][name] = _row(values, name).get("epoch", 1)
    del values["tenants"][name]
    values["gateways"].pop(name, None)
    for part in ("groups", "gateways"):
        for members in values[part].values():
            if name in members:
                members.remove(name)


def set_limits(values: _Values, name: str, limits: _Values) -> None:
    """Changes the limits that are named; None is no limit of its own again."""
    row = _row(values, name)
    kept = {**row.get("limits", {}), **limits}
    row["limits"] = {field: value for field, value in kept.items() if value is not None}


def set_access(
    values: _Values, name: str, roles: Sequence[str] | None, certificates: Sequence[str] | None
) -> None:
    """Changes roles and the names in certificates, where given."""
    row = _row(values, name)
    if roles is not None:
        row["roles"] = list(roles)
    if certificates is not None:
        row["certificates"] = list(certificates)


def set_list(values: _Values, part: str, name: str, members: Sequence[str]) -> None:
    """A group's members, or whom a gateway speaks for; none takes it away."""
    if members:
        values[part][name] = list(members)
    elif values[part].pop(name, None) is None:
        raise ChangeRefused(f"{part}.{name}: there is none to take away")


def _row(values: _Values, name: str) -> _Values:
    row: _Values | None = values["tenants"].get(name)
    if row is None:
        raise ChangeRefused(f"tenants.{name}: there is no such tenant; list names those there are")
    return row


def _new_token(row: _Values) -> str:
    token = new_token()
    known = {each["id"] for each in row.get("tokens", [])}
    token_id = next(i for i in iter(lambda: secrets.token_hex(4), None) if i not in known)
    row.setdefault("tokens", []).append(
        {
            "id": token_id,
            "sha256": digest(token.encode("ascii")).hex(),
            "created_at": int(time.time()),
        }
    )
    return token
