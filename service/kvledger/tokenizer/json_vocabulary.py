"""A vocabulary from tokenizer.json, as model folders carry it.

The file defines its own rules of cutting and merging, and the `tokenizers` library follows them.
What is done to it here: control tokens are taken out of the table that text is looked up in, so a
user who types one gets ordinary text; and each token's bytes are worked out once, for decoding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from kvledger.errors import ModelRefused
from kvledger.tokenizer.byte_alphabet import bytes_of_byte_token, bytes_of_letters
from kvledger.tokenizer.vocabulary import Vocabulary, encode_all, is_panic

# How vocabularies that come from sentencepiece write a space.
_SPACE = "▁"
# Decoding steps of such vocabularies; what they do together is in `_spaced_bytes`.
_SPACED_DECODERS = ("Replace", "ByteFallback", "Fuse", "Strip", "Metaspace")

_TRIED_TEXTS = (
    "",
    " ",
    "a",
    "The end, 123.\n\n  \t",
    "\N{LATIN SMALL LETTER E WITH ACUTE} \U0001f642",
)


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of a folder that say how its text is cut, and what begins and ends one."""

    # tokenizer.json
    tokenizer: Mapping[str, Any] = field(repr=False)
    # tokenizer_config.json, or nothing
    config: Mapping[str, Any] = field(repr=False)
    # Ids that end an answer, from generation_config.json or config.json; may be empty.
    end_ids: Sequence[int]
    chat_template: str | None = field(repr=False)


def json_vocabulary(files: TokenizerFiles, size: int) -> Vocabulary:
    """The vocabulary of a folder, with `size` ids as the model's embedding has.

    Ids that the tokenizer does not name stand for nothing. Raises ModelRefused, in one sentence,
    for a kind of tokenizer that is not known, or one that contradicts itself.
    """
    model = _model_of(files.tokenizer)
    ids = _ids_of(model, size)
    added = _added_tokens(files.tokenizer, ids, size)
    texts = {token_id: text for text, token_id in ids.items()}
    bos, eos = _special_text(files.config, "bos_token"), _special_text(files.config, "eos_token")
    # What config.json calls bos_token_id is often a default that no tokenizer goes by.
    if bos is not None and bos not in ids:
        raise ModelRefused("tokenizer_config.json: bos_token is not in tokenizer.json")
    bos_id = ids[bos] if bos is not None else None
    end_ids = list(files.end_ids) or ([ids[eos]] if eos in ids else [])
    if not end_ids:
        raise ModelRefused("neither generation_config.json nor config.json names an eos_token_id")
    for token_id in end_ids:
        if token_id not in texts:
            raise ModelRefused(f"eos_token_id names {token_id}, which is not in tokenizer.json")
    control = {token_id for token_id, token in added.items() if token["special"]}
    control |= _declared_special(files.config, texts) | set(end_ids)
    control |= {ids[text] for text in (bos, eos) if text in ids}
    control_texts = {token_id: texts[token_id] for token_id in sorted(control)}
    first, later = _encoders(files.tokenizer, model, ids, added, control_texts)
    return Vocabulary(
        control_texts=control_texts,
        encoder=first,
        later_encoder=later,
        token_bytes=_token_bytes(files.tokenizer, model, ids, added, control, size),
        first_ids=_first_ids(files, bos_id, control),
        end_ids=frozenset(end_ids),
        bos_token=texts[bos_id] if bos_id is not None else None,
        eos_token=eos if eos in ids else texts[end_ids[0]],
        chat_template=files.chat_template,
    )


