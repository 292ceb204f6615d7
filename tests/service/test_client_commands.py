"""`kvledger generate` and `kvledger chat`: what they send, what they show, and how they end."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from kvledger.cli import main
from kvledger.cli.client import printable, readable, summary
from kvledger.v1 import generation_pb2, generation_pb2_grpc

Responses = Iterator[generation_pb2.GenerateResponse]


def delta(text: str) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(delta=generation_pb2.Delta(text=text))


def finished(samples: Sequence[str] = ()) -> generation_pb2.GenerateResponse:
    usage = generation_pb2.Usage(prompt_tokens=7, completion_tokens=11)
    receipt = generation_pb2.Receipt(peak_blocks=3, block_bytes=1_000_000)
    receipt.held.seconds, receipt.held.nanos = 2, 500_000_000
    receipt.decode_time.seconds = 5
    return generation_pb2.GenerateResponse(
        finished=generation_pb2.Finished(
            samples=[
                generation_pb2.Sample(index=index, text=text) for index, text in enumerate(samples)
            ],
            usage=usage,
            receipt=receipt,
        )
    )


class FakeService(generation_pb2_grpc.GenerationServiceServicer):
    """Remembers the requests, and answers as it is told to."""

    def __init__(self) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.refuse: Callable[[grpc.ServicerContext], None] = lambda context: None
        self.answers: list[str] = ["Hello", " you"]
        self.samples: list[str] = []

    def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Responses:
        self.requests.append(request)
        self.refuse(context)
        yield generation_pb2.GenerateResponse(accepted=generation_pb2.Accepted(request_id="1"))
        yield from map(delta, self.answers)
        yield finished(self.samples)

    @property
    def request(self) -> generation_pb2.GenerateRequest:
        """The one request there was."""
        (request,) = self.requests
        return request


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[FakeService, str]]:
    service = FakeService()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def service(running: tuple[FakeService, str]) -> FakeService:
    service = running[0]
    service.__init__()  # type: ignore[misc]
    return service


@pytest.fixture
def server(running: tuple[FakeService, str]) -> str:
    return running[1]


def type_in(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    """Standard input, from a pipe."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))


Captured = pytest.CaptureFixture[str]


