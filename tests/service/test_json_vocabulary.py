"""Vocabularies from tokenizer.json: ids as the reference library has them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hub_models import END, VOCABULARY, tokenizer_rules
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import CHAT_TEMPLATE, CONTROL_TOKENS

from kvledger.errors import ModelRefused
from kvledger.tokenizer import ChatMessage, IncrementalDecoder, Tokenizer, VocabularySource
from kvledger.tokenizer import json_vocabulary as json_vocabulary_module
from kvledger.tokenizer.json_vocabulary import TokenizerFiles, json_vocabulary

SIZE = VOCABULARY + 11
BEGIN = "<s>"
SPACED_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[INST]{{ ' ' + m.content + ' ' }}[/INST]"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
TEXTS = [
    *(
        "",
        " ",
        "th",
        "  two  spaces ",
        "the tooth",
        "a\nb\r\n\tc",
        "日本語 é ü",
        "👩‍👩‍👧 🙂",
        "\x00\x7f",
    ),
    *("e\u0301", "I'll 12345", "\u2581mark\u2581", "<0x41>", "▁", "x" * 300),
]


def files(rules: dict[str, Any] | None = None, **changes: Any) -> TokenizerFiles:
    values: dict[str, Any] = {
        "tokenizer": tokenizer_rules() if rules is None else rules,
        "config": {"eos_token": CONTROL_TOKENS[0]},
        "end_ids": [END],
        "chat_template": CHAT_TEMPLATE,
    }
    values.update(changes)
    return TokenizerFiles(**values)


def made(rules: dict[str, Any] | None = None, size: int = SIZE, **changes: Any) -> Tokenizer:
    return Tokenizer(json_vocabulary(files(rules, **changes), size))


def changed(path: Sequence[str | int], value: Any, rules: dict[str, Any] | None = None) -> Any:
    """The rules with one value replaced."""
    rules = tokenizer_rules() if rules is None else rules
    place: Any = rules
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return rules


def added(token_id: int, content: str, **changes: Any) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": False, **flags, **changes}


def spaced_rules(way: str) -> dict[str, Any]:
    """A vocabulary as those that come from sentencepiece: a mark for spaces, names for bytes.

    `way` is how the first space is put: by a normalizer (older files) or a pre-tokenizer.
    """
    texts = ["<unk>", BEGIN, "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "[INST]"]
    texts += ["[/INST]", "▁", *"abcdefghijklmnopqrstuvwxyz</>[]INST"]
    # Merges that lead to a control token, as a conversion writes them for every pair that fits.
    texts += ["</", "s>", "▁t", "th", "▁th", "ee", "▁▁", "oo"]
    texts = list(dict.fromkeys(texts))
    merges = ["< /", "s >", "</ s>", "▁ t", "t h", "▁ th", "▁t h", "e e", "▁ ▁", "o o"]
    special = [added(i, texts[i], special=True) for i in range(3)]
    special += [added(texts.index(t), t, special=True) for t in ("[INST]", "[/INST]")]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizer: Any = {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace],
    }
    cutting = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": way, "split": False}
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    rules = tokenizer_rules([])
    rules["model"] |= {
        "vocab": {text: i for i, text in enumerate(texts)},
        "merges": merges,
        "unk_token": "<unk>",
        "byte_fallback": True,
        "fuse_unk": True,
    }
    return rules | {
        "added_tokens": sorted(special, key=lambda token: token["id"]),
        "normalizer": normalizer if way == "normalizer" else None,
        "pre_tokenizer": None if way == "normalizer" else cutting,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "post_processor": begins_with(BEGIN, 1),
    }


def begins_with(text: str, token_id: int, ends: bool = False) -> dict[str, Any]:
    token = {"SpecialToken": {"id": text, "type_id": 0}}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [token, sequence, *([token] if ends else [])],
        "pair": [token, sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [token_id], "tokens": [text]}},
    }


def spaced(way: str, rules: dict[str, Any] | None = None) -> Tokenizer:
    config = {"bos_token": BEGIN, "eos_token": {"content": "</s>"}}
    return made(
        spaced_rules(way) if rules is None else rules,
        size=400,
        config=config,
        end_ids=[2],
        chat_template=SPACED_TEMPLATE,
    )


def reference(folder: Path, rules: dict[str, Any], template: str, **tokens: str) -> Any:
    """The same tokenizer as transformers runs it."""
    import transformers

    path = folder / "tokenizer.json"
    path.write_text(json.dumps(rules), "utf-8")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path), chat_template=template, **tokens
    )


# --- The reference library ------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_are_cut_as_the_reference_does(tmp_path: Path, text: str) -> None:
    """The model would read other tokens than with the library that it was published for."""
    ours, theirs = made(), reference(tmp_path, tokenizer_rules(), CHAT_TEMPLATE)
    ids = ours.encode_text(text).tolist()
    assert ids == theirs(text).input_ids
    assert ours.decode(ids) == theirs.decode(ids) == text


@pytest.mark.parametrize("way", ["normalizer", "first", "always", "never"])
@pytest.mark.parametrize("text", TEXTS)
def test_marked_spaces_are_cut_as_the_reference_does(tmp_path: Path, way: str, text: str) -> None:
    """Older models, with a mark for spaces, would read every prompt with odd spaces."""
    ours = spaced(way)
    theirs = reference(
        tmp_path, spaced_rules(way), SPACED_TEMPLATE, bos_token=BEGIN, eos_token="</s>"
    )
    ids = ours.encode_text(text).tolist()
    assert ids == theirs(text).input_ids
    # The reference leaves out the first space of a whole text; a server cannot, for the same
    # tokens are also the middle of one.
    assert ours.decode(ids).removeprefix(" ") == theirs.decode(ids, True)


@pytest.mark.parametrize("way", ["normalizer", "first", "always", "never"])
@pytest.mark.parametrize("content", ["", "the tooth", " two  spaces\n", "日本 é"])
def test_chats_with_marked_spaces_equal_the_reference(
    tmp_path: Path, way: str, content: str
) -> None:
    """A space too many after each control token is a conversation that no model has seen."""
    ours = spaced(way)
    theirs = reference(
        tmp_path, spaced_rules(way), SPACED_TEMPLATE, bos_token=BEGIN, eos_token="</s>"
    )
    messages = [{"role": role, "content": content} for role in ("user", "assistant", "user")]
    expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    ids = ours.encode_chat([ChatMessage(m["role"], m["content"]) for m in messages])  # type: ignore[arg-type]
    assert ids.tolist() == expected


def test_chats_equal_the_reference(tmp_path: Path) -> None:
    """The model would read another conversation than with its own library."""
    ours, theirs = made(), reference(tmp_path, tokenizer_rules(), CHAT_TEMPLATE)
    messages = [{"role": role, "content": f"the {role}"} for role in ("system", "user")]
    expected = theirs.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    ids = ours.encode_chat([ChatMessage(m["role"], m["content"]) for m in messages])  # type: ignore[arg-type]
    assert ids.tolist() == expected


def test_a_published_vocabulary_gives_the_same_ids_from_both_files(
    model_metadata: dict[str, Any], tokenizer: Tokenizer
) -> None:
    """The same model would answer differently from a folder than from its GGUF file."""
    tokens = model_metadata["tokenizer.ggml.tokens"]
    rules = tokenizer_rules([])
    rules["model"] |= {
        "vocab": {token: token_id for token_id, token in enumerate(tokens)},
        "merges": model_metadata["tokenizer.ggml.merges"],
    }
    rules["added_tokens"] = [added(i, tokens[i], special=True) for i in range(17)]
    rules["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, rules["pre_tokenizer"]],
    }
    source = files(
        rules,
        config={"eos_token": tokens[2], "bos_token": tokens[1]},
        end_ids=[2],
        chat_template=model_metadata["tokenizer.chat_template"],
    )
    folder = Tokenizer(json_vocabulary(source, len(tokens)))
    assert folder.control_ids == tokenizer.control_ids
    assert folder.token_bytes == tokenizer.token_bytes
    for text in [*TEXTS, "<|im_start|>system", *(f"x{text}1234" for text in TEXTS)]:
        assert folder.encode_text(text).tolist() == tokenizer.encode_text(text).tolist()
        chat = [ChatMessage("user", text), ChatMessage("assistant", text)]
        assert folder.encode_chat(chat).tolist() == tokenizer.encode_chat(chat).tolist()


# --- The guarantees -------------------------------------------------------------------------

FRAGMENTS = st.lists(
    st.sampled_from([*CONTROL_TOKENS, "<|", "|>", "</s>", "</", "s>", "<s>", "[INST]", " ", "th"]),
    max_size=12,
).map("".join)


@settings(max_examples=200)
@given(text=FRAGMENTS | st.text())
def test_no_text_encodes_to_a_control_token(text: str) -> None:
    """A user could end a turn, or speak for the system, by typing."""
    for vocabulary in (BYTES, SPACED):
        ids = vocabulary.encode_text(text).tolist()[len(vocabulary._vocabulary.first_ids) :]
        assert not vocabulary.control_ids.intersection(ids)
        chat = vocabulary.encode_chat([ChatMessage("user", text)]).tolist()
        empty = vocabulary.encode_chat([ChatMessage("user", "")]).tolist()
        control = [i for i in chat if i in vocabulary.control_ids]
        assert control == [i for i in empty if i in vocabulary.control_ids]


@settings(max_examples=200)
@given(text=st.text() | st.text("th e▁<0xA>🙂é"))
def test_text_comes_back_token_by_token(text: str) -> None:
    """A stream would show broken characters, or lose some."""
    text = text.encode("utf-8", "replace").decode()
    for vocabulary, expected in ((BYTES, text), (SPACED, " " + text.replace("▁", " "))):
        decoder = IncrementalDecoder(vocabulary.token_bytes)
        ids = vocabulary.encode_text(text).tolist()
        streamed = "".join(map(decoder.feed_token, ids)) + decoder.finish()
        assert streamed == vocabulary.decode(ids)
        assert streamed == expected or text == ""


BYTES = made()
SPACED = spaced("normalizer")


def test_every_control_token_is_one_wherever_it_is_declared() -> None:
    """A control token that only one of the files declares could be typed by a user."""
    rules = tokenizer_rules()
    rules["added_tokens"][1]["special"] = False
    ours = made(rules)
    assert ours.control_ids == {END, END + 2, END + 3}
    assert ours.encode_text(CONTROL_TOKENS[1]).tolist() == [END + 1]
    decoder = {str(END + 1): {"content": CONTROL_TOKENS[1], "special": True}}
    ours = made(rules, config={"added_tokens_decoder": decoder})
    assert ours.control_ids == {END, END + 1, END + 2, END + 3}
    assert ours.encode_text(CONTROL_TOKENS[1]).tolist() == list(CONTROL_TOKENS[1].encode())
    # What ends or begins a text is one, whatever any file says.
    rules["added_tokens"][2]["special"] = rules["added_tokens"][3]["special"] = False
    assert made(rules, end_ids=[END, END + 1]).control_ids == {END, END + 1}
    given = {"bos_token": CONTROL_TOKENS[2]}
    assert made(rules, config=given).control_ids == {END, END + 2}


def test_added_tokens_that_users_may_write_keep_their_ids() -> None:
    """Marks such as those around tool calls would be cut up, or become other tokens."""
    rules = tokenizer_rules()
    rules["added_tokens"].append(added(END + 6, "<think>"))
    rules["added_tokens"].append(added(END + 9, "é x"))
    ours = made(rules)
    assert ours.encode_text("a<think>é x").tolist() == [ord("a"), END + 6, END + 9]
    assert ours.decode([END + 6, END + 9]) == "<think>é x"
    assert ours.token_bytes[END + 7] == b"", "an id that nothing names stands for nothing"
    assert ours.vocabulary_size == SIZE


def test_what_begins_a_prompt_is_what_the_reference_writes(tmp_path: Path) -> None:
    """A model trained with a first token answers badly without, and the reverse."""
    first, end = CONTROL_TOKENS[3], END + 3
    rules = tokenizer_rules(post_processor=begins_with(first, end))
    assert made(rules).encode_text("a").tolist() == [end, ord("a")]
    assert reference(tmp_path, rules, "")("a").input_ids == [end, ord("a")]
    given = {"bos_token": first}
    assert made(rules, config=given).encode_text("a").tolist() == [end, ord("a")]
    without = {**given, "add_bos_token": False}
    assert made(rules, config=without).encode_text("a").tolist() == [ord("a")]
    nothing = {"bos_token": None, "add_bos_token": True}
    assert made(rules, config=nothing).encode_text("a").tolist() == [ord("a")]
    told = {**given, "add_bos_token": True}
    assert made(config=told).encode_text("a").tolist() == [end, ord("a")]
    assert made(config=given).encode_text("a").tolist() == [ord("a")]


def test_ends_come_from_the_first_file_that_names_them() -> None:
    """An answer would go on after its end until it is cut."""
    assert made(end_ids=[END, END + 1]).eos_ids == {END, END + 1}
    assert made(end_ids=[]).eos_ids == {END}
    assert made(end_ids=[END + 1], config={}).eos_ids == {END + 1}


# --- What is refused ------------------------------------------------------------------------

REFUSED = [
    (("model", "type"), "Unigram", "not of type BPE"),
    (("model", "type"), "WordPiece", "not of type BPE"),
    (("model",), None, "not of type BPE"),
    (("model", "dropout"), 0.1, "dropout"),
    (("model", "continuing_subword_prefix"), "##", "continuing_subword_prefix"),
    (("model", "end_of_word_suffix"), "</w>", "end_of_word_suffix"),
    (("model", "vocab"), {}, "no vocab"),
    (("model", "vocab"), [["a", 1.0]], "no vocab"),
    (("model", "vocab", "a"), 5000, "outside of the model's"),
    (("model", "vocab", "a"), -1, "outside of the model's"),
    (("model", "vocab", "a"), "1", "not a whole number"),
    (("model", "vocab", "a"), True, "not a whole number"),
    (("model", "vocab", "a"), 66, "the same id"),
    (("model", "merges"), None, "no merges"),
    (("model", "merges"), ["a"], r"merges\[0\] is not a pair"),
    (("model", "merges"), [["t", "h"], ["t", 5]], r"merges\[1\] is not a pair"),
    (("model", "merges"), [["t", "nonsense"]], "does not say how to cut"),
    (("added_tokens", 0, "id"), 5000, "outside of the model's"),
    (("added_tokens", 0, "id"), 3, "does not fit the vocab"),
    (("added_tokens", 0, "content"), None, "has no content"),
    (("added_tokens", 0, "content"), "a", "does not fit the vocab"),
    (("added_tokens", 0, "rstrip"), True, "takes spaces next to it"),
    (("added_tokens", 0, "lstrip"), True, "takes spaces next to it"),
    (("pre_tokenizer",), {"type": "Unheard"}, "does not say how to cut"),
    (("pre_tokenizer",), 5, "does not say how to cut"),
    (("normalizer",), {"type": "Prepend", "prepend": ""}, "does not say how to cut"),
    (("normalizer",), {"type": "Replace"}, "does not say how to cut"),
    (("decoder",), None, "its decoder is none"),
    (("decoder",), {"type": "WordPiece", "prefix": "##", "cleanup": True}, "its decoder is none"),
    (("decoder",), {"type": "Sequence", "decoders": []}, "its decoder is none"),
    (
        ("decoder",),
        {"type": "Replace", "pattern": {"String": "x"}, "content": " "},
        "the Replace of its decoder",
    ),
    (("decoder",), {"type": "Metaspace", "replacement": "_"}, "the Metaspace of its decoder"),
    (("decoder",), {"type": "Strip", "content": " ", "start": 0, "stop": 1}, "the Strip of its"),
    (("post_processor",), begins_with("x", 5), "writes what is no control token"),
    (("post_processor",), begins_with("x", 5, ends=True), "would end every prompt"),
    (("post_processor",), {"type": "Unheard"}, "does not say how to cut"),
    (("version",), "9.9", "does not say how to cut"),
]


@pytest.mark.parametrize(("path", "value", "reason"), REFUSED)
def test_a_tokenizer_of_an_unknown_kind_is_refused(
    path: tuple[str | int, ...], value: Any, reason: str
) -> None:
    """A model whose text is cut nearly right answers nearly right, without a word."""
    with pytest.raises(ModelRefused, match=reason) as refused:
        made(changed(path, value))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_a_failure_of_the_library_is_one_requests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One text that the library gives up on would end the server for everybody."""
    rules = tokenizer_rules(normalizer={"type": "Prepend", "prepend": ""})
    monkeypatch.setattr(json_vocabulary_module, "_TRIED_TEXTS", ())
    ours = made(rules)
    with pytest.raises(RuntimeError, match="fail on this text"):
        ours.encode_text("the end")
    assert made().encode_text("x").tolist() == [ord("x")]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"end_ids": [], "config": {}}, "names an eos_token_id"),
        ({"end_ids": [SIZE - 1]}, "which is not in tokenizer.json"),
        ({"config": {"add_eos_token": True}}, "add_eos_token"),
        ({"config": {"bos_token": "<none>"}}, "bos_token is not in tokenizer.json"),
        (
            {"config": {"added_tokens_decoder": {"5": {"content": "x", "special": True}}}},
            "names a special token that is not",
        ),
        (
            {"config": {"added_tokens_decoder": {"9" * 99: {"content": "x", "special": True}}}},
            "names a special token that is not",
        ),
        ({"chat_template": "{% bad"}, "does not compile"),
    ],
)
def test_files_that_contradict_each_other_are_refused(changes: dict[str, Any], reason: str) -> None:
    """Answers would never end, or begin with a token of another model."""
    with pytest.raises(ModelRefused, match=reason):
        made(**changes)


