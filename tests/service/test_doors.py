"""The table of doors: no method without a row."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import ServiceDescriptor
from grpc_channelz.v1 import channelz_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from kvledger.rpc.doors import Port, check_every_method_has_a_row, role_for
from kvledger.tenants.roles import GIVEN, Role, with_implied
from kvledger.v1 import diagnosis_pb2, generation_pb2, ledger_pb2, models_pb2

SERVED = [
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"],
    models_pb2.DESCRIPTOR.services_by_name["ModelService"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
]
DIAGNOSIS = diagnosis_pb2.DESCRIPTOR.services_by_name["DiagnosisService"]
LEDGER = ledger_pb2.DESCRIPTOR.services_by_name["LedgerService"]
CHANNELZ = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"]


def service(package: str, name: str, *methods: str) -> ServiceDescriptor:
    """A service that exists only here."""
    file = descriptor_pb2.FileDescriptorProto(name="made_up.proto", package=package)
    file.message_type.add(name="Nothing")
    added = file.service.add(name=name)
    for method in methods:
        nothing = f".{package}.Nothing"
        added.method.add(name=method, input_type=nothing, output_type=nothing)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool.FindServiceByName(f"{package}.{name}")


def test_every_method_that_is_served_has_a_row() -> None:
    """The server would not start."""
    check_every_method_has_a_row([*SERVED, CHANNELZ, DIAGNOSIS, LEDGER])


def test_every_service_of_the_contract_is_served() -> None:
    """A service that is not asked for its rows could have methods open to anybody."""
    ours = {
        name
        for file in (diagnosis_pb2, generation_pb2, ledger_pb2, models_pb2)
        for name in (s.full_name for s in file.DESCRIPTOR.services_by_name.values())
    }
    assert ours <= {served.full_name for served in (*SERVED, DIAGNOSIS, LEDGER)}


@pytest.mark.parametrize(
    ("package", "name", "method"),
    [
        ("kvledger.v1", "GenerationService", "Purge"),
        ("kvledger.v1", "generationservice", "Generate"),
        ("kvledger.v1", "ModelService", "generate"),
        ("kvledger.v2", "GenerationService", "Generate"),
        ("kvledger.v1", "ModelService", "Generate"),
    ],
)
def test_a_method_without_a_row_is_refused(package: str, name: str, method: str) -> None:
    """A method that somebody adds would be open before anybody decided for whom."""
    with pytest.raises(LookupError, match=f"/{package}.{name}/{method} has no row"):
        check_every_method_has_a_row([service(package, name, method)])


def test_one_missing_row_among_many_is_found() -> None:
    """Only the first method, or the first service, would be looked at."""
    last = service("kvledger.v1", "ModelService", "ListModels", "GetModel", "Forget")
    with pytest.raises(LookupError, match="Forget"):
        check_every_method_has_a_row([*SERVED, last])


def test_each_listener_has_only_its_own() -> None:
    """Clients could read what is for operators, because somebody put it on the wrong listener."""
    generation, models, health, reflection = SERVED
    check_every_method_has_a_row(SERVED, Port.CLIENTS)
    check_every_method_has_a_row([health, reflection, CHANNELZ, LEDGER], Port.OPERATORS)
    check_every_method_has_a_row([LEDGER], Port.CLIENTS, {"GetStatement"})
    with pytest.raises(LookupError, match=r"/GetLedger belongs to .* OPERATORS, not of CLIENTS"):
        check_every_method_has_a_row([LEDGER], Port.CLIENTS)
    with pytest.raises(LookupError, match=r"/grpc\.channelz\..* belongs to .* OPERATORS"):
        check_every_method_has_a_row([*SERVED, CHANNELZ], Port.CLIENTS)
    for service_ in (generation, models):
        with pytest.raises(LookupError, match=f"/{service_.full_name}/.* belongs to .* CLIENTS"):
            check_every_method_has_a_row([health, service_], Port.OPERATORS)


def test_what_each_method_asks_for() -> None:
    """A row that is changed by accident would let strangers generate, or clients look around."""
    roles: dict[Role, set[str]] = {}
    served: Mapping[Port, list[ServiceDescriptor]] = {
        Port.CLIENTS: SERVED,
        Port.OPERATORS: [*SERVED[2:], CHANNELZ],
    }
    for port, services in served.items():
        for described in services:
            for method in described.methods:
                role = role_for(f"/{described.full_name}/{method.name}", port)
                roles.setdefault(role, set()).add(described.full_name)
    assert roles == {
        Role.CLIENT: {"kvledger.v1.GenerationService", "kvledger.v1.ModelService"},
        Role.VIEWER: {"grpc.channelz.v1.Channelz"},
        Role.ANYONE: {
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        },
    }
    with pytest.raises(LookupError):
        role_for("/kvledger.v1.ModelService/Nothing", Port.CLIENTS)


def test_a_method_may_ask_for_another_role_on_another_listener() -> None:
    """A client could read another tenant's account, or an operator no account at all."""
    path = "/kvledger.v1.LedgerService/"
    assert role_for(path + "GetStatement", Port.CLIENTS) is Role.CLIENT
    for name in ("GetStatement", "GetLedger", "WatchLedger"):
        assert role_for(path + name, Port.OPERATORS) is Role.VIEWER
    for name in ("GetLedger", "WatchLedger"):
        with pytest.raises(LookupError, match=f"{name} has no row for the listener of CLIENTS"):
            role_for(path + name, Port.CLIENTS)


def test_clients_ask_about_their_own_requests_only() -> None:
    """A client could read what limits the server, and what all tenants send."""
    path = "/kvledger.v1.DiagnosisService/"
    assert role_for(path + "Explain", Port.CLIENTS) is Role.CLIENT
    for name in ("Explain", "Diagnose"):
        assert role_for(path + name, Port.OPERATORS) is Role.VIEWER
    with pytest.raises(LookupError, match="Diagnose has no row for the listener of CLIENTS"):
        role_for(path + "Diagnose", Port.CLIENTS)


def test_an_operator_may_look_and_is_no_client() -> None:
    """Who runs a server would read what its clients may, or not even see who is connected."""
    assert with_implied([Role.OPERATOR]) == {Role.OPERATOR, Role.VIEWER}
    assert with_implied([Role.VIEWER]) == {Role.VIEWER}
    assert with_implied([Role.CLIENT]) == {Role.CLIENT}
    assert Role.ANYONE not in GIVEN
