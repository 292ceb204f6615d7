"""Constraints from a caller's side: what comes, what is refused, and with which words."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from constrained import PERSON, require_person
from server_harness import ServerHarness, request, serving

from kvledger.rpc.generation import RECEIPT_METADATA
from kvledger.v1 import generation_pb2 as pb

CANARY = "canary-4711"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ServerHarness]:
    async with serving(blocks=512, context_tokens=2048) as server:
        yield server


def flatten(logits: Any, plan: Any) -> None:
    """Makes every token as likely as any other."""
    logits *= 0.0


def hot(seed: int) -> dict[str, Any]:
    return {"temperature": 1.5, "seed": seed}


@pytest.mark.parametrize("final_only", [False, True])
async def test_an_answer_has_the_schema(server: ServerHarness, final_only: bool) -> None:
    """A program would read what it cannot parse."""
    server.scripted.after_step = flatten
    constraint = pb.Constraint(json_schema=json.dumps(PERSON))
    answers = await asyncio.gather(
        *(
            server.answer(
                text="a",
                max_tokens=800,
                sampling=hot(seed),
                constraint=constraint,
                final_only=final_only,
            )
            for seed in range(6)
        )
    )
    for answer in answers:
        (sample,) = answer.finished.samples
        require_person(sample.text if final_only else answer.text)
        assert answer.reason == "STOP"
    await server.require_all_free()


async def test_every_kind_is_followed(server: ServerHarness) -> None:
    """A kind would be taken for another, or for none."""
    server.scripted.after_step = flatten
    kinds = {
        r"[a-f]{3,6}": pb.Constraint(regex="[a-f]{3,6}"),
        r"(ab)+c": pb.Constraint(lark_grammar='start: ab+ "c"\nab: "a" "b"\n'),
        r"(?s)\{.*\}": pb.Constraint(json_object=pb.AnyJsonObject()),
    }
    for pattern, constraint in kinds.items():
        answer = await server.answer(
            text="a",
            max_tokens=150,
            sampling={"temperature": 1.0, "seed": 2, "logit_bias": []},
            constraint=constraint,
        )
        if answer.reason == "STOP":
            assert re.fullmatch(pattern, answer.text)
            if constraint.HasField("json_object"):
                assert isinstance(json.loads(answer.text), dict)
        else:
            assert constraint.HasField("json_object")
            assert answer.text.startswith("{")


async def test_the_same_seed_gives_the_same_answer(server: ServerHarness) -> None:
    """An answer would depend on who else is served."""
    server.scripted.after_step = flatten
    fields = {
        "text": "a",
        "max_tokens": 500,
        "constraint": pb.Constraint(json_schema=json.dumps(PERSON)),
    }
    alone = await server.answer(**fields, sampling=hot(4))
    company = await asyncio.gather(
        *(server.answer(**fields, sampling=hot(seed)) for seed in range(6)),
        server.answer(text="a", max_tokens=100),
    )
    assert company[4].text == alone.text
    assert company[3].text != alone.text


async def test_ends_that_are_ignored_do_not_go_on_after_the_end(server: ServerHarness) -> None:
    """Text would follow what is complete; or the request fail."""
    constraint = pb.Constraint(regex="b{0,3}")
    server.scripted.following[:] = 257  # the end, always
    plain = await server.answer(text="a", max_tokens=9, constraint=constraint)
    assert (plain.text, plain.reason) == ("", "STOP")
    message = request("a", max_tokens=9, ignore_eos=True, constraint=constraint, wants_ids=True)
    message.stop.min_tokens = 9
    call = server.generation.Generate(message, timeout=20)
    responses = [response async for response in call]
    ids = [token for response in responses for token in response.delta.token_ids]
    assert ids == [*b"bbb", 257]
    (sample,) = responses[-1].finished.samples
    assert sample.finish_reason == pb.FINISH_REASON_STOP


async def test_a_stop_sequence_cuts_it(server: ServerHarness) -> None:
    """A caller's own stop would count less than its constraint."""
    answer = await server.answer(
        text="a", max_tokens=20, stop=("ef",), constraint=pb.Constraint(regex="[a-z]{12}")
    )
    assert (answer.text, answer.reason) == ("bcd", "STOP")


