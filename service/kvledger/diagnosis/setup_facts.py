"""What a server was started with, as the files of --books state it, and read again from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvledger.diagnosis.observation import UNKNOWN, Setup
from kvledger.machine.peaks import MachinePeaks
from kvledger.planning.floors import StepCosts

_COUNTS = ("threads", "processors", "token_budget", "sequences_max", "block_tokens")
_WORK = ("layer_bytes", "head_bytes", "kv_token_bytes")


def facts_of(setup: Setup) -> dict[str, Any]:
    """`settings`, the model's `work`, and the machine's `peaks` if they are known."""
    costs = setup.costs
    facts: dict[str, Any] = {
        "settings": {
            **{name: getattr(setup, name) for name in _COUNTS},
            "step_stretch": setup.step_stretch,
            "prefill_step": setup.prefill_step,
            "tpot_target": setup.tpot_target,
            "prefix_reuse": setup.reuses_prefixes,
        },
        "work": {
            **{name: getattr(costs, name) for name in _WORK},
            "key_operations": round(costs.key_operations),
            "layer_operations": _rounded(costs.layer_operations),
            "head_operations": _rounded(costs.head_operations),
        },
    }
    if setup.is_measured:
        facts["peaks"] = {
            "read_bytes_per_second": round(costs.peaks.read_bytes_per_second),
            "operations_per_second": _rounded(costs.peaks.operations_per_second),
        }
    return facts


def setup_from(line: Mapping[str, Any]) -> Setup | None:
    """The setup that a replica's line states; None if it states none, or none that can be read."""
    try:
        settings, work, peaks = line["settings"], line["work"], line.get("peaks")
        target = settings["tpot_target"]
        costs = StepCosts(
            **{name: int(work[name]) for name in _WORK},
            layer_operations=_numbers(work["layer_operations"]),
            head_operations=_numbers(work["head_operations"]),
            key_operations=float(work["key_operations"]),
            peaks=UNKNOWN if peaks is None else _peaks(peaks),
        )
        counts = {name: int(settings[name]) for name in _COUNTS}
        # Damage must not end a whole report.
        bounded = (*counts.values(), costs.layer_bytes, costs.kv_token_bytes, line["blocks"])
        if not all(1 <= value < 1 << 62 for value in bounded):
            return None
        return Setup(
            costs=costs,
            **counts,
            blocks=line["blocks"],
            step_stretch=float(settings["step_stretch"]),
            prefill_step=float(settings["prefill_step"]),
            tpot_target=None if target is None else float(target),
            reuses_prefixes=bool(settings["prefix_reuse"]),
            kv_format=str(line["kv_format"]),
            by_threads={},  # what other numbers of threads would do is not stated
        )
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError):
        return None


def _peaks(facts: Mapping[str, Any]) -> MachinePeaks:
    operations = _numbers(facts["operations_per_second"])
    peaks = MachinePeaks(float(facts["read_bytes_per_second"]), operations)
    rates = (peaks.read_bytes_per_second, operations["f32"], *operations.values())
    if not all(0.0 < rate < 1e30 for rate in rates):  # nan as well
        raise ValueError("a machine does something")
    return peaks


def _rounded(values: Mapping[str, float]) -> dict[str, int]:
    return {name: round(value) for name, value in values.items()}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
