"""Every limit on a request: what is at the limit passes, one more is refused and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cache_requests import CACHE_ROWS
from hypothesis import given
from hypothesis import strategies as st

from kvledger.errors import InvalidRequest
from kvledger.limits import (
    LIMITS,
    MESSAGE_BYTES_MAX,
    check_detokenize,
    check_generate,
    check_prompt_fits,
    check_text_fits,
    check_tokenize,
)
from kvledger.v1 import generation_pb2, models_pb2

VOCABULARY = 1000
CANARY = "what-only-the-client-may-read"
MIB = 1024 * 1024


def generate(**fields: Any) -> generation_pb2.GenerateRequest:
    """A request with a short text, unless the fields say otherwise."""
    if not {"text", "token_ids", "chat"} & set(fields):
        fields["text"] = "x"
    return generation_pb2.GenerateRequest(**fields)


def chat(*contents: str, role: int = generation_pb2.ROLE_USER) -> generation_pb2.ChatPrompt:
    messages = [generation_pb2.ChatMessage(role=role, content=content) for content in contents]
    return generation_pb2.ChatPrompt(messages=messages)


def violations(request: generation_pb2.GenerateRequest) -> dict[str, str]:
    """Reasons by field, as the client reads them."""
    with pytest.raises(InvalidRequest) as refused:
        check_generate(request, VOCABULARY)
    return {violation.field: violation.reason for violation in refused.value.violations}


def sampling(**options: float) -> generation_pb2.GenerateRequest:
    return generate(sampling=generation_pb2.SamplingOptions(**options))


def stop(**options: Any) -> generation_pb2.GenerateRequest:
    return generate(stop=generation_pb2.StopOptions(**options))


def told(**options: Any) -> generation_pb2.GenerateRequest:
    return generate(output=generation_pb2.OutputOptions(**options))


def constrained(**kind: Any) -> generation_pb2.GenerateRequest:
    return generate(constraint=generation_pb2.Constraint(**kind))


def biased(*entries: tuple[int, float]) -> generation_pb2.GenerateRequest:
    request = generate()
    for token, bias in entries:
        request.sampling.logit_bias.add(token_id=token, bias=bias)
    return request


def ids(count: int) -> generation_pb2.GenerateRequest:
    return generate(token_ids=generation_pb2.TokenIds(ids=[1] * count))


def offering(*tools: generation_pb2.Tool) -> generation_pb2.GenerateRequest:
    prompt = chat("x")
    prompt.tools.extend(tools)
    return generate(chat=prompt)


def arguing(arguments: dict[str, str]) -> generation_pb2.GenerateRequest:
    prompt = chat("x")
    prompt.template_arguments.update(arguments)
    return generate(chat=prompt)


def calling(count: int) -> generation_pb2.GenerateRequest:
    call = generation_pb2.ToolCall(name="a", arguments="{}")
    message = generation_pb2.ChatMessage(
        role=generation_pb2.ROLE_ASSISTANT, tool_calls=[call] * count
    )
    return generate(chat=generation_pb2.ChatPrompt(messages=[message]))


def aiming(seconds: float) -> generation_pb2.GenerateRequest:
    request = generate()
    request.tpot_target.seconds = int(seconds)
    request.tpot_target.nanos = round((seconds - int(seconds)) * 1e9)
    return request


def waiting(seconds: float) -> generation_pb2.GenerateRequest:
    request = generate()
    request.queue_timeout.seconds = int(seconds)
    request.queue_timeout.nanos = round((seconds - int(seconds)) * 1e9)
    return request


# By row of the table: a request with that value, the path that is named if it is refused, and the
# first refused value below and above, None where there is none to send.
ROWS: dict[str, tuple[Callable[[Any], Any], str, float | None, float | None]] = {
    **CACHE_ROWS,
    "model": (lambda n: generate(model="m" * n), "model", None, 257),
    "text": (lambda n: generate(text="t" * n), "text", 0, MIB + 1),
    "token_ids.ids": (ids, "token_ids.ids", 0, 256 * 1024 + 1),
    "chat.messages": (lambda n: generate(chat=chat(*[""] * n)), "chat.messages", 0, 1025),
    "chat.messages.content": (
        lambda n: generate(chat=chat("c" * (n // 2), "c" * (n - n // 2))),
        "chat.messages.content",
        None,
        MIB + 1,
    ),
    "chat.messages.tool_calls": (calling, "chat.messages[0].tool_calls", None, 65),
    "chat.tools": (
        lambda n: offering(*(generation_pb2.Tool(name=f"t{i}") for i in range(n))),
        "chat.tools",
        None,
        129,
    ),
    "chat.tools.definitions": (
        lambda n: (
            offering(
                generation_pb2.Tool(name="a", description="d" * (n // 2)),
                generation_pb2.Tool(name="b", parameters="p" * (n - n // 2 - 2)),
            )
            if n
            else offering()
        ),
        "chat.tools",
        None,
        256 * 1024 + 1,
    ),
    "chat.template_arguments": (
        lambda n: arguing({f"a{i}": "1" for i in range(n)}),
        "chat.template_arguments",
        None,
        33,
    ),
    "chat.template_arguments.values": (
        lambda n: arguing({"a": "1" * (n - 1)} if n else {}),
        "chat.template_arguments",
        None,
        16 * 1024 + 1,
    ),
    "sampling.temperature": (
        lambda x: sampling(temperature=x),
        "sampling.temperature",
        -0.25,
        100.0000076293945,
    ),
    "sampling.top_p": (lambda x: sampling(top_p=x), "sampling.top_p", -0.25, 1.00000011920929),
    "sampling.top_k": (lambda n: sampling(top_k=n), "sampling.top_k", None, 2**31),
    "sampling.min_p": (lambda x: sampling(min_p=x), "sampling.min_p", -0.25, 1.00000011920929),
    "sampling.repetition_penalty": (
        lambda x: sampling(repetition_penalty=x),
        "sampling.repetition_penalty",
        -0.25,
        10.0000009536743,
    ),
    "sampling.presence_penalty": (
        lambda x: sampling(presence_penalty=x),
        "sampling.presence_penalty",
        -2.00000023841858,
        2.00000023841858,
    ),
    "sampling.frequency_penalty": (
        lambda x: sampling(frequency_penalty=x),
        "sampling.frequency_penalty",
        -2.00000023841858,
        2.00000023841858,
    ),
    "sampling.logit_bias": (
        lambda n: biased(*((token, 1.0) for token in range(n))),
        "sampling.logit_bias",
        None,
        513,
    ),
    "sampling.logit_bias.bias": (
        lambda x: biased((3, 0.0), (7, x)),
        "sampling.logit_bias[1].bias",
        -100.000007629395,
        100.000007629395,
    ),
    "stop.min_tokens": (lambda n: stop(min_tokens=n), "stop.min_tokens", None, 2**31),
    "stop.token_ids": (lambda n: stop(token_ids=[5] * n), "stop.token_ids", None, 65),
    "constraint.json_schema": (
        lambda n: constrained(json_schema="s" * n),
        "constraint.json_schema",
        0,
        128 * 1024 + 1,
    ),
    "constraint.regex": (lambda n: constrained(regex="r" * n), "constraint.regex", 0, 8193),
    "constraint.lark_grammar": (
        lambda n: constrained(lark_grammar="l" * n),
        "constraint.lark_grammar",
        0,
        64 * 1024 + 1,
    ),
    "output.top_logprobs": (lambda n: told(top_logprobs=n), "output.top_logprobs", None, 21),
    "output.prompt_logprobs": (
        lambda n: told(prompt_logprobs=n),
        "output.prompt_logprobs",
        None,
        21,
    ),
    "samples": (lambda n: generate(samples=n), "samples", 0, 17),
    "stop.max_tokens": (lambda n: stop(max_tokens=n), "stop.max_tokens", 0, 2**31),
    "stop.sequences": (lambda n: stop(sequences=["s"] * n), "stop.sequences", None, 17),
    "stop.sequences.text": (lambda n: stop(sequences=["a", "s" * n]), "stop.sequences[1]", 0, 257),
    "priority": (lambda n: generate(priority=n), "priority", -11, 11),
    "tpot_target": (aiming, "tpot_target", 0.000999, 60.000000001),
    "queue_timeout": (waiting, "queue_timeout", -0.5, 3600.000000001),
}


def test_every_row_of_the_table_is_tested() -> None:
    """A new limit that nobody tries might not be checked at all."""
    assert set(ROWS) == set(LIMITS)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_at_the_limit_it_passes(name: str) -> None:
    """A documented value would be refused."""
    make, limit = ROWS[name][0], LIMITS[name]
    above_zero = ("sampling.top_p", "sampling.repetition_penalty")
    least = 1e-30 if name in above_zero else limit.least
    for value in (least, limit.most):
        check_generate(make(int(value) if limit.most > 1 and value == int(value) else value), 1000)


BEYOND = [
    (name, value)
    for name, (_, _, below, above) in sorted(ROWS.items())
    for value in (below, above)
    if value is not None
]


@pytest.mark.parametrize(("name", "value"), BEYOND)
def test_beyond_the_limit_it_is_refused_and_named(name: str, value: float) -> None:
    """A client must read which field, which value and which limit, or it cannot mend anything."""
    make, field = ROWS[name][:2]
    limit = LIMITS[name]
    unit = f" {limit.unit}" if limit.unit else ""
    assert violations(make(value)) == {
        field: f"{value:.15g}{unit}, allowed are {limit.least:.15g} to {limit.most:.15g}"
    }


def test_lengths_are_bytes_and_not_characters() -> None:
    """Three times the memory would come in behind a limit that counts characters."""
    wide = "\u65e5" * 86  # 258 bytes
    assert violations(generate(model=wide)) == {"model": "258 bytes, allowed are 0 to 256"}
    assert set(violations(stop(sequences=[wide]))) == {"stop.sequences[0]"}
    assert set(violations(generate(text="\u65e5" * (MIB // 3 + 1)))) == {"text"}
    assert set(violations(generate(chat=chat("\u65e5" * (MIB // 3 + 1))))) == {
        "chat.messages.content"
    }


@pytest.mark.parametrize(
    "name",
    [
        *("temperature", "top_p", "min_p"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_finite_number_is_refused(name: str, value: float) -> None:
    """NaN passes every comparison that asks whether it is too large, and spoils a step."""
    field = f"sampling.{name}"
    assert violations(sampling(**{name: value})) == {field: "is not a finite number"}


def test_a_nucleus_of_nothing_is_refused() -> None:
    """top_p 0 would keep no token, or be taken for "unset"."""
    assert "must be above 0" in violations(sampling(top_p=0.0))["sampling.top_p"]


@pytest.mark.parametrize("bias", [float("nan"), float("inf"), float("-inf")])
def test_a_bias_is_a_number(bias: float) -> None:
    """One NaN among the biases would make a request's whole step unusable."""
    assert violations(biased((1, bias))) == {
        "sampling.logit_bias[0].bias": "is not a finite number"
    }


