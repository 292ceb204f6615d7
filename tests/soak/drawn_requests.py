"""Requests for a long run, drawn from a seed: what is asked, and how the caller behaves."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from tiny_model import TinyShape

from kvledger.v1 import generation_pb2 as pb

_SHAPE = TinyShape()
# Ids that stand for text: the bytes, and "th".
_TEXT_IDS = 257
_LETTERS = "abcdefghijklmnopqrstuvwxyz  \n.,é\u65e5\U0001f642"


class Manner(Enum):
    """How a caller behaves."""

    READS = "reads to the end"
    CANCELS = "cancels after some messages"
    DEADLINE = "has a deadline that may pass"
    SLOW = "waits before it reads each message"
    STALLS = "keeps its window closed for a while"
    IMPATIENT = "names a longest wait in the queue"
    MISTAKEN = "asks for what is not allowed"


_WEIGHTS = {
    Manner.READS: 700,
    Manner.CANCELS: 100,
    Manner.DEADLINE: 50,
    Manner.SLOW: 50,
    Manner.STALLS: 5,
    Manner.IMPATIENT: 50,
    Manner.MISTAKEN: 45,
}


@dataclass(frozen=True)
class Drawn:
    """One request of the run. `template` is the place of what it asks in the list of templates."""

    template: int
    message: pb.GenerateRequest
    manner: Manner
    messages: int  # that it reads before it cancels
    seconds: float  # its deadline, or how long it waits


def templates(seed: int, count: int) -> list[pb.GenerateRequest]:
    """Requests whose answers are functions of the request: greedy, or sampled with a seed."""
    chance = random.Random(seed)
    return [_template(chance) for _ in range(count)]


def draw(asked: list[pb.GenerateRequest], seed: int, number: int) -> Drawn:
    """The request of a number; the same for the same seed, whatever came before."""
    chance = random.Random(f"{seed} {number}")
    place = chance.randrange(len(asked))
    message = pb.GenerateRequest()
    message.CopyFrom(asked[place])
    message.priority = chance.randint(-10, 10)
    (manner,) = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
    seconds = chance.uniform(0.002, 0.4)
    if manner == Manner.IMPATIENT:
        message.queue_timeout.FromMilliseconds(chance.randint(0, 200))
    if manner == Manner.MISTAKEN:
        _spoil(chance, message)
    if manner == Manner.SLOW:
        seconds = chance.uniform(0.0, 0.02)
    if manner == Manner.STALLS:
        seconds = chance.uniform(0.0, 4.0)
    return Drawn(place, message, manner, chance.randint(0, 6), seconds)


def _template(chance: random.Random) -> pb.GenerateRequest:
    message = pb.GenerateRequest()
    # Most are short, some fill many chunks, a few reach the end of the context.
    length = chance.choice((chance.randint(1, 40), chance.randint(1, 40), chance.randint(40, 200)))
    if chance.random() < 0.03:
        length = chance.randint(480, _SHAPE.context - 1)
    _prompt(chance, message, length)
    message.stop.max_tokens = chance.randint(1, 32)
    message.stop.ignore_eos = chance.random() < 0.5
    message.output.token_ids = True
    if chance.random() < 0.3:
        message.sampling.temperature = chance.uniform(0.2, 2.0)
        message.sampling.seed = chance.getrandbits(64)
        message.sampling.top_k = chance.choice((0, 5, 50))
        message.sampling.top_p = chance.uniform(0.3, 1.0)
    if chance.random() < 0.2:
        _change_logits(chance, message)
    if chance.random() < 0.2:
        message.stop.sequences.extend(chance.choices(_LETTERS, k=chance.randint(1, 4)))
    if chance.random() < 0.1:
        message.stop.token_ids.extend(chance.sample(range(_TEXT_IDS), chance.randint(1, 8)))
        message.stop.min_tokens = chance.randint(0, message.stop.max_tokens)
    if chance.random() < 0.2:
        message.output.final_only = True
    elif chance.random() < 0.2:
        message.output.top_logprobs = chance.randint(0, 5)
    return message


def _prompt(chance: random.Random, message: pb.GenerateRequest, length: int) -> None:
    kind = chance.random()
    if kind < 0.4:
        message.token_ids.ids.extend(chance.choices(range(_TEXT_IDS), k=length))
    elif kind < 0.8:
        message.text = "".join(chance.choices(_LETTERS[:27], k=length))
    else:
        message.chat.messages.add(role=pb.ROLE_SYSTEM, content="be brief")
        text = "".join(chance.choices(_LETTERS, k=min(length, 60)))
        message.chat.messages.add(role=pb.ROLE_USER, content=text)


def _change_logits(chance: random.Random, message: pb.GenerateRequest) -> None:
    message.sampling.repetition_penalty = chance.uniform(0.8, 1.5)
    message.sampling.presence_penalty = chance.uniform(-1.0, 1.0)
    message.sampling.frequency_penalty = chance.uniform(-1.0, 1.0)
    for token in chance.sample(range(_TEXT_IDS), chance.randint(0, 20)):
        message.sampling.logit_bias.add(token_id=token, bias=chance.uniform(-5.0, 5.0))


def _spoil(chance: random.Random, message: pb.GenerateRequest) -> None:
    """Makes one thing of it wrong."""
    wrong = chance.randrange(6)
    if wrong == 0:
        message.sampling.temperature = float("nan")
    elif wrong == 1:
        message.token_ids.ids.append(_SHAPE.vocabulary)
    elif wrong == 2:
        message.stop.max_tokens = 0
    elif wrong == 3:
        message.priority = 11
    elif wrong == 4:
        message.stop.sequences.extend("abc" * 6)
    else:
        message.text = "a" * (_SHAPE.context + 1)
