"""The real model under constraints, in a real server: greedy and hot, and what people would ask."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from constrained import PERSON, require_person
from server_process import PATIENCE, ServerProcess, generation, server_process

from kvledger.v1 import generation_pb2 as pb


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process("--kv-blocks", "64") as server:
        yield server


def ask(
    server: ServerProcess, text: str, constraint: pb.Constraint, seed: int | None = None
) -> tuple[str, pb.Sample]:
    """The text of an answer, and how it ended."""
    message = pb.GenerateRequest(constraint=constraint)
    message.chat.messages.add(role=pb.ROLE_USER, content=text)
    message.stop.max_tokens = 300
    message.output.final_only = True
    if seed is not None:
        message.sampling.temperature = 1.5
        message.sampling.seed = seed
    with server.channel() as channel:
        responses = list(generation(channel).Generate(message, timeout=PATIENCE))
    (sample,) = responses[-1].finished.samples
    return sample.text, sample


PROMPT = "Tell me about Ann, who is 33, alive, and tagged a. Answer in JSON."


def test_answers_have_the_schema(server: ServerProcess) -> None:
    """What a program parses would sometimes not parse."""
    constraint = pb.Constraint(json_schema=json.dumps(PERSON))
    with ThreadPoolExecutor(8) as pool:
        seeds: list[int | None] = [None, None, *range(6)]
        answers = list(pool.map(lambda seed: ask(server, PROMPT, constraint, seed), seeds))
    for text, sample in answers:
        assert sample.finish_reason == pb.FINISH_REASON_STOP, text
        require_person(text)
    assert answers[0][0] == answers[1][0]
    assert len({text for text, _ in answers}) > 3
    assert ask(server, PROMPT, constraint, 3)[0] == answers[5][0], "alone as in company"


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_answers_match_the_expression(server: ServerProcess, seed: int | None) -> None:
    """The same for a regular expression, with characters of several bytes."""
    pattern = r"(Jan|Feb|März) [1-3][0-9], 20[0-9]{2} → [a-zé]{3,12}\."
    text, sample = ask(server, "When, and what?", pb.Constraint(regex=pattern), seed)
    assert sample.finish_reason == pb.FINISH_REASON_STOP
    assert re.fullmatch(pattern, text)


def test_a_choice_is_one_of_them(server: ServerProcess) -> None:
    """A classifier would get an explanation instead of a class."""
    constraint = pb.Constraint(lark_grammar='start: "positive" | "negative" | "neutral"\n')
    text, _ = ask(server, "Is 'what a lovely day' positive, negative or neutral?", constraint)
    assert text in ("positive", "negative", "neutral")


def test_hostile_constraints_leave_the_server_well(server: ServerProcess) -> None:
    """One request would end everybody's server."""
    hostile = [
        pb.Constraint(json_schema='{"type":"integer","multipleOf":999983}'),
        pb.Constraint(regex="(" * 4000 + "a" + ")" * 4000),
        pb.Constraint(json_schema="[" * 100_000),
        pb.Constraint(lark_grammar="start: start\n"),
    ]
    for constraint in hostile:
        with pytest.raises(grpc.RpcError) as refused:
            ask(server, "x", constraint)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert ask(server, "Say b.", pb.Constraint(regex="b"))[0] == "b"
    assert server.process.poll() is None
