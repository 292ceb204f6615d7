"""Metrics of reused prefixes: each prompt counted once, by where its tokens came from."""

from __future__ import annotations

from typing import Any

import pytest
from reuse_harness import BLOCK, NONE, found, prompt, reusing, reusing_tenants, shared
from server_harness import Log, until
from test_metrics import scraped

from kvledger.engine import EndReason
from kvledger.metrics import Metrics
from kvledger.prefix_metrics import SOURCES, PrefixMetrics
from kvledger.streams import Receipt, receipt_of_waiting

METRICS = ("--metrics-listen", "127.0.0.1:0")


class Counted:
    """The metrics alone, over counts that a test sets."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.metrics = Metrics()
        self.prefixes = PrefixMetrics(self.metrics, lambda: self.counts, lambda: 3)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    @property
    def tokens(self) -> list[float | None]:
        """Of prompts, in the order of SOURCES."""
        return [self.value("kvledger_prompt_tokens_total", source=source) for source in SOURCES]


def receipt(**changes: int) -> Receipt:
    plain = receipt_of_waiting(EndReason.STOP, 0, 0)
    return Receipt(**{**vars(plain), **changes})


@pytest.mark.parametrize(
    ("told", "public", "expected"),
    [
        ({"computed_tokens": 107}, False, [100, 0, 0, 0]),
        ({"reused_own": 64, "computed_tokens": 40}, False, [36, 64, 0, 0]),
        (
            {"reused_own": 16, "reused_shared": 32, "computed_tokens": 60},
            False,
            [52, 16, 32, 0],
        ),
        ({"reused_shared": 96, "computed_tokens": 9}, True, [4, 0, 0, 96]),
        # Preempted: it found and computed some of it again.
        (
            {"reused_own": 150, "reused_shared": 64, "computed_tokens": 30},
            True,
            [0, 36, 0, 64],
        ),
        # Cancelled while its prompt was read, and while it waited.
        ({"reused_own": 32, "computed_tokens": 20}, False, [20, 32, 0, 0]),
        ({}, False, [0, 0, 0, 0]),
    ],
)
def test_each_token_of_a_prompt_counts_once(
    told: dict[str, int], public: bool, expected: list[int]
) -> None:
    """A hit rate could be more than one, or that of what was preempted."""
    counted = Counted()
    counted.prefixes.request_ended(receipt(prompt_tokens=100, **told), public)
    assert counted.tokens == expected


def test_the_cores_counts_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator would chart zeros, or hear nothing of blocks that crossed a border."""
    log = Log()
    monkeypatch.setattr("kvledger.prefix_metrics._log", log)
    counted = Counted()
    counted.prefixes.look()
    assert counted.value("kvledger_prefix_foreign_blocks_total") == 0, "there before the first step"
    counted.counts = {"lookups": 7, "inserted": 5, "evicted": 2, "foreign": 0}
    counted.prefixes.look()
    assert log.lines == []
    assert counted.value("kvledger_prefix_lookups_total") == 7
    assert counted.value("kvledger_prefix_inserted_blocks_total") == 5
    assert counted.value("kvledger_prefix_evictions_total") == 2
    assert counted.value("kvledger_prefix_scopes") == 3
    counted.counts = {**counted.counts, "foreign": 2}
    for _ in range(3):
        counted.prefixes.look()
    assert [facts["blocks"] for facts in log.of("prefix_foreign_blocks")] == [2]
    assert counted.value("kvledger_prefix_foreign_blocks_total") == 2


async def test_a_server_counts_what_it_did() -> None:
    """The chart would be of something else than what requests were told."""
    async with reusing(*METRICS) as server:
        ids = prompt("p", 5 * BLOCK + 3)
        await server.ids(ids)
        warm = await server.ids(ids)
        await server.ids(ids, cache=NONE)
        await until(lambda: not server.server._admission.open_requests)
        await until(lambda: server.counts["lookups"] == 2)
        told = await scraped(server)
        assert told["kvledger_prompt_tokens_total own"] == found(warm)[0] == 5 * BLOCK
        assert told["kvledger_prompt_tokens_total computed"] == 2 * len(ids) + 3
        assert told["kvledger_prefix_lookups_total"] == 2, "who has no scope does not look"
        assert told["kvledger_prefix_inserted_blocks_total"] == 5
        assert told["kvledger_prefix_scopes"] == 1
        for count in range(12):
            await server.ids(prompt(f"flood {count}", 10 * BLOCK))
        told = await scraped(server)
        assert told["kvledger_prefix_evictions_total"] > 0
        assert told["kvledger_prefix_foreign_blocks_total"] == 0


async def test_shared_beginnings_have_their_own_sources(tmp_path: Any) -> None:
    """A group's work would look like the operator's."""
    (tmp_path / "terms").write_text("x" * 2 * BLOCK)
    option = ("--public-prefix", f"terms={tmp_path / 'terms'}")
    metrics = ("--metrics-listen", f"unix:{tmp_path / 'metrics.sock'}")
    async with reusing_tenants(tmp_path, *option, *metrics) as their:
        ids = [*b"x" * 2 * BLOCK, 1, 2]
        await their.ask("acme", ids, cache=shared("terms", 2 * BLOCK))
        for who in ("acme", "globex"):
            await their.ask(who, ids, cache=shared("team", 2 * BLOCK))
        await until(lambda: not their.server.server._admission.open_requests)
        told = await scraped(their.server)
        sources = [told[f"kvledger_prompt_tokens_total {source}"] for source in SOURCES]
        # The server itself computed the prefix.
        assert sources == [2 * BLOCK + 2 + len(ids) + 2, 0, 2 * BLOCK, 2 * BLOCK]
