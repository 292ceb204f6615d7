"""The fuzz programs in Python, for a moment: that they find nothing, and that they would."""

from __future__ import annotations

import random
from typing import Any

import chat_templates
import driver
import model_folder
import pytest
from generate_requests import check_bytes, fuzz_server, fuzz_validator

from kvledger import limits
from kvledger.errors import FieldViolation, InvalidRequest, ModelRefused
from kvledger.models import safetensors_file
from kvledger.tokenizer.chat_template import ChatTemplate
from kvledger.v1 import generation_pb2 as pb


def test_no_model_folder_ends_the_start_with_anything_but_a_sentence() -> None:
    """A folder from a stranger would crash the server, hang it, or fill its memory (S21)."""
    outcomes = driver.drive("model_folder", model_folder.target, ["--runs", "120"])
    assert outcomes["refused"] > 40
    assert outcomes["loaded"] > 10, "what changes nothing that counts is served"


def test_no_chat_template_does_more_than_it_may() -> None:
    """A template from a stranger would run for ever, or a message speak for the system (B64)."""
    outcomes = driver.drive("chat_templates", chat_templates.target, ["--runs", "300"])
    assert outcomes["rendered"] > 50
    assert outcomes["template refused"] > 50


def test_every_message_is_taken_or_refused_by_the_table() -> None:
    """A number that no limit knows would reach the engine (S17)."""
    outcomes = fuzz_validator(3000, 0, 1)
    assert min(outcomes[name] for name in ("taken", "refused", "undecodable")) > 200


async def test_no_message_gets_anything_but_a_documented_status() -> None:
    """A stranger's message would end the server, or change somebody else's answer (S16, S18)."""
    outcomes = await fuzz_server(500, 0, 1)
    assert outcomes["INVALID_ARGUMENT"] > 100
    assert outcomes["OK"] + outcomes["CANCELLED"] > 30


def test_a_reader_that_trusts_its_file_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that reach no check would prove nothing."""
    monkeypatch.setattr(safetensors_file, "_are_sizes", lambda value: True)
    with pytest.raises(SystemExit):
        driver.drive("model_folder", model_folder.target, ["--runs", "250"])


def test_a_message_that_makes_a_control_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations without anything like a control token in them would prove nothing."""
    monkeypatch.setattr(
        "kvledger.tokenizer.control_tokens.ControlTokens.guarded", lambda self, text, mark: text
    )
    with pytest.raises((SystemExit, AssertionError)):
        driver.drive("chat_templates", chat_templates.target, ["--runs", "300"])


def test_a_missing_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that lie inside of every limit would prove nothing."""
    monkeypatch.setattr(limits, "_counted", lambda *arguments: iter(()))
    with pytest.raises(AssertionError):
        fuzz_validator(3000, 0, 1)


def test_a_refusal_that_quotes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence with a client's own words in it would pass."""

    def quoting(message: pb.GenerateRequest, vocabulary: int) -> None:
        raise InvalidRequest(FieldViolation("text", message.text))

    monkeypatch.setattr("generate_requests.check_generate", quoting)
    with pytest.raises(AssertionError):
        check_bytes(pb.GenerateRequest(text="canary4711").SerializeToString())


def test_a_run_that_takes_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work without an end would look like a slow machine."""
    monkeypatch.setattr(driver, "RUN_SECONDS_MAX", 0.01)

    def slow(chance: random.Random) -> str:
        return str(sum(range(3_000_000)))

    with pytest.raises(SystemExit):
        driver.drive("slow", slow, ["--runs", "1"])


def test_a_run_that_fills_the_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that claims to be large would be believed."""
    monkeypatch.setattr(driver, "GROWTH_BYTES_MAX", 32 << 20)
    kept: list[Any] = []

    def greedy(chance: random.Random) -> str:
        kept.append(bytearray(driver.peak_bytes() + (64 << 20)) if kept else None)
        return "kept"

    kept.append(None)
    with pytest.raises(SystemExit):
        driver.drive("greedy", greedy, ["--runs", "1"])


def test_a_template_that_raises_what_it_may_not_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that nobody thought of would come out of the sandbox unseen."""

    def broken(self: ChatTemplate, *arguments: Any) -> str:
        raise KeyError("inside")

    monkeypatch.setattr(ChatTemplate, "_rendered", broken)
    with pytest.raises((SystemExit, KeyError)):
        driver.drive("chat_templates", chat_templates.target, ["--runs", "50"])


def test_a_refused_model_is_one_sentence() -> None:
    """An operator would read pages."""
    with pytest.raises(AssertionError):
        driver.check_sentence(str(ModelRefused("two\nlines")))