def test_generate_shows_every_sample(
    service: FakeService, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers that were computed would not be shown, or run into each other."""
    service.answers = []
    service.samples = ["One.", "Two."]
    assert main(["generate", "--server", server, "--samples", "2", "Hi"]) == 0
    assert capsys.readouterr().out == "\n--- sample 0\nOne.\n--- sample 1\nTwo.\n"
    assert service.request.samples == 2
    assert service.request.output.final_only


@pytest.mark.parametrize("samples", ["0", "17", "many"])
def test_generate_refuses_a_wrong_number_of_samples(server: str, samples: str) -> None:
    """A typo would be sent to the server, or answered with a traceback."""
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--server", server, "--samples", samples, "Hi"])
    assert ended.value.code == 2


def test_generate_sends_the_prompt_as_a_message(
    service: FakeService, server: str, capsys: Captured
) -> None:
    """The model would be given something else than what was typed, or its answer not shown."""
    assert main(["generate", "--server", server, "What is it?"]) == 0
    (message,) = service.request.chat.messages
    assert (message.role, message.content) == (generation_pb2.ROLE_USER, "What is it?")
    assert not service.request.HasField("stop")
    assert not service.request.HasField("sampling")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("Hello you\n", "")


def test_raw_sends_a_text(service: FakeService, server: str) -> None:
    """--raw would be wrapped in the chat template all the same."""
    assert main(["generate", "--raw", "--server", server, "Once upon"]) == 0
    assert service.request.WhichOneof("prompt") == "text"
    assert service.request.text == "Once upon"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_options_arrive(
    service: FakeService, server: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option would be shown in the help and ignored; zero would be taken for "not given"."""
    type_in(monkeypatch, b"x\n")
    arguments = ["--max-tokens", "9", "--temperature", "0", "--top-p", "0.5", "--seed", "0"]
    assert main([command, "--server", server, *arguments]) == 0
    assert service.request.stop.max_tokens == 9
    assert service.request.sampling.HasField("temperature")
    assert service.request.sampling.temperature == 0.0
    assert service.request.sampling.top_p == 0.5
    assert service.request.sampling.HasField("seed")
    assert service.request.sampling.seed == 0


@pytest.mark.parametrize(
    ("option", "kind", "text"),
    [
        ("--json-schema", "json_schema", '{"type": "object"}'),
        ("--lark", "lark_grammar", 'start: "é"\n'),
        ("--regex", "regex", "[a-z]+"),
    ],
)
def test_what_the_answer_must_match_arrives(
    service: FakeService, server: str, tmp_path: Path, option: str, kind: str, text: str
) -> None:
    """The answer would be any text."""
    file = tmp_path / "constraint"
    file.write_text(text, "utf-8")
    given = text if option == "--regex" else str(file)
    assert main(["generate", "--server", server, option, given, "a"]) == 0
    assert service.request.constraint.WhichOneof("kind") == kind
    assert getattr(service.request.constraint, kind) == text


def test_a_file_that_cannot_be_read_is_told(
    service: FakeService, server: str, tmp_path: Path, capsys: Captured
) -> None:
    """A traceback would come, or an answer that matches nothing."""
    broken = tmp_path / "broken"
    broken.write_bytes(b"\xff")
    for path, why in ((tmp_path / "none", "No such file"), (broken, "is no text in UTF-8")):
        assert main(["generate", "--server", server, "--json-schema", str(path), "a"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("kvledger generate: --json-schema ")
        assert why in error
    assert service.requests == []


def test_the_largest_seed_arrives(service: FakeService, server: str) -> None:
    """A seed copied from somewhere would be refused or cut off."""
    assert main(["generate", "--server", server, "--seed", str(2**64 - 1), "x"]) == 0
    assert service.request.sampling.seed == 2**64 - 1


def test_a_prompt_may_come_from_standard_input(
    service: FakeService, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text in a pipe, with lines and broken bytes, would be cut or end in a traceback."""
    type_in(monkeypatch, b"one\ntwo \xff\xe6\x97\xa5\n")
    assert main(["generate", "--raw", "--server", server]) == 0
    assert service.request.text == "one\ntwo \ufffd\u65e5\n"


def test_broken_bytes_of_the_command_line_are_readable(service: FakeService, server: str) -> None:
    """An argument in another encoding would end in a traceback."""
    assert main(["generate", "--raw", "--server", server, "caf\udce9"]) == 0
    assert service.request.text == "caf\ufffd"
    assert readable("plain \u65e5") == "plain \u65e5"


HOSTILE = "a\x1b[2Jb\x07c\x9b31md\re\u202ef\u2028g\x00h\u200bi\x7fj\ufeffk\u2066l\x08"


def test_control_characters_are_not_shown(
    service: FakeService, server: str, capsys: Captured
) -> None:
    """A model's answer could clear the screen, type commands or turn text around."""
    service.answers = [HOSTILE[:9], HOSTILE[9:], "\n\ttab"]
    assert main(["generate", "--server", server, "x"]) == 0
    assert capsys.readouterr().out == "a[2Jbc31mdefghijkl\n\ttab\n"


def test_control_characters_of_an_error_are_not_shown(
    service: FakeService, server: str, capsys: Captured
) -> None:
    """A server that is not ours could do the same with its error."""
    service.refuse = lambda context: context.abort(grpc.StatusCode.INTERNAL, "bad\x1b[31mnews")
    assert main(["generate", "--server", server, "x"]) == 1
    assert capsys.readouterr().err == "kvledger generate: INTERNAL: bad[31mnews\n"


def test_what_people_write_is_shown() -> None:
    """Emoji, accents and other scripts would be taken for something dangerous."""
    family = "\U0001f469\u200d\U0001f469\u200d\U0001f466"
    text = f"Zo\u00eb \u65e5\u672c\u8a9e \u0627\u0644 {family} e\u0301"
    assert printable(text) == text


def test_a_receipt_is_shown_apart_from_the_answer(
    service: FakeService, server: str, capsys: Captured
) -> None:
    """A script that reads the answer would read the receipt as part of it."""
    assert main(["generate", "--receipt", "--server", server, "x"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "Hello you\n"
    assert shown.err == (
        "[7 + 11 tokens, 2.0 tokens/s; 3 KV blocks of 1000000 bytes at most, 2.500 MB x s held]\n"
    )


def test_a_receipt_without_time_divides_by_nothing() -> None:
    """An answer of one token would end in a traceback."""
    message = generation_pb2.Finished(usage=generation_pb2.Usage(completion_tokens=1))
    assert "tokens/s" not in summary(message)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_no_server_is_told_in_one_line(
    command: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person who forgot to start the server would see a traceback."""
    type_in(monkeypatch, b"hello\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # free again once it is closed
    assert main([command, "--server", f"127.0.0.1:{port}"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith(f"kvledger {command}: no server answers at 127.0.0.1:{port}")
    assert "kvledger serve --dev" in line


def test_a_server_that_shuts_down_is_no_missing_server(
    service: FakeService, server: str, capsys: Captured
) -> None:
    """A person would be told to start the server that has just answered."""

    def drain(context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata((("grpc-status-details-bin", b""),))
        context.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")

    service.refuse = drain
    assert main(["generate", "--server", server, "x"]) == 1
    assert capsys.readouterr().err == (
        "kvledger generate: UNAVAILABLE: the server is shutting down\n"
    )


def test_a_refusal_is_a_status_and_a_sentence(
    service: FakeService, server: str, capsys: Captured
) -> None:
    """A script would take a refused request for an empty answer."""
    service.refuse = lambda context: context.abort(
        grpc.StatusCode.INVALID_ARGUMENT, "stop.max_tokens: 0 tokens"
    )
    assert main(["generate", "--server", server, "--max-tokens", "0", "x"]) == 1
    assert "INVALID_ARGUMENT: stop.max_tokens: 0 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["", "a b", "nonsense:::", "caf\udce9:1", "host:99999:1"])
def test_an_address_that_is_none_is_told(address: str, capsys: Captured) -> None:
    """A misspelt address would end in a traceback."""
    assert main(["generate", "--server", address, "x"]) == 1
    assert "kvledger generate: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-tokens", "-1"],
        ["--max-tokens", str(2**32)],
        ["--max-tokens", "many"],
        ["--seed", str(2**64)],
        ["--seed", "-1"],
        ["--temperature", "warm"],
        ["--top-p", ""],
        ["--unheard-of"],
        ["--server"],
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(
    service: FakeService, server: str, command: str, arguments: list[str], capsys: Captured
) -> None:
    """A number that the contract cannot hold would end in a traceback."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--server", server, *arguments])
    assert ended.value.code == 2
    assert f"kvledger {command}: error: " in capsys.readouterr().err
    assert service.requests == []


def test_chat_sends_the_whole_conversation(
    service: FakeService, server: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """The model would not remember what it said, or not be given its instructions."""
    type_in(monkeypatch, b"first\n  second \xff \n\nnot sent\n")
    assert main(["chat", "--system", "Be brief.", "--server", server]) == 0
    first, second = service.requests
    assert [message.content for message in first.chat.messages] == ["Be brief.", "first"]
    said = [(message.role, message.content) for message in second.chat.messages]
    assert said == [
        (generation_pb2.ROLE_SYSTEM, "Be brief."),
        (generation_pb2.ROLE_USER, "first"),
        (generation_pb2.ROLE_ASSISTANT, "Hello you"),
        (generation_pb2.ROLE_USER, "second \ufffd"),
    ]
    assert capsys.readouterr().out == "Hello you\nHello you\n"


@pytest.mark.parametrize("typed", [b"", b"\n", b"   \nx\n"])
def test_chat_ends_with_an_empty_line_or_the_end(
    service: FakeService, server: str, monkeypatch: pytest.MonkeyPatch, typed: bytes
) -> None:
    """A conversation could not be left, or would end in a traceback."""
    type_in(monkeypatch, typed)
    assert main(["chat", "--server", server]) == 0
    assert service.requests == []


def test_chat_ends_with_the_server(
    service: FakeService, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation would go on without answers."""
    type_in(monkeypatch, b"one\ntwo\n")
    service.refuse = lambda context: context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
    assert main(["chat", "--server", server]) == 1
    assert len(service.requests) == 1


def status_without_a_reader(arguments: list[str]) -> int:
    """The exit status of a command whose standard output nobody reads any more."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with (
        open(write_end, "w", closefd=False) as pipe,
        contextlib.redirect_stdout(pipe),
    ):
        status = main(arguments)
        print("what follows goes nowhere", flush=True)
    os.close(write_end)
    return status


@pytest.mark.parametrize("arguments", [["generate", "x"], ["chat"]])
def test_a_reader_who_has_seen_enough_ends_an_answer_quietly(
    service: FakeService, server: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kvledger generate ... | head -1` would end in a traceback."""
    type_in(monkeypatch, b"hello\n")
    assert status_without_a_reader([*arguments, "--server", server]) == 141
    assert len(service.requests) == 1


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["models"]])
def test_a_reader_who_has_seen_enough_ends_a_list_quietly(arguments: list[str]) -> None:
    """What is printed at the very end would fail where nobody can catch it."""
    assert status_without_a_reader(arguments) == 141


def test_an_interrupt_ends_quietly(
    service: FakeService, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during an answer would end in a traceback."""

    def interrupt(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvledger.cli.generate.show", interrupt)
    assert main(["generate", "--server", server, "x"]) == 130


def test_an_unknown_command_is_refused(capsys: Captured) -> None:
    """A misspelt command would do something else, or nothing without a word."""
    assert main(["generat"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "no command 'generat'" in shown.err


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"], ["help"]])
def test_help_names_every_command(arguments: list[str], capsys: Captured) -> None:
    """A command that help does not name might as well not exist."""
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    for command in ("serve", "chat", "generate", "health", "models", "doctor"):
        assert f"kvledger {command} " in shown
