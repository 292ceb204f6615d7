"""What limits the service: rules over an observation, each with its evidence and what helps.

Causes that somebody set (a limit, a pool, threads) come before what the traffic is like, because
they can be changed. Among them goes first what makes the others come true: readers that let their
tokens stand and tenants that flood hold places and blocks, which then are short; and where places
or blocks are short the queue fills. Whoever mends the last of these mends a symptom.

A finding says which phase it helps, and one change that looks right and would not help. Where
nothing is short, it says so: a healthy server is not told to tune.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvledger.diagnosis.observation import Observation
from kvledger.diagnosis.traffic import largest_share

Phase = Literal["prefill", "decode", "both", "none"]

# Less than this in the interval says nothing.
STEPS_LEAST = 20
REQUESTS_LEAST = 3
# Of the steps' time, that in which somebody waited for it: from here on it is what is short.
_WAITED_LEAST = 0.3


@dataclass(frozen=True)
class Finding:
    """One thing that limits the service."""

    name: str  # a word for programs
    # How much of the service it touches, from 0 to 1: a share of time, or of requests.
    weight: float
    sentence: str  # what, with its figures
    remedy: str  # what to change first
    helps: Phase
    # What looks right and would not help, and why.
    in_vain: str


Rule = Callable[[Observation], Finding | None]


def findings(seen: Observation) -> list[Finding]:
    """What limits the service, what can be changed first and the gravest before the others."""
    if sum(phase.steps for phase in (seen.decode, seen.prefill)) < STEPS_LEAST and not any(
        seen.traffic.refused.values()
    ):
        return []
    found = [finding for rules in _ORDER for finding in _found(seen, rules)]
    return found or _found(seen, (overload,))


def _found(seen: Observation, rules: tuple[Rule, ...]) -> list[Finding]:
    found = [finding for rule in rules if (finding := rule(seen)) is not None]
    return sorted(found, key=lambda finding: -finding.weight)


def percent(share: float) -> str:
    """A share as people read it."""
    return f"{share * 100:.0f} %"


# --- What somebody set ------------------------------------------------------------------------


def queue_limit(seen: Observation) -> Finding | None:
    """Requests that a limit of the queue turned away."""
    refused = seen.traffic.refused["queue_full"] + seen.traffic.refused["queued_tokens_full"]
    share = refused / seen.arrivals if seen.arrivals else 0.0
    if share < 0.01:
        return None
    return Finding(
        "queue_limit",
        share,
        f"The queue was full for {refused} of {seen.arrivals} requests ({percent(share)}), while a "
        f"step ran {percent(seen.busy)} of the time and the pool's waterline was "
        f"{percent(seen.waterline)}.",
        "Raise --max-queued (or --max-queued-tokens) if callers can wait; add a replica if they "
        "cannot.",
        "none",
        "A larger KV pool: the queue is counted in requests, and refuses before blocks are asked "
        "for.",
    )


def pool(seen: Observation) -> Finding | None:
    """A pool that is too small for what runs: work is lost, or requests wait for blocks."""
    traffic = seen.traffic
    lost = traffic.recomputed_tokens / traffic.computed_tokens if traffic.computed_tokens else 0.0
    waits = seen.waiting
    # Blocks, not places: where both are short, more memory alone would not help.
    blocked = (
        waits > 0.2
        and seen.waited_for["memory"] > _WAITED_LEAST
        and seen.waited_for["memory"] > seen.waited_for["place"]
    )
    if lost < 0.02 and not blocked and not (seen.preempted > 3 and seen.waterline > 0.75):
        return None
    return Finding(
        "pool",
        max(lost, waits if blocked else 0.0, 0.02),
        f"The KV pool is short: its waterline was {percent(seen.waterline)} of "
        f"{seen.setup.blocks} blocks, "
        + (
            f"{seen.preempted} sequences lost their blocks, {percent(lost)} of the computed tokens "
            f"had been computed before, and "
            if seen.preempted or lost
            else ""
        )
        + f"requests waited {percent(waits)} of their time"
        + (
            f"; one that waits needs {_waiting_blocks(seen):.0f} blocks for its prompt."
            if blocked
            else "."
        )
        + _mostly(seen),
        "Raise --kv-bytes, lower max_tokens or the context that clients send, or add a replica.",
        "both",
        "More threads or a bigger batch: both ask for more blocks at a time.",
    )


def _waiting_blocks(seen: Observation) -> float:
    """Blocks for the prompt of a request that waits, on average; of one that came, if none does."""
    traffic = seen.traffic
    if traffic.waiting_time > 0:
        tokens = traffic.waiting_tokens / traffic.waiting_time
    else:
        tokens = seen.prompts / traffic.requests if traffic.requests else 0.0
    return tokens / seen.setup.block_tokens


def _mostly(seen: Observation) -> str:
    """Whose load it is, where it is one's of several."""
    name, share = largest_share(seen.traffic.asked)
    if len(+seen.traffic.asked) < 2 or share < 0.5:
        return ""
    return f" {percent(share)} of what is asked for is tenant {name}'s."