def test_a_penalty_that_divides_by_nothing_is_refused() -> None:
    """Logits would be infinite, or 0 be taken for "off" by one side and not the other."""
    found = violations(sampling(repetition_penalty=0.0))
    assert "must be above 0" in found["sampling.repetition_penalty"]


def test_a_token_has_one_bias() -> None:
    """Which of two biases holds would be a matter of luck; the client meant one of them."""
    check_generate(biased((1, 2.0), (2, 2.0)), VOCABULARY)
    assert violations(biased((4, 1.0), (5, 1.0), (4, -1.0), (5, 1.0))) == {
        "sampling.logit_bias[2].token_id": "4 has a bias already; give one a token"
    }


def test_ids_of_options_lie_in_the_vocabulary() -> None:
    """An id beyond it would change a neighbour's logits, or end the step of all (B66, B76)."""
    check_generate(biased((VOCABULARY - 1, 1.0)), VOCABULARY)
    check_generate(stop(token_ids=[VOCABULARY - 1]), VOCABULARY)
    for wrong in (VOCABULARY, 2**31, 2**32 - 1):
        reason = f"{wrong} is outside the vocabulary of 1000 tokens"
        assert violations(biased((1, 1.0), (wrong, 1.0))) == {
            "sampling.logit_bias[1].token_id": reason
        }
        assert violations(stop(token_ids=[0, wrong])) == {"stop.token_ids[1]": reason}