@pytest.mark.parametrize(
    ("constraint", "field", "reason"),
    [
        (pb.Constraint(), "constraint", "is empty; give json_schema, regex, lark_grammar or"),
        (pb.Constraint(regex=""), "constraint.regex", "0 bytes, allowed are 1 to 8192"),
        (
            pb.Constraint(regex=CANARY * 1000),
            "constraint.regex",
            "11000 bytes, allowed are 1 to 8192",
        ),
        (
            pb.Constraint(json_schema=json.dumps({"enum": [CANARY * 100_000]})),
            "constraint.json_schema",
            "bytes, allowed are 1 to 131072",
        ),
        (
            pb.Constraint(lark_grammar="# " + CANARY * 7000),
            "constraint.lark_grammar",
            "77002 bytes, allowed are 1 to 65536",
        ),
        (pb.Constraint(json_schema="{" + CANARY), "constraint.json_schema", "is not JSON"),
        (
            pb.Constraint(json_schema=json.dumps({"not": {"const": CANARY}})),
            "constraint.json_schema",
            "uses what is not supported in the schema itself: not",
        ),
        (
            pb.Constraint(json_schema=json.dumps({"properties": {CANARY: {CANARY: 3}}})),
            "constraint.json_schema",
            "none of JSON Schema's: of the keys of properties[0], counted from 0, number 0",
        ),
        (
            pb.Constraint(json_schema='{"items":' * 3000 + "{}" + "}" * 3000),
            "constraint.json_schema",
            "nests objects and arrays more than 64 levels deep",
        ),
        (pb.Constraint(regex=f"({CANARY}"), "constraint.regex", "is not a regular expression"),
        (
            pb.Constraint(lark_grammar=f'start: "a"\n\nx: {CANARY})\n'),
            "constraint.lark_grammar",
            "is not a grammar in llguidance's variant of Lark",
        ),
    ],
    ids=str,
)
async def test_what_cannot_be_followed_is_refused(
    server: ServerHarness, constraint: pb.Constraint, field: str, reason: str
) -> None:
    """A caller would not know what to change, or find its text in somebody's log."""
    for _ in range(2):  # the second time it is known already
        refusal = await server.refusal(text="a", constraint=constraint)
        assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
        assert refusal.reason == "FIELD_INVALID"
        assert set(refusal.violations) == {field}
        assert reason in refusal.violations[field]
        assert CANARY not in refusal.everything()
    assert CANARY not in str(server.log.lines)
    assert (await server.answer(text="a")).text == "bcde"


async def test_a_constraint_that_breaks_is_an_internal_error_with_an_id(
    server: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A beginning that matches nothing would look like an answer."""
    from kvledger.constraints.matcher import ConstraintBroken, ConstraintState

    fill = ConstraintState.fill
    steps = 0

    def failing(self: ConstraintState, words: Any) -> None:
        nonlocal steps
        steps += 1
        if steps > 3:
            raise ConstraintBroken(CANARY)
        fill(self, words)

    monkeypatch.setattr(ConstraintState, "fill", failing)
    broken = asyncio.create_task(
        server.refusal(text="a", max_tokens=9, constraint=pb.Constraint(regex="[a-z]{9}"))
    )
    neighbour = await server.answer(text="a", max_tokens=9)
    refusal = await broken
    assert refusal.code == grpc.StatusCode.INTERNAL
    assert refusal.reason == "REQUEST_FAILED"
    (line,) = [each for each in server.log.of("request_finished") if each["reason"] == "failed"]
    assert line["request_id"] in refusal.message
    assert CANARY not in refusal.everything()
    assert neighbour.text == "bcdefghij"
    requests = server.server._work_metrics._requests
    assert [requests.ended_count(reason) for reason in ("constraint", "failed")] == [0, 1]
    await server.require_all_free()


async def test_a_constraint_that_leads_nowhere_is_the_client_s_to_change(
    server: ServerHarness,
) -> None:
    """The caller would be told to report a fault of the server's, and try the same again."""
    server.scripted.after_step = flatten
    grammar = f'start: "aaa" B | "aab" B\nB: /b.{{3}}/ & /{CANARY}/\n'
    fields = {"text": "a", "max_tokens": 9, "constraint": pb.Constraint(lark_grammar=grammar)}
    for more in ({}, {"samples": 3, "sampling": hot(2)}):
        neighbour = asyncio.create_task(server.answer(text="a", max_tokens=9))
        refusal = await server.refusal(**fields, **more)
        assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
        assert refusal.reason == "CONSTRAINT_DEAD_END"
        assert set(refusal.violations) == {"constraint.lark_grammar"}
        assert "could follow the first 3 of" in refusal.violations["constraint.lark_grammar"]
        assert refusal.metadata[RECEIPT_METADATA]
        assert CANARY not in refusal.everything()
        assert (await neighbour).reason == "LENGTH"
    assert sorted(server.log.reasons) == ["constraint", "constraint", "length", "length"]
    # Or clients could page whoever is on duty.
    requests = server.server._work_metrics._requests
    assert [requests.ended_count(reason) for reason in ("constraint", "failed")] == [2, 0]
    assert not server.log.of("sampling_failed")
    await server.require_all_free()


async def test_a_constraint_that_takes_too_much_says_so(
    server: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller would be told to report a fault of the server's, and try the same again."""
    monkeypatch.setattr("kvledger.constraints.matcher._AT_ONCE_SECONDS", -1.0)
    refusal = await server.refusal(text="a", constraint=pb.Constraint(regex="[a-z]{9}"))
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.reason == "CONSTRAINT_TOO_COSTLY"
    assert "too much work after 0 tokens" in refusal.violations["constraint.regex"]


async def test_a_server_without_the_extra_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server would not start without it, or give answers that match nothing."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.delitem(sys.modules, "kvledger.constraints.vocabulary", raising=False)
    async with serving() as server:
        refusal = await server.refusal(text="a", constraint=pb.Constraint(regex="a"))
        assert refusal.code == grpc.StatusCode.FAILED_PRECONDITION
        assert refusal.reason == "CONSTRAINTS_UNAVAILABLE"
        assert "kvledger[grammar]" in refusal.message
        assert (await server.answer(text="a")).text == "bcde"
