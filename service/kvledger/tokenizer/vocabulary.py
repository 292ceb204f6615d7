"""The model's vocabulary: from text to token ids and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, models

from kvledger.errors import FieldViolation, InvalidRequest, ModelRefused
from kvledger.tokenizer.byte_alphabet import bytes_of_byte_token, bytes_of_letters
from kvledger.tokenizer.chat_template import ChatTemplate
from kvledger.tokenizer.control_tokens import RenderedPart
from kvledger.tokenizer.conversation import ChatMessage, JsonValue, Tool
from kvledger.tokenizer.word_cutting import word_cutting_of

TokenIds = npt.NDArray[np.int32]

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


@dataclass(frozen=True)
class VocabularySource:
    """What a model file says about its vocabulary. Raises ModelRefused if that cannot be."""

    # Kind of vocabulary: "gpt2" is byte-level BPE.
    model: str
    # How text is cut into words before they are merged from bytes.
    pre: str
    # By token id; a normal token is written in the byte alphabet of byte-level BPE.
    tokens: list[str] = field(repr=False)
    # By token id: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
    token_types: list[int] = field(repr=False)
    # "left right", the pair to merge first at the front.
    merges: list[str] = field(repr=False)
    eos_id: int
    bos_id: int | None
    # Whether a prompt of text begins with `bos_id`. A chat template writes its own.
    add_bos: bool
    chat_template: str | None = field(default=None, repr=False)
    # What ends an answer besides `eos_id`: the end of a turn or of a message.
    further_end_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.token_types) != len(self.tokens):
            raise ModelRefused(
                f"tokenizer.ggml.token_type has {len(self.token_types)} entries"
                f" for {len(self.tokens)} tokens"
            )
        for token_id, token_type in enumerate(self.token_types):
            if not _NORMAL <= token_type <= _BYTE:
                raise ModelRefused(
                    f"tokenizer.ggml.token_type[{token_id}] is {token_type}; known are 1 to 6"
                )
        for token_id in self.special_ids:
            if not 0 <= token_id < len(self.tokens):
                raise ModelRefused(
                    f"the model names token {token_id} as special, outside of its"
                    f" {len(self.tokens)} tokens"
                )
        if self.add_bos and self.bos_id is None:
            raise ModelRefused(
                "tokenizer.ggml.add_bos_token asks for a first token,"
                " but tokenizer.ggml.bos_token_id is missing"
            )

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        return frozenset((self.eos_id, *self.further_end_ids))

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids with a meaning to the server, which count as control tokens whatever their type."""
        return self.end_ids if self.bos_id is None else self.end_ids | {self.bos_id}

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> VocabularySource:
        """Reads the `tokenizer.*` keys of a GGUF file's metadata.

        Lists may be any sequences, numpy arrays included. Raises ModelRefused if a key is missing,
        has the wrong type, or asks for what is not supported.
        """
        reader = _MetadataReader(metadata)
        model = reader.text("tokenizer.ggml.model")
        if model != "gpt2":
            raise ModelRefused(
                "tokenizer.ggml.model names a kind of vocabulary that is not supported;"
                ' supported is "gpt2", byte-level BPE'
            )
        pre = reader.text("tokenizer.ggml.pre")
        cutting = word_cutting_of(pre)
        for key in ("tokenizer.ggml.add_space_prefix", "tokenizer.ggml.add_eos_token"):
            if reader.optional_flag(key):
                raise ModelRefused(f"{key} is true, which is not supported")
        add_bos = reader.optional_flag("tokenizer.ggml.add_bos_token")
        further_end_ids = (
            reader.optional_integer(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")
        )
        return cls(
            model=model,
            pre=pre,
            tokens=reader.texts("tokenizer.ggml.tokens"),
            token_types=reader.integers("tokenizer.ggml.token_type"),
            merges=reader.texts("tokenizer.ggml.merges"),
            eos_id=reader.integer("tokenizer.ggml.eos_token_id"),
            bos_id=reader.optional_integer("tokenizer.ggml.bos_token_id"),
            add_bos=cutting.adds_bos if add_bos is None else add_bos,
            chat_template=reader.optional_text("tokenizer.chat_template"),
            further_end_ids=tuple(end_id for end_id in further_end_ids if end_id is not None),
        )


class _MetadataReader:
    """Takes values out of a file's metadata by key and type; ModelRefused where one is wrong."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata

    def text(self, key: str) -> str:
        text = self.optional_text(key)
        if text is None:
            raise ModelRefused(f"the model file has no {key}")
        return text

    def optional_text(self, key: str) -> str | None:
        value = self._metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise ModelRefused(f"{key} is not a string")
        return value

    def optional_flag(self, key: str) -> bool | None:
        value = self._metadata.get(key)
        if value is not None and not isinstance(value, (bool, np.bool_)):
            raise ModelRefused(f"{key} is not a boolean")
        return None if value is None else bool(value)

    def integer(self, key: str) -> int:
        integer = self.optional_integer(key)
        if integer is None:
            raise ModelRefused(f"the model file has no {key}")
        return integer

    def optional_integer(self, key: str) -> int | None:
        value = self._metadata.get(key)
        if value is None:
            return None
        integers = _integers_among([value])
        if not integers:
            raise ModelRefused(f"{key} is not an integer")
        return integers[0]

    def texts(self, key: str) -> list[str]:
        values = self._values(key)
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) != len(values):
            raise ModelRefused(f"{key} is not a list of strings")
        return texts

    def integers(self, key: str) -> list[int]:
        values = self._values(key)
        integers = _integers_among(values)
        if len(integers) != len(values):
            raise ModelRefused(f"{key} is not a list of integers")
        return integers

    def _values(self, key: str) -> list[object]:
        values = self._metadata.get(key)
        if values is None:
            raise ModelRefused(f"the model file has no {key}")
        if isinstance(values, np.ndarray):
            values = values.tolist()
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
            raise ModelRefused(f"{key} is not a list")
        return list(values)


def _integers_among(values: Sequence[object]) -> list[int]:
    return [
        int(value)
        for value in values
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    ]


def _bytes_of_token(token: str, token_type: int) -> bytes:
    if token_type == _UNUSED:
        return b""
    if token_type == _BYTE:
        return _byte_of_token(token)
    if token_type == _NORMAL:
        return bytes_of_letters(token)
    return token.encode("utf-8", "replace")


def _byte_of_token(token: str) -> bytes:
    byte = bytes_of_byte_token(token)
    if byte is None:
        raise ModelRefused("a token of type 6 (byte) is not written as <0x00> to <0xFF>")
    return byte


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary ready to be used, whatever file it comes from."""

    # Written forms by id; they are in no encoder's table.
    control_texts: Mapping[int, str] = field(repr=False)
    # For the beginning of a text, and for what follows a control token.
    encoder: tokenizers.Tokenizer = field(repr=False)
    later_encoder: tokenizers.Tokenizer = field(repr=False)
    # By token id; nothing for control tokens and for ids that stand for nothing.
    token_bytes: list[bytes] = field(repr=False)
    # What a prompt of text begins with.
    first_ids: list[int]
    end_ids: frozenset[int]
    bos_token: str | None
    eos_token: str
    chat_template: str | None = field(repr=False)

    @classmethod
    def of(cls, source: VocabularySource) -> Vocabulary:
        """The vocabulary of a GGUF file. Raises ModelRefused if it cannot be used."""
        if source.model != "gpt2":
            raise ModelRefused('the only supported kind of vocabulary is "gpt2", byte-level BPE')
        types = source.token_types
        control_texts = {
            token_id: token
            for token_id, token in enumerate(source.tokens)
            if types[token_id] in (_UNKNOWN, _CONTROL) or token_id in source.special_ids
        }
        encoder = _encoder_of(source, control_texts)
        return cls(
            control_texts=control_texts,
            encoder=encoder,
            later_encoder=encoder,
            token_bytes=[
                b"" if token_id in control_texts else _bytes_of_token(token, types[token_id])
                for token_id, token in enumerate(source.tokens)
            ],
            first_ids=[source.bos_id] if source.add_bos and source.bos_id is not None else [],
            end_ids=source.end_ids,
            bos_token=None if source.bos_id is None else source.tokens[source.bos_id],
            eos_token=source.tokens[source.eos_id],
            chat_template=source.chat_template,
        )


class Tokenizer:
    """Turns text and conversations into token ids, and ids into text.

    Ids equal those of the `transformers` library, with one difference on purpose: a control token
    can only come from the chat template. The control tokens are not in the table that text is
    looked up in, so what is written like one in a text or a message is ordinary text.

    Building takes about 0.2 s for 50,000 tokens. May be used from several threads at once;
    encoding runs without the GIL.
    """

    def __init__(
        self,
        source: VocabularySource | Vocabulary,
        *,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        """Raises ModelRefused if the vocabulary or its chat template cannot be used.

        `clock` is for templates that write today's date; without it they write a fixed one, and
        the same messages always give the same ids.
        """
        vocabulary = source if isinstance(source, Vocabulary) else Vocabulary.of(source)
        self._vocabulary = vocabulary
        self._control_texts = vocabulary.control_texts
        self._id_of_control = {text: id_ for id_, text in vocabulary.control_texts.items()}
        self._token_bytes = vocabulary.token_bytes
        self._template = self._chat_template_of(vocabulary, clock)

    def _chat_template_of(
        self, vocabulary: Vocabulary, clock: Callable[[], datetime] | None
    ) -> ChatTemplate | None:
        if vocabulary.chat_template is None:
            return None
        return ChatTemplate(
            vocabulary.chat_template,
            control_tokens=[text for text in self._id_of_control if text],
            bos_token=vocabulary.bos_token,
            eos_token=vocabulary.eos_token,
            clock=clock,
        )

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids; they begin at 0."""
        return len(self._token_bytes)

    @property
    def token_bytes(self) -> list[bytes]:
        """The bytes that each id adds to a text, by id; none for a control token.

        A token may end inside a character: only joined bytes are text.
        """
        return self._token_bytes

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that only a chat template, or a prompt of token ids, can bring into a prompt."""
        return frozenset(self._control_texts)

    @property
    def control_texts(self) -> Mapping[int, str]:
        """How control tokens are written, by id."""
        return self._control_texts

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an answer; all are control ids."""
        return self._vocabulary.end_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can be used."""
        return self._template is not None

    def encode_text(self, text: str) -> TokenIds:
        """Ids of a text, shape [tokens], after the first token if the model wants one.

        Raises nothing, whatever the text: a lone surrogate is read as U+FFFD. As in training,
        some vocabularies bring text to Unicode's form NFC first, and bytes that a vocabulary has
        no token for (some control characters, in some models) are dropped.
        """
        first = self._vocabulary.first_ids
        return np.array([*first, *encode_all(self._vocabulary.encoder, [text])[0]], dtype=np.int32)

    def encode_answer(self, text: str, marks: Collection[str] = ()) -> TokenIds:
        """Ids of a text as a model would write it after a prompt, shape [tokens].

        Those of `marks` that are control tokens of the vocabulary become them. For what the server
        itself writes, never for a client's text.
        """
        known = sorted(filter(self._id_of_control.__contains__, marks), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, known))})", text) if known else [text]
        texts = iter(encode_all(self._vocabulary.later_encoder, pieces[::2]))
        ids: list[int] = []
        for place, piece in enumerate(pieces):
            ids += [self._id_of_control[piece]] if place % 2 else next(texts)
        return np.array(ids, dtype=np.int32)

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, if it has one."""
        return self._template

    @property
    def chat_template_source(self) -> str | None:
        """The chat template as it is written in the model's files."""
        return self._vocabulary.chat_template

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        arguments: Mapping[str, JsonValue] | None = None,
        *,
        invites: bool = True,
    ) -> TokenIds:
        """Ids of a conversation, shape [tokens], up to where the model is to answer.

        `arguments` are variables of the template. Unless it `invites`, it ends with the last
        message: nobody is asked to answer. Raises InvalidRequest if the model has no chat
        template, or the template refuses the messages or cannot write what they hold.
        """
        if self._template is None:
            raise InvalidRequest(
                FieldViolation(
                    "chat", "the model has no chat template; send text or token ids instead"
                )
            )
        parts = self._template.render(
            [replace(message, content=_encodable(message.content)) for message in messages],
            tools,
            arguments,
            invites=invites,
        )
        texts = iter(self._encode_parts(parts))
        ids: list[int] = []
        for part in parts:
            if part.is_control_token:
                ids.append(self._id_of_control[part.text])
            else:
                ids.extend(next(texts))
        return np.array(ids, dtype=np.int32)

    def decode(self, token_ids: Iterable[int], *, with_control_tokens: bool = False) -> str:
        """The text of ids, with U+FFFD for broken characters.

        Control tokens are left out, or written if `with_control_tokens`. Raises ValueError for an
        id outside of the vocabulary.
        """
        ids = np.asarray(list(token_ids), dtype=np.int64).tolist()
        if ids and not 0 <= min(ids) <= max(ids) < self.vocabulary_size:
            raise ValueError(
                f"token ids lie in 0 to {self.vocabulary_size - 1}, not {min(ids)} to {max(ids)}"
            )
        written = self._control_texts if with_control_tokens else {}
        return b"".join(
            written[token_id].encode("utf-8", "replace")
            if token_id in written
            else self._token_bytes[token_id]
            for token_id in ids
        ).decode("utf-8", "replace")

    def _encode_parts(self, parts: Sequence[RenderedPart]) -> list[list[int]]:
        """Ids of the texts among the parts of a conversation."""
        texts = [part.text for part in parts if not part.is_control_token]
        begins_with_text = bool(texts) and not parts[0].is_control_token
        if not begins_with_text:
            return encode_all(self._vocabulary.later_encoder, texts)
        return [
            *encode_all(self._vocabulary.encoder, texts[:1]),
            *encode_all(self._vocabulary.later_encoder, texts[1:]),
        ]


