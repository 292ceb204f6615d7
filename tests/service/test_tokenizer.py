from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from kvledger.errors import InvalidRequest, ModelRefused
from kvledger.tokenizer import ChatMessage, Tokenizer, VocabularySource

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "data" / "smollm2_greedy_fp32.json").read_text("utf-8")
)["items"]

# Emoji families, scripts with combining marks, digits, white space of all kinds, line ends.
ODD_TEXTS = [
    "",
    " ",
    "\n\n",
    "\n\nObservation:",
    "a\r\nb\r\n\r\n",
    " " * 300 + "x" + "\t" * 7 + " \n \n",
    "👨‍👩‍👧‍👦🏳️‍🌈👍🏽",
    "法国的首都是哪里 日本語のテキスト。한국어",
    "e\u0301 Z\u0351\u036b\u0343 पाठ ไทย",
    "3.14159 1,000,000 2024-01-01 ٣٤٥ Ⅻ ½  12",
    "I'll we've THEY'RE don't",
    "\u200b\u202e\ufeff\u00a0\u3000",
    "def f(x):\n    return {'a': [x ** 2]}  # <b>&amp;</b>\n",
    "ď ď ď",
    "\x00\x01\x7f",
    "\U000f1234\U0010ffff\ufdd0",
]
# The vocabulary of the default model has no tokens for some bytes, as it had none in training.
WITHOUT_TOKENS = "\x04\x06\x13\x14\x16\x1d"
ENCODABLE_CHARACTERS = st.characters(
    exclude_characters=WITHOUT_TOKENS, max_codepoint=0x3FFFF, exclude_categories=["Cs"]
)