def test_the_least_number_of_tokens_is_not_above_the_most() -> None:
    """Of two promises that cannot both be kept one would be broken without a word (B75)."""
    check_generate(stop(min_tokens=7, max_tokens=7), VOCABULARY)
    check_generate(stop(min_tokens=7), VOCABULARY)
    assert violations(stop(min_tokens=8, max_tokens=7)) == {
        "stop.min_tokens": "8 tokens, at most stop.max_tokens, 7"
    }


def test_log_probabilities_come_with_deltas() -> None:
    """A caller would ask for numbers, get none, and not be told why."""
    check_generate(told(final_only=True), VOCABULARY)
    for count in (0, 5):
        found = violations(told(final_only=True, top_logprobs=count))
        assert set(found) == {"output.top_logprobs"}
        found = violations(told(final_only=True, prompt_logprobs=count))
        assert set(found) == {"output.prompt_logprobs"}


def test_what_is_unset_is_not_checked() -> None:
    """The default of a field, zero on the wire, would be refused where zero is not allowed."""
    check_generate(generate(), VOCABULARY)
    check_generate(sampling(), VOCABULARY)
    check_generate(stop(), VOCABULARY)


def test_a_request_without_a_prompt_is_refused() -> None:
    """It would be taken for an empty text."""
    request = generation_pb2.GenerateRequest()
    assert violations(request) == {"prompt": "is not set; give text, token_ids or chat"}


