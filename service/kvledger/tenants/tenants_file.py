"""The file of tenants: its format, and how it is read and written.

JSON with a version. Whatever it holds beyond the format is refused with its path, because a limit
or a revocation that is misspelt and ignored would be worse than a server that keeps the last good
file. It holds hashes of tokens and no token, and still is for its owner only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from kvledger.errors import SettingRefused
from kvledger.models.json_file import parse_object
from kvledger.tenants.tenant import TenantLimits

# Bounds on the file. One of 4,096 tenants has some MB, and is read within a second.
FILE_BYTES_MAX = 16 << 20
TENANTS_MAX = 4096
GROUPS_MAX = 1_000
REMOVED_MAX = 100_000
TOKENS_OF_TENANT_MAX = 8
CERTIFICATES_OF_TENANT_MAX = 16
EPOCH_MAX = 1 << 31

# How long a writer waits for another one, in seconds.
LOCK_SECONDS = 10.0
_LOCK_INTERVAL = 0.05
# The tenant of --dev.
RESERVED_NAME = "dev"

# The end of the year 9999, in seconds since 1970: later ones cannot be shown.
SECONDS_MAX = 253_402_300_799
_COUNT_MAX = (1 << 31) - 1

# Not Literal[1], which true would be as well.
Version = Annotated[int, Field(ge=1, le=1)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}\z")]
_Certificate = Annotated[str, StringConstraints(pattern=r"^(dns|uri|cn):[ -~]{1,512}\z")]
_Role = Literal["client", "viewer", "operator"]
_Count = Annotated[int, Field(ge=0, le=_COUNT_MAX)]
_Time = Annotated[int, Field(ge=0, le=SECONDS_MAX)]
_Share = Annotated[float, Field(ge=0.0, le=1.0)]


class TenantsRefused(SettingRefused):
    """A file that cannot be used. `kind` is one word for the log."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TokenRow(_Strict):
    """One bearer token: its hash, and seconds since 1970."""

    id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8}\z")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]
    created_at: _Time
    expires_at: _Time | None = None


class LimitsRow(_Strict):
    """The fields of TenantLimits, with their bounds."""

    running_max: _Count | None = None
    queued_max: _Count | None = None
    queued_tokens_max: _Count | None = None
    # Not less than what the door and the pool take: a server would refuse the whole file.
    tokens_per_second: Annotated[float, Field(ge=0.001, le=1e9)] | None = None
    tpot_target: Annotated[float, Field(ge=0.001, le=60.0)] | None = None
    kv_bytes_max: Annotated[int, Field(ge=1, le=1 << 62)] | None = None
    kv_guaranteed: _Share = 0.0
    kv_max: _Share = 1.0
    sealed: bool = False

    def limits(self) -> TenantLimits:
        """As the rest of the service knows them."""
        return TenantLimits(**self.model_dump())


class TenantRow(_Strict):
    """One name, what it may do, and how it shows who it is."""

    epoch: Annotated[int, Field(ge=1, le=EPOCH_MAX)] = 1
    roles: Annotated[tuple[_Role, ...], Field(min_length=1, max_length=3, strict=False)] = (
        "client",
    )
    tokens: Annotated[
        tuple[TokenRow, ...], Field(max_length=TOKENS_OF_TENANT_MAX, strict=False)
    ] = ()
    certificates: Annotated[
        tuple[_Certificate, ...], Field(max_length=CERTIFICATES_OF_TENANT_MAX, strict=False)
    ] = ()
    limits: LimitsRow = LimitsRow()


_Names = Annotated[tuple[Name, ...], Field(max_length=TENANTS_MAX, strict=False)]


class TenantsFile(_Strict):
    """All of it, checked."""

    version: Version
    tenants: Annotated[dict[Name, TenantRow], Field(max_length=TENANTS_MAX)] = {}
    groups: Annotated[dict[Name, _Names], Field(max_length=GROUPS_MAX)] = {}
    # Names of tenants that speak for others, and for whom.
    gateways: Annotated[dict[Name, _Names], Field(max_length=TENANTS_MAX)] = {}
    # Epochs of names that are gone: who comes back by such a name is somebody else.
    removed: Annotated[
        dict[Name, Annotated[int, Field(ge=1, lt=EPOCH_MAX)]], Field(max_length=REMOVED_MAX)
    ] = {}


def parse(data: bytes) -> TenantsFile:
    """A file's content. ValueError, with the path of the field that is wrong, and no value."""
    try:
        return checked(parse_object(data))
    except ValidationError as error:  # a ValueError too, whose text quotes values
        raise ValueError(sentence(error)) from None


def checked(values: Mapping[str, Any]) -> TenantsFile:
    """The same of what JSON held. ValidationError or ValueError."""
    found = TenantsFile.model_validate(values)
    _check_tenants(found)
    _check_names(found)
    return found