def encode_all(encoder: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text by the rules of an encoder. RuntimeError if the library fails on one."""
    try:
        # The batch call, unlike the single one, lets go of the GIL and keeps no offsets.
        encodings = encoder.encode_batch_fast(
            [_encodable(text) for text in texts], add_special_tokens=False
        )
    except BaseException as error:
        if isinstance(error, Exception) or not is_panic(error):
            raise
        raise RuntimeError("the tokenizer's rules fail on this text") from None
    return [encoding.ids for encoding in encodings]


def is_panic(error: BaseException) -> bool:
    """Whether the tokenizers library gave up. Its panics are no Exception, and would end more
    than the request that they belong to."""
    return type(error).__name__ == "PanicException"


def _encodable(text: str) -> str:
    """`text` with U+FFFD for each lone surrogate, which has no bytes in UTF-8."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _encoder_of(source: VocabularySource, control_texts: Mapping[int, str]) -> tokenizers.Tokenizer:
    """The table that text is looked up in: normal and user-defined tokens, no control tokens."""
    cutting = word_cutting_of(source.pre)
    ids: dict[str, int] = {}
    added: list[AddedToken] = []
    for token_id, (token, token_type) in enumerate(
        zip(source.tokens, source.token_types, strict=True)
    ):
        if token_id in control_texts or token_type not in (_NORMAL, _USER_DEFINED):
            continue
        if ids.setdefault(token, token_id) != token_id:
            raise ModelRefused(
                f"tokenizer.ggml.tokens has the same text at {ids[token]} and {token_id}"
            )
        if token_type == _USER_DEFINED:
            added.append(AddedToken(token, normalized=False, special=False))
    merges = _merge_pairs(source.merges, ids)
    try:
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=cutting.ignores_merges)
    except Exception:
        raise ModelRefused("tokenizer.ggml.merges do not fit tokenizer.ggml.tokens") from None
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = cutting.pre_tokenizer
    if cutting.normalizer is not None:
        encoder.normalizer = cutting.normalizer
    encoder.add_tokens(added)
    return encoder


def _merge_pairs(merges: Sequence[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for place, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not (left in ids and right in ids and left + right in ids):
            raise ModelRefused(
                f"tokenizer.ggml.merges[{place}] names a token that is not in the vocabulary,"
                " or that is a control token"
            )
        pairs.append((left, right))
    return pairs
