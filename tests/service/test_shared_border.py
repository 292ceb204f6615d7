"""Where the shared part of a prompt ends: no token before the border depends on what is behind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from cache_requests import cached, chat_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat_template import CONTROL_TOKENS as PLAIN_TOKENS
from test_chat_template import TEMPLATES as PLAIN_TEMPLATES
from test_tokenizer import byte_letters
from tool_templates import CONTROL_TOKENS as TOOL_TOKENS
from tool_templates import TEMPLATES as TOOL_TEMPLATES

from kvledger.errors import InvalidRequest
from kvledger.rpc.prompts import PromptEncoder, SharedPrompt
from kvledger.tokenizer import ChatMessage, Tokenizer, VocabularySource
from kvledger.v1 import generation_pb2 as pb

TEMPLATES = {**PLAIN_TEMPLATES, **TOOL_TEMPLATES}
TEMPLATES["joined"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
TEMPLATES["only_whole"] = (
    "{% if messages | length < 2 %}{{ raise_exception('two at least') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
)
TEMPLATES["backwards"] = "{% for m in messages[::-1] %}{{ m.content }}<|im_end|>{% endfor %}"
TEMPLATES["counting"] = "{{ messages | length }}" + PLAIN_TEMPLATES["plain"]
ROLES = (pb.ROLE_USER, pb.ROLE_ASSISTANT)
# Pairs of letters that become one token, also across the border of two texts: line ends, spaces.
PAIRS = ["Ċ Ċ", "Ġ a", "a b", "ab c", "> Ċ", "Ċ <", "Ġ [", "Ċ Ġ"]


@cache
def tokenizer_of(name: str) -> Tokenizer:
    """Bytes, a few longer tokens, and the template's control tokens."""
    letters = [*byte_letters(), *(pair.replace(" ", "") for pair in PAIRS)]
    control = list(dict.fromkeys([*PLAIN_TOKENS, *TOOL_TOKENS]))
    return Tokenizer(
        VocabularySource(
            model="gpt2",
            pre="gpt-2",
            tokens=[*letters, *control],
            token_types=[1] * len(letters) + [3] * len(control),
            merges=PAIRS,
            eos_id=len(letters) + control.index("<|im_end|>"),
            bos_id=len(letters) + control.index("<s>"),
            add_bos=False,
            chat_template=TEMPLATES[name],
        )
    )


@cache
def encoder_of(tokenizer: Tokenizer) -> PromptEncoder:
    return PromptEncoder(tokenizer, 8)


def encoded(
    tokenizer: Tokenizer, contents: Sequence[str], count: int, tools: Sequence[pb.Tool] = ()
) -> SharedPrompt:
    """A conversation of the person and the model in turns, of which `count` messages are shared."""
    request = cached(pb.ChatPrompt(), shared_scope="g", shared_messages=count)
    for place, content in enumerate(contents):
        request.chat.messages.add(role=ROLES[place % 2], content=content)
    request.chat.tools.extend(tools)
    return encoder_of(tokenizer)._encode_shared_chat(request)


def written(tokenizer: Tokenizer, prompt: SharedPrompt) -> str:
    """What lies before the border, as text."""
    return tokenizer.decode(prompt.tokens[: prompt.shared_tokens], with_control_tokens=True)


FRAGMENTS = ["a", "b", "bc", "\n", " ", "<|im_end|>", "<", "</think>", "<think>", "[", "é", ">"]
TEXT = st.lists(st.sampled_from(FRAGMENTS), max_size=4).map("".join)
CONTENTS = st.lists(TEXT, min_size=1, max_size=3)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25)
@given(first=CONTENTS, later=st.lists(TEXT, max_size=3), others=st.lists(TEXT, max_size=3))
def test_nothing_before_the_border_depends_on_what_follows(
    name: str, first: list[str], later: list[str], others: list[str]
) -> None:
    """A tenant's own words would lie in the scope of the whole group."""
    tokenizer, count = tokenizer_of(name), len(first)
    try:
        prompts = [encoded(tokenizer, first + rest, count) for rest in (later, others, [])]
    except InvalidRequest:
        return  # the template refuses one of them; which it takes is tested below
    least = min(prompt.shared_tokens for prompt in prompts)
    beginnings = {tuple(prompt.tokens[:least].tolist()) for prompt in prompts}
    assert len(beginnings) == 1
    alone = tokenizer.encode_chat(
        [
            ChatMessage("assistant" if place % 2 else "user", content)
            for place, content in enumerate(first)
        ],
        invites=False,
    )
    for prompt in prompts:
        shared = prompt.shared_tokens
        assert prompt.tokens[:shared].tolist() == alone[:shared].tolist(), "made of those alone"


