"""What a change would do to the steps: how long one takes, how many tokens a second come, how many
requests can be answered.

How long steps take is fitted to the interval (step_fit.py). A change of what a step computes is
another place on the same line; a change of the machine or of the KV format moves the line by what
it does to the floors. How many requests run at a time follows from how many are here: nobody can
decode who has not come. `kvledger diagnose --against FILE` says how a prediction turned out, and
docs/benchmarks.md how good they are over a set of changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from kvledger.diagnosis.counts import BOTH, DECODE, PREFILL, PREFILL_ONLY, Counts
from kvledger.diagnosis.observation import Observation, Setup
from kvledger.diagnosis.step_fit import PhaseFit, decode_floor, fit_phase
from kvledger.diagnosis.turns import Request, in_turns

# Requests that ended, from which an interval tells what one takes.
_ENDED_LEAST = 3
# How often two things that depend on each other are looked at in turn.
_SETTLES = 20

Kind = Literal[
    "more_sequences",
    "max_sequences",
    "token_budget",
    "kv_blocks",
    "threads",
    "kv_format",
    "replicas",
]


@dataclass(frozen=True)
class Change:
    """One thing that an operator could do."""

    kind: Kind
    value: int | str

    @property
    def words(self) -> str:
        """As people say it."""
        if self.kind == "more_sequences":
            return f"{self.value} more sequences at a time"
        if self.kind == "kv_format":
            return f"KV in {self.value}"
        if self.kind == "replicas":
            return f"{self.value} replicas, equal parts"
        return f"--{self.kind.replace('_', '-')} {self.value}"


@dataclass(frozen=True)
class Prediction:
    """What a change would come to."""

    change: Change
    helps: str  # "prefill", "decode", "both" or "none"
    decode_step_seconds: float | None  # on average
    tokens_per_second: float | None  # of all streams, while they decode
    prefill_tokens_per_second: float | None
    requests_per_second: float | None  # answered, if there are always enough
    longest_step_seconds: float | None  # one with as many prompt tokens as it may have
    sequences: int | None  # that fit, with the context of now
    caution: str = ""


@dataclass(frozen=True)
class Work:
    """What runs: the figures that a change changes."""

    decode: PhaseFit
    prefill: PhaseFit | None
    sequences: float  # that decode in a step
    context: float  # tokens before each token
    request: Request | None  # on average; None where too few ended
    chunk_most: float  # prompt tokens that a step has at most

    @property
    def decode_step(self) -> float:
        """Seconds, on average."""
        return self.decode.seconds(self.sequences, self.sequences * self.context)

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens a second."""
        if self.prefill is None or self.request is None:
            return None
        seconds = self._prefill_seconds(self.prefill, self.request)
        return self.request.prompt / seconds if seconds > 0.0 else None

    @property
    def prompt_seconds(self) -> float:
        """Of steps, for one request's prompt."""
        if self.prefill is None or self.request is None:
            return 0.0
        return self._prefill_seconds(self.prefill, self.request)

    @property
    def requests_rate(self) -> float | None:
        """Requests a second while a step runs."""
        if self.request is None or self.sequences <= 0.0:
            return None
        seconds = self.request.output * self.decode_step / self.sequences + self.prompt_seconds
        return 1.0 / seconds if seconds > 0.0 else None

    @property
    def longest_step(self) -> float | None:
        """Seconds of a step in which all decode and a prompt has its most tokens."""
        if self.prefill is None:
            return None
        keys = self.chunk_most * (self.chunk_most + 1) / 2
        return self.decode_step + self.prefill.seconds(self.chunk_most, keys)

    @staticmethod
    def _prefill_seconds(fit: PhaseFit, request: Request) -> float:
        return fit.fixed * request.chunks + fit.token * request.prompt + fit.key * request.keys


@dataclass(frozen=True)
class Crowd:
    """Requests in the core while a step runs, on average."""

    here: float
    running: float
    # Blocks of one that runs.
    blocks: float


