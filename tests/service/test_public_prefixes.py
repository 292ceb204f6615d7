"""Public prefixes: which files can be one, and what tokens they become."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cache_requests import cached
from test_shared_border import encoded, tokenizer_of, written

from kvledger.cli import serve
from kvledger.engine import EndReason
from kvledger.errors import SettingRefused
from kvledger.public_prefixes import compute_public_prefixes
from kvledger.rpc.prompts import PromptEncoder
from kvledger.scopes.claims import CacheWish, Scopes
from kvledger.scopes.keys import KvIdentity
from kvledger.scopes.prefix_files import PREFIXES_MAX, TEXT_BYTES_MAX, PrefixFile
from kvledger.scopes.public_prefixes import PublicPrefix, load_public_prefixes
from kvledger.settings import load_settings
from kvledger.streams import Mailbox, MailboxLimits, receipt_of_waiting
from kvledger.tenants.tenant import Tenant
from kvledger.tokenizer import Tokenizer
from kvledger.v1 import generation_pb2 as pb

TEXT = "You answer questions about the manual. Be short."


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., PrefixFile]:
    """Makes a file of a public prefix."""

    def make(data: str | bytes = TEXT, is_system: bool = False) -> PrefixFile:
        path = tmp_path / "prefix.txt"
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return PrefixFile("manual", path, is_system)

    return make


def loaded(file: PrefixFile, tokenizer: Tokenizer, tokens_max: int = 1000) -> PublicPrefix:
    return load_public_prefixes([file], tokenizer, tokens_max)["manual"]


def refusal(file: PrefixFile, tokenizer: Tokenizer, tokens_max: int = 1000) -> str:
    with pytest.raises(SettingRefused) as refused:
        loaded(file, tokenizer, tokens_max)
    return str(refused.value)


# --- Settings -------------------------------------------------------------------------------


def test_settings_name_them() -> None:
    """A prefix would be left out without a word, or another file be read."""
    settings = load_settings(
        [
            *("--public-prefix", "a=x", "--public-prefix", "b=y=z"),
            *("--public-system", "c=folder/file.txt"),
        ],
        {},
    )
    assert settings.public_files() == [
        PrefixFile("a", Path("x"), False),
        PrefixFile("b", Path("y=z"), False),
        PrefixFile("c", Path("folder/file.txt"), True),
    ]
    variable = load_settings([], {"KVLEDGER_PUBLIC_SYSTEM": "a=x,b=y"}).public_files()
    assert variable == [PrefixFile("a", Path("x"), True), PrefixFile("b", Path("y"), True)]
    assert load_settings([], {}).public_files() == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--public-prefix", "a"], "--public-prefix: 'a' is not NAME=FILE"),
        (["--public-system", "a="], "--public-system: 'a=' is not NAME=FILE"),
        (["--public-prefix", "=x"], "is not NAME=FILE"),
        (["--public-prefix", "a b=x"], "letters, digits, _, - and ."),
        (["--public-prefix", f"{'a' * 129}=x"], "1 to 128"),
        (["--public-prefix", ""], "is not NAME=FILE"),
        (["--public-prefix", "a=x", "--public-prefix", "a=y"], "the same name"),
        (["--public-prefix", "a=x", "--public-system", "a=y"], "--public-system a: another"),
        (
            [f"--public-prefix=n{place}=x" for place in range(PREFIXES_MAX + 1)],
            "65 public prefixes are given, at most 64 can be",
        ),
    ],
)
def test_settings_that_name_nothing_are_refused(arguments: list[str], reason: str) -> None:
    """The server would start without what the operator believes is shared."""
    with pytest.raises(SettingRefused) as refused:
        load_settings(arguments, {})
    assert reason in str(refused.value)


def test_reuse_can_be_switched_off() -> None:
    """An operator who trusts no cache could not turn it off."""
    assert load_settings([], {}).reuses_prefixes
    assert load_settings(["--prefix-reuse", "on"], {}).reuses_prefixes
    assert not load_settings(["--prefix-reuse", "off"], {}).reuses_prefixes
    with pytest.raises(SettingRefused, match="--prefix-reuse"):
        load_settings(["--prefix-reuse", "maybe"], {})


# --- Files ----------------------------------------------------------------------------------


def test_the_line_end_of_the_last_line_is_no_part_of_it(file: Callable[..., PrefixFile]) -> None:
    """Editors write one and clients do not, so no prompt would begin with it."""
    for end, kept in (("", ""), ("\n", ""), ("\r\n", ""), ("\n\n", "\n"), (" ", " ")):
        assert file(TEXT + end).text() == TEXT + kept


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it has no text"),
        (b" \n\t\n", "it has no text"),
        (b"ab\xff", "it is no UTF-8 text: byte 2 cannot stand there"),
        (b"x" * (TEXT_BYTES_MAX + 1), f"more than {TEXT_BYTES_MAX} bytes"),
    ],
)
def test_files_that_are_no_text_are_refused(
    file: Callable[..., PrefixFile], data: bytes, reason: str
) -> None:
    """The start would end with a traceback, or a prefix of nothing be shared."""
    said = refusal(file(data), tokenizer_of("plain"))
    assert said.startswith("--public-prefix manual: ")
    assert reason in said


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A misspelt path would be a prefix of nothing."""
    said = refusal(PrefixFile("manual", tmp_path / "none", True), tokenizer_of("plain"))
    assert said.startswith("--public-system manual: ")
    assert "none" in said