@pytest.mark.parametrize(
    ("name", "count", "before"),
    [
        ("plain", 1, "<|im_start|>user\nA<|im_end|>\n"),
        ("plain", 2, "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"),
        # The border is inside: what counts the turns, or cuts off reasoning, depends on the rest.
        ("trimming", 1, "<s><|im_start|>user\n\nA<|im_end|>"),
        ("reasoning", 1, "<|im_start|>user\n"),
        # It always invites, and the model's turn begins as the invitation does.
        ("roles", 1, "<|user|>\nA<|im_end|>\n<|assistant|>"),
        ("roles", 2, "<|user|>\nA<|im_end|>\n<|assistant|>\nB<|im_end|>\n"),
        ("qwen", 1, "<|im_start|>user\nA<|im_end|>\n"),
        ("qwen", 2, "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n"),
        ("llama", 1, None),
        ("mistral", 1, None),
    ],
)
def test_the_border_is_where_the_counted_messages_end(
    name: str, count: int, before: str | None
) -> None:
    """Less would be shared than could be, or more than was meant."""
    tokenizer = tokenizer_of(name)
    prompt = encoded(tokenizer, ["A", "B", "C"], count)
    text = written(tokenizer, prompt)
    if before is not None:
        assert text == before
    assert "A" in text or name == "reasoning"
    assert "C" not in text
    assert count == 2 or "B" not in text
    assert "A" not in written(tokenizer, encoded(tokenizer, ["X", "Y", "Z"], count))


def test_letters_that_become_one_token_across_the_border_lie_behind_it() -> None:
    """A token that holds a letter of the next message would be shared."""
    tokenizer = tokenizer_of("joined")
    prompt = encoded(tokenizer, ["xa", "bc"], 1)
    assert written(tokenizer, prompt) == "x"
    assert encoded(tokenizer, ["xa", "x"], 1).shared_tokens == 2


def test_a_template_that_cannot_stop_there_is_named() -> None:
    """All would be computed each time, and nobody learn why."""
    with pytest.raises(InvalidRequest) as refused:
        encoded(tokenizer_of("only_whole"), ["what-only-the-client-may-read", "b", "c"], 1)
    (violation,) = refused.value.violations
    assert violation.field == "cache.shared_messages"
    assert "the first 1 messages without those that follow" in violation.reason
    assert "what-only" not in str(refused.value)
    tokenizer = tokenizer_of("only_whole")
    assert written(tokenizer, encoded(tokenizer, ["a", "b", "c"], 2)) == "a<|im_end|>b<|im_end|>"


def test_a_conversation_that_is_refused_is_refused_as_itself() -> None:
    """A caller would be told to count otherwise, which helps nothing."""
    with pytest.raises(InvalidRequest) as refused:
        encoded(tokenizer_of("only_whole"), ["a"], 1)
    assert refused.value.violations[0].field == "chat.messages"


@pytest.mark.parametrize("name", ["backwards", "counting"])
def test_a_template_that_begins_with_what_is_last_shares_nothing(name: str) -> None:
    """The beginning would be somebody's question, or tell how many came after."""
    assert encoded(tokenizer_of(name), ["a", "b", "c"], 1).shared_tokens == 0


def test_tools_before_the_messages_are_shared_with_them() -> None:
    """The contract says so: they stand before the first message."""
    tokenizer = tokenizer_of("qwen")
    tool = pb.Tool(name="f", description="does f")
    prompt = encoded(tokenizer, ["A", "B", "C"], 1, [tool])
    assert "does f" in written(tokenizer, prompt)
    assert written(tokenizer, prompt).endswith("<|im_start|>user\nA<|im_end|>\n")


async def test_all_kinds_of_prompts_have_their_border() -> None:
    """A count of tokens would be lost, or one of messages taken for it."""
    encoder = encoder_of(tokenizer_of("plain"))
    whole = await encoder.encode_shared(cached(chat_of(3)))
    assert whole.shared_tokens == 0
    shared = await encoder.encode_shared(cached(chat_of(3), shared_scope="g", shared_messages=3))
    assert shared.tokens.tolist() == whole.tokens.tolist()
    assert 0 < shared.shared_tokens < len(shared.tokens), "the invitation is behind it"
    text = await encoder.encode_shared(cached("xyz", shared_scope="g", shared_tokens=2))
    assert (len(text.tokens), text.shared_tokens) == (3, 2)
    ids = await encoder.encode_shared(cached([5, 6], shared_scope="g", shared_tokens=2))
    assert (ids.tokens.tolist(), ids.shared_tokens) == ([5, 6], 2)
    with pytest.raises(InvalidRequest, match="4 tokens, and the prompt has 3"):
        await encoder.encode_shared(cached("xyz", shared_scope="g", shared_tokens=4))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("end", ["", "\n", " ", "\n\n", "."])
def test_borders_of_the_real_model(tokenizer: Tokenizer, count: int, end: str) -> None:
    """The model that everybody tries first would share something else than its messages."""
    contents = [f"Be kind{end}", f"Hello{end}", f"{end}What is new?", "More"]
    prompt = encoded(tokenizer, contents, count)
    turns = [f"<|im_start|>{('user', 'assistant')[place % 2]}\n" for place in range(3)]
    expected = "".join(f"{turns[place]}{contents[place]}<|im_end|>\n" for place in range(count))
    text = written(tokenizer, prompt)
    # The template writes a system message of its own where there is none.
    assert text.endswith(expected)
    assert text.count("<|im_start|>") == count + 1
    others = encoded(tokenizer, [*contents[:count], "Something else"], count)
    assert others.shared_tokens == prompt.shared_tokens