def sentence(error: ValidationError) -> str:
    """The first thing that is wrong, by its path, without the value."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"] if part != "[key]")
    shown = "".join(c if c.isprintable() else "?" for c in path[:200])
    if first["type"] == "extra_forbidden":
        return f"{shown}: there is no such field"
    return f"{shown}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _check_tenants(found: TenantsFile) -> None:
    seen_hashes: dict[str, str] = {}
    seen_certificates: dict[str, str] = {}
    guaranteed = 0.0
    for name, row in found.tenants.items():
        path = f"tenants.{name}"
        if name == RESERVED_NAME:
            raise ValueError(f"{path}: the name is that of --dev; take another")
        if len(set(row.roles)) != len(row.roles):
            raise ValueError(f"{path}.roles: one stands twice")
        if len({token.id for token in row.tokens}) != len(row.tokens):
            raise ValueError(f"{path}.tokens: two have the same id")
        for token in row.tokens:
            if (other := seen_hashes.setdefault(token.sha256, name)) != name or (
                sum(each.sha256 == token.sha256 for each in row.tokens) > 1
            ):
                raise ValueError(f"{path}.tokens: one is a token of tenants.{other} too")
        for certificate in row.certificates:
            known = certificate.lower() if certificate.startswith("dns:") else certificate
            if known in seen_certificates:
                other = seen_certificates[known]
                raise ValueError(f"{path}.certificates: one is a name of tenants.{other} too")
            seen_certificates[known] = name
        _check_limits(path, row.limits)
        guaranteed += row.limits.kv_guaranteed
        if found.removed.get(name, 0) >= row.epoch:
            raise ValueError(f"{path}.epoch: {row.epoch} was used up by a tenant that was removed")
    if guaranteed > 1.0 + 1e-9:
        raise ValueError(f"tenants: kv_guaranteed adds up to {guaranteed:g}; at most 1")


def _check_limits(path: str, limits: LimitsRow) -> None:
    if limits.kv_guaranteed > limits.kv_max:
        raise ValueError(
            f"{path}.limits: kv_guaranteed {limits.kv_guaranteed:g} is more than kv_max "
            f"{limits.kv_max:g}"
        )
    if limits.sealed and limits.kv_guaranteed == 0.0:
        raise ValueError(f"{path}.limits: sealed needs kv_guaranteed: it takes no more than that")


def _check_names(found: TenantsFile) -> None:
    """That groups and gateways speak of tenants that are."""
    served = {
        name
        for name, row in found.tenants.items()
        if "client" in row.roles and name not in found.gateways
    }
    for kind, lists in (("groups", found.groups), ("gateways", found.gateways)):
        for name, members in lists.items():
            if len(set(members)) != len(members):
                raise ValueError(f"{kind}.{name}: a name stands twice")
            for index, member in enumerate(members):
                if member not in served:
                    raise ValueError(
                        f"{kind}.{name}.{index}: it is no tenant with the role client here, or a "
                        f"gateway"
                    )
    for name in found.gateways:
        row = found.tenants.get(name)
        if row is None or row.roles != ("client",):
            raise ValueError(
                f"gateways.{name}: tenants.{name} has to be there, with the role client alone"
            )
        if row.limits != LimitsRow():
            raise ValueError(f"tenants.{name}.limits: a gateway has none; its tenants do")


def read(path: Path) -> TenantsFile:
    """The file, checked. TenantsRefused, in one sentence."""
    data = read_owners(path, 0o177, "chmod 600")
    try:
        return parse(data)
    except ValueError as error:
        raise TenantsRefused("not_valid", f"{path}: {error}") from None


def read_owners(path: Path, forbidden: int, mend: str) -> bytes:
    """The bytes of a regular file whose mode has none of these bits. TenantsRefused."""
    try:
        # A pipe in its place would keep who opens it waiting.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise TenantsRefused("missing", f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or "cannot be opened"
        raise TenantsRefused("unreadable", f"{path}: {reason}") from None
    with contextlib.ExitStack() as closing:
        closing.callback(os.close, descriptor)
        # Of what is open, not of the name: it may have been replaced meanwhile.
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise TenantsRefused("unreadable", f"{path}: it is not a regular file")
        if mode & forbidden:
            raise TenantsRefused(
                "mode",
                f"{path}: its mode {stat.S_IMODE(mode):04o} lets others at it; {mend} {path}",
            )
        try:
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise TenantsRefused("unreadable", f"{path}: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise TenantsRefused("not_valid", f"{path}: it is larger than {FILE_BYTES_MAX} bytes")
    return data


def write(path: Path, values: Mapping[str, Any]) -> None:
    """Puts the whole new file in the place of the old, or changes nothing. Mode 0600."""
    data = json.dumps(values, indent=1, sort_keys=True).encode() + b"\n"
    path = path.resolve()  # a link stays a link
    # One writer at a time: a name that a killed one left is free to take.
    beside = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        beside.unlink()
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)
            with contextlib.suppress(FileNotFoundError):
                old = path.stat()
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    # Root may write for the user that serves, who has to read it.
                    os.fchown(descriptor, old.st_uid, old.st_gid)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        beside.rename(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other writers out; TenantsRefused if one stays for long.

    The lock is a file of its own beside it, because the file itself is replaced.
    """
    path = path.resolve()
    beside = path.with_name(f".{path.name}.lock")
    descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        ends = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= ends:
                    raise TenantsRefused(
                        "locked", f"{path}: somebody else is changing it; try again"
                    ) from None
                time.sleep(_LOCK_INTERVAL)
        yield
    finally:
        os.close(descriptor)
