"""How text is cut into words before they are merged from bytes, by the names that GGUF uses.

The rules are those of the models' published tokenizers, letter by letter.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

from kvledger.errors import ModelRefused


class WordCutting(NamedTuple):
    """How text is cut into words, under one name of `tokenizer.ggml.pre`."""

    pre_tokenizer: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    # A word that is a token as a whole is taken as it is, without merging.
    ignores_merges: bool = False
    # Where the file does not say whether a prompt begins with a first token.
    adds_bos: bool = False


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_GPT2 = WordCutting(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
_SMOLLM = WordCutting(
    pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
)
_LLAMA3 = WordCutting(
    _split_by(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    ignores_merges=True,
    adds_bos=True,
)
_QWEN2 = WordCutting(
    _split_by(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    normalizer=normalizers.NFC(),
)

# By tokenizer.ggml.pre. A name that is missing here is refused: the nearest other rule would give
# nearly the right ids, and a model that answers nearly right.
_CUTTINGS = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
}


def word_cutting_of(pre: str) -> WordCutting:
    """The rule of that name; ModelRefused for a name that is not known exactly."""
    known = _CUTTINGS.get(pre)
    if known is None:
        raise ModelRefused(
            f"tokenizer.ggml.pre is {pre[:40]!r}; known are {', '.join(sorted(_CUTTINGS))}"
        )
    return known