def _running(seen: Observation) -> float:
    """Sequences that have a place: those that decode, and those whose prompts are computed or that
    pause; a request may have several."""
    return max(seen.running, seen.decode.sequences, seen.prefill.sequences)


def slow_reader(seen: Observation) -> Finding | None:
    """Sequences that pause because nobody reads them."""
    share = seen.stalled
    if share < 0.2:
        return None
    return Finding(
        "slow_reader",
        share,
        f"Requests stood still {percent(share)} of their time because their clients did not read, "
        f"and kept their blocks meanwhile (waterline {percent(seen.waterline)}).",
        "Let the clients read faster, or ask for final_only; a larger --mailbox-tokens lets "
        "answers that fit into it end all the same, a shorter --stall-timeout frees the blocks "
        "sooner.",
        "none",
        "A larger pool, a larger batch, another replica: the tokens were ready, and nobody took "
        "them.",
    )


def flood(seen: Observation) -> Finding | None:
    """One tenant that asks for most, while others wait.

    What counts is what is open, not what came: a flood whose prompts came before the interval
    stands in the way of those that come in it.
    """
    name, share = largest_share(seen.traffic.asked)
    if len(+seen.traffic.asked) < 2 or share < 0.7:
        return None
    queued = sum(time for tenant, time in seen.traffic.queued.items() if tenant != name)
    lived = sum(time for tenant, time in seen.traffic.lives.items() if tenant != name)
    waits = queued / lived if lived else 0.0
    if waits < 0.2:
        return None
    return Finding(
        "flooding_tenant",
        share,
        f"Of the prompt tokens of open requests {percent(share)} were tenant {name}'s, of "
        f"{len(+seen.traffic.asked)} tenants; the others' requests waited {percent(waits)} of "
        f"their time.",
        f"Give {name} running_max, tokens_per_second or kv_max, and the others kv_guaranteed "
        f"(docs/quotas.md).",
        "both",
        "A longer queue: it fills with the same tenant's requests.",
    )


def tenant_limit(seen: Observation) -> Finding | None:
    """Requests that wait for others of their own tenant to end."""
    if seen.held < 0.2:
        return None
    return Finding(
        "tenant_limit",
        seen.held,
        f"Requests waited {percent(seen.held)} of their time at the door, for others of their own "
        f"tenant to end; a step ran {percent(seen.busy)} of the time.",
        "Raise running_max of the tenants that wait (kvledger ledger shows who does), or leave it: "
        "then it does what it is there for.",
        "none",
        "A larger pool, a larger batch, another replica: none lets that tenant run more.",
    )


def batch(seen: Observation) -> Finding | None:
    """Requests that wait for a place in a batch that is kept small."""
    waits = seen.waiting
    most = seen.setup.sequences_max
    running = _running(seen)
    if waits < 0.2 or seen.waited_for["place"] < _WAITED_LEAST:
        return None
    if seen.waited_for["place"] < seen.waited_for["memory"]:
        return None
    if seen.prefill_share > 0.6:
        return None  # who has a place computes its prompt: more places do not make that faster
    if seen.decode.binds == "compute" and seen.decode.compute_share > 0.6:
        return None
    return Finding(
        "batch",
        waits,
        f"Requests waited {percent(waits)} of their time for a place: {running:.1f} "
        f"of at most {most} sequences ran at a time, with a waterline of "
        f"{percent(seen.waterline)}. Decoding reads the weights once a step for all of them: "
        f"{percent(1 - seen.decode.kv_share)} of its bytes.",
        "Raise --max-sequences.",
        "decode",
        "A larger KV pool: it is not what is short.",
    )


def sampling(seen: Observation) -> Finding | None:
    """Choosing tokens takes as long as computing them."""
    share = seen.sampling_seconds / seen.step_seconds if seen.step_seconds else 0.0
    if share < 0.25:
        return None
    return Finding(
        "sampling",
        share,
        f"Choosing tokens took {percent(share)} of the steps' time.",
        "Ask for less of it: fewer top_logprobs, no penalties over long texts, simpler "
        "constraints, or temperature 0 where that is meant.",
        "decode",
        "A smaller KV format or a bigger pool: the model is not what takes the time.",
    )


