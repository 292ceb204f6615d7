"""Who may call what: every RPC is a row of one table, and a method without a row stops the start.

Until identity exists there is one caller, the tenant of `--dev`, who may do everything here.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from google.protobuf.descriptor import ServiceDescriptor


class Role(Enum):
    """What a caller may be."""

    CLIENT = "client"
    # Needs no identity: probes and tools call it before they have one.
    ANYONE = "anyone"


_TABLE = {
    "/kvledger.v1.GenerationService/Generate": Role.CLIENT,
    "/kvledger.v1.ModelService/ListModels": Role.CLIENT,
    "/kvledger.v1.ModelService/GetModel": Role.CLIENT,
    "/kvledger.v1.ModelService/Tokenize": Role.CLIENT,
    "/kvledger.v1.ModelService/Detokenize": Role.CLIENT,
    "/grpc.health.v1.Health/Check": Role.ANYONE,
    "/grpc.health.v1.Health/Watch": Role.ANYONE,
    "/grpc.health.v1.Health/List": Role.ANYONE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Role.ANYONE,
}


def check_every_method_has_a_row(services: Iterable[ServiceDescriptor]) -> None:
    """Raises LookupError for a method that the table does not name."""
    for service in services:
        for method in service.methods:
            path = f"/{service.full_name}/{method.name}"
            if path not in _TABLE:
                raise LookupError(f"{path} has no row in the table of doors")