@dataclass(frozen=True)
class Model:
    """What an interval says of the server."""

    setup: Setup
    work: Work
    crowd: Crowd
    # Of the steps' time, what kernels took; choosing tokens and bookkeeping are the rest.
    kernels_share: float
    # Of a decode step's kernels, the part in which memory is what binds.
    memory_share: float
    is_stretched: bool  # whether chunks are as long as those who decode beside them can bear

    @property
    def fits(self) -> float:
        """Sequences of the context of now that the pool holds."""
        return self.setup.blocks * self.setup.block_tokens / max(1.0, self.work.context)


def fit(seen: Observation, counts: Counts) -> Model | None:
    """The model of an interval; None where nobody decoded in it."""
    costs = seen.setup.costs
    decode = fit_phase(counts, DECODE, costs)
    if decode is None or seen.decode.tokens == 0:
        return None
    work = Work(
        decode=decode,
        prefill=fit_phase(counts, PREFILL, costs),
        sequences=seen.decode.tokens / seen.decode.steps,
        context=seen.decode.keys / seen.decode.tokens,
        request=(request := _request(seen, counts)),
        chunk_most=_chunk_most(seen),
    )
    return Model(
        setup=seen.setup,
        work=work,
        crowd=_crowd(seen),
        kernels_share=min(1.0, seen.forward_seconds / seen.step_seconds)
        if seen.step_seconds
        else 1.0,
        memory_share=min(1.0, seen.decode.memory_share) if seen.setup.is_measured else 0.5,
        is_stretched=_is_stretched(seen, request),
    )


def _request(seen: Observation, counts: Counts) -> Request | None:
    ended = seen.traffic.ended
    if ended < _ENDED_LEAST:
        return None
    prompt = seen.prefill.tokens / ended
    most = min(float(seen.setup.token_budget), max(1.0, prompt))
    alone_steps, _, alone_tokens = (int(each) for each in counts.mixtures[PREFILL_ONLY][:3])
    beside_steps = int(counts.mixtures[BOTH][0])
    return Request(
        output=seen.decode.tokens / ended,
        prompt=prompt,
        keys=seen.prefill.keys / ended,
        chunks=seen.prefill.steps / ended,
        beside=(seen.prefill.tokens - alone_tokens) / beside_steps if beside_steps else most,
        alone=alone_tokens / alone_steps if alone_steps else most,
    )


def _chunk_most(seen: Observation) -> float:
    """Prompt tokens that a step may have: the budget, unless prompts are in smaller ones."""
    budget = float(seen.setup.token_budget)
    mean = seen.computed_prompt
    # Long prompts fill their steps, so if they do not, a limit in time is what binds.
    if mean > 2 * budget and seen.prefill.tokens_per_step < 0.5 * budget:
        return max(1.0, seen.prefill.tokens_per_step)
    return budget


def _is_stretched(seen: Observation, request: Request | None) -> bool:
    """Whether prompts come in chunks as long as those who decode beside them can bear."""
    setup = seen.setup
    if request is None or setup.step_stretch <= 1.0 or setup.tpot_target is not None:
        return False
    return request.beside < 0.8 * min(float(setup.token_budget), seen.computed_prompt)


def _crowd(seen: Observation) -> Crowd:
    traffic, busy = seen.traffic, seen.step_seconds * 1e9
    if busy <= 0.0:
        return Crowd(0.0, 0.0, 0.0)
    here = max(0, traffic.open_time - traffic.held_time)
    running = max(0, here - traffic.waiting_time)
    live = seen.waterline * seen.setup.blocks * seen.seconds * 1e9
    return Crowd(here / busy, running / busy, live / running if running > 0 else 0.0)


# --- Changes ----------------------------------------------------------------------------------


def predict(
    model: Model, formats: Mapping[str, int], asked: tuple[Change, ...] = ()
) -> list[Prediction]:
    """What changes would do: those that were asked about first, then the usual ones.

    `formats` are bytes of a token by KV format that the build has.
    """
    changes = list(dict.fromkeys((*asked, *_usual(model, formats))))
    found = (predicted(model, change, formats) for change in changes)
    return [prediction for prediction in found if prediction is not None]