def byte_letters() -> list[str]:
    """The letters of byte-level BPE, in the order of their bytes."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return [
        chr(byte) if byte in printing else chr(0x100 + others.index(byte)) for byte in range(256)
    ]


def small_source(**changes: Any) -> VocabularySource:
    """All bytes, "Ġa", a tag that users may write, and three control tokens."""
    tokens = [*byte_letters(), "Ġa", "<tag>", "<|end|>", "<|user|>", "<|begin|>"]
    source = VocabularySource(
        model="gpt2",
        pre="gpt-2",
        tokens=tokens,
        token_types=[1] * 257 + [4] + [3] * 3,
        merges=["Ġ a"],
        eos_id=258,
        bos_id=260,
        add_bos=True,
        chat_template="{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}",
    )
    return replace(source, **changes)


def small_metadata(**changes: Any) -> dict[str, Any]:
    source = small_source()
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": source.tokens,
        "tokenizer.ggml.token_type": source.token_types,
        "tokenizer.ggml.merges": source.merges,
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.ggml.bos_token_id": 260,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": source.chat_template,
    }
    metadata.update({f"tokenizer.{key}": value for key, value in changes.items()})
    return {key: value for key, value in metadata.items() if value is not None}


# --- What the file says ---------------------------------------------------------------------


def test_metadata_is_read_with_lists_of_any_kind() -> None:
    # A model would be refused because of how the file was read.
    metadata = small_metadata(
        **{
            "ggml.token_type": np.array(small_source().token_types, dtype=np.int32),
            "ggml.eos_token_id": np.uint32(258),
            "ggml.eot_token_id": 259,
        }
    )
    source = VocabularySource.from_gguf(metadata)
    assert source == small_source(further_end_ids=(259,))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ggml.model": None}, "no tokenizer.ggml.model"),
        ({"ggml.model": "llama"}, "not supported"),
        ({"ggml.pre": None}, "no tokenizer.ggml.pre"),
        ({"ggml.pre": "default"}, "known are gpt-2, llama-bpe"),
        ({"ggml.pre": "x" * 100_000}, "known are"),
        ({"ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"ggml.tokens": "abc"}, "not a list"),
        ({"ggml.tokens": [b"a"] * 261}, "not a list of strings"),
        ({"ggml.token_type": [1.0] * 261}, "not a list of integers"),
        ({"ggml.token_type": [1] * 260}, "260 entries for 261 tokens"),
        ({"ggml.token_type": [0] * 261}, r"token_type\[0\] is 0"),
        ({"ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"ggml.eos_token_id": None}, "no tokenizer.ggml.eos_token_id"),
        ({"ggml.eos_token_id": True}, "not an integer"),
        ({"ggml.eos_token_id": 261}, "outside of its 261 tokens"),
        ({"ggml.bos_token_id": -1}, "outside of its 261 tokens"),
        ({"ggml.bos_token_id": None}, "bos_token_id is missing"),
        ({"ggml.add_bos_token": "yes"}, "not a boolean"),
        ({"ggml.add_space_prefix": True}, "add_space_prefix is true"),
        ({"chat_template": ["a"]}, "not a string"),
    ],
)
def test_metadata_that_cannot_be_is_refused_in_one_sentence(
    changes: dict[str, Any], reason: str
) -> None:
    # A broken or unknown model would answer nearly right, or fail with a traceback.
    with pytest.raises(ModelRefused, match=reason) as refused:
        VocabularySource.from_gguf(small_metadata(**changes))
    assert len(str(refused.value)) < 300
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"merges": ["Ġa"]}, r"merges\[0\]"),
        ({"merges": ["Ġ a", "x yz"]}, r"merges\[1\]"),
        (
            {"tokens": [*small_source().tokens[:256], "<|end|>", *small_source().tokens[257:]]},
            "merges",
        ),
        (
            {"tokens": [*small_source().tokens[:256], "b", *small_source().tokens[257:]]},
            "same text",
        ),
        ({"chat_template": "{% bad"}, "does not compile"),
        ({"chat_template": "a" * 1_000_000}, "1000000 characters; the limit is 65536"),
    ],
)
def test_vocabulary_that_cannot_be_used_is_refused(changes: dict[str, Any], reason: str) -> None:
    # The server would start and then fail on every request, or on some.
    with pytest.raises(ModelRefused, match=reason):
        Tokenizer(small_source(**changes))


def test_without_a_chat_template_text_still_works() -> None:
    # A base model could not be served, or a chat would get a template that nobody chose.
    tokenizer = Tokenizer(small_source(chat_template=None))
    assert not tokenizer.has_chat_template
    assert tokenizer.decode(tokenizer.encode_text("as ever")) == "as ever"
    with pytest.raises(InvalidRequest) as refused:
        tokenizer.encode_chat([ChatMessage("user", "a")])
    assert [violation.field for violation in refused.value.violations] == ["chat"]
    assert "text or token ids" in refused.value.violations[0].reason


# --- Text -----------------------------------------------------------------------------------


def test_known_ids(tokenizer: Tokenizer) -> None:
    # The model would read other tokens than those it was trained on.
    assert tokenizer.encode_text("🙂").tolist() == [10813, 38887]
    assert tokenizer.encode_text("日本語").tolist() == [23274, 115, 40993, 179, 120, 248]
    assert tokenizer.encode_text("\n\nObservation:").tolist() == [198, 198, 23143, 2903, 42]
    assert tokenizer.encode_text("").tolist() == []
    assert tokenizer.encode_text("a").dtype == np.int32
    assert tokenizer.vocabulary_size == len(tokenizer.token_bytes) == 49152
    assert tokenizer.eos_ids == {2}
    assert tokenizer.control_ids == set(range(17))


@pytest.mark.parametrize("item", GOLDEN, ids=[item["name"] for item in GOLDEN])
def test_golden_prompts_and_answers(tokenizer: Tokenizer, item: dict[str, Any]) -> None:
    # Every comparison with the reference model would start from another prompt.
    messages = item["messages"]
    if isinstance(messages, str):
        # The long prompt is stored only in its rendered form.
        content = item["prompt_text"].split("<|im_start|>user\n")[1].rsplit("<|im_end|>", 1)[0]
        messages = [{"role": "user", "content": content}]
    ids = tokenizer.encode_chat([ChatMessage(**message) for message in messages])
    assert ids.dtype == np.int32
    assert ids.tolist() == item["prompt_ids"]
    answer = tokenizer.decode(item["output_ids"], with_control_tokens=True)
    assert answer == item["output_text"]
    assert tokenizer.decode(item["prompt_ids"], with_control_tokens=True) == item["prompt_text"]


@settings(max_examples=300)
@given(text=st.text(ENCODABLE_CHARACTERS))
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    # Some text would reach the model changed.
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_round_trip_of_odd_texts(tokenizer: Tokenizer, text: str) -> None:
    # Some text would reach the model changed.
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_a_lone_surrogate_becomes_a_replacement_character(tokenizer: Tokenizer) -> None:
    # A text from elsewhere than the wire would end the request with INTERNAL.
    for text in ("a\ud800b", "\udfff", "\ud83d\ude42 \ud83d"):
        decoded = tokenizer.decode(tokenizer.encode_text(text))
        assert decoded == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        tokenizer.encode_chat([ChatMessage("user", text)])


def test_first_token_only_where_the_model_wants_it() -> None:
    # A model trained with a first token would answer badly without, and the reverse.
    with_first = Tokenizer(small_source())
    assert with_first.encode_text(" a").tolist() == [260, 256]
    without = Tokenizer(small_source(add_bos=False))
    assert without.encode_text(" a").tolist() == [256]
    # A chat template writes its own.
    assert with_first.encode_chat([ChatMessage("user", " a")]).tolist() == [259, 256, 258]


def test_decode_writes_control_tokens_only_if_asked() -> None:
    # An answer would show marks that are not part of it.
    tokenizer = Tokenizer(small_source())
    ids = [260, 256, 257, 258]
    assert tokenizer.decode(ids) == " a<tag>"
    assert tokenizer.decode(np.array(ids), with_control_tokens=True) == "<|begin|> a<tag><|end|>"
    assert tokenizer.decode([0xC3 + 0, 258, 0xA9]) == "é"
    assert tokenizer.decode([0xC3, 256]) == "\N{REPLACEMENT CHARACTER} a"


@pytest.mark.parametrize("token_id", [-1, 261])
def test_decode_refuses_ids_outside_the_vocabulary(token_id: int) -> None:
    # A negative id would read a token from the end of the table.
    with pytest.raises(ValueError, match="lie in 0 to 260"):
        Tokenizer(small_source()).decode([1, token_id])


def test_bytes_of_tokens_of_every_type() -> None:
    # Text would be shown with the alphabet that stands for bytes, or with a byte's name.
    source = small_source()
    tokens = [*source.tokens, "<0x0A>", "[PAD]", "日", "two words"]
    types = [*source.token_types, 6, 5, 4, 1]
    token_bytes = Tokenizer(replace(source, tokens=tokens, token_types=types)).token_bytes
    assert token_bytes[:256] == [bytes([byte]) for byte in range(256)]
    assert token_bytes[256:258] == [b" a", b"<tag>"]
    assert token_bytes[258:261] == [b"", b"", b""]
    assert token_bytes[261:] == [b"\n", b"", "日".encode(), b"two words"]


def test_pre_tokenizers_cut_digits_as_their_models_do() -> None:
    # Numbers, and the white space before them, would get ids that the model never saw.
    tokens = [*byte_letters(), "12", "123", "ĠĠ", "Ġ1", "<|end|>"]
    merges = ["Ġ 1", "1 2", "12 3", "Ġ Ġ"]
    source = small_source(
        tokens=tokens,
        token_types=[1] * 260 + [3],
        merges=merges,
        eos_id=260,
        bos_id=None,
        add_bos=False,
        chat_template=None,
    )

    def cut(pre: str, text: str) -> list[bytes]:
        tokenizer = Tokenizer(replace(source, pre=pre))
        return [tokenizer.token_bytes[token_id] for token_id in tokenizer.encode_text(text)]

    assert cut("gpt-2", "x  1234") == [b"x", b" ", b" 1", b"2", b"3", b"4"]
    assert cut("smollm", "x  1234") == [b"x", b"  ", b"1", b"2", b"3", b"4"]
    assert cut("qwen2", "x  1234") == [b"x", b" ", b" ", b"1", b"2", b"3", b"4"]
    assert cut("llama-bpe", "x  1234") == [b"x", b" ", b" ", b"123", b"4"]
    # One model family composes characters first, the others keep them as they are.
    assert b"".join(cut("qwen2", "e\u0301")) == "é".encode()
    assert b"".join(cut("smollm", "e\u0301")) == "e\u0301".encode()


# --- Control tokens -------------------------------------------------------------------------

CONTROL_TEXTS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>"]
# Pieces that control tokens are made of: random texts are full of whole and nearly whole ones.
FRAGMENTS = st.lists(
    st.sampled_from(
        [*CONTROL_TEXTS, "<|", "|>", "<", ">", "im_start", "im_end|>", "<|im_", " ", "\n", "x"]
    ),
    max_size=12,
).map("".join)


@settings(max_examples=300)
@given(text=FRAGMENTS | st.text())
@example(text="".join(CONTROL_TEXTS))
def test_no_text_encodes_to_a_control_token(tokenizer: Tokenizer, text: str) -> None:
    # A user could end a turn, or speak for the system, by typing.
    ids = tokenizer.encode_text(text)
    assert not tokenizer.control_ids.intersection(ids.tolist())


def test_no_token_of_the_vocabulary_is_written_as_a_control_token(
    tokenizer: Tokenizer, model_metadata: dict[str, Any]
) -> None:
    # Some odd token would be a way around the rule.
    tokens = model_metadata["tokenizer.ggml.tokens"]
    for token_id, token in enumerate(tokens):
        for text in {token, tokenizer.token_bytes[token_id].decode("utf-8", "replace")}:
            ids = tokenizer.encode_text(text)
            assert ids.size == 0 or ids.min() > 16, f"token {token_id}"
    for control in tokens[:17]:
        for text in (control, f" {control}", f"{control}\n", f"x{control}x", control * 3):
            assert tokenizer.encode_text(text).min() > 16
            assert tokenizer.decode(tokenizer.encode_text(text)) == text


@settings(max_examples=200)
@given(contents=st.lists(FRAGMENTS, min_size=1, max_size=4))
def test_contents_add_no_control_tokens_to_a_chat(
    tokenizer: Tokenizer, contents: list[str]
) -> None:
    # A user could add turns of the system or the assistant to a conversation.
    roles = ["user", "assistant"] * 2
    messages = [ChatMessage(role, text) for role, text in zip(roles, contents, strict=False)]  # type: ignore[arg-type]
    ids = tokenizer.encode_chat(messages).tolist()
    control = [token_id for token_id in ids if token_id in tokenizer.control_ids]
    # The template opens and closes the system's turn and each message, and opens the answer.
    assert control == [1, 2] * (len(contents) + 1) + [1]
    # Nothing of what was written is lost either.
    text = tokenizer.decode(ids)
    for content in contents:
        assert content in text


def test_a_tag_that_users_may_write_stays_one_token() -> None:
    # Marks such as those around tool calls would be cut up, and the model would not know them.
    tokenizer = Tokenizer(small_source(add_bos=False))
    assert tokenizer.encode_text("a<tag>").tolist() == [ord("a"), 257]


def test_ends_are_control_tokens_whatever_their_type() -> None:
    # In a file that calls its end token normal, a user could end the answer by typing it.
    source = small_source(token_types=[1] * 257 + [4] + [1] * 3, add_bos=False)
    tokenizer = Tokenizer(source)
    assert tokenizer.control_ids == {258, 260}
    assert 258 not in tokenizer.encode_text("<|end|>")


# --- The reference library ------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(model_file: Path) -> Any:
    reason = "comparing with the reference tokenizer needs transformers and torch"
    pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    loaded = transformers.AutoTokenizer.from_pretrained(
        str(model_file.parent), gguf_file=model_file.name
    )
    # Its reader of GGUF leaves out the rule that each digit is a word of its own.
    loaded.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return loaded


@pytest.mark.parametrize("text", [*ODD_TEXTS, WITHOUT_TOKENS])
def test_ids_equal_the_reference(reference: Any, tokenizer: Tokenizer, text: str) -> None:
    # The model would read other tokens than with the library that it was published for.
    expected = reference(text, add_special_tokens=False).input_ids
    assert tokenizer.encode_text(text).tolist() == expected
    assert tokenizer.decode(expected) == reference.decode(
        expected, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


@settings(max_examples=200)
@given(contents=st.lists(st.text() | st.sampled_from(ODD_TEXTS), min_size=1, max_size=3))
def test_chats_equal_the_reference(
    reference: Any, tokenizer: Tokenizer, contents: list[str]
) -> None:
    # The model would read another conversation than with the library that it was published for.
    roles = ["user", "assistant", "user"]
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]
    expected = reference.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    ids = tokenizer.encode_chat([ChatMessage(**message) for message in messages])  # type: ignore[arg-type]
    assert ids.tolist() == expected
