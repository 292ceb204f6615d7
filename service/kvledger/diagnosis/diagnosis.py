"""A diagnosis: an observation, what limits the service in it, and what changes would do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvledger.diagnosis.counts import Counts
from kvledger.diagnosis.findings import Finding, findings, percent
from kvledger.diagnosis.observation import Observation, Setup, observe
from kvledger.diagnosis.predictions import Prediction, fit, predict

# What differs by less than this factor is the same.
_SAME = 1.25
# Shares that differ by less than this are the same.
_SAME_SHARE = 0.05


@dataclass(frozen=True)
class Diagnosis:
    """See the head of this file."""

    seen: Observation
    findings: list[Finding]
    predictions: list[Prediction]

    @property
    def summary(self) -> str:
        """In one sentence."""
        if self.findings:
            return self.findings[0].sentence
        seen = self.seen
        if seen.decode.steps + seen.prefill.steps == 0:
            return "Nobody asked for anything: there is nothing to say."
        return (
            f"Nothing is short: a step ran {percent(seen.busy)} of the time, requests waited "
            f"{percent(seen.waiting + seen.held)} of theirs, and the pool's "
            f"waterline was {percent(seen.waterline)}."
        )


def diagnose(setup: Setup, counts: Counts, formats: Mapping[str, int]) -> Diagnosis:
    """`counts` are of an interval, `formats` bytes of a token by the KV formats of the build."""
    seen = observe(setup, counts)
    model = fit(seen, counts)
    return Diagnosis(
        seen=seen,
        findings=findings(seen),
        predictions=predict(model, seen, dict(formats)) if model is not None else [],
    )


def changes(now: Observation, before: Observation) -> list[str]:
    """What is different now, in sentences, traffic first."""
    rates = [
        ("Requests came", now.arrivals / _time(now), before.arrivals / _time(before), "a second"),
        ("Prompts have", _mean_prompt(now), _mean_prompt(before), "tokens on average"),
        ("Contexts have", _context(now), _context(before), "tokens on average"),
        ("A step decodes", now.decode.sequences, before.decode.sequences, "sequences"),
        (
            "A step of decoding takes",
            now.decode_step[0] * 1e3,
            before.decode_step[0] * 1e3,
            "ms (median)",
        ),
    ]
    shares = [
        ("Steps run", now.busy, before.busy, "of the time"),
        ("Prompts take", now.prefill_share, before.prefill_share, "of the steps' time"),
        ("Cached tokens are", _reused(now), _reused(before), "of the prompts'"),
        ("The waterline is", now.waterline, before.waterline, "of the pool"),
        (
            "Requests wait",
            now.waiting + now.held,
            before.waiting + before.held,
            "of their time",
        ),
    ]
    said = [
        f"{what} {new:.3g} {unit}, not {old:.3g}."
        for what, new, old, unit in rates
        if max(new, old) > 0 and (min(new, old) == 0 or max(new, old) / min(new, old) > _SAME)
    ]
    said += [
        f"{what} {percent(new)} {unit}, not {percent(old)}."
        for what, new, old, unit in shares
        if abs(new - old) > _SAME_SHARE
    ]
    return said or ["Nothing that is counted differs by a quarter."]


def _time(seen: Observation) -> float:
    return max(seen.seconds, 1e-9)


def _mean_prompt(seen: Observation) -> float:
    return seen.prompts / seen.traffic.requests if seen.traffic.requests else 0.0


def _context(seen: Observation) -> float:
    return seen.decode.keys / seen.decode.tokens if seen.decode.tokens else 0.0


def _reused(seen: Observation) -> float:
    return seen.traffic.reused_tokens / seen.prompts if seen.prompts else 0.0