def _usual(model: Model, formats: Mapping[str, int]) -> list[Change]:
    setup = model.setup
    changes = [Change("more_sequences", 8), Change("kv_blocks", 2 * setup.blocks)]
    changes += [
        Change("token_budget", budget)
        for budget in (setup.token_budget // 2, setup.token_budget * 2)
        if budget >= 1
    ]
    changes += [Change("threads", threads) for threads in sorted(setup.by_threads)]
    changes += [Change("kv_format", name) for name in formats if name != setup.kv_format]
    return [*changes, Change("replicas", 2)]


def predicted(model: Model, change: Change, formats: Mapping[str, int]) -> Prediction | None:
    """What a change would do; None where nothing is known about it."""
    if isinstance(change.value, str):
        return _other_format(model, change, formats)
    if change.kind == "more_sequences":
        return _more(model, change, change.value)
    if change.kind == "max_sequences":
        return _places(model, change, change.value)
    if change.kind == "kv_blocks":
        return _pool(model, change, change.value)
    if change.kind == "token_budget":
        return _chunks(model, change, change.value)
    if change.kind == "threads":
        return _threads(model, change, change.value)
    if change.kind == "replicas":
        return _replicas(model, change, change.value)
    return None


def _told(change: Change, helps: str, work: Work, fits: float | None, caution: str) -> Prediction:
    return Prediction(
        change,
        helps,
        work.decode_step,
        work.sequences / work.decode_step,
        work.prefill_rate,
        work.requests_rate,
        work.longest_step,
        None if fits is None else math.floor(fits),
        caution,
    )


def _running(model: Model, most: int, blocks: int) -> float:
    """Sequences that run, with so many places and blocks and the requests of now."""
    crowd = model.crowd
    # Where it holds more now than is thought to fit, it will hold more of another size as well.
    more = max(1.0, crowd.running / max(1.0, _room(crowd, model.setup.blocks)))
    return min(crowd.here, float(most), more * _room(crowd, blocks))


def _room(crowd: Crowd, blocks: int) -> float:
    """Sequences that are let into so many blocks: each keeps one to grow into, and admission leaves
    what its forecast may be off by (core/memory_forecast.h), where each is still there or has ended
    with equal chances."""
    if crowd.blocks <= 0.0:
        return math.inf
    each, off = crowd.blocks + 1.0, 0.5 * crowd.blocks
    root = (math.sqrt(off * off + 4.0 * each * blocks) - off) / (2.0 * each)
    return root * root


def _settled(model: Model, work: Work, running: float) -> Work:
    """`work` with as many sequences decoding as there will be of so many that run."""
    crowd, now, request = model.crowd, model.work, work.request
    if crowd.running <= 0.0 or now.request is None or request is None:
        share = running / crowd.running if crowd.running > 0.0 else 1.0
        return replace(work, sequences=max(1.0, now.sequences * share))
    # What is not in the model, such as the end of a load, is taken to stay as it is.
    known = in_turns(crowd.running, now.request)
    settled = work
    for _ in range(_SETTLES):  # chunks depend on who decodes, and who decodes on the chunks
        turns = in_turns(running, request)
        settled = replace(
            work,
            sequences=max(min(1.0, running), turns.decoding * now.sequences / known.decoding),
            request=replace(request, chunks=turns.chunks * now.request.chunks / known.chunks),
        )
        if model.is_stretched and settled.request is not None:
            # The longer decoding takes, the longer the prompts beside it may.
            longer = settled.decode_step / now.decode_step
            most = max(work.chunk_most, work.request.beside) if work.request else math.inf
            request = replace(request, beside=min(most, now.request.beside * longer))
    return settled


def _more(model: Model, change: Change, more: int) -> Prediction:
    sequences = model.work.sequences + more
    caution = ""
    if sequences > model.fits:
        caution = f"only {model.fits:.0f} of this context fit into the pool"
    return _told(change, "decode", replace(model.work, sequences=sequences), model.fits, caution)


def _places(model: Model, change: Change, most: int) -> Prediction:
    running = _running(model, most, model.setup.blocks)
    caution = ""
    if running < 0.9 * most:
        caution = f"of the requests of now {running:.1f} run at a time"
    return _told(change, "decode", _settled(model, model.work, running), model.fits, caution)


def _pool(model: Model, change: Change, blocks: int) -> Prediction:
    running = _running(model, model.setup.sequences_max, blocks)
    is_same = abs(running - model.crowd.running) < 0.1 * model.crowd.running
    return _told(
        change,
        "none" if is_same else "both",
        model.work if is_same else _settled(model, model.work, running),
        model.fits * blocks / model.setup.blocks,
        "the requests of now would not use it; it helps where requests wait for blocks or lose them"
        if is_same
        else "what fewer lost blocks save comes on top",
    )


def _chunks(model: Model, change: Change, budget: int) -> Prediction:
    work, now = model.work, model.setup.token_budget
    most = min(float(budget), work.chunk_most) if work.chunk_most < now else float(budget)
    caution = "decode steps alone stay as they are; the longest step changes with the chunk"
    changed, request = replace(work, chunk_most=most), work.request
    if most == work.chunk_most:
        caution = "prompts are in smaller chunks already, because of a limit in time"
    elif request is not None and request.prompt > 0.0 and request.chunks > 0.0:
        # As many more or fewer as the same prompt has alone.
        had, gets = (math.ceil(request.prompt / size) for size in (work.chunk_most, most))
        parts = gets / had
        chunked = replace(
            request,
            chunks=request.chunks * parts,
            beside=request.beside / parts,
            alone=request.alone / parts,
        )
        changed = replace(changed, request=chunked)
        changed = _settled(model, changed, model.crowd.running)
    return _told(change, "prefill" if budget > now else "none", changed, None, caution)


def _threads(model: Model, change: Change, threads: int) -> Prediction | None:
    setup = model.setup
    other = setup.by_threads.get(threads)
    if other is None or not setup.is_measured:
        return None
    peaks = setup.costs.peaks
    arithmetic = peaks.operations("f32") / other.operations("f32")
    reading = peaks.read_bytes_per_second / other.read_bytes_per_second
    # What memory does not bind goes with the arithmetic, and so does what reads less than it could.
    memory = model.memory_share
    kernels = model.kernels_share
    decode = kernels * (memory * reading + (1 - memory) * arithmetic) + 1 - kernels
    prefill = kernels * arithmetic + 1 - kernels
    work = model.work
    changed = replace(
        work,
        decode=work.decode.times(decode, decode, decode),
        prefill=work.prefill.times(prefill, prefill, prefill) if work.prefill else None,
    )
    helps = "both" if threads > setup.threads else "none"
    return _told(change, helps, changed, model.fits, "")


def _replicas(model: Model, change: Change, replicas: int) -> Prediction:
    part = max(1.0, model.work.sequences / replicas)  # of a step that runs somebody decodes
    work = replace(model.work, sequences=part)
    one = _told(change, "both", work, model.fits, "the figures are of all replicas together")

    def all_of(value: float | None) -> float | None:
        return None if value is None else replicas * value

    busy = model.work.sequences >= replicas
    return replace(
        one,
        tokens_per_second=all_of(one.tokens_per_second) if busy else None,
        prefill_tokens_per_second=all_of(one.prefill_tokens_per_second),
        requests_per_second=all_of(one.requests_per_second) if busy else None,
        sequences=math.floor(replicas * model.fits),
    )


def _other_format(model: Model, change: Change, formats: Mapping[str, int]) -> Prediction | None:
    assert isinstance(change.value, str)
    token_bytes = formats.get(change.value)
    if token_bytes is None:
        return None
    costs = model.setup.costs
    other = replace(costs, kv_token_bytes=token_bytes)
    before, after = decode_floor(costs), decode_floor(other)
    work = model.work
    changed = replace(
        work,
        decode=work.decode.times(1.0, 1.0, after.key / before.key),
    )
    less = token_bytes < costs.kv_token_bytes
    return _told(
        change,
        "decode" if less else "none",
        changed,
        model.fits * costs.kv_token_bytes / token_bytes,
        "what it costs in accuracy is not said here",
    )