@pytest.mark.parametrize("role", [0, 5, 17, -1])
def test_roles_are_known(role: int) -> None:
    """A message without a role would be spoken by somebody."""
    request = generate(chat=chat("hello", role=role))
    assert violations(request) == {
        "chat.messages[0].role": f"{role} is not a role; "
        "set ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT or ROLE_TOOL"
    }


SYSTEM, USER, ASSISTANT, TOOL = 1, 2, 3, 4


@pytest.mark.parametrize(
    ("fields", "violated"),
    [
        ({"role": USER, "reasoning": CANARY}, "reasoning"),
        ({"role": TOOL, "tool_call_id": "a", "reasoning": CANARY}, "reasoning"),
        ({"role": USER, "tool_calls": [generation_pb2.ToolCall(name="a")]}, "tool_calls"),
        ({"role": ASSISTANT, "tool_call_id": CANARY}, "tool_call_id"),
        ({"role": SYSTEM, "name": CANARY}, "name"),
        ({"role": TOOL}, "tool_call_id"),
        ({"role": TOOL, "tool_call_id": f"{CANARY} "}, "tool_call_id"),
        ({"role": TOOL, "tool_call_id": "a" * 129}, "tool_call_id"),
        ({"role": TOOL, "tool_call_id": "a", "name": f"<{CANARY}>"}, "name"),
        ({"role": ASSISTANT, "tool_calls": [generation_pb2.ToolCall()]}, "tool_calls[0].name"),
        (
            {"role": ASSISTANT, "tool_calls": [generation_pb2.ToolCall(name="a", id="<")]},
            "tool_calls[0].id",
        ),
        (
            {"role": ASSISTANT, "tool_calls": [generation_pb2.ToolCall(name=f"{CANARY}\n")]},
            "tool_calls[0].name",
        ),
    ],
)
def test_what_a_message_holds_fits_its_role(fields: dict[str, Any], violated: str) -> None:
    """A call of the person, or a result of no call, would be dropped or written as nonsense; a
    name with marks in it could become a control token."""
    message = generation_pb2.ChatMessage(**fields)
    found = violations(generate(chat=generation_pb2.ChatPrompt(messages=[message])))
    assert set(found) == {f"chat.messages[0].{violated}"}
    assert CANARY not in str(found)


def test_tools_have_names_of_their_own() -> None:
    """Which of two tools a call means would be a matter of luck."""
    tools = [generation_pb2.Tool(name=name) for name in ("a", "b.c-1_D", "a", "", f"<{CANARY}>")]
    found = violations(offering(*tools))
    assert found["chat.tools[2].name"] == "is that of chat.tools[0] as well"
    assert set(found) == {f"chat.tools[{place}].name" for place in (2, 3, 4)}
    assert CANARY not in str(found)


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "range", "", "_a", "a b", "1a"])
def test_variables_of_the_server_are_not_set(name: str) -> None:
    """A client would put its own messages, or control tokens, before the server's."""
    assert set(violations(arguing({"fine": "1", name: "1"}))) == {"chat.template_arguments"}


