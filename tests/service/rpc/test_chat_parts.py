"""Chat with tools from a gateway's side: reasoning, calls and results, through a whole server."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from scripted_model import END_OF_TEXT, PATIENCE, VOCABULARY
from server_harness import Answer, ServerHarness, refusal_of, serving
from tiny_model import byte_letters
from tool_templates import MISTRAL_NAMES, QWEN

from kvledger.streams import Mail, Mailbox
from kvledger.tokenizer import Tokenizer, VocabularySource
from kvledger.v1 import generation_pb2 as pb
from kvledger.v1 import models_pb2

ROOT = Path(__file__).parents[3]
CANARY = "canary-4711"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
ROOM = {"context_tokens": 4096, "blocks": 1200}


def tokenizer_with(template: str, control: Sequence[str]) -> Tokenizer:
    """As many ids as the tiny model has, with other control tokens."""
    tokens = [*byte_letters(), "th", "<|im_end|>", *control]
    assert len(tokens) == VOCABULARY
    return Tokenizer(
        VocabularySource(
            model="gpt2",
            pre="gpt-2",
            tokens=tokens,
            token_types=[1] * 257 + [3] * (len(tokens) - 257),
            merges=["t h"],
            eos_id=END_OF_TEXT,
            bos_id=None,
            add_bos=False,
            chat_template=template,
        )
    )


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ServerHarness]:
    tokenizer = tokenizer_with(QWEN, ["<|im_start|>", "<unused1>", "<unused2>"])
    async with serving(tokenizer=tokenizer, **ROOM) as server:
        yield server


@pytest_asyncio.fixture
async def marked_server() -> AsyncIterator[ServerHarness]:
    template = "{% set bos_token = '' %}" + MISTRAL_NAMES
    tokenizer = tokenizer_with(template, ["[TOOL_CALLS]", "[ARGS]", "[INST]"])
    async with serving(tokenizer=tokenizer, **ROOM) as server:
        yield server


def script(server: ServerHarness, *answer: str | int) -> list[int]:
    """Makes the model answer so, to one request at a time; returns the ids."""
    tokens: list[int] = []
    for part in answer:
        tokens += [part] if isinstance(part, int) else part.encode()
    left = iter([*tokens, *[END_OF_TEXT] * 8])

    def say(logits: Any, plan: Any) -> None:
        if plan.logits:
            logits[:] = 0.0
            logits[:, next(left)] = 20.0

    server.scripted.after_step = say
    return tokens


def asking(*, tools: bool = True, parse: bool = True, **options: Any) -> pb.GenerateRequest:
    message = pb.GenerateRequest(output=pb.OutputOptions(parse_chat=parse, **options))
    message.chat.messages.add(role=pb.ROLE_USER, content="Weather in Zürich?")
    if tools:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        message.chat.tools.add(
            name="get_weather", description="The weather.", parameters=json.dumps(schema)
        )
    return message


async def send(server: ServerHarness, message: pb.GenerateRequest) -> Answer:
    answer = Answer()
    async for response in server.generation.Generate(message, timeout=20):
        answer.responses.append(response)
    return answer


def reasoning_of(answer: Answer) -> str:
    return "".join(delta.reasoning for delta in answer.deltas)


def calls_of(answer: Answer) -> list[tuple[int, str, str]]:
    return [
        (call.index, call.name, call.arguments)
        for delta in answer.deltas
        for call in delta.tool_calls
    ]


async def written(server: ServerHarness, chat: pb.ChatPrompt) -> str:
    """The prompt of a chat, control tokens written out."""
    request = models_pb2.TokenizeRequest(chat=chat)
    tokens = await server.models.Tokenize(request)
    back = await server.models.Detokenize(models_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
    return str(back.text)


async def test_a_round_with_a_tool(server: ServerHarness) -> None:
    """A gateway could not offer tools, or could not hand their results back."""
    tokens = script(server, f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{CALL}")
    message = asking(token_ids=True, top_logprobs=0)
    answer = await send(server, message)
    assert reasoning_of(answer) == "hm"
    assert answer.text == "I look."
    arguments = '{"city": "Zürich"}'
    assert calls_of(answer) == [(0, "get_weather", arguments), (1, "get_weather", arguments)]
    assert answer.reason == "TOOL_CALLS"
    assert answer.token_ids == [*tokens, END_OF_TEXT]
    assert answer.finished.usage.completion_tokens == len(tokens) + 1
    for delta in answer.deltas:
        assert delta.tokens == len(delta.token_ids) == len(delta.logprobs)
        assert [each.chosen.token_id for each in delta.logprobs] == list(delta.token_ids)
    assert sum(bool(delta.tool_calls) for delta in answer.deltas) == 2

    ids = [call.id for delta in answer.deltas for call in delta.tool_calls]
    assert len(set(ids)) == 2
    turn = message.chat.messages.add(
        role=pb.ROLE_ASSISTANT, content=answer.text, reasoning=reasoning_of(answer)
    )
    for call_id in ids:
        turn.tool_calls.add(id=call_id, name="get_weather", arguments=arguments)
    for call_id in ids:
        message.chat.messages.add(
            role=pb.ROLE_TOOL, tool_call_id=call_id, name="get_weather", content="<|im_end|>7 °C"
        )
    text = await written(server, message.chat)
    assert f"I look.\n{CALL}\n{CALL}<|im_end|>\n" in text
    assert text.count("<tool_response>\n<|im_end|>7 °C\n</tool_response>") == 2
    tokenized = await server.models.Tokenize(models_pb2.TokenizeRequest(chat=message.chat))
    assert list(tokenized.token_ids).count(END_OF_TEXT) == 4, "those of the template alone"
    script(server, "It is 7 °C.")
    again = await send(server, message)
    assert (again.text, again.reason) == ("It is 7 °C.", "STOP")
    assert again.accepted.prompt_tokens == len(tokenized.token_ids)
    await server.require_all_free()


async def test_the_example_calls_its_function(server: ServerHarness) -> None:
    """Whoever starts from the example would start from something that does not work."""
    multiply = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
    script(server, f"<think>hm</think>{multiply}", END_OF_TEXT, "It is 42.")
    command = [sys.executable, "examples/python/tools.py"]
    command += ["service/kvledger/v1/kvledger.protoset", server.address, "6 times 7?"]
    example = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(example.communicate(), 60)
    assert err.decode() == ""
    assert out.decode().split("\n") == ["", '[multiply({"a": 6, "b": 7}) is 42]', "It is 42.", ""]
    assert example.returncode == 0


def read_each_token(server: ServerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the model says nothing more before what it said has been fetched."""
    take, say = Mailbox.take, server.scripted.after_step
    fetched = threading.Semaphore(1)

    def counted(mailbox: Mailbox) -> Mail:
        mail = tokens, _ = take(mailbox)
        if tokens:
            fetched.release(len(tokens))
        return mail

    def wait(logits: Any, plan: Any) -> None:
        if plan.logits:
            assert fetched.acquire(timeout=PATIENCE)
        say(logits, plan)

    monkeypatch.setattr(Mailbox, "take", counted)
    server.scripted.after_step = wait


