"""How long a step takes.

    seconds = step + decode(tokens, keys) where somebody decodes + prefill(tokens, keys) where a
              prompt is computed

Keys are what the tokens' attention reads, as core/step_time.h counts them. Fits of a real server's
steps stand in what `kvledger diagnose --json` prints.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvledger import _core
from kvledger.diagnosis.step_fit import PhaseFit
from kvledger.errors import SettingRefused

_TIME = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*(s|ms|us|ns)?")
_UNITS = {None: 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_NOTHING = PhaseFit(0.0, 0.0, 0.0)
_SETTINGS = ("max_sequences", "token_budget", "kv_blocks", "step_stretch", "prefill_step")


class StepWork(NamedTuple):
    """What a step computes, as core/step_time.h has it."""

    decode_tokens: int
    decode_keys: int
    prefill_tokens: int
    prefill_keys: int


class StepCost(Protocol):
    """Whatever knows how long steps take."""

    def seconds(self, plan: _core.Plan) -> float:
        """Of a step, before anything unforeseen."""
        ...


def work_of(plan: _core.Plan) -> StepWork:
    """What a planned step computes. Decoding sequences stand first and have one token each."""
    decoding = plan.decode_tokens
    context = plan.context_length.astype(np.int64)
    chunks = np.diff(plan.query_start[decoding:]).astype(np.int64)
    computed = context[decoding:] - chunks
    keys = chunks * computed + chunks * (chunks + 1) // 2
    return StepWork(
        decoding, int(context[:decoding].sum()), plan.tokens - decoding, int(keys.sum())
    )


@dataclass(frozen=True)
class Costs:
    """Seconds: of any step, and of what its phases add."""

    decode: PhaseFit = _NOTHING
    prefill: PhaseFit = _NOTHING
    step: float = 0.0

    def seconds(self, plan: _core.Plan) -> float:
        """See StepCost."""
        return self.of(work_of(plan))

    def of(self, work: StepWork) -> float:
        """Of a step that computes so much."""
        took = self.step
        if work.decode_tokens:
            took += self.decode.seconds(work.decode_tokens, work.decode_keys)
        if work.prefill_tokens:
            took += self.prefill.seconds(work.prefill_tokens, work.prefill_keys)
        return took

    @property
    def words(self) -> str:
        """In the form that the options take."""
        parts = (
            f"{name} {','.join(_shown(value) for value in (fit.fixed, fit.token, fit.key))}"
            for name, fit in (("--decode", self.decode), ("--prefill", self.prefill))
        )
        return " ".join(parts)


@dataclass(frozen=True)
class ServedCosts:
    """What a diagnosis says of a server: its steps, and the settings it was started with."""

    costs: Costs
    settings: Mapping[str, Any]
    block_tokens: int | None


def seconds_of(text: str) -> float:
    """A time such as 5ms, 1.4ms or 2ns; ValueError for what is none."""
    match = _TIME.fullmatch(text.strip())
    try:
        value = float(match.group(1)) * _UNITS[match.group(2)] if match else math.nan
    except ValueError:  # more than one point
        value = math.nan
    if not 0.0 <= value < 1e6:
        raise ValueError(f"{text!r} is no time such as 5ms, 1.4ms or 2ns")
    return value


def phase_fit(text: str) -> PhaseFit:
    """`FIXED,TOKEN,KEY`; ValueError for what is none."""
    parts = text.split(",")
    if len(parts) != 3:
        raise ValueError(f"{text!r} is not FIXED,TOKEN,KEY, three times such as 5ms,1.4ms,2ns")
    fit = PhaseFit(*map(seconds_of, parts))
    if fit.fixed + fit.token <= 0.0:
        raise ValueError(f"{text!r}: a step would take no time; raise FIXED or TOKEN")
    return fit


def costs_from(path: Path, text: str) -> ServedCosts:
    """What `kvledger diagnose --json` printed. Raises SettingRefused."""
    try:
        now = json.loads(text)["now"]
        decode, prefill = now["decode"], now["prefill"]
        setup = now["setup"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise SettingRefused(
            f"--costs {path} holds no diagnosis; write one with: kvledger diagnose --json > FILE"
        ) from None
    for name, phase in (("decoded", decode), ("computed a prompt", prefill)):
        if "fit" not in phase:
            raise SettingRefused(
                f"--costs {path}: nobody {name} in its interval; diagnose the server while it "
                f"works, or give --decode and --prefill"
            )
    try:
        costs = Costs(_fit(decode["fit"]), _fit(prefill["fit"]))
        settings = {name: setup[name] for name in _SETTINGS}
        settings["tpot_target"] = setup.get("tpot_target")
        settings["prefix_reuse"] = "on" if setup["prefix_reuse"] else "off"
        block_tokens = int(setup["slots_per_block"]) or None
    except (KeyError, TypeError, ValueError):
        raise SettingRefused(
            f"--costs {path} is a diagnosis of another version; write it with this one"
        ) from None
    return ServedCosts(costs, settings, block_tokens)


def _fit(values: Mapping[str, Any]) -> PhaseFit:
    numbers = [float(values[f"{name}_seconds"]) for name in ("fixed", "token", "key")]
    if not all(0.0 <= value < 1e6 for value in numbers):
        raise ValueError("a step takes some time")
    return PhaseFit(*numbers)


def _shown(seconds: float) -> str:
    """With a unit that leaves few digits."""
    for unit in ("s", "ms", "us"):
        if seconds >= _UNITS[unit]:
            return f"{seconds / _UNITS[unit]:.4g}{unit}"
    return f"{seconds * 1e9:.4g}ns"
