"""What a client's constraint says, in the words of llguidance: always one Lark grammar."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Literal

from kvledger.constraints.schema import read_schema

Kind = Literal["json_schema", "regex", "lark_grammar", "json_object"]

# Between two parts of a JSON text there is white space once, and this much of it at most: enough to
# indent by, and a model that likes spaces does not fill its answer with them.
_WHITE_SPACE = r"[ \n\r\t]{1,32}"

# Tokens are not forced where bytes are: the model chooses among all that spell them. So a mask is
# exactly the set of tokens that the grammar admits, and no text is ever cut into tokens here.
_OPTIONS = '%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True)
class ConstraintSource:
    """A constraint as a client wrote it; `json_object` has no text."""

    kind: Kind
    text: str = ""

    @property
    def field(self) -> str:
        """Its path in a request."""
        return f"constraint.{self.kind}"

    @property
    def digest(self) -> bytes:
        """Equal for equal sources alone."""
        return hashlib.sha256(f"{self.kind}:{self.text}".encode("utf-8", "replace")).digest()


def lark_of(source: ConstraintSource) -> str:
    """The grammar of a source. Raises ConstraintRefused if it is none."""
    if source.kind == "lark_grammar":
        return _OPTIONS + source.text
    if source.kind == "regex":
        # Between slashes a slash is written with a backslash, unless it has one already.
        body = re.sub(r"\\.|/|\n", _escaped, source.text, flags=re.DOTALL)
        return f"{_OPTIONS}start: /{body}/\n"
    schema = {"type": "object"} if source.kind == "json_object" else read_schema(source.text)
    options = {"whitespace_pattern": _WHITE_SPACE}
    written = json.dumps({**schema, "x-guidance": options}, allow_nan=False)
    return f"{_OPTIONS}start: %json {written}\n"


def _escaped(match: re.Match[str]) -> str:
    text = match.group()
    return {"/": r"\/", "\n": r"\n"}.get(text, text)