def _model_of(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        raise ModelRefused(
            "tokenizer.json: its model is not of type BPE, the only one kvledger knows"
        )
    if model.get("dropout"):
        raise ModelRefused("tokenizer.json: dropout would cut the same text in different ways")
    if not isinstance(model.get("unk_token"), str | None):
        raise ModelRefused("tokenizer.json: its unk_token is not a text")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ModelRefused(f"tokenizer.json: {key} is set, which kvledger does not know")
    return model


def _ids_of(model: Mapping[str, Any], size: int) -> dict[str, int]:
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not vocab:
        raise ModelRefused("tokenizer.json: its model has no vocab")
    ids = {text: _checked_id(token_id, size) for text, token_id in vocab.items()}
    if len(set(ids.values())) != len(ids):
        raise ModelRefused("tokenizer.json: two tokens of its vocab have the same id")
    return ids


def _checked_id(token_id: object, size: int) -> int:
    if isinstance(token_id, bool) or not isinstance(token_id, int):
        raise ModelRefused("tokenizer.json: the id of a token is not a whole number")
    if not 0 <= token_id < size:
        raise ModelRefused(
            f"tokenizer.json has a token with an id outside of the model's {size} embeddings"
        )
    return token_id


def _added_tokens(
    tokenizer: Mapping[str, Any], ids: dict[str, int], size: int
) -> dict[int, dict[str, Any]]:
    """The added tokens by id; `ids` gets those that the model's own vocab has not."""
    added: dict[int, dict[str, Any]] = {}
    taken = set(ids.values())
    tokens = tokenizer.get("added_tokens") or []
    if not isinstance(tokens, list):
        raise ModelRefused("tokenizer.json: added_tokens is not a list")
    for token in tokens:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise ModelRefused("tokenizer.json: an added token has no content")
        token_id = _checked_id(token.get("id"), size)
        text = token["content"]
        if ids.get(text, token_id) != token_id or (text not in ids and token_id in taken):
            raise ModelRefused(
                f"tokenizer.json: added token {token_id} does not fit the vocab of its model"
            )
        flags = ("special", "lstrip", "rstrip", "single_word", "normalized")
        added[token_id] = {flag: token.get(flag) is True for flag in flags} | {"content": text}
        ids[text] = token_id
        taken.add(token_id)
    return added


def _special_text(config: Mapping[str, Any], key: str) -> str | None:
    """bos_token or eos_token, which is a text, or an object that has one."""
    value = config.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _declared_special(config: Mapping[str, Any], texts: Mapping[int, str]) -> set[int]:
    """Ids that tokenizer_config.json calls special, which older tokenizer.json may not."""
    declared = config.get("added_tokens_decoder")
    special: set[int] = set()
    for key, token in declared.items() if isinstance(declared, dict) else ():
        if isinstance(token, dict) and token.get("special") is True and key.isdecimal():
            token_id = int(key) if len(key) < 10 else -1
            if texts.get(token_id) != token.get("content"):
                raise ModelRefused(
                    "tokenizer_config.json names a special token that is not in tokenizer.json"
                )
            special.add(token_id)
    return special


def _encoders(
    tokenizer: Mapping[str, Any],
    model: Mapping[str, Any],
    ids: Mapping[str, int],
    added: Mapping[int, Mapping[str, Any]],
    control_texts: Mapping[int, str],
) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """Tables without control tokens, for the beginning of a text and for what comes later."""
    control = set(control_texts.values())
    for token_id, token in added.items():
        if token_id in control_texts and (token["lstrip"] or token["rstrip"]):
            raise ModelRefused(
                f"tokenizer.json: control token {token_id} takes spaces next to it, "
                f"which kvledger does not know"
            )
    kept = {text: token_id for text, token_id in ids.items() if text not in control}
    # The library numbers added tokens anew unless they are in the model's vocab.
    rules: dict[str, Any] = {
        **tokenizer,
        "model": {
            **model,
            "vocab": kept,
            "merges": list(_merges(model, control)),
            # It is a control token, or every byte has a token and it is never used.
            "unk_token": model.get("unk_token") if model.get("unk_token") in kept else None,
        },
        "added_tokens": [
            {"id": token_id, **token}
            for token_id, token in sorted(added.items())
            if token_id not in control_texts
        ],
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    first = _loaded(rules)
    if any(first.token_to_id(token["content"]) != token["id"] for token in rules["added_tokens"]):
        raise ModelRefused("tokenizer.json: its added tokens do not keep their ids")
    later_rules = _without_first_space(rules)
    return first, first if later_rules is None else _loaded(later_rules)


def _merges(model: Mapping[str, Any], control: set[str]) -> Iterator[list[str]]:
    """The merges, as pairs, without those that lead to a control token."""
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise ModelRefused("tokenizer.json: its model has no merges")
    for place, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(part, str) for part in pair)
        ):
            raise ModelRefused(f"tokenizer.json: merges[{place}] is not a pair of tokens")
        if control.isdisjoint((*pair, "".join(pair))):
            yield pair


