"""A listener's gRPC server: its services, each with the rows of the doors that it must have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_channelz.v1 import channelz_pb2
from grpc_channelz.v1.channelz import add_channelz_servicer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from kvledger.rpc import connections
from kvledger.rpc.calls import Calls
from kvledger.rpc.diagnosis import DiagnosisServicer
from kvledger.rpc.doors import Port, check_every_method_has_a_row
from kvledger.rpc.generation import GenerationServicer, add_to_server
from kvledger.rpc.health import HealthServicer
from kvledger.rpc.identity import IdentityRequired
from kvledger.rpc.ledger import LedgerServicer
from kvledger.rpc.models import ModelServicer
from kvledger.rpc.reflection import add_reflection
from kvledger.rpc.undecodable import UndecodableRefused
from kvledger.tenants.authentication import Authenticator
from kvledger.v1 import (
    diagnosis_pb2,
    diagnosis_pb2_grpc,
    generation_pb2,
    ledger_pb2,
    ledger_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
)

_DIAGNOSIS = diagnosis_pb2.DESCRIPTOR.services_by_name["DiagnosisService"]
_LEDGER = ledger_pb2.DESCRIPTOR.services_by_name["LedgerService"]
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]


@dataclass(frozen=True)
class Service:
    """One service, and what puts it on a server."""

    descriptor: ServiceDescriptor
    add: Callable[[grpc.aio.Server], Any]
    # Names of the methods that are there; None: all.
    methods: frozenset[str] | None = None


def generation_service(servicer: GenerationServicer) -> Service:
    """For clients: tokens."""
    descriptor = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
    return Service(descriptor, lambda server: add_to_server(servicer, server))


def model_service(servicer: ModelServicer) -> Service:
    """For clients: the model."""
    add = models_pb2_grpc.add_ModelServiceServicer_to_server
    descriptor = models_pb2.DESCRIPTOR.services_by_name["ModelService"]
    return Service(descriptor, lambda server: add(servicer, server))  # type: ignore[no-untyped-call]


def ledger_service(servicer: LedgerServicer) -> Service:
    """For operators: the books."""
    add = ledger_pb2_grpc.add_LedgerServiceServicer_to_server
    return Service(_LEDGER, lambda server: add(servicer, server))  # type: ignore[no-untyped-call]


def statement_service(servicer: LedgerServicer) -> Service:
    """For clients: of the books, their own account."""
    return _only(
        _LEDGER,
        "GetStatement",
        grpc.unary_unary_rpc_method_handler(
            servicer.GetStatement,
            ledger_pb2.GetStatementRequest.FromString,
            ledger_pb2.GetStatementResponse.SerializeToString,
        ),
    )


def diagnosis_service(servicer: DiagnosisServicer) -> Service:
    """For operators: what limits the service."""
    add = diagnosis_pb2_grpc.add_DiagnosisServiceServicer_to_server
    return Service(_DIAGNOSIS, lambda server: add(servicer, server))  # type: ignore[no-untyped-call]


def explanation_service(servicer: DiagnosisServicer) -> Service:
    """For clients: where the time of their own requests went."""
    return _only(
        _DIAGNOSIS,
        "Explain",
        grpc.unary_unary_rpc_method_handler(
            servicer.Explain,
            diagnosis_pb2.ExplainRequest.FromString,
            diagnosis_pb2.ExplainResponse.SerializeToString,
        ),
    )


def _only(descriptor: ServiceDescriptor, name: str, handler: Any) -> Service:
    handlers = grpc.method_handlers_generic_handler(descriptor.full_name, {name: handler})
    return Service(
        descriptor,
        lambda server: server.add_generic_rpc_handlers((handlers,)),
        frozenset({name}),
    )


def health_service(servicer: HealthServicer) -> Service:
    """For probes, everywhere."""
    add = health_pb2_grpc.add_HealthServicer_to_server
    descriptor = health_pb2.DESCRIPTOR.services_by_name["Health"]
    return Service(descriptor, lambda server: add(servicer, server))


def channelz_service() -> Service:
    """For operators: gRPC's own view of servers and connections."""
    descriptor = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"]
    return Service(descriptor, add_channelz_servicer)


def names(services: Sequence[Service], *, reflects: bool) -> list[str]:
    """Full names of services; a probe must not hear that one is well which is not there."""
    found = [service.descriptor.full_name for service in services]
    return [*found, _REFLECTION.full_name] if reflects else found


def maker(
    port: Port,
    services: Sequence[Service],
    calls: Calls,
    authenticator: Authenticator,
    *,
    reflects: bool,
    connections_max: int,
    keepalive: connections.Keepalive,
    queued_max: int = 0,
) -> Callable[[], grpc.aio.Server]:
    """What makes a server with these services and no port yet.

    Raises LookupError if one of their methods has no row in the table of doors for this port.
    """
    for service in services:
        check_every_method_has_a_row([service.descriptor], port, service.methods)
    if reflects:
        check_every_method_has_a_row([_REFLECTION], port)

    def make() -> grpc.aio.Server:
        server = grpc.aio.server(
            options=connections.options(connections_max, keepalive, max_queued=queued_max),
            interceptors=(calls, IdentityRequired(authenticator, port), UndecodableRefused()),
        )
        for service in services:
            service.add(server)
        if reflects:
            add_reflection(names(services, reflects=True), server)
        return server

    return make
