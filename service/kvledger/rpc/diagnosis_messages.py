"""Diagnoses as the contract has them, and two of them side by side."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from kvledger import __version__
from kvledger.diagnosis.comparison import CHANGEABLE, FIGURES, Picture, changes, outcomes
from kvledger.diagnosis.diagnosis import Diagnosis, utilization_explained
from kvledger.diagnosis.observation import PhaseFigures
from kvledger.diagnosis.observation import Setup as ServedSetup
from kvledger.diagnosis.predictions import Change
from kvledger.diagnosis.step_fit import PhaseFit
from kvledger.errors import FieldViolation, InvalidRequest
from kvledger.rpc.translation import duration
from kvledger.v1 import diagnosis_pb2

_NANOS = 1_000_000_000
_WHAT_IF_MOST = 16
_OTHER_SETTINGS = (
    "model",
    "fingerprint",
    "version",
    "processors",
    "step_stretch",
    "prefill_step",
    "prefix_reuse",
)


@dataclass(frozen=True)
class Served:
    """What the server serves."""

    model: str
    fingerprint: str


def fill(message: diagnosis_pb2.Diagnosis, diagnosis: Diagnosis, served: Served) -> None:
    """Writes a diagnosis of an interval that ends now into a message."""
    seen = diagnosis.seen
    message.interval.CopyFrom(duration(round(seen.seconds * _NANOS)))
    message.ended_at.FromNanoseconds(time.time_ns())
    message.summary = diagnosis.summary
    for finding in diagnosis.findings:
        message.findings.add(**vars(finding))
    for prediction in diagnosis.predictions:
        values = dict(vars(prediction))
        change = values.pop("change")
        added = message.predictions.add(change=change.words, **values)
        setattr(added.what, change.kind, change.value)
    _fill_phase(message.decode, seen.decode, seen.decode_step, diagnosis.decode_fit)
    _fill_phase(message.prefill, seen.prefill, seen.prefill_step, diagnosis.prefill_fit)
    _fill_traffic(message.traffic, diagnosis)
    _fill_setup(message.setup, seen.setup, served)
    message.busy = seen.busy
    # The three are read while steps go on, one after the other.
    message.steps = max(0, seen.decode.steps + seen.prefill.steps - seen.mixed_steps)
    message.prefill_share = seen.prefill_share
    message.waterline = seen.waterline
    message.cached = seen.cached
    message.preemptions.update(seen.preemptions)
    message.utilization = seen.utilization
    if seen.machine_utilization is not None:
        message.machine_utilization = seen.machine_utilization
    message.utilization_explained = utilization_explained(seen)
    if seen.forecast_error is not None:
        message.forecast_error = seen.forecast_error
    peaks = seen.setup.costs.peaks
    if seen.setup.is_measured:
        message.peaks.bytes_per_second = peaks.read_bytes_per_second
        message.peaks.operations_per_second = peaks.operations("f32")


def _fill_phase(
    message: diagnosis_pb2.Phase,
    phase: PhaseFigures,
    steps: tuple[float, float],
    fit: PhaseFit | None,
) -> None:
    message.steps = phase.steps
    message.seconds = phase.seconds
    message.tokens = phase.tokens
    message.sequences = phase.sequences
    message.context = phase.keys / phase.tokens if phase.tokens else 0.0
    message.bytes = phase.weight_bytes + phase.kv_bytes
    message.kv_share = phase.kv_share
    message.operations = phase.operations
    message.memory_share = phase.memory_share
    message.compute_share = phase.compute_share
    message.bound_by = phase.binds
    message.step_median, message.step_p99 = steps
    if fit is not None:
        message.fit.fixed_seconds = fit.fixed
        message.fit.token_seconds = fit.token
        message.fit.key_seconds = fit.key


def _fill_traffic(message: diagnosis_pb2.Traffic, diagnosis: Diagnosis) -> None:
    seen, traffic = diagnosis.seen, diagnosis.seen.traffic
    message.requests = traffic.requests
    message.ended = traffic.ended
    message.refused.update(+traffic.refused)
    message.prompt_median, message.prompt_p95 = seen.prompt_lengths
    message.output_median, message.output_p95 = seen.output_lengths
    if traffic.requests:
        message.prompt_mean = seen.prompts / traffic.requests
    if seen.prompts:
        message.reused = traffic.reused_tokens / seen.prompts
        # Known by whole blocks; what was reused counts parts of them as well.
        message.reusable = max(message.reused, traffic.reusable_tokens / seen.prompts)
    message.waiting = seen.waiting
    message.held = seen.held
    message.stalled = seen.stalled
    message.delayed = seen.of_life(traffic.delayed_time)
    message.prompt_tokens.update(+traffic.prompt_tokens)
    nanoseconds = max(1.0, seen.seconds * _NANOS)
    for tenant, tokens in (+traffic.asked).items():
        message.open_tokens[tenant] = tokens / nanoseconds


def _fill_setup(message: diagnosis_pb2.Setup, setup: ServedSetup, served: Served) -> None:
    message.model = served.model
    message.fingerprint = served.fingerprint
    message.version = __version__
    message.max_sequences = setup.sequences_max
    message.token_budget = setup.token_budget
    message.kv_blocks = setup.blocks
    message.kv_format = setup.kv_format
    message.threads = setup.threads
    message.processors = setup.processors
    message.step_stretch = setup.step_stretch
    message.prefill_step = setup.prefill_step
    if setup.tpot_target is not None:
        message.tpot_target = setup.tpot_target
    message.prefix_reuse = setup.reuses_prefixes
    message.slots_per_block = setup.block_tokens


def changes_of(messages: Iterable[diagnosis_pb2.Change]) -> tuple[Change, ...]:
    """Changes that somebody asks about. Raises InvalidRequest for what is none."""
    asked = []
    for place, message in enumerate(messages):
        path = f"what_if[{place}]"
        if place >= _WHAT_IF_MOST:
            raise InvalidRequest(FieldViolation("what_if", f"has more than {_WHAT_IF_MOST}"))
        change = _change_of(message)
        if change is None:
            raise InvalidRequest(FieldViolation(path, "names no change"))
        if change.value in (0, ""):
            raise InvalidRequest(FieldViolation(f"{path}.{change.kind}", "is 0 or empty"))
        asked.append(change)
    return tuple(asked)


def _change_of(message: diagnosis_pb2.Change) -> Change | None:
    kind = message.WhichOneof("what")
    return Change(kind, getattr(message, kind)) if kind is not None else None


def compare(response: diagnosis_pb2.DiagnoseResponse, before: diagnosis_pb2.Diagnosis) -> None:
    """Says in a response what its `now` has that an earlier diagnosis had not."""
    now_seen, then_seen = _picture(response.now), _picture(before)
    response.changes.extend(changes(now_seen, then_seen))
    for outcome in outcomes(now_seen, then_seen):
        message = response.outcomes.add(change=outcome.change.words)
        for name, (predicted, came) in outcome.figures.items():
            message.figures.add(name=name, predicted=predicted, came=came)


def _picture(message: diagnosis_pb2.Diagnosis) -> Picture:
    traffic, decode, setup = message.traffic, message.decode, message.setup
    arrivals = traffic.requests + sum(traffic.refused.values())
    seconds = message.interval.ToNanoseconds() / _NANOS
    settings = {name: getattr(setup, name) for name in (*CHANGEABLE, *_OTHER_SETTINGS)}
    settings["tpot_target"] = setup.tpot_target if setup.HasField("tpot_target") else None
    rates = {
        "Requests came": (arrivals / seconds if seconds > 0 else 0.0, "a second"),
        "Prompts have": (traffic.prompt_mean, "tokens on average"),
        "Contexts have": (decode.context, "tokens on average"),
        "A step decodes": (decode.sequences, "sequences"),
    }
    if decode.step_median > 0:
        rates["A step of decoding takes"] = (decode.step_median * 1e3, "ms (median)")
    return Picture(
        settings=settings,
        rates=rates,
        shares={
            "Steps run": (message.busy, "of the time"),
            "Prompts take": (message.prefill_share, "of the steps' time"),
            "Cached tokens are": (traffic.reused, "of the prompts'"),
            "The waterline is": (message.waterline, "of the pool"),
            "Requests wait": (traffic.waiting + traffic.held, "of their time"),
        },
        sequences=decode.sequences,
        figures=_figures(message),
        predictions=[
            (
                change,
                {name: getattr(each, name) for name in FIGURES if each.HasField(name)},
            )
            for each in message.predictions
            if (change := _change_of(each.what)) is not None
        ],
    )


def _figures(message: diagnosis_pb2.Diagnosis) -> dict[str, float]:
    """What an interval has of the figures that are predicted."""
    decode, prefill = message.decode, message.prefill
    pairs = {
        "decode_step_seconds": (decode.seconds, decode.steps),
        "tokens_per_second": (decode.tokens, decode.seconds),
        "prefill_tokens_per_second": (prefill.tokens, prefill.seconds),
        "requests_per_second": (message.traffic.ended, decode.seconds + prefill.seconds),
    }
    return {name: part / whole for name, (part, whole) in pairs.items() if part > 0 and whole > 0}