async def test_parts_come_as_the_model_writes_them(
    server: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reasoning would come in one piece at its end, and a person look at nothing meanwhile."""
    script(server, f"<think>hm, let me</think>{CALL}")
    read_each_token(server, monkeypatch)
    answer = await send(server, asking())
    thoughts = [delta.reasoning for delta in answer.deltas if delta.reasoning]
    assert len(thoughts) > 3
    assert answer.text == ""
    assert len(calls_of(answer)) == 1


async def test_the_whole_answer_has_the_same_parts(server: ServerHarness) -> None:
    """Two ways to ask would give two answers."""
    tokens = script(server, f"<think>\nhm\n</think>\n\nI look.\n{CALL}")
    answer = await send(server, asking(final_only=True, token_ids=True))
    assert answer.kinds == ["accepted", "finished"]
    (sample,) = answer.finished.samples
    assert (sample.reasoning, sample.text) == ("hm", "I look.")
    (call,) = sample.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Zürich"})
    assert len(call.id) == 9
    assert answer.reason == "TOOL_CALLS"
    assert list(sample.token_ids) == [*tokens, END_OF_TEXT]


async def test_without_the_option_all_is_text(server: ServerHarness) -> None:
    """Clients that parse for themselves would suddenly get nothing to parse."""
    said = f"<think>\nhm\n</think>\n\nI look.\n{CALL}"
    script(server, said)
    answer = await send(server, asking(parse=False))
    assert (answer.text, answer.reason) == (said, "STOP")
    assert (reasoning_of(answer), calls_of(answer)) == ("", [])


async def test_without_tools_a_call_is_text(server: ServerHarness) -> None:
    """Who asks how calls are written would be told nothing, or get one."""
    script(server, f"So: {CALL}")
    answer = await send(server, asking(tools=False))
    assert (answer.text, answer.reason, calls_of(answer)) == (f"So: {CALL}", "STOP", [])


async def test_a_call_that_is_cut_off_is_text(server: ServerHarness) -> None:
    """Half a call would be made, or its text be lost."""
    script(server, f"I look.\n{CALL}")
    message = asking(token_ids=True)
    message.stop.max_tokens = 50
    answer = await send(server, message)
    assert answer.text == f"I look.\n{CALL}".encode()[:50].decode()
    assert (answer.reason, calls_of(answer)) == ("LENGTH", [])
    assert len(answer.token_ids) == 50


async def test_a_stop_string_ends_an_answer_with_parts(server: ServerHarness) -> None:
    """What a stop string should cut off would be sent as part of a call."""
    script(server, f"<think>hm</think>I look.\n{CALL} STOP {CALL}")
    message = asking(token_ids=True)
    message.stop.sequences.append("STOP")
    answer = await send(server, message)
    assert (answer.text, reasoning_of(answer), len(calls_of(answer))) == ("I look.", "hm", 1)
    assert answer.reason == "TOOL_CALLS"
    assert answer.token_ids[-1] == ord("P")
    await server.require_all_free()


async def test_a_prompt_may_open_and_close_the_reasoning(server: ServerHarness) -> None:
    """The first words of an answer would be taken for thoughts, or thoughts for the answer."""
    message = asking(tools=False)
    message.chat.template_arguments["enable_thinking"] = "false"
    assert (await written(server, message.chat)).endswith("<think>\n\n</think>\n\n")
    script(server, "Yes.")
    answer = await send(server, message)
    assert (answer.text, reasoning_of(answer)) == ("Yes.", "")
    opening = tokenizer_with(QWEN + "{{ '<think>\\n' }}", ["<|im_start|>", "<think>", "</think>"])
    async with serving(tokenizer=opening, **ROOM) as other:
        script(other, "hm, </think>?", 260, "\n\nYes.")
        answer = await send(other, asking(tools=False))
        assert (reasoning_of(answer), answer.text) == ("hm, </think>?", "Yes.")


async def test_marks_that_are_control_tokens(marked_server: ServerHarness) -> None:
    """Models whose marks have no text would never call; and text like a mark would be a call."""
    marks, arguments_follow = 258, 259
    tokens = script(marked_server, "I look.", marks, "get_weather", arguments_follow, '{"a": 1}')
    answer = await send(marked_server, asking(token_ids=True))
    assert answer.text == "I look."
    assert calls_of(answer) == [(0, "get_weather", '{"a": 1}')]
    assert answer.reason == "TOOL_CALLS"
    assert answer.token_ids == [*tokens, END_OF_TEXT]
    quoted = 'Write [TOOL_CALLS]get_weather[ARGS]{"a": 1}'
    script(marked_server, quoted)
    answer = await send(marked_server, asking())
    assert (answer.text, calls_of(answer), answer.reason) == (quoted, [], "STOP")


async def test_what_a_model_can_do_is_told(
    server: ServerHarness, marked_server: ServerHarness
) -> None:
    """A gateway would have to try out whether tools are refused."""
    request = models_pb2.GetModelRequest()
    chat = (await server.models.GetModel(request)).model.chat
    assert (chat.tools, chat.tool_calls, chat.reasoning) == (True, True, True)
    assert chat.call_syntax == "tagged_json"
    assert (await marked_server.models.GetModel(request)).model.chat.call_syntax == "marked"
    async with serving() as plain:
        chat = (await plain.models.GetModel(request)).model.chat
        assert [turn.conversation for turn in chat.history[::2]] == ["text", "system", "blanks"]
        chat.ClearField("history")
        assert chat == models_pb2.ChatSupport()


async def test_a_template_without_tools_refuses_them() -> None:
    """Tools would be dropped without a word."""
    async with serving(**ROOM) as plain:
        refusal = await refusal_of(send(plain, asking()))
        assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
        assert set(refusal.violations) == {"chat.tools"}
        script(plain, "<think>x</think>")
        answer = await send(plain, asking(tools=False))
        assert answer.text == "<think>x</think>", "a family that is not known"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda chat: chat.tools.add(name=f"{CANARY}!"), "chat.tools[1].name"),
        (lambda chat: chat.tools.add(name="get_weather"), "chat.tools[1].name"),
        (
            lambda chat: chat.tools.add(name="a", parameters=f'"{CANARY}"'),
            "chat.tools[1].parameters",
        ),
        (
            lambda chat: chat.tools.add(name="a", parameters=f"{{{CANARY}"),
            "chat.tools[1].parameters",
        ),
        (
            lambda chat: chat.messages.add(role=pb.ROLE_ASSISTANT).tool_calls.add(
                name="a", arguments=f"[{CANARY}"
            ),
            "chat.messages[1].tool_calls[0].arguments",
        ),
        (
            lambda chat: chat.messages.add(role=pb.ROLE_TOOL, content=CANARY),
            "chat.messages[1].tool_call_id",
        ),
        (
            lambda chat: chat.messages.add(role=pb.ROLE_USER, reasoning=CANARY),
            "chat.messages[1].reasoning",
        ),
        (lambda chat: chat.template_arguments.update(a=CANARY), "chat.template_arguments"),
        (lambda chat: chat.template_arguments.update(messages="[]"), "chat.template_arguments"),
        (lambda chat: chat.template_arguments.update({CANARY: "1"}), "chat.template_arguments"),
    ],
)
async def test_what_is_wrong_is_named(server: ServerHarness, change: Any, field: str) -> None:
    """A gateway would learn nothing but that something is wrong, or the log what was sent."""
    message = asking()
    change(message.chat)
    refusal = await refusal_of(send(server, message))
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.reason == "FIELD_INVALID"
    assert set(refusal.violations) == {field}
    assert CANARY not in refusal.everything() + str(server.log.lines)
    tokenize = models_pb2.TokenizeRequest(chat=message.chat)
    assert set((await refusal_of(server.models.Tokenize(tokenize))).violations) == {field}


async def test_only_answers_to_a_chat_have_parts(server: ServerHarness) -> None:
    """A caller would wait for calls that no template has asked the model for."""
    message = pb.GenerateRequest(text="a", output=pb.OutputOptions(parse_chat=True))
    refusal = await refusal_of(send(server, message))
    assert set(refusal.violations) == {"output.parse_chat"}
