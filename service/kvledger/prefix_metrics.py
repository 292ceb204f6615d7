"""What operators can chart of reused prefixes, and the alarm that must never ring.

The core's own counts come with its last report; where a prompt's tokens came from is told by
receipts, so every request that was admitted counts once, when it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import structlog

from kvledger.metrics import Metrics
from kvledger.streams import Receipt

_log = structlog.get_logger(__name__)

# Where the tokens of a prompt can come from: computed, or from cached blocks of the request's own
# scope, of a share group, of a public prefix.
SOURCES = ("computed", "own", "group", "public")

# Names of metrics without `_total`, what the core calls the count, and what it means.
_COUNTS = (
    (
        "kvledger_prefix_lookups",
        "lookups",
        "Requests that were admitted with what was cached for them, much or nothing.",
    ),
    (
        "kvledger_prefix_inserted_blocks",
        "inserted",
        "Blocks that were kept for others to begin with.",
    ),
    (
        "kvledger_prefix_evictions",
        "evicted",
        "Cached blocks that went because somebody needed room.",
    ),
    (
        "kvledger_prefix_foreign_blocks",
        "foreign",
        "Blocks of another owner that the index named and the books refused: always 0.",
    ),
)


class PrefixMetrics:
    """The metrics of one server's prefix reuse."""

    def __init__(
        self, metrics: Metrics, counts: Callable[[], Mapping[str, int]], scopes: Callable[[], int]
    ) -> None:
        """`counts` are the core's, after its last step; `scopes` is how many are known now.

        Both are asked for at every scrape, from another thread.
        """
        self._counts = counts
        self._foreign = 0  # that the log has heard of
        self._prompt_tokens = metrics.counter(
            "kvledger_prompt_tokens",
            "Tokens of prompts of requests that were admitted and have ended, by their source.",
            "source",
            SOURCES,
        )
        for name, key, meaning in _COUNTS:
            metrics.watch_count(name, meaning, partial(self._count, key))
        metrics.watch("kvledger_prefix_scopes", "Scopes of prefixes that are known.", scopes)

    def request_ended(self, receipt: Receipt, shares_public: bool) -> None:
        """Counts the prompt of a request; nothing of one that was never admitted.

        `shares_public` says that what it shares is a public prefix. Each token of the prompt counts
        once at most, though a preempted request finds or computes it again.
        """
        left = receipt.prompt_tokens
        shared = "public" if shares_public else "group"
        for source, tokens in (
            (shared, receipt.reused_shared),
            ("own", receipt.reused_own),
            ("computed", receipt.computed_tokens),
        ):
            counted = min(left, tokens)
            left -= counted
            self._prompt_tokens.labels(source).inc(counted)

    def prompt_tokens(self) -> dict[str, float]:
        """Of requests that have ended, by their source; any thread may ask."""
        (family,) = self._prompt_tokens.collect()
        return {sample.labels["source"]: sample.value for sample in family.samples}

    def _count(self, key: str) -> int:
        return self._counts().get(key, 0)

    def look(self) -> None:
        """Says in the log if the index has ever named a block of somebody else's; call it often."""
        foreign = self._count("foreign")
        if foreign > self._foreign:
            _log.error(
                "prefix_foreign_blocks",
                blocks=foreign - self._foreign,
                meaning="the index named blocks of another owner, and they were refused",
            )
            self._foreign = foreign
