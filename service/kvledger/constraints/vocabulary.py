"""The model's tokens as llguidance wants them, and on their way to another process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import llguidance

# llguidance's mark for control tokens. No text has this byte: it is not in UTF-8.
_MARK = b"\xff"


@dataclass(frozen=True)
class Vocabulary:
    """What every token adds to a text, by id: nothing where a constraint never lets it come."""

    tokens: Sequence[bytes] = field(repr=False)
    # Names of control tokens, by id: a Lark grammar may ask for one as <name>.
    controls: Mapping[int, bytes] = field(repr=False)
    end_ids: Sequence[int]

    def pack(self) -> bytes:
        """All of it, for `unpack`."""
        head = {
            "lengths": [len(token) for token in self.tokens],
            "controls": {id_: name.decode("utf-8") for id_, name in self.controls.items()},
            "end_ids": list(self.end_ids),
        }
        return json.dumps(head).encode() + b"\n" + b"".join(self.tokens)

    @classmethod
    def unpack(cls, packed: bytes) -> Vocabulary:
        """What `pack` made."""
        line, _, joined = packed.partition(b"\n")
        head = json.loads(line)
        tokens, begin = [], 0
        for length in head["lengths"]:
            tokens.append(joined[begin : begin + length])
            begin += length
        controls = {int(id_): name.encode() for id_, name in head["controls"].items()}
        return cls(tokens, controls, head["end_ids"])

    def prepared(self) -> llguidance.LLTokenizer:
        """The tokens as a tree of bytes; takes about 0.1 s for 50,000 of them."""
        tokens = [b"" if token.startswith(_MARK) else token for token in self.tokens]
        for id_, name in self.controls.items():
            tokens[id_] = _MARK + name
        wrapper = llguidance.TokenizerWrapper(_Tokens(tokens, list(self.controls), self.end_ids[0]))
        return llguidance.LLTokenizer(wrapper, eos_token=list(self.end_ids))


@dataclass(frozen=True)
class _Tokens:
    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: int | None = None

    def __call__(self, text: object) -> NoReturn:
        raise RuntimeError("constraints cut no text into tokens")