def test_a_file_that_cannot_be_used_ends_the_start_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator would wait minutes for a model to hear of a misspelt path."""
    arguments = ["--dev", "--listen", "127.0.0.1:0", "--model", str(tmp_path / "no-model.gguf")]
    assert serve.run([*arguments, "--public-prefix", f"manual={tmp_path / 'none'}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvledger serve: --public-prefix manual: ")
    assert "no-model" not in said


def test_what_leaves_no_room_for_an_answer_is_refused(file: Callable[..., PrefixFile]) -> None:
    """The request that computes it would be refused after the server has said it is ready."""
    tokenizer = tokenizer_of("plain")
    length = len(loaded(file(), tokenizer).tokens)
    assert f"it has {length} tokens, and {length - 1} is the most" in refusal(
        file(), tokenizer, length
    )
    loaded(file(), tokenizer, length + 1)


# --- Tokens ---------------------------------------------------------------------------------


def test_a_text_is_what_prompts_of_text_begin_with(
    file: Callable[..., PrefixFile], tokenizer: Tokenizer
) -> None:
    """No prompt would begin with the prefix's tokens."""
    prefix = loaded(file(), tokenizer)
    prompt = tokenizer.encode_text(TEXT + "\n\nWhat is on page 7?")
    assert prompt[: len(prefix.tokens)].tolist() == prefix.tokens.tolist()
    assert len(prefix.tokens) > 8


@pytest.mark.parametrize("name", ["plain", "trimming", "roles", "qwen", "mistral_names", "real"])
async def test_a_system_message_is_what_chats_begin_with(
    file: Callable[..., PrefixFile], tokenizer: Tokenizer, name: str
) -> None:
    """No chat would begin with the prefix's tokens, as far as its first message goes."""
    model = tokenizer if name == "real" else tokenizer_of(name)
    prefix = loaded(file(is_system=True), model)
    scopes = Scopes(KvIdentity("m", "c", "bf16"), lambda numbers: None, {"manual": prefix})
    encoder = PromptEncoder(model, 8)
    for following in (pb.ROLE_USER, pb.ROLE_ASSISTANT):
        if following == pb.ROLE_ASSISTANT and name not in ("plain", "roles", "real"):
            continue  # its template begins with the person
        request = cached(pb.ChatPrompt(), shared_scope="manual", shared_messages=1)
        request.chat.messages.add(role=pb.ROLE_SYSTEM, content=TEXT)
        request.chat.messages.add(role=following, content="What is on page 7?")
        prompt = await encoder.encode_shared(request)
        assert TEXT in written(model, prompt)
        wish = CacheWish(shared_scope="manual", shared_tokens=prompt.shared_tokens)
        told = scopes.claim(Tenant("a", 1), wish, prompt.tokens).hold()
        assert told.shared_tokens == prompt.shared_tokens > 8
    encoder.close()


@pytest.mark.parametrize("name", ["strict", "mistral", "backwards", "only_whole"])
def test_a_template_that_puts_the_system_message_elsewhere_is_refused(
    file: Callable[..., PrefixFile], name: str
) -> None:
    """A prefix would be computed that no chat begins with."""
    said = refusal(file(is_system=True), tokenizer_of(name))
    assert said.startswith(
        "--public-system manual: it cannot be written as a system message: the model's chat "
    )


def test_another_text_or_form_is_another_scope(file: Callable[..., PrefixFile]) -> None:
    """After a restart with a new text, or beside the other form, blocks would be mixed up."""
    tokenizer = tokenizer_of("plain")
    scopes = {
        loaded(file(text, is_system), tokenizer).scope
        for text in (TEXT, TEXT + "!")
        for is_system in (False, True)
    }
    assert len(scopes) == 4


def test_conversations_that_say_something_else_do_not_begin_with_it(
    file: Callable[..., PrefixFile],
) -> None:
    """Tools, which stand in the same place, would be computed as if they were not there."""
    tokenizer = tokenizer_of("qwen")
    prefix = loaded(file(is_system=True), tokenizer)
    with_tools = encoded(tokenizer, [TEXT, "b"], 1, [pb.Tool(name="f")])
    same = with_tools.tokens[: len(prefix.tokens)].tolist() == prefix.tokens.tolist()
    assert not same


# --- Computing them -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda mailbox: mailbox.refuse(), "public prefix manual: 3 tokens do not fit, "),
        (lambda mailbox: mailbox.refuse(lost=True), "public prefix manual: it could not be comp"),
        (
            lambda mailbox: mailbox.finish(receipt_of_waiting(EndReason.FAILED, 3, 0)),
            "public prefix manual: it could not be comp",
        ),
    ],
)
async def test_what_ends_the_start_is_named(end: Callable[[Mailbox], None], said: str) -> None:
    """Whose engine has died would buy memory."""
    flow: Any = SimpleNamespace()
    mailbox = Mailbox(range(1), MailboxLimits(tokens=10, stall_seconds=10.0), flow)
    end(mailbox)
    job = SimpleNamespace(name="manual", prompt=np.arange(3, dtype=np.int32), claim=None)
    scopes: Any = SimpleNamespace(start_jobs=lambda: [job])
    admission: Any = SimpleNamespace(enter=lambda *_, **__: SimpleNamespace(mailbox=mailbox))
    with pytest.raises(SettingRefused) as refused:
        await compute_public_prefixes(scopes, admission)
    assert str(refused.value).startswith(said)