def _loaded(rules: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The library's tokenizer, tried out: some rules load, and fail on every text."""
    try:
        encoder = tokenizers.Tokenizer.from_str(json.dumps(rules))
        encode_all(encoder, _TRIED_TEXTS)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelRefused(
            "tokenizer.json does not say how to cut text, or not in a way that works"
        ) from None
    return encoder


def _without_first_space(rules: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rules for text that follows a control token, or None if they are the same.

    Where a space is put before the first word of the whole text only, the library goes by the
    place of the piece; here, pieces between control tokens are encoded by themselves.
    """
    cutting = rules.get("pre_tokenizer")
    steps = cutting.get("pretokenizers") if isinstance(cutting, dict) else None
    steps = steps if isinstance(steps, list) else [cutting]
    changed = [
        {**step, "prepend_scheme": "never"}
        if isinstance(step, dict)
        and step.get("type") == "Metaspace"
        and step.get("prepend_scheme") == "first"
        else step
        for step in steps
    ]
    if changed == steps:
        return None
    return {**rules, "pre_tokenizer": {"type": "Sequence", "pretokenizers": changed}}


def _first_ids(files: TokenizerFiles, bos_id: int | None, control: set[int]) -> list[int]:
    """Ids that a prompt of text begins with.

    As in `transformers`, add_bos_token counts where it is given; else tokenizer.json says it.
    """
    if files.config.get("add_eos_token") is True:
        raise ModelRefused("tokenizer_config.json: add_eos_token would end every prompt")
    adds = files.config.get("add_bos_token")
    if isinstance(adds, bool):
        return [bos_id] if adds and bos_id is not None else []
    rule = files.tokenizer.get("post_processor")
    if rule is None:
        return []
    # What the rule does is found out by letting it, around a text of one known token.
    tiny = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    probe = _loaded({"version": "1.0", "model": tiny, "post_processor": rule}).encode("a")
    if not probe.special_tokens_mask or probe.special_tokens_mask[-1] == 1:
        raise ModelRefused("tokenizer.json: its post_processor would end every prompt")
    first = probe.ids[:-1]
    if not control.issuperset(first):
        raise ModelRefused("tokenizer.json: its post_processor writes what is no control token")
    return list(first)


def _token_bytes(
    tokenizer: Mapping[str, Any],
    model: Mapping[str, Any],
    ids: Mapping[str, int],
    added: Mapping[int, Mapping[str, Any]],
    control: set[int],
    size: int,
) -> list[bytes]:
    kinds = [step.get("type") for step in _decoding_steps(tokenizer)]
    if kinds == ["ByteLevel"]:
        spaced = False
    elif kinds and all(kind in _SPACED_DECODERS for kind in kinds):
        _check_spaced(_decoding_steps(tokenizer))
        spaced = True
    else:
        raise ModelRefused("tokenizer.json: its decoder is none that kvledger knows")
    by_bytes = model.get("byte_fallback") is True
    token_bytes = [b""] * size
    for text, token_id in ids.items():
        if token_id in control:
            continue
        if token_id in added:
            token_bytes[token_id] = text.encode("utf-8", "replace")
        elif spaced:
            token_bytes[token_id] = _spaced_bytes(text, by_bytes)
        else:
            token_bytes[token_id] = bytes_of_letters(text)
    return token_bytes


def _decoding_steps(tokenizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    decoder = tokenizer.get("decoder")
    steps = decoder.get("decoders") if isinstance(decoder, dict) else None
    steps = steps if isinstance(steps, list) else [decoder]
    return [step for step in steps if isinstance(step, dict)]


def _check_spaced(steps: Sequence[Mapping[str, Any]]) -> None:
    """What the steps of a decoder with a mark for spaces may say."""
    for step in steps:
        known = {
            "Replace": step.get("pattern") == {"String": _SPACE} and step.get("content") == " ",
            "Metaspace": step.get("replacement") == _SPACE,
            "Strip": step.get("content") == " " and step.get("stop") == 0,
        }
        if not known.get(str(step["type"]), True):
            raise ModelRefused(
                f"tokenizer.json: the {step['type']} of its decoder is none that kvledger knows"
            )


def _spaced_bytes(text: str, by_bytes: bool) -> bytes:
    """The bytes of a token where a mark stands for spaces, and some tokens for single bytes."""
    if by_bytes:
        byte = bytes_of_byte_token(text)
        if byte is not None:
            return byte
    return text.replace(_SPACE, " ").encode("utf-8", "replace")
