"""The real core with prefix reuse, without a model, and what its sequences were given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from engine_harness import BLOCK_STATES, make_core
from stepping import arrivals

from kvledger.scopes.prefix_scopes import PrefixScopes

REUSES, KEEPS_AND_REUSES = 2, 3
SLOTS = 4

Tokens = npt.NDArray[np.int32]


@dataclass
class Asked:
    """A request, and all that the core said of it."""

    tenant: int
    scope: int
    prompt: Tokens
    max_tokens: int = 1
    flags: int = KEEPS_AND_REUSES
    admitted_at: int = -1  # the step
    reused_tokens: int = 0  # when it was admitted
    blocks: tuple[int, ...] = ()  # its table in the last step that it took part in
    receipt: Any = None


class ScopedCore:
    """Steps whose tokens are all the same; time goes by one millisecond a step."""

    def __init__(self, **changes: Any) -> None:
        settings = {"slots_per_block": SLOTS, "reuses_prefixes": True, "seed": 7, "now": 0}
        self.engine = make_core(**{**settings, **changes})
        self.slots = changes.get("slots_per_block", SLOTS)
        self.asked: dict[int, Asked] = {}
        self.steps = 0
        self.plans: list[tuple[Any, ...]] = []  # what each step computed, as `record` has it
        self.balances: dict[str, int] = {}
        self._numbers = 0
        self._rows: dict[int, int] = {}
        self._waiting: list[tuple[int, Asked]] = []

    @property
    def now(self) -> int:
        return self.steps * 1_000_000

    def submit(self, asked: Asked) -> Asked:
        """For the next step."""
        self._numbers += 1
        number = self._numbers
        self.asked[number] = asked
        self._waiting.append((number, asked))
        return asked

    def ask(
        self, tenant: int, scopes: PrefixScopes | int, prompt: Tokens, max_tokens: int = 1
    ) -> Asked:
        """The same, of a tenant by number and the scopes that the service derived."""
        scope = scopes if isinstance(scopes, int) else scopes.own
        assert scope is not None
        return self.submit(Asked(tenant, scope, prompt, max_tokens))

    def step(self) -> int:
        """One step; the tokens that it computed."""
        self.steps += 1
        plan, report = self.engine.plan(self.now, self._arrivals())
        self._note(report)
        tokens = int(plan.tokens)
        if tokens:
            self._see(plan)
            chosen = np.full(plan.logits, 5, np.int32)
            self._note(self.engine.commit(plan.step, chosen, None, self.now))
        return tokens

    def run_out(self) -> None:
        """Steps until nobody is left."""
        while any(asked.receipt is None for asked in self.asked.values()):
            assert self.step() or self._waiting == [], "it stands still"

    def forget(self) -> None:
        """What has ended is not looked at any more."""
        self.asked.clear()
        self.plans.clear()

    def purge(self, *scopes: int) -> int:
        """How many blocks of these scopes were let go."""
        return self.engine.purge(np.array(scopes, np.uint32), self.now)

    def _arrivals(self) -> Any:
        new, self._waiting = self._waiting, []
        if not new:
            return None
        requests: Sequence[Asked] = [asked for _, asked in new]
        return arrivals(
            [asked.prompt.tolist() for asked in requests],
            ids=np.array([number for number, _ in new], np.uint64),
            tenants=np.array([asked.tenant for asked in requests], np.uint32),
            arrived_at=np.full(len(new), self.now, np.int64),
            output_tokens_max=np.array([asked.max_tokens for asked in requests], np.int64),
            own_scopes=np.array([asked.scope for asked in requests], np.uint32),
            scope_flags=np.array([asked.flags for asked in requests], np.uint8),
        )

    def _note(self, report: Any) -> None:
        for admission in report.admissions:
            number = int(admission["sequence"])
            self._rows[int(admission["row"])] = number
            self.asked[number].admitted_at = self.steps
            self.asked[number].reused_tokens = int(admission["reused_tokens"])
        for receipt in report.receipts:
            self.asked[int(receipt["sequence"])].receipt = receipt.copy()
        assert len(report.refusals) == 0
        self.balances = dict(zip(BLOCK_STATES, report.balances.tolist(), strict=True))

    def _see(self, plan: Any) -> None:
        tables, starts = plan.block_tables, plan.query_start.tolist()
        computed = []
        for place, (row, context) in enumerate(
            zip(plan.rows.tolist(), plan.context_length.tolist(), strict=True)
        ):
            number = self._rows[row]
            self.asked[number].blocks = tuple(tables[row, : -(-context // self.slots)].tolist())
            computed.append((number, starts[place + 1] - starts[place], context))
        self.plans.append((self.steps, *computed))
