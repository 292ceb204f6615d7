"""How many of those that run decode, and how many wait for their prompts' turns.

Counted in steps: decoding takes as many as there are tokens, however many decode, and a prompt as
many as it has chunks, which all prompts share. So it is a closed network of a delay and a queue,
which knows its states by how many are in the queue: the machine repair model (Kleinrock, Queueing
Systems 1, 1975, section 3.8), here with another speed when nobody is left that decodes, since then
steps are the prompts' own.

    decoding --- each after `output` steps ---> in their prompts
       ^                                             |
       +---- one after every `prompt / chunk` -------+
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Of more that run, whatever fluctuates is small.
_MANY = 512


@dataclass(frozen=True)
class Request:
    """What a request comes to, on average."""

    output: float  # tokens that are made in decode steps; above 0
    prompt: float  # tokens that are computed
    keys: float  # that these read
    chunks: float  # steps in which they are computed, among others
    beside: float  # prompt tokens, of all requests, in a step in which somebody decodes
    alone: float  # and in one in which nobody does


@dataclass(frozen=True)
class Turns:
    """What comes of it."""

    decoding: float  # sequences in a step in which any does
    chunks: float  # steps that compute prompts, for each request


def in_turns(running: float, request: Request) -> Turns:
    """With so many requests that run at a time; what lies between whole numbers is in between."""
    whole = max(1, math.floor(running))
    low = _of(whole, request)
    part = running - whole
    if part <= 0.0:
        return low
    high = _of(whole + 1, request)
    return Turns(
        low.decoding + part * (high.decoding - low.decoding),
        low.chunks + part * (high.chunks - low.chunks),
    )


def _of(running: int, request: Request) -> Turns:
    beside = _steps(request.prompt, request.beside)
    alone = _steps(request.prompt, request.alone)
    if running > _MANY:
        most = request.output / beside if beside > 0.0 else math.inf
        decoding = min(most, running * request.output / (request.output + beside))
        return Turns(max(1.0, decoding), max(1.0, beside))
    # How likely it is that so many are in their prompts, over a common factor.
    chance, chances, decoding, queued = 1.0, 1.0, float(running), 0.0
    for prompts in range(1, running):
        left = running - prompts
        chance *= (left + 1) / request.output * beside
        chances += chance
        queued += chance
        decoding += left * chance
        if chances > 1e200:
            chance, chances, queued, decoding = (
                each / chances for each in (chance, chances, queued, decoding)
            )
    nobody = chance / request.output * alone
    ended = (queued / beside if beside > 0.0 else 0.0) + (nobody / alone if alone > 0.0 else 0.0)
    chunks = (queued + nobody) / ended if ended > 0.0 else 1.0
    return Turns(decoding / chances, chunks)


def _steps(prompt: float, chunk: float) -> float:
    return prompt / chunk if chunk > 0.0 else 0.0
