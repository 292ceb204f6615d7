"""The door for several tenants over an engine that only remembers, and all that it was told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from test_admission import CONTEXT, MAILBOXES, FakeEngine, admit, finish

from kvledger.admission import Admission, Caller, Ticket
from kvledger.engine import EndReason
from kvledger.errors import TenantLimitReached
from kvledger.sampling import SamplingParameters
from kvledger.tenants.shares import CoreShare
from kvledger.tenants.tenant import Tenant, TenantLimits


def caller(number: int) -> Caller:
    """Somebody of the tenant of this number."""
    return Caller(Tenant(f"t{number}", number))


class Door:
    """A door for tenants by number, and all that it was told."""

    def __init__(self, **settings: Any) -> None:
        self.engine = FakeEngine()
        self.refusals: list[str] = []
        self.shares: list[Sequence[CoreShare]] = []
        self.admission = Admission(
            self.engine,  # type: ignore[arg-type]
            CONTEXT,
            settings.pop("queued_max", 100),
            MAILBOXES,
            on_refusal=self.refusals.append,
            set_shares=self.shares.append,
            **settings,
        )

    def limit(self, more_may_come: bool = True, **limits: dict[str, Any]) -> None:
        """Limits of tenants, by names such as t1."""
        self.admission.set_tenants(
            [
                Tenant(name, int(name[1:]), limits=TenantLimits(**given))
                for name, given in limits.items()
            ],
            more_may_come,
        )

    def enter(self, tenant: int, tokens: int = 10, samples: int = 1, **more: Any) -> Ticket:
        return self.admission.enter(
            caller=caller(tenant),
            prompt=np.arange(tokens, dtype=np.int32),
            max_tokens=5,
            sampling=SamplingParameters(),
            priority=0,
            ignore_eos=False,
            samples=samples,
            **more,
        )

    def reached(self, tenant: int, tokens: int = 10) -> TenantLimitReached:
        """The limit that a request meets, which must meet one."""
        with pytest.raises(TenantLimitReached) as refused:
            self.enter(tenant, tokens)
        assert refused.value.tenant == f"t{tenant}"
        assert self.refusals[-1] == refused.value.limit
        return refused.value

    def admit(self, *tickets: Ticket) -> None:
        admit(self.admission, *tickets)

    def finish(self, ticket: Ticket, reason: EndReason = EndReason.STOP) -> None:
        finish(self.admission, ticket, reason)

    @property
    def submitted(self) -> list[int]:
        return [job.sequence for job in self.engine.jobs]
