"""Traffic out of the files of --books: what a server's callers asked for, when, and as whom.

Receipts say when a request ended and how long it was here, so when it came; what it shared with
whom they do not say. A prompt of which the tenant's own scope had 100 tokens begins here with the
first 100 tokens of one text of its tenant, so about as much is reused. A request with several
samples comes as that many requests with one prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from kvledger.books.file_lines import Notes, lines_of, paths_of
from kvledger.books.lines import LOST, are_counts
from kvledger.books.load_lines import PHASES, is_whole
from kvledger.diagnosis.counts import DECODE, PREFILL
from kvledger.diagnosis.observation import Setup
from kvledger.diagnosis.setup_facts import setup_from
from kvledger.diagnosis.step_fit import fit_phase
from kvledger.errors import SettingRefused
from kvledger.simulation.costs import Costs
from kvledger.simulation.traffic import Row

_TIMES = ("queue", "prefill", "decode", "stall")
_PHASE = ("steps", "time", "tokens", "keys", "sequences")


@dataclass
class Recorded:
    """What some folders hold; the setup is that of the server that was started last."""

    rows: list[Row] = field(default_factory=list)
    setup: Setup | None = None
    block_bytes: int = 0
    phases: Any = field(default_factory=lambda: np.zeros((2, len(_PHASE)), np.int64))

    @property
    def fits(self) -> Any:
        """Lines of load tell how long steps took, and nothing by which weights are told apart."""
        return np.zeros((2, 9), np.float64)

    def costs(self, folder: Path) -> Costs:
        """Of its steps: the floors of its model and machine, times what steps took of them.

        Raises SettingRefused where the files do not say.
        """
        if self.setup is not None:
            fits = [fit_phase(self, phase, self.setup.costs) for phase in (DECODE, PREFILL)]
            if fits[0] is not None and fits[1] is not None:
                return Costs(fits[0], fits[1])
        raise SettingRefused(
            f"--books {folder} does not say how long steps took; give --costs, or --decode and "
            f"--prefill"
        )


def read_books(folder: Path, limit: int | None = None) -> Recorded:
    """What the files of a folder hold, and their first `limit` requests. Raises SettingRefused."""
    recorded = Recorded()
    seen: set[str] = set()
    for path in paths_of([folder]):
        for line in lines_of(path, Notes()):
            kind = line["kind"]
            if kind == "replica":
                recorded.setup = setup_from(line) or recorded.setup
                recorded.block_bytes = int(line["block_bytes"])
            elif kind == "load" and is_whole(line):
                phases = line["phases"]
                recorded.phases += [[phases[name][key] for key in _PHASE] for name in PHASES]
            elif kind == "receipt" and line["id"] not in seen:  # some are written twice
                seen.add(line["id"])
                recorded.rows += _rows(line)
    recorded.rows.sort(key=lambda row: row.at)
    recorded.rows = recorded.rows[:limit]
    if not recorded.rows:
        raise SettingRefused(f"--books {folder} has no receipt of a request that was answered")
    return recorded


def _rows(line: Mapping[str, Any]) -> Iterator[Row]:
    """One request for each sample; none for what says too little, or made no token."""
    if line["end"] == LOST or not are_counts(line, (*_TIMES, "samples", "output_tokens")):
        return
    samples, prompt = max(1, line["samples"]), line["prompt_tokens"]
    output = line["output_tokens"] // samples
    if prompt < 1 or output < 1:
        return
    try:
        ended = datetime.fromisoformat(line["ended_at"].replace("Z", "+00:00")).timestamp()
    except ValueError:
        return
    came = ended - _seconds(line, _TIMES)
    shared = min(prompt, line["reused_own_tokens"])
    for _ in range(samples):
        if samples > 1:
            yield Row(came, prompt, output, line["tenant"], line["id"], prompt)
        else:
            yield Row(came, prompt, output, line["tenant"], "reused" if shared else "", shared)


def _seconds(line: Mapping[str, Any], names: Sequence[str]) -> float:
    return float(sum(line[name] for name in names)) / 1e9