@pytest.mark.parametrize("prompt", [{"text": "x"}, {"token_ids": {"ids": [1]}}])
def test_only_answers_to_a_chat_are_told_apart(prompt: dict[str, Any]) -> None:
    """A caller would wait for calls that no template has asked the model for."""
    fields: dict[str, Any] = {"output": generation_pb2.OutputOptions(parse_chat=True)}
    check_generate(generate(chat=chat("x"), **fields), VOCABULARY)
    assert set(violations(generate(**prompt, **fields))) == {"output.parse_chat"}


def test_ids_lie_in_the_vocabulary() -> None:
    """An id beyond it would read weights that are none."""
    check_generate(generate(token_ids=generation_pb2.TokenIds(ids=[0, VOCABULARY - 1])), 1000)
    for wrong in (VOCABULARY, 2**31, 2**32 - 1):
        prompt = generation_pb2.TokenIds(ids=[0, 5, wrong, wrong])
        assert violations(generate(token_ids=prompt)) == {
            "token_ids.ids[2]": f"{wrong} is outside the vocabulary of 1000 tokens"
        }


def test_too_many_ids_are_counted_and_not_read() -> None:
    """A refusal of many ids would name one that is wrong, instead of their number."""
    prompt = generation_pb2.TokenIds(ids=[VOCABULARY] * (256 * 1024 + 1))
    assert set(violations(generate(token_ids=prompt))) == {"token_ids.ids"}


def test_all_violations_come_at_once() -> None:
    """A client would mend one field after the other, one refusal each."""
    request = sampling(temperature=-1, top_p=2, min_p=2)
    request.stop.max_tokens = 0
    request.stop.sequences.extend(["ok", ""])
    request.priority = 99
    request.queue_timeout.seconds = -1
    request.ClearField("text")
    assert set(violations(request)) == {
        *("prompt", "sampling.temperature", "sampling.top_p", "sampling.min_p"),
        *("stop.max_tokens", "stop.sequences[1]", "priority", "queue_timeout"),
    }


def test_a_refusal_names_sixteen_violations_at_most() -> None:
    """A refusal of a thousand messages would not fit into the metadata that carries it."""
    found = violations(generate(chat=chat(*["x"] * 1024, role=0)))
    assert len(found) == 16


@given(
    temperature=st.floats(0, 100, width=32) | st.floats(width=32),
    top_p=st.floats(0, 1, width=32) | st.floats(width=32),
    min_p=st.floats(0, 1, width=32) | st.floats(width=32),
    top_k=st.integers(0, 2**31 - 1) | st.integers(0, 2**32 - 1),
    priority=st.integers(-11, 11) | st.integers(-(2**31), 2**31 - 1),
    seconds=st.integers(0, 3600) | st.integers(-(2**63), 2**63 - 1),
    nanos=st.integers(0, 10**9) | st.integers(-(2**31), 2**31 - 1),
    tokens=st.lists(st.integers(0, 1000) | st.integers(0, 2**32 - 1), max_size=2),
)
def test_whatever_is_sent_is_refused_or_in_range(
    temperature: float,
    top_p: float,
    min_p: float,
    top_k: int,
    priority: int,
    seconds: int,
    nanos: int,
    tokens: list[int],
) -> None:
    """A number that nobody thought of would come through, or end the call with INTERNAL."""
    request = generate(token_ids=generation_pb2.TokenIds(ids=tokens), priority=priority)
    options = request.sampling
    options.temperature, options.top_p, options.min_p, options.top_k = (
        temperature,
        top_p,
        min_p,
        top_k,
    )
    request.queue_timeout.seconds, request.queue_timeout.nanos = seconds, nanos
    fine = (
        0 <= temperature <= 100
        and 0 < top_p <= 1
        and 0 <= min_p <= 1
        and top_k < 2**31
        and -10 <= priority <= 10
        and 0 <= seconds * 10**9 + nanos <= 3600 * 10**9
        and 0 <= nanos < 10**9
        and tokens
        and all(token < VOCABULARY for token in tokens)
    )
    try:
        check_generate(request, VOCABULARY)
    except InvalidRequest:
        accepted = False
    else:
        accepted = True
    assert accepted == bool(fine)


