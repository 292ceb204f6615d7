"""Public prefixes: beginnings that an operator lets every tenant share.

They are read when the server starts, and never made by clients. A request that names one must begin
with it as far as it counts; so nothing of its own can lie in the public scope.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvledger.errors import FieldViolation, InvalidRequest, SettingRefused
from kvledger.scopes.keys import Scope
from kvledger.scopes.prefix_files import PrefixFile
from kvledger.tokenizer import ChatMessage, TokenIds, Tokenizer


@dataclass(frozen=True)
class PublicPrefix:
    """A beginning that everybody may share."""

    name: str
    scope: Scope
    tokens: TokenIds = field(repr=False)


def load_public_prefixes(
    files: Sequence[PrefixFile], tokenizer: Tokenizer, tokens_max: int
) -> dict[str, PublicPrefix]:
    """The prefixes by name.

    `tokens_max` is the most that a prompt and its output may be. Raises SettingRefused for a file
    that cannot be used.
    """
    return {file.name: _loaded(file, tokenizer, tokens_max) for file in files}


def _loaded(file: PrefixFile, tokenizer: Tokenizer, tokens_max: int) -> PublicPrefix:
    text = file.text()
    try:
        tokens = _system_tokens(text, tokenizer) if file.is_system else tokenizer.encode_text(text)
    except InvalidRequest as error:
        reasons = "; ".join(violation.reason for violation in error.violations)
        raise SettingRefused(
            f"{file}: it cannot be written as a system message: {reasons}"
        ) from None
    if len(tokens) >= tokens_max:
        raise SettingRefused(
            f"{file}: it has {len(tokens)} tokens, and {tokens_max - 1} is the most that leaves "
            f"room for an answer; shorten it"
        )
    digest = hashlib.sha256(f"{file.option}\n{text}".encode()).digest()
    return PublicPrefix(file.name, Scope.of_public(file.name, digest), tokens)


def _system_tokens(text: str, tokenizer: Tokenizer) -> TokenIds:
    """What a conversation begins with whose first message, of the system, is this text."""
    system = ChatMessage("system", text)
    alone = tokenizer.encode_chat([system], invites=False)
    followed = tokenizer.encode_chat([system, ChatMessage("user", "a")])
    # Some templates put it elsewhere, such as into the first message of the person.
    common = alone[: common_tokens(alone, followed)]
    written = unicodedata.normalize("NFC", tokenizer.decode(common))
    if unicodedata.normalize("NFC", text.strip()) not in written:
        raise InvalidRequest(
            FieldViolation(
                "chat.messages",
                "the model's chat template does not write it before what follows; "
                "use --public-prefix",
            )
        )
    return alone


def common_tokens(a: TokenIds, b: TokenIds) -> int:
    """How many tokens two prompts begin with alike."""
    least = min(len(a), len(b))
    different = np.flatnonzero(a[:least] != b[:least])
    return int(different[0]) if different.size else least


def check_begins_with(prefix: PublicPrefix, prompt: TokenIds, count: int, field_path: str) -> None:
    """Raises InvalidRequest unless the first `count` tokens of a prompt are the prefix's.

    `field_path` is the field that counts them. The prefix is public, so it may be told where they
    differ.
    """
    length = len(prefix.tokens)
    if count > length:
        reason = f"counts {count} tokens of the prompt, and the public prefix has {length}"
        raise InvalidRequest(FieldViolation(field_path, reason))
    same = common_tokens(prefix.tokens[:count], prompt[:count])
    if same < count:
        reason = (
            f"counts {count} tokens of the prompt, which begins with only the first {same} of the "
            f"public prefix's {length}"
        )
        raise InvalidRequest(FieldViolation(field_path, reason))
