"""Reflection that finds what belongs to a file and what tools ask for: methods as well.

The library's own service answers NOT_FOUND for `package.Service.Method`, which is what
`grpcurl describe` asks for when somebody names a method.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.reflection import aio


class ReflectionServicer(aio.ReflectionServicer):  # type: ignore[misc]
    """Describes the services of one listener."""

    def _file_containing_symbol(
        self, request: reflection_pb2.ServerReflectionRequest, fully_qualified_name: str
    ) -> reflection_pb2.ServerReflectionResponse:
        """The file of a symbol; of a method, its service's."""
        return super()._file_containing_symbol(request, _in_pool(fully_qualified_name))


def add_reflection(service_names: Iterable[str], server: grpc.aio.Server) -> None:
    """Lets a server describe these services to whoever asks."""
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
        ReflectionServicer(service_names), server
    )


def _in_pool(symbol: str) -> str:
    """The symbol, or the service in whose place it stands if it names a method."""
    try:
        method = descriptor_pool.Default().FindMethodByName(symbol)
    except KeyError:
        return symbol
    return str(method.containing_service.full_name)