def refusals_that_quote() -> list[InvalidRequest]:
    """Refusals of requests that hold the canary wherever a string can stand."""
    long = CANARY * 50_000
    checks: list[Callable[[], None]] = [
        lambda: check_generate(generate(model=CANARY * 20), VOCABULARY),
        lambda: check_generate(generate(text=long), VOCABULARY),
        lambda: check_generate(generate(chat=chat(CANARY, role=0)), VOCABULARY),
        lambda: check_generate(generate(chat=chat(long)), VOCABULARY),
        lambda: check_generate(stop(sequences=[CANARY * 20]), VOCABULARY),
        lambda: check_generate(stop(sequences=[CANARY] * 17), VOCABULARY),
        lambda: check_tokenize(models_pb2.TokenizeRequest(text=long)),
        lambda: check_tokenize(models_pb2.TokenizeRequest(model=CANARY * 20, text="x")),
        lambda: check_tokenize(models_pb2.TokenizeRequest(chat=chat(CANARY, role=0))),
        lambda: check_text_fits(CANARY * 200_000),
    ]
    refusals = []
    for check in checks:
        with pytest.raises(InvalidRequest) as refused:
            check()
        refusals.append(refused.value)
    return refusals


def test_nothing_quotes_the_client() -> None:
    """A prompt would stand in whatever collects error messages."""
    for refusal in refusals_that_quote():
        shown = str(refusal) + "".join(v.field + v.reason for v in refusal.violations)
        assert CANARY not in shown
        assert CANARY[:8] not in shown
        assert len(shown) < 4096


def test_a_request_to_tokenize_has_the_same_limits() -> None:
    """A limit that one method checks and another does not is no limit."""
    check_tokenize(models_pb2.TokenizeRequest(text="x"))
    for request, field in (
        (models_pb2.TokenizeRequest(), "prompt"),
        (models_pb2.TokenizeRequest(text=""), "text"),
        (models_pb2.TokenizeRequest(text="t" * (MIB + 1)), "text"),
        (models_pb2.TokenizeRequest(chat=chat()), "chat.messages"),
        (models_pb2.TokenizeRequest(chat=chat(*[""] * 1025)), "chat.messages"),
        (models_pb2.TokenizeRequest(chat=chat("c" * (MIB + 1))), "chat.messages.content"),
        (models_pb2.TokenizeRequest(model="m" * 257, text="x"), "model"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            check_tokenize(request)
        assert [violation.field for violation in refused.value.violations] == [field]


def test_a_request_to_detokenize_has_its_limits() -> None:
    """Ids that are no token, none at all or too many would reach the tokenizer."""
    check_detokenize(models_pb2.DetokenizeRequest(token_ids=[0, 999]), VOCABULARY)
    check_detokenize(models_pb2.DetokenizeRequest(token_ids=[0] * (256 * 1024)), VOCABULARY)
    for token_ids, field in (
        ([], "token_ids"),
        ([0] * (256 * 1024 + 1), "token_ids"),
        ([0, 1000], "token_ids[1]"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            check_detokenize(models_pb2.DetokenizeRequest(token_ids=token_ids), VOCABULARY)
        assert [violation.field for violation in refused.value.violations] == [field]


def test_a_text_that_fits_no_message_is_refused() -> None:
    """gRPC would end the call with a status that says nothing about the request."""
    most = MESSAGE_BYTES_MAX - 1024
    check_text_fits("t" * most)
    for text in ("t" * (most + 1), "\u65e5" * (most // 3 + 1)):
        with pytest.raises(InvalidRequest, match=f"{len(text.encode())} bytes .* {most} fit"):
            check_text_fits(text)
    message = models_pb2.DetokenizeResponse(text="t" * most)
    assert message.ByteSize() < MESSAGE_BYTES_MAX


@pytest.mark.parametrize(
    ("tokens_max", "whose"), [(100, "the context window"), (99, "the whole KV pool")]
)
def test_a_prompt_leaves_room_for_an_answer(tokens_max: int, whose: str) -> None:
    """What can never be answered would wait for ever, or be told the wrong limit."""
    check_prompt_fits(1, tokens_max, 100)
    check_prompt_fits(tokens_max - 1, tokens_max, 100)
    for tokens in (tokens_max, tokens_max + 1, 10**9):
        with pytest.raises(InvalidRequest) as refused:
            check_prompt_fits(tokens, tokens_max, 100)
        (violation,) = refused.value.violations
        assert violation.field == "prompt"
        assert violation.reason.startswith(f"{tokens} tokens, at most {tokens_max - 1} ")
        assert violation.reason.endswith(whose)
    with pytest.raises(InvalidRequest, match="no tokens"):
        check_prompt_fits(0, tokens_max, 100)
