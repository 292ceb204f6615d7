"""Who may call what, and where: every RPC is a row of one table.

A method without a row, or on a listener that its row does not name, stops the start. `rpc.identity`
asks for the role on every call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Flag

from google.protobuf.descriptor import ServiceDescriptor

from kvledger.tenants.roles import Role


class Port(Flag):
    """Which of the server's listeners."""

    CLIENTS = 1
    OPERATORS = 2
    BOTH = CLIENTS | OPERATORS


@dataclass(frozen=True)
class Door:
    """A row: what the caller of a method must be, and where it is served."""

    role: Role
    port: Port


_CLIENT = (Door(Role.CLIENT, Port.CLIENTS),)
_VIEWER = (Door(Role.VIEWER, Port.OPERATORS),)
_ANYONE = (Door(Role.ANYONE, Port.BOTH),)

# A method may have a row for each listener, with a role of its own.
_TABLE = {
    "/kvledger.v1.GenerationService/Generate": _CLIENT,
    "/kvledger.v1.ModelService/ListModels": _CLIENT,
    "/kvledger.v1.ModelService/GetModel": _CLIENT,
    "/kvledger.v1.ModelService/Tokenize": _CLIENT,
    "/kvledger.v1.ModelService/Detokenize": _CLIENT,
    "/kvledger.v1.LedgerService/GetLedger": _VIEWER,
    "/kvledger.v1.LedgerService/WatchLedger": _VIEWER,
    "/kvledger.v1.LedgerService/GetStatement": (*_CLIENT, *_VIEWER),
    "/kvledger.v1.DiagnosisService/Diagnose": _VIEWER,
    "/kvledger.v1.DiagnosisService/Explain": (*_CLIENT, *_VIEWER),
    "/grpc.health.v1.Health/Check": _ANYONE,
    "/grpc.health.v1.Health/Watch": _ANYONE,
    "/grpc.health.v1.Health/List": _ANYONE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ANYONE,
    "/grpc.channelz.v1.Channelz/GetTopChannels": _VIEWER,
    "/grpc.channelz.v1.Channelz/GetServers": _VIEWER,
    "/grpc.channelz.v1.Channelz/GetServer": _VIEWER,
    "/grpc.channelz.v1.Channelz/GetServerSockets": _VIEWER,
    "/grpc.channelz.v1.Channelz/GetChannel": _VIEWER,
    "/grpc.channelz.v1.Channelz/GetSubchannel": _VIEWER,
    "/grpc.channelz.v1.Channelz/GetSocket": _VIEWER,
}


def role_for(path: str, port: Port) -> Role:
    """What the caller of a method must be. LookupError for a method without a row for this port."""
    for door in _rows(path):
        if port in door.port:
            return door.role
    raise LookupError(f"{path} has no row for the listener of {port.name}")


def check_every_method_has_a_row(
    services: Iterable[ServiceDescriptor],
    port: Port | None = None,
    methods: Collection[str] | None = None,
) -> None:
    """Raises LookupError for a method that the table does not name, or not for this port.

    `methods` are the names of those that are served, where these are not all.
    """
    for service in services:
        for method in service.methods:
            if methods is not None and method.name not in methods:
                continue
            path = f"/{service.full_name}/{method.name}"
            doors = _rows(path)
            if port is not None and not any(port in door.port for door in doors):
                theirs = " and ".join(str(door.port.name) for door in doors)
                raise LookupError(f"{path} belongs to the listener of {theirs}, not of {port.name}")


def _rows(path: str) -> tuple[Door, ...]:
    doors = _TABLE.get(path)
    if doors is None:
        raise LookupError(f"{path} has no row in the table of doors")
    return doors
