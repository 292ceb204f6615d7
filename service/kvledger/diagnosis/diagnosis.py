"""A diagnosis: an observation, what limits the service in it, and what changes would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvledger.diagnosis.counts import DECODE, PREFILL, Counts
from kvledger.diagnosis.findings import Finding, findings, percent
from kvledger.diagnosis.observation import Observation, Setup, observe
from kvledger.diagnosis.predictions import Change, Prediction, fit, predict
from kvledger.diagnosis.step_fit import PhaseFit, fit_phase


@dataclass(frozen=True)
class Diagnosis:
    """See the head of this file."""

    seen: Observation
    findings: list[Finding]
    predictions: list[Prediction]
    # What a step of each phase takes; None where there was none.
    decode_fit: PhaseFit | None = None
    prefill_fit: PhaseFit | None = None

    @property
    def summary(self) -> str:
        """In one sentence."""
        if self.findings:
            return self.findings[0].sentence
        seen = self.seen
        if seen.decode.steps + seen.prefill.steps == 0:
            return "Nobody asked for anything: there is nothing to say."
        waits = seen.waiting + seen.held
        begin = "Nothing is short" if waits < 0.2 else "Nothing that is known explains the waiting"
        return (
            f"{begin}: a step ran {percent(seen.busy)} of the time, requests waited "
            f"{percent(waits)} of theirs, and the pool's "
            f"waterline was {percent(seen.waterline)}."
        )


def utilization_explained(seen: Observation) -> str:
    """Why what the operating system shows is not the share of a peak."""
    said = (
        f"The operating system counts {percent(seen.utilization)} of the processors' time as used "
        f"by this server; a step ran {percent(seen.busy)} of the time"
    )
    threads, processors = seen.setup.threads, seen.setup.processors
    if threads < processors:
        said += f", on {threads} of {processors} processors"
    said += "."
    if seen.setup.is_measured and seen.step_seconds > 0:
        memory, compute = (
            sum(getattr(phase, f"{bound}_seconds") for phase in (seen.decode, seen.prefill))
            / seen.step_seconds
            for bound in ("memory", "compute")
        )
        said += (
            f" While one ran, {percent(compute)} of the machine's arithmetic and {percent(memory)} "
            f"of its memory's speed were used: a processor that waits for memory or for another "
            f"thread counts as used."
        )
    others = _others(seen)
    if others is not None and others > 0.1:
        said += f" Other programs used {percent(others)} of the machine."
    return said


def _others(seen: Observation) -> float | None:
    """What others used of the processors that this server may use, as far as that can be told."""
    if seen.machine_utilization is None or seen.processors_of_machine != seen.setup.processors:
        return None
    return max(0.0, seen.machine_utilization - seen.utilization)


def diagnose(
    setup: Setup, counts: Counts, formats: Mapping[str, int], asked: Sequence[Change] = ()
) -> Diagnosis:
    """`counts` are of an interval, `formats` bytes of a token by the KV formats of the build, and
    `asked` changes to say something about beside the usual ones."""
    seen = observe(setup, counts)
    model = fit(seen, counts)
    return Diagnosis(
        seen=seen,
        findings=findings(seen),
        predictions=predict(model, formats, tuple(asked)) if model is not None else [],
        decode_fit=fit_phase(counts, DECODE, setup.costs),
        prefill_fit=fit_phase(counts, PREFILL, setup.costs),
    )