def threads(seen: Observation) -> Finding | None:
    """Processors that have nothing to do."""
    setup = seen.setup
    if setup.threads * 2 > setup.processors or seen.busy < 0.6:
        return None
    share = seen.busy * (1 - setup.threads / setup.processors)
    return Finding(
        "threads",
        share,
        f"Steps ran {percent(seen.busy)} of the time on {setup.threads} of {setup.processors} "
        f"processors.",
        f"Raise --threads to {setup.processors}.",
        "both",
        "A bigger batch: with the arithmetic of one processor prompts stay slow.",
    )


# Prompt tokens for which a step is worth its fixed cost: the core never takes fewer than twice as
# many of its own accord where nobody decodes (kChunkLeast in core/scheduler.h).
_CHUNK_SMALL = 16
# Tokens that a step takes of a prompt whatever limits it has, lest prompts starve (prefill_least).
_CHUNK_FLOOR = 4


def small_chunks(seen: Observation) -> Finding | None:
    """Prompts that are computed a few tokens at a time because of a limit.

    Few tokens beside many that decode are no waste by themselves: the weights are read anyway, and
    --step-stretch 2, the default, gives prompts half of such a step. What is looked for is a budget
    that no step can be worth its cost with, and a limit of time that would give prompts next to
    nothing. Tokens are counted and not times: how a step's time is divided between its prompts and
    its decoding is an estimate, and the first to be wrong on a machine that does much else.
    """
    prefill, setup = seen.prefill, seen.setup
    chunk = prefill.tokens_per_step
    if prefill.steps < STEPS_LEAST or seen.computed_prompt < 4 * chunk:
        return None  # there was no more of them to compute
    steps = prefill.steps + seen.decode.steps - seen.mixed_steps
    # A limit of time may leave prompts so little that they hardly take any: their steps count then.
    if (
        setup.token_budget <= 2 * _CHUNK_SMALL
        and chunk <= _CHUNK_SMALL
        and seen.prefill_share >= 0.2
    ):
        cause, remedy = f"--token-budget {setup.token_budget}", "Raise --token-budget."
    elif prefill.steps < 0.5 * steps or chunk > 2 * _CHUNK_FLOOR:
        return None  # most steps have no prompt to compute, or get on with it
    elif setup.tpot_target is not None or 0 < setup.step_stretch < 2:
        cause = (
            f"--step-stretch {setup.step_stretch:g}"
            if setup.tpot_target is None
            else f"--tpot-target {setup.tpot_target:g}"
        )
        remedy = "Raise it, if tokens may come less evenly."
    else:
        return None
    return Finding(
        "chunk_too_small",
        max(seen.prefill_share, prefill.steps / steps),
        f"Prompts were computed {chunk:.0f} tokens a step, because of {cause}, in "
        f"{percent(prefill.steps / steps)} of the steps"
        + (
            f", and reached {percent(prefill.compute_share)} of the arithmetic that the machine "
            f"can do."
            if setup.is_measured
            else "."
        ),
        remedy,
        "prefill",
        "More memory for KV: prompts wait for steps, not for blocks.",
    )


def large_chunks(seen: Observation) -> Finding | None:
    """Prompts that hold up everybody who decodes."""
    alone, both = seen.decode_mean, seen.both_mean
    mixed = seen.mixed_steps / seen.decode.steps if seen.decode.steps else 0.0
    delayed = seen.of_life(seen.traffic.delayed_time)
    if alone <= 0.0 or both < _STRETCH_FAR * alone or mixed < 0.02 or delayed < 0.2:
        return None
    if 0 < seen.setup.step_stretch < _STRETCH_FAR:
        return None  # chunks are shorter than that: who made steps so long is somebody else
    return Finding(
        "chunk_too_large",
        delayed,
        f"Steps with prompts took {both * 1e3:.0f} ms on average where decoding alone takes "
        f"{alone * 1e3:.0f} ms: requests spent {percent(delayed)} of their time in others' "
        f"prompts.",
        "Set --tpot-target: prompts are computed in smaller chunks."
        if seen.setup.step_stretch == 0
        else "Lower --step-stretch, not to 0, or set --tpot-target: then prompts are computed in "
        "smaller chunks.",
        "decode",
        "A smaller batch: the gap comes from one prompt, however few decode.",
    )


# How many times longer than decoding alone a step may be before it is a gap that readers notice:
# twice the default of --step-stretch.
_STRETCH_FAR = 4.0


def cold_prefix(seen: Observation) -> Finding | None:
    """Beginnings that came before and are computed again."""
    if seen.prompts == 0 or seen.prefill_share < 0.2:
        return None
    reusable = seen.traffic.reusable_tokens / seen.prompts
    reused = seen.traffic.reused_tokens / seen.prompts
    is_full = seen.waterline + seen.cached > 0.9
    if reusable - reused < 0.3 or (seen.setup.reuses_prefixes and not is_full):
        return None
    cause = "" if seen.setup.reuses_prefixes else " (--prefix-reuse is off)"
    return Finding(
        "cold_prefix",
        seen.prefill_share * (reusable - reused),
        f"{percent(reusable)} of the prompt tokens came before in the same scope, and "
        f"{percent(reused)} were reused{cause}; prompts took {percent(seen.prefill_share)} of the "
        f"steps' time.",
        "Turn --prefix-reuse on."
        if not seen.setup.reuses_prefixes
        else "Raise --kv-bytes so that more stays cached, or give the tenant kv_guaranteed.",
        "prefill",
        "Quantized weights: they make each token cheaper, and compute the same ones again.",
    )


