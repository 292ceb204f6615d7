"""Targets for the time of an output token: whose holds, and what a request may ask for."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from server_harness import serving

from kvledger import _core
from kvledger.errors import InvalidRequest
from kvledger.tenants.tenant import TenantLimits
from kvledger.tpot_targets import step_time_max


def limits(target: float | None) -> TenantLimits:
    return TenantLimits(tpot_target=target)


@pytest.mark.parametrize(
    ("server", "tenant", "asked", "nanoseconds"),
    [
        (None, None, None, 0),
        (0.1, None, None, 0),  # the core knows the server's own
        (0.1, 0.25, None, 250_000_000),
        (0.1, 0.05, None, 50_000_000),
        (None, 0.05, None, 50_000_000),
        (0.1, None, 0.1, 100_000_000),
        (0.1, None, 2.5, 2_500_000_000),
        (0.1, 0.05, 0.07, 70_000_000),
        (None, 0.25, 0.25, 250_000_000),
    ],
)
def test_the_nearest_target_holds(
    server: float | None, tenant: float | None, asked: float | None, nanoseconds: int
) -> None:
    """A batch job would hold up others, or a tenant's own target be the server's."""
    assert step_time_max(server, limits(tenant), asked) == nanoseconds


@pytest.mark.parametrize(
    ("server", "tenant", "asked", "told"),
    [
        (None, None, 1.0, "neither"),
        (0.1, None, 0.099, "0.1 s"),
        (0.05, 0.2, 0.1, "0.2 s"),
        (None, 0.2, 0.001, "0.2 s"),
    ],
)
def test_a_request_may_only_ask_for_a_longer_one(
    server: float | None, tenant: float | None, asked: float, told: str
) -> None:
    """A client could starve everybody else's prompts."""
    with pytest.raises(InvalidRequest) as refused:
        step_time_max(server, limits(tenant), asked)
    (violation,) = refused.value.violations
    assert violation.field == "tpot_target"
    assert told in violation.reason


def aim(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromMicroseconds(round(seconds * 1e6))
    return duration


async def test_what_is_asked_for_comes_to_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target would be read, checked and lost."""
    heard: list[int] = []
    arrivals = _core.Arrivals

    def listened(**arrays: Any) -> _core.Arrivals:
        heard.extend(arrays["step_times_max"].tolist())
        return arrivals(**arrays)

    monkeypatch.setattr(_core, "Arrivals", listened)
    async with serving("--tpot-target", "0.1") as server:
        heard.clear()
        await server.answer(text="a", max_tokens=2)
        await server.answer(text="a", max_tokens=2, tpot_target=aim(0.4))
        refusal = await server.refusal(text="a", max_tokens=2, tpot_target=aim(0.05))
        assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
        assert list(refusal.violations) == ["tpot_target"]
    assert heard == [0, 400_000_000]


async def test_without_any_target_none_can_be_asked_for() -> None:
    """One who asks would believe that it has one."""
    async with serving() as server:
        refusal = await server.refusal(text="a", max_tokens=2, tpot_target=aim(0.4))
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "leave it out" in refusal.violations["tpot_target"]