def test_a_tokenizer_larger_than_the_embedding_is_refused() -> None:
    """A text could become an id that the model has no row for."""
    assert made(size=VOCABULARY).vocabulary_size == VOCABULARY
    with pytest.raises(ModelRefused, match=f"outside of the model's {VOCABULARY - 1} embeddings"):
        made(size=VOCABULARY - 1)


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 400) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


def outcome(rules: dict[str, Any]) -> str:
    """The sentence that refuses the rules, or nothing if text can be encoded by them."""
    try:
        made(rules).encode_text("the end <|end|>")
    except ModelRefused as refused:
        return str(refused)
    return ""


@settings(max_examples=150)
@given(
    path=st.sampled_from(
        [
            *[(key,) for key in tokenizer_rules()],
            *[("model", key) for key in tokenizer_rules()["model"]],
            *[("added_tokens", 0, key) for key in tokenizer_rules()["added_tokens"][0]],
            *[("decoder", "type"), ("pre_tokenizer", "type"), ("model", "merges", 0)],
        ]
    ),
    value=VALUES,
)
def test_no_rules_end_in_anything_but_a_sentence(path: tuple[str | int, ...], value: Any) -> None:
    """A folder from a stranger would end the start with a traceback, or a panic."""
    assert "\n" not in outcome(changed(path, value))


def test_a_gguf_vocabulary_is_used_as_before() -> None:
    """Model files that were served would be refused, or answer differently."""
    source = VocabularySource(
        model="gpt2",
        pre="gpt-2",
        tokens=["a", "b", "ab", "<e>"],
        token_types=[1, 1, 1, 3],
        merges=["a b"],
        eos_id=3,
        bos_id=None,
        add_bos=False,
    )
    assert Tokenizer(source).encode_text("abb<").tolist() == [2, 1]