# --- What the traffic is like -----------------------------------------------------------------


def long_prompts(seen: Observation) -> Finding | None:
    """Prompts take most of the time, and are bound by arithmetic."""
    if seen.busy < 0.7 or seen.prefill_share < 0.6 or seen.computed_prompt < 128:
        return None
    prefill = seen.prefill
    return Finding(
        "long_prompts",
        seen.busy * seen.prefill_share,
        f"Prompts took {percent(seen.prefill_share)} of the steps' time: "
        f"{seen.computed_prompt:.0f} tokens of each were computed, on average. Prefill is bound by "
        f"{prefill.binds}"
        + (
            f", at {percent(prefill.compute_share)} of the machine's arithmetic and "
            f"{percent(prefill.memory_share)} of its memory's speed."
            if seen.setup.is_measured
            else "."
        ),
        "Shorter prompts, beginnings that repeat (docs/reuse.md), or another replica.",
        "prefill",
        "A smaller KV format: prompts are bound by arithmetic, and KV is "
        f"{percent(prefill.kv_share)} of what they read.",
    )


def long_contexts(seen: Observation) -> Finding | None:
    """Decoding reads more keys and values than weights."""
    decode = seen.decode
    if seen.busy < 0.7 or seen.prefill_share > 0.6 or decode.kv_share < 0.4:
        return None
    return Finding(
        "long_contexts",
        seen.busy * (1 - seen.prefill_share) * decode.kv_share,
        f"Decoding took {percent(1 - seen.prefill_share)} of the steps' time and is bound by "
        f"{decode.binds}"
        + (
            f" at {percent(max(decode.memory_share, decode.compute_share))} of the peak"
            if seen.setup.is_measured
            else ""
        )
        + f"; KV is {percent(decode.kv_share)} of the bytes "
        f"({decode.keys / max(1, decode.tokens):.0f} tokens of context for each token)."
        + (
            f" Compute at {percent(decode.compute_share)} is not starvation."
            if seen.setup.is_measured
            else ""
        ),
        "A KV format with fewer bytes, shorter contexts, or another replica.",
        "decode",
        "Bigger steps for prompts: they do not make decoding read less.",
    )


def weights_bound(seen: Observation) -> Finding | None:
    """Decoding reads the weights for few sequences, and is busy all the time."""
    decode = seen.decode
    if seen.busy < 0.9 or seen.prefill_share > 0.4 or decode.kv_share >= 0.4:
        return None
    if decode.sequences > 0.5 * seen.setup.sequences_max or seen.traffic.ended < REQUESTS_LEAST:
        return None
    return Finding(
        "weights",
        seen.busy * (1 - seen.prefill_share) * 0.5,
        f"Decoding took {percent(1 - seen.prefill_share)} of the steps' time and reads the weights "
        f"for {decode.sequences:.1f} sequences a step ({percent(1 - decode.kv_share)} of its "
        f"bytes)"
        + (
            f", at {percent(decode.memory_share)} of the memory's speed."
            if seen.setup.is_measured
            else "."
        ),
        "Let more requests run at a time: each further one costs little until arithmetic binds.",
        "decode",
        "A smaller KV format: keys and values are the small part.",
    )


def overload(seen: Observation) -> Finding | None:
    """More than the server can do, where nothing says why: whoever waits is not told of health."""
    if seen.busy < 0.7 or seen.waiting < 0.2:
        return None
    return Finding(
        "overload",
        seen.waiting,
        f"Steps ran {percent(seen.busy)} of the time and requests waited {percent(seen.waiting)} "
        f"of theirs: more comes than this server computes, {percent(seen.prefill_share)} of it "
        f"prompts." + _mostly(seen),
        "Add a replica, or let callers send less at a time.",
        "both",
        "A longer queue: who stands in it waits longer, and nothing is computed sooner.",
    )


_ORDER: tuple[tuple[Rule, ...], ...] = (
    (slow_reader, flood),  # they hold what is short then
    (
        pool,
        tenant_limit,
        batch,
        sampling,
        threads,
        small_chunks,
        large_chunks,
        cold_prefix,
    ),
    (queue_limit,),  # it is full because others wait
    (long_prompts, long_contexts, weights_bound),
)
