"""`kvledger tenants`: who may call a server, with which credentials and limits."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kvledger.errors import SettingRefused
from kvledger.tenants import editing, tenants_file
from kvledger.tenants.roles import GIVEN
from kvledger.tenants.tenants_file import TenantRow, TenantsFile

# The variable of the server's setting: one file for both.
_FILE_VARIABLE = "KVLEDGER_TENANTS"
_GRACE_SECONDS = 24 * 3600
_GRACE_SECONDS_MAX = 90 * 24 * 3600
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_OFF = "none"


def run(arguments: Sequence[str]) -> int:
    """Changes the file, or lists it; 0, or 2 if that cannot be."""
    options = _parser().parse_args(list(arguments))
    if options.file is None:
        print(f"kvledger tenants: give --file FILE, or set {_FILE_VARIABLE}", file=sys.stderr)
        return 2
    try:
        options.act(options)
    except (SettingRefused, editing.ChangeRefused) as error:
        print(f"kvledger tenants: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvledger tenants",
        description="Who may call a server. A running one follows the file within a second.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, act: Callable[[argparse.Namespace], None], text: str, *, named: bool = True
    ) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text, description=text)
        if named:
            found.add_argument("name", metavar="NAME")
        file = os.environ.get(_FILE_VARIABLE)
        found.add_argument(
            "--file",
            type=Path,
            default=file,
            help=f"the file of tenants; default: ${_FILE_VARIABLE}",
        )
        found.set_defaults(act=act)
        return found

    added = command("add", _add, "add a tenant and print its token, once")
    _add_access(added)
    added.add_argument("--no-token", action="store_true", help="it has certificates only")
    command("list", _list, "list tenants, groups and gateways", named=False)
    rotated = command("rotate", _rotate, "print a new token; those before it end after the grace")
    when = rotated.add_mutually_exclusive_group()
    when.add_argument("--at-once", action="store_true", help="those before it end now")
    when.add_argument(
        "--grace", type=_duration, default=_GRACE_SECONDS, help="such as 30m or 24h; default: 24h"
    )
    revoked = command("revoke", _revoke, "end a tenant's tokens, and the streams that they opened")
    revoked.add_argument("--token", metavar="ID", help="only this one, by the id that list shows")
    command("remove", _remove, "remove a tenant; who is added by its name later is another")
    changed = command("set", _set, "change limits, roles or certificates of a tenant")
    _add_access(changed)
    for field, kind in _LIMITS.items():
        changed.add_argument(
            f"--{field.replace('_', '-')}", type=_limit(kind), help=f"or {_OFF}", metavar="VALUE"
        )
    group = command("group", _group, "say which tenants share a group's prefixes")
    group.add_argument("--members", type=_names, required=True, help="a,b,c; empty: no such group")
    gateway = command("gateway", _gateway, "let a tenant act for others, and for nobody else")
    gateway.add_argument("--tenants", type=_names, required=True, help="a,b,c; empty: it is none")
    return parser


def _add_access(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--role",
        action="append",
        choices=[role.value for role in GIVEN],
        help="may be given again; client unless told otherwise",
    )
    parser.add_argument(
        "--certificate",
        action="append",
        metavar="KIND:NAME",
        help="a name in its client certificate: dns:, uri: or cn:; may be given again",
    )


def _duration(text: str) -> int:
    """Seconds of such as 90, 30m, 24h or 7d."""
    unit = _UNITS.get(text[-1:])
    try:
        seconds = int(text[:-1]) * unit if unit is not None else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError("it is no time such as 90, 30m, 24h or 7d") from None
    if not 1 <= seconds <= _GRACE_SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"it is not from 1 to {_GRACE_SECONDS_MAX} seconds")
    return seconds


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


# What a value that cannot be read should have been.
_KINDS: dict[Callable[[str], Any], str] = {
    int: "a whole number",
    float: "a number",
    _flag: "true or false",
}

# The fields of TenantLimits, and how they are read.
_LIMITS: dict[str, Callable[[str], Any]] = {
    "running_max": int,
    "queued_max": int,
    "queued_tokens_max": int,
    "tokens_per_second": float,
    "tpot_target": float,
    "kv_bytes_max": int,
    "kv_guaranteed": float,
    "kv_max": float,
    "sealed": _flag,
}


def _limit(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any]]:
    """A reader of a limit, which makes (None,) of `none`: a bare None is a limit not told of."""

    def value(text: str) -> tuple[Any]:
        if text == _OFF:
            return (None,)
        try:
            return (kind(text),)
        except ValueError:
            raise argparse.ArgumentTypeError(f"it is not {_KINDS[kind]}, or {_OFF}") from None

    return value


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _add(options: argparse.Namespace) -> None:
    roles, certificates = options.role or ["client"], options.certificate or []

    def edit(values: dict[str, Any]) -> str | None:
        return editing.add(values, options.name, roles, certificates, not options.no_token)

    token = editing.change(options.file, edit, create=True)
    if token is not None:
        _show(token)


def _rotate(options: argparse.Namespace) -> None:
    grace = 0 if options.at_once else options.grace
    _show(editing.change(options.file, lambda v: editing.rotate(v, options.name, grace)))


def _show(token: str) -> None:
    print("kvledger tenants: keep this token; it is not shown again", file=sys.stderr)
    print(token)


def _revoke(options: argparse.Namespace) -> None:
    gone = editing.change(options.file, lambda v: editing.revoke(v, options.name, options.token))
    print(f"kvledger tenants: {gone} revoked", file=sys.stderr)


def _remove(options: argparse.Namespace) -> None:
    editing.change(options.file, lambda values: editing.remove(values, options.name))


def _set(options: argparse.Namespace) -> None:
    told = {field: getattr(options, field) for field in _LIMITS}
    limits = {field: value[0] for field, value in told.items() if value is not None}
    if not limits and options.role is None and options.certificate is None:
        raise editing.ChangeRefused(
            "set: there is nothing to set; give a limit, --role or --certificate (see set --help)"
        )

    def edit(values: dict[str, Any]) -> None:
        editing.set_limits(values, options.name, limits)
        editing.set_access(values, options.name, options.role, options.certificate)

    editing.change(options.file, edit)


def _group(options: argparse.Namespace) -> None:
    editing.change(
        options.file, lambda v: editing.set_list(v, "groups", options.name, options.members)
    )


def _gateway(options: argparse.Namespace) -> None:
    editing.change(
        options.file, lambda v: editing.set_list(v, "gateways", options.name, options.tenants)
    )


def _list(options: argparse.Namespace) -> None:
    file = tenants_file.read(options.file)
    for name, row in sorted(file.tenants.items()):
        print("  ".join((name, *_facts(file, name, row))))
    for name, members in sorted(file.groups.items()):
        print(f"group {name}: {', '.join(members)}")


def _facts(file: TenantsFile, name: str, row: TenantRow) -> list[str]:
    facts = [",".join(row.roles), f"epoch {row.epoch}"]
    if name in file.gateways:
        facts.append(f"gateway for {', '.join(file.gateways[name])}")
    for token in row.tokens:
        text = f"token {token.id} of {_day(token.created_at)}"
        if token.expires_at is not None:
            ended = "ended" if token.expires_at <= time.time() else "ends"
            text += f", {ended} {_day(token.expires_at)}"
        facts.append(text)
    facts += [f"certificate {certificate}" for certificate in row.certificates]
    limits = row.limits.model_dump(exclude_defaults=True)
    return facts + [f"{field} {value}" for field, value in limits.items()]


def _day(seconds: int) -> str:
    shown = min(max(seconds, 0), tenants_file.SECONDS_MAX)
    return f"{datetime.fromtimestamp(shown, timezone.utc):%Y-%m-%d %H:%M}"
