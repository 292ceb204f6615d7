"""Bottlenecks to plant: for each a server's settings and its callers, drawn from a seed.

Ranges are those of which an operator would say that this is what limits the server, whatever the
machine's speed: lengths against each other, callers against places, a pool against one request.
Callers are in a closed loop, each asks again when it has its answer, so that a slower machine is
asked for less. All speak to the real model of 135 million weights: there a step's arithmetic, its
memory and the sampler stand to each other as they do in production.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvledger.v1 import generation_pb2 as pb

# Ids that stand for text in the model's vocabulary of 49,152.
_FIRST_ID, _LAST_ID = 1_000, 40_000
BLOCK = 32  # tokens
# Room for whoever comes, in cases that are not about room: 11,000 tokens.
_POOL = ("--kv-bytes", "256MiB")
_LARGER_POOL = ("--kv-bytes", "512MiB")

Draw = random.Random
Span = tuple[int, int]


def ids(draw: Draw, count: int) -> list[int]:
    """Tokens that nobody sent before."""
    return [draw.randrange(_FIRST_ID, _LAST_ID) for _ in range(count)]


@dataclass(frozen=True)
class Caller:
    """Somebody who asks again and again. Lengths are drawn anew for each request."""

    prompt: Span
    output: Span
    # What prompts begin with: one of these, in turns.
    beginnings: tuple[list[int], ...] = ()
    # Waits so many times as long as its last answer took, before it asks again.
    thinks: tuple[float, float] = (0.0, 0.0)
    # Seconds until it reads its next message.
    reads_every: float = 0.0
    # Comes together with all others who do, whenever the last of them has its answer and has
    # thought; who is refused comes again with the next crowd.
    in_crowds: bool = False
    tenant: str = ""
    shape: Callable[[pb.GenerateRequest], None] | None = None

    def request(self, draw: Draw, turn: int) -> pb.GenerateRequest:
        """Its next request."""
        message = pb.GenerateRequest()
        if self.beginnings:
            message.token_ids.ids.extend(self.beginnings[turn % len(self.beginnings)])
        message.token_ids.ids.extend(ids(draw, draw.randint(*self.prompt)))
        message.stop.max_tokens = draw.randint(*self.output)
        message.stop.ignore_eos = True
        if self.shape is not None:
            self.shape(message)
        return message


@dataclass(frozen=True)
class Plant:
    """A server and its callers."""

    options: tuple[str, ...]
    callers: tuple[Caller, ...]
    said: str  # the variant, in words
    # Asked before the load begins, once each.
    warm: tuple[list[int], ...] = ()
    # The change that the finding says would not help, as options beside the others.
    in_vain: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()


def long_prompts(draw: Draw) -> Plant:
    """Much to read, little to say."""
    shortest = draw.randint(300, 600)
    count = draw.randint(2, 5)
    asks = Caller((shortest, shortest + 300), (2, 12))
    return Plant(_POOL, (asks,) * count, f"{count} callers, prompts from {shortest}")


def long_contexts(draw: Draw) -> Plant:
    """Long answers about long documents, which stay cached: to compute them is no part of it."""
    length, count = draw.randint(1200, 1800), draw.randint(5, 8)
    document = ids(draw, length)
    asks = Caller((8, 24), (120, 240), (document,))
    said = f"{count} callers, a document of {length} tokens"
    return Plant(_POOL, (asks,) * count, said, warm=(document,))


def tiny_pool(draw: Draw) -> Plant:
    """From 1.2 to 2 times what one request takes."""
    prompt, output = draw.randint(100, 300), draw.randint(30, 100)
    times, count = draw.uniform(1.2, 2.0), draw.randint(4, 8)
    blocks = max(2, int(times * -(-(prompt + output) // BLOCK)))
    asks = Caller((prompt * 4 // 5, prompt), (output * 4 // 5, output))
    said = f"{count} callers of {prompt}+{output} tokens, {blocks} blocks"
    return Plant(
        ("--kv-blocks", str(blocks)), (asks,) * count, said, in_vain=("--max-sequences", "128")
    )


def one_thread(draw: Draw) -> Plant:
    """One thread where two processors are."""
    count, prompt, output = draw.randint(3, 6), draw.randint(40, 150), draw.randint(20, 60)
    asks = Caller((prompt // 2, prompt), (output // 2, output))
    said = f"{count} callers of {prompt}+{output} tokens"
    return Plant((*_POOL, "--threads", "1"), (asks,) * count, said)


def slow_reader(draw: Draw) -> Plant:
    """Callers who read now and then, and find a full mailbox: the more it holds the more they read.

    A mailbox is full long before they come again even on a slow machine.
    """
    count, every = draw.randint(2, 4), draw.uniform(2.5, 4.0)
    mailbox = draw.choice((8, 16))

    def shape(message: pb.GenerateRequest) -> None:
        message.output.top_logprobs = 20  # what the network keeps on its way is few tokens

    asks = Caller((16, 48), (8 * mailbox, 16 * mailbox), reads_every=every, shape=shape)
    said = f"{count} callers read every {every:.1f} s, mailboxes of {mailbox}"
    return Plant(
        (*_POOL, "--mailbox-tokens", str(mailbox)),
        (asks,) * count,
        said,
        in_vain=_LARGER_POOL,
    )


def cold_prefix(draw: Draw) -> Plant:
    """Beginnings that are computed again: reuse is off, or they are more than the pool keeps."""
    count, length = draw.randint(2, 4), draw.randint(250, 450)
    if draw.random() < 0.5:
        beginning = ids(draw, length)
        asks = Caller((16, 40), (8, 24), (beginning,))
        said = f"{count} callers begin with the same {length} tokens, reuse is off"
        return Plant((*_POOL, "--prefix-reuse", "off"), (asks,) * count, said)
    # Beginnings that the pool could keep besides those that run. All have come before the load: in
    # an interval in which each comes for the first time nothing could be reused. With three times
    # as many as fit the order of eviction still keeps two thirds of what comes again.
    kept = draw.randint(1, 2)
    number = (kept + count) * draw.randint(4, 5)
    beginnings = tuple(ids(draw, length) for _ in range(number))
    blocks = (kept + count) * -(-(length + 64) // BLOCK)
    callers = tuple(
        Caller((16, 40), (8, 24), beginnings[place:] + beginnings[:place])
        for place in (number * caller // count for caller in range(count))
    )
    said = f"{count} callers, {number} beginnings of {length} tokens, {blocks} blocks"
    return Plant(("--kv-blocks", str(blocks)), callers, said, warm=beginnings)


def tiny_batch(draw: Draw) -> Plant:
    """From three to six times as many callers as may run."""
    most = draw.randint(1, 3)
    count = most * draw.randint(3, 6)
    prompt, output = draw.randint(20, 60), draw.randint(20, 60)
    asks = Caller((prompt // 2, prompt), (output // 2, output))
    return Plant(
        (*_POOL, "--max-sequences", str(most)),
        (asks,) * count,
        f"{count} callers of {prompt}+{output} tokens, {most} may run",
        in_vain=_LARGER_POOL,
    )


def expensive_sampling(draw: Draw) -> Plant:
    """Much is asked of each token besides the token."""
    count, likeliest = draw.randint(4, 8), draw.randint(15, 20)
    letters = draw.choice(("[a-z ]", "[A-Za-z0-9 ,.]"))

    def shape(message: pb.GenerateRequest) -> None:
        message.sampling.temperature = 0.8
        message.sampling.top_p = 0.9
        message.output.top_logprobs = likeliest
        message.sampling.repetition_penalty = 1.2
        message.sampling.presence_penalty = 0.5
        message.constraint.regex = letters + "{2000}"
        message.stop.ignore_eos = False

    asks = Caller((16, 48), (40, 100), shape=shape)
    said = f"{count} callers, penalties, {letters}, {likeliest} log-probabilities"
    return Plant(_POOL, (asks,) * count, said, in_vain=_LARGER_POOL)


def queue_limit(draw: Draw) -> Plant:
    """Callers come in crowds: there are places for them most of the time, but the queue is too
    short for a crowd. Without pauses between crowds the places would be what is short."""
    if draw.random() < 0.5:
        prompt = draw.randint(60, 150)
        count, most = draw.randint(6, 10), prompt * draw.randint(2, 3)
        asks = Caller((prompt // 2, prompt), (4, 12), thinks=(0.5, 1.5), in_crowds=True)
        limit: tuple[str, ...] = ("--max-queued-tokens", str(most))
        said = f"{count} callers of up to {prompt} tokens, {most} may wait"
    else:
        places, queue = draw.randint(3, 6), draw.randint(1, 2)
        count = places + queue + draw.randint(2, 4)
        asks = Caller((16, 40), (16, 40), thinks=(0.5, 1.5), in_crowds=True)
        limit = ("--max-sequences", str(places), "--max-queued", str(queue))
        said = f"{count} callers, {places} may run, {queue} may wait"
    return Plant((*_POOL, *limit), (asks,) * count, said, in_vain=_LARGER_POOL)


def flooding_tenant(draw: Draw) -> Plant:
    """One tenant takes all places for long; two others want little, and wait.

    They are next when a place is free, so it is long answers that make them wait.
    """
    places, count = draw.randint(3, 5), draw.randint(3, 4)
    output = draw.randint(150, 250)
    flood = Caller((60, 200), (output // 2, output), tenant="bulk")
    quiet = tuple(
        Caller((16, 40), (4, 12), thinks=(0.2, 1.0), tenant=name) for name in ("acme", "globex")
    )
    return Plant(
        (*_POOL, "--max-sequences", str(places)),
        (flood,) * (places * count) + quiet,
        f"{places * count} callers of one tenant, one each of two, {places} may run",
        tenants=("bulk", "acme", "globex"),
        in_vain=("--max-queued", "512"),
    )


def chunk_too_small(draw: Draw) -> Plant:
    """Prompts of hundreds of tokens, a few tokens a step."""
    count, shortest = draw.randint(2, 4), draw.randint(150, 300)
    asks = Caller((shortest, shortest + 150), (4, 16))
    kind = draw.choice(("budget", "stretch", "target"))
    options = {
        "budget": ("--token-budget", str(draw.randint(5, 10))),
        "stretch": ("--step-stretch", f"{draw.uniform(1.02, 1.2):.2f}"),
        "target": ("--tpot-target", "0.001"),
    }[kind]
    if kind != "budget":  # somebody must be decoding all the time
        asks_long = Caller((16, 32), (200, 300))
        return Plant(
            (*_POOL, *options),
            (asks,) * count + (asks_long,) * draw.randint(3, 6),
            f"{count} callers of {shortest} tokens, {' '.join(options)}",
        )
    return Plant(
        (*_POOL, *options), (asks,) * count, f"{count} callers of {shortest}, {' '.join(options)}"
    )


def chunk_too_large(draw: Draw) -> Plant:
    """Long prompts are computed at once beside streams that should flow."""
    budget, streams = draw.choice((384, 512, 1024)), draw.randint(3, 6)
    shortest, count = draw.randint(350, 600), draw.randint(1, 2)
    flows = Caller((16, 32), (100, 200))
    bursts = Caller((shortest, shortest + 200), (2, 6), thinks=(0.3, 1.0))
    # The server's own test at its start is another tenant: for a minute steps would be short.
    return Plant(
        (*_POOL, "--step-stretch", "0", "--prefill-step", "0", "--token-budget", str(budget)),
        (flows,) * streams + (bursts,) * count,
        f"{streams} streams, {count} callers of {shortest} tokens, {budget} a step",
    )


def healthy(draw: Draw) -> Plant:
    """Busy for about half of the time; nothing is short."""
    count, prompt, output = draw.randint(2, 4), draw.randint(40, 120), draw.randint(20, 50)
    asks = Caller((prompt // 2, prompt), (output // 2, output), thinks=(count, 1.5 * count))
    said = f"{count} callers of {prompt}+{output} tokens"
    return Plant(_POOL, (asks,) * count, said)


def near_idle(draw: Draw) -> Plant:
    """Somebody asks now and then."""
    prompt, output = draw.randint(16, 200), draw.randint(8, 50)
    asks = Caller((prompt // 2, prompt), (output // 2, output), thinks=(6.0, 12.0))
    return Plant(_POOL, (asks,), f"one caller of {prompt}+{output} tokens")


# What must be named first; None is no finding at all.
CASES: Mapping[str, tuple[Callable[[Draw], Plant], str | None]] = {
    "long prompts": (long_prompts, "long_prompts"),
    "long contexts": (long_contexts, "long_contexts"),
    "tiny pool": (tiny_pool, "pool"),
    "one thread": (one_thread, "threads"),
    "slow reader": (slow_reader, "slow_reader"),
    "cold prefix": (cold_prefix, "cold_prefix"),
    "tiny batch": (tiny_batch, "batch"),
    "expensive sampling": (expensive_sampling, "sampling"),
    "queue limit": (queue_limit, "queue_limit"),
    "flooding tenant": (flooding_tenant, "flooding_tenant"),
    "chunk too small": (chunk_too_small, "chunk_too_small"),
    "chunk too large": (chunk_too_large, "chunk_too_large"),
    "healthy": (healthy, None),
    "near idle": (near_idle, None),
}


def planted(case: str, seed: int) -> Plant:
    """A case's variant of a seed."""
    return CASES[case][0](random.Random(f"{seed} {case}"))
