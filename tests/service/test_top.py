"""`kvledger top` in a terminal, before whole servers: what it shows, and how it ends."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest
from reuse_harness import TenantsServer, operated_tenants, prompt
from scripted_model import PATIENCE
from server_harness import serving
from terminal_harness import ANY, KVLEDGER, ScreenProgram, in_terminal
from top_messages import flooded_diagnosis, flooded_ledger

from kvledger.v1 import diagnosis_pb2, diagnosis_pb2_grpc, ledger_pb2, ledger_pb2_grpc

LIVE = re.compile(r"\d s old$", re.MULTILINE)
PLAIN = [sys.executable, "-c", "import sys; from kvledger.cli import main; sys.exit(main())"]


def is_live(text: str) -> bool:
    """Whether books and diagnosis are there, and nothing keeps new ones away."""
    return bool(LIVE.search(text)) and "\nlimits " in text and "NO ANSWER" not in text


def changed(code: str) -> tuple[str, ...]:
    """The command in a terminal, with something changed before it runs."""
    *python, program = KVLEDGER
    return (*python, program.replace("from kvledger.cli", f"{code}from kvledger.cli", 1))


class FakeServer(
    ledger_pb2_grpc.LedgerServiceServicer, diagnosis_pb2_grpc.DiagnosisServiceServicer
):
    """Says what it is told to, as no server of ours would."""

    def __init__(self) -> None:
        self.ledger = flooded_ledger()
        self.status: grpc.StatusCode | None = None
        self.is_silent = False
        self.asked: list[diagnosis_pb2.DiagnoseRequest] = []

    def WatchLedger(
        self, request: ledger_pb2.WatchLedgerRequest, context: grpc.ServicerContext
    ) -> Iterator[ledger_pb2.WatchLedgerResponse]:
        while context.is_active():
            if self.status is not None:
                context.abort(self.status, "as it was told to")
            if not self.is_silent:
                self.ledger.elapsed.seconds += 1
                yield ledger_pb2.WatchLedgerResponse(ledger=self.ledger)
            time.sleep(0.05)

    def GetLedger(
        self, request: ledger_pb2.GetLedgerRequest, context: grpc.ServicerContext
    ) -> ledger_pb2.GetLedgerResponse:
        return ledger_pb2.GetLedgerResponse(ledger=self.ledger)

    def Diagnose(
        self, request: diagnosis_pb2.DiagnoseRequest, context: grpc.ServicerContext
    ) -> diagnosis_pb2.DiagnoseResponse:
        self.asked.append(request)
        return flooded_diagnosis()


@contextmanager
def serving_fakes(address: str) -> Iterator[FakeServer]:
    """A fake server at a unix socket."""
    fake, server = FakeServer(), grpc.server(futures.ThreadPoolExecutor(4))
    ledger_pb2_grpc.add_LedgerServiceServicer_to_server(fake, server)  # type: ignore[no-untyped-call]
    diagnosis_pb2_grpc.add_DiagnosisServiceServicer_to_server(fake, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(address)
    server.start()
    try:
        yield fake
    finally:
        server.stop(None).wait()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path / 'o.sock'}"


@pytest.fixture
def fake(address: str) -> Iterator[FakeServer]:
    with serving_fakes(address) as server:
        yield server


@pytest.fixture
def top(fake: FakeServer, address: str) -> Iterator[ScreenProgram]:
    with in_terminal(*KVLEDGER, "top", "--server", address) as program:
        yield program


@asynccontextmanager
async def loaded_tenants(folder: Path) -> AsyncIterator[tuple[TenantsServer, list[str]]]:
    """A server whose tenant acme asks for more than there is, and how to look at it."""
    async with operated_tenants(folder) as (their, _):
        token = folder / "token"
        token.write_text(their.tenants.tokens["eye"])
        token.chmod(0o600)
        is_over = False

        async def ask_again_and_again(who: str, number: int) -> None:
            while not is_over:
                await their.ask(who, prompt(f"{who}{number}", 40), max_tokens=40)

        who = [*["acme"] * 6, "globex"]
        asking = [asyncio.create_task(ask_again_and_again(w, n)) for n, w in enumerate(who)]
        try:
            shown = ["--server", str(their.server.server.operators_address)]
            yield their, [*shown, "--token-file", str(token)]
        finally:
            is_over = True
            await asyncio.gather(*asking)


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (120, 40)])
async def test_it_shows_a_real_server(tmp_path: Path, columns: int, lines: int) -> None:
    """Its figures would be those of messages that no server sends."""
    async with loaded_tenants(tmp_path) as (their, shown):
        command = (*KVLEDGER, "top", *shown, "--interval", "0.1")
        with in_terminal(*command, columns=columns, lines=lines) as top:
            text = await top.until(
                lambda t: (
                    is_live(t)
                    and re.search(r"^memory +[1-9]", t, re.MULTILINE)
                    and re.search(r"^A acme .*\nG globex ", t, re.MULTILINE)
                )
            )
            rows = text.splitlines()
            assert len(rows) == lines
            assert rows[0].startswith(f"kvledger top  {their.server.model.id} ")
            (memory,) = [row for row in rows if row.startswith("memory ")]
            assert re.match(r"memory +\d+% of 111 kB █", memory)
            states = re.search(
                r"held (\d+) .* reserved (\d+) .* releasing (\d+) .* cached (\d+) .* free (\d+)",
                text,
            )
            assert states is not None
            assert sum(map(int, states.groups())) == 24
            mapped = [row for row in rows if re.fullmatch(r"[AGag~.]{24}", row)]
            assert len(mapped) == 1
            assert re.search(r"requests +\d+ running in \d of 8 places, ", text)
            assert re.search(r"decode +\d+% +[\d.]+ +[\d.]+ m?s +[\d.]+ m?s +[\d.]+", text)
            assert re.search(r"^lost +refused 0, preempted ", text, re.MULTILINE)
            assert rows[-1].startswith(" q quit   s sort: memory")
            top.press("s")
            await top.until(lambda t: "sort: cached" in t)
            top.press("?")
            await top.until(lambda t: "The waterline: blocks held" in t)
            top.press("q")
            assert await top.end() == 0
            assert top.is_given_back


async def test_it_goes_on_when_the_server_comes_back(address: str) -> None:
    """Whoever watches a restart would have to start it again, or look at an old picture."""
    with in_terminal(*KVLEDGER, "top", "--server", address, "--interval", "0.1") as top:
        text = await top.until(lambda t: "NO ANSWER, asked again every " in t)
        assert f"no server answers at {address}" in text.replace("\n", " ")
        with serving_fakes(address):
            await top.until(lambda t: is_live(t) and "A acme FLOODS" in t)
        text = await top.until(lambda t: "NO ANSWER, asked again every " in t)
        assert "A acme FLOODS" in text, "what was so is still there"
        await top.until(lambda t: re.search(r"^kvledger top .* [1-9]\.\d s old$", t, re.MULTILINE))
        with serving_fakes(address):
            await top.until(is_live)
        top.press("q")
        assert await top.end() == 0


async def test_a_server_that_falls_silent_is_told(fake: FakeServer, address: str) -> None:
    """A machine that went without a word would leave its last picture on the screen for ever."""
    impatient = "from kvledger.cli import top_source; top_source._PATIENCE = 0.5; "
    with in_terminal(*changed(impatient), "top", "--server", address, "--interval", "0.1") as top:
        await top.until(is_live)
        fake.is_silent = True
        text = await top.until(lambda t: "NO ANSWER" in t)
        assert "nothing came from unix:" in " ".join(text.split())
        fake.is_silent = False
        await top.until(is_live)


async def test_the_clients_address_is_explained() -> None:
    """The first thing that everybody tries would end in a status code."""
    async with serving() as server:
        with in_terminal(*KVLEDGER, "top", "--server", server.address) as top:
            assert await top.end() == 1
            assert top.is_given_back
            said = "".join(top.text.split())  # the terminal breaks lines within words
            assert f"kvledgertop:{server.address}doesnotshowthebooks;askwhere" in said
            assert "operatorsarelistenedto" in said


async def test_a_refusal_later_ends_it_too(fake: FakeServer, top: ScreenProgram) -> None:
    """Whose token was revoked would ask on for ever."""
    await top.until(is_live)
    fake.status = grpc.StatusCode.UNAUTHENTICATED
    assert await top.end() == 1
    assert top.is_given_back
    assert "UNAUTHENTICATED: as it was told to" in top.text


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
async def test_signals_leave_the_terminal_as_it_was(
    top: ScreenProgram, number: signal.Signals, status: int
) -> None:
    """The operator's shell would show no input, at the moment it is needed."""
    await top.until(is_live)
    assert top.attributes() != top.before, "keys come one by one"
    if number == signal.SIGINT:
        top.press("\x03")
    else:
        top.process.send_signal(number)
    assert await top.end() == status
    assert top.is_given_back


async def test_an_exception_leaves_the_terminal_as_it_was(fake: FakeServer, address: str) -> None:
    """A fault of ours would take the operator's shell with it."""
    broken = "from kvledger.top import view; view.memory = None; "
    with in_terminal(*changed(broken), "top", "--server", address) as top:
        assert await top.end() == 1
        assert top.is_given_back
        assert "TypeError" in top.text


async def test_it_can_be_stopped_and_go_on(fake: FakeServer, address: str) -> None:
    """Ctrl-Z would leave a shell without echo, and fg a screen without a picture."""
    if (shell := shutil.which("bash")) is None:
        pytest.skip("no bash, which has job control")
    with in_terminal(*ANY, shell, "--norc", "--noprofile", "-i", PS1="READY> ") as session:
        await session.until(lambda t: "READY>" in t)
        code = PLAIN[2].replace("'", "")
        session.press(f"{sys.executable} -c '{code}' top --server {address}\n")
        await session.until(is_live)
        session.press("\x1a")
        await session.until(lambda t: "Stopped" in t and "READY>" in t)
        session.press("echo a''b\n")
        await session.until(lambda t: "\nab\n" in t)
        session.press("fg\n")
        # The picture takes all of the screen, which the emulator keeps only one of.
        await session.until(lambda t: is_live(t) and "READY>" not in t)
        session.press("q")
        await session.until(lambda t: "READY>" in t)
        session.press("exit\n")
        assert await session.end() == 0


async def test_it_follows_the_size_of_the_terminal(top: ScreenProgram) -> None:
    """Half of the picture would be out of sight, or half of the room empty."""
    await top.until(is_live)
    for columns, lines in ((120, 40), (60, 16), (100, 30)):
        top.resize(columns, lines)
        text = await top.until(
            lambda t, last=lines: is_live(t) and t.split("\n")[last - 1].startswith(" q quit")
        )
        assert max(map(len, text.splitlines())) <= columns
    top.resize(30, 5)
    await top.until(lambda t: "kvledger top needs 60 x 16" in t.replace("\n", ""))
    top.resize(80, 24)
    await top.until(is_live)


async def test_a_name_does_nothing_to_the_terminal(fake: FakeServer, top: ScreenProgram) -> None:
    """Whoever names a tenant would move the operator's cursor, or retitle the window."""
    name = "\x1b]0;owned\x07\x1b[2J\x1b[1;1Hroot# \u202e\u05d0\r\nx"
    fake.ledger.tenants[1].name = name
    text = await top.until(lambda t: "\\x1b]0;" in t)
    assert top.screen.title == ""
    assert text.splitlines()[0].startswith("kvledger top ")
    assert b"\x1b]0;" not in top.output
    assert "\u202e" not in top.output.decode()
    await top.until(is_live)


async def test_no_color_is_honoured(fake: FakeServer, address: str) -> None:
    """Who cannot bear or see colours would get them all the same."""
    coloured = re.compile(rb"\x1b\[[0-9;]*\b(3[0-7]|4[0-7]|9[0-7])\b[0-9;]*m")
    with in_terminal(*KVLEDGER, "top", "--server", address) as top:
        await top.until(is_live)
        assert coloured.search(top.output)
    with in_terminal(*KVLEDGER, "top", "--server", address, NO_COLOR="1") as top:
        await top.until(is_live)
        assert not coloured.search(top.output)


async def printed(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """What `kvledger top` writes into a pipe."""
    variables = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return await asyncio.to_thread(
        subprocess.run,
        [*PLAIN, "top", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE,
        env={**variables, "PYTHONUTF8": "1", "TERM": "xterm", **env},
        check=False,
    )


async def test_a_pipe_gets_one_picture_as_text(fake: FakeServer, address: str) -> None:
    """Scripts would get escape sequences, or wait without end."""
    done = await printed("--server", address)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("kvledger top  smollm2-135m-instruct 0.1.0  up 3 h 12 min")
    assert "\x1b" not in done.stdout
    for name in ("acme FLOODS", "globex", "initech", "group team", "umbrella-production"):
        assert f" {name} " in done.stdout
    assert "limits    flooding_tenant 92%" in done.stdout, "there is room for all findings"
    # First it must be known how long the server has served.
    asked = [(each.interval.seconds, each.against.seconds) for each in fake.asked]
    assert asked == [(30, 0), (30, 300)]
    old = {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    once = await printed("--server", address, "--once", **old)
    assert once.stdout.isascii()
    assert "acme FLOODS" in once.stdout


async def test_once_in_a_terminal_leaves_no_screen(fake: FakeServer, address: str) -> None:
    """What was asked for once would vanish with the other screen."""
    for extra, env in ((("--once",), {}), ((), {"TERM": "dumb"})):
        with in_terminal(*KVLEDGER, "top", "--server", address, *extra, **env) as top:
            assert await top.end() == 0
            assert b"\x1b[?1049h" not in top.output
            assert b"acme FLOODS" in top.output


async def test_once_says_why_there_is_nothing(address: str) -> None:
    """A script would take an empty picture for a quiet server."""
    done = await printed("--server", address, "--once")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"no server answers at {address}" in done.stderr
    wrong = await printed("--server", address, "--interval", "0")
    assert wrong.returncode == 2
    assert "0 is not from 0.1 to 3600" in wrong.stderr


def test_it_does_not_import_what_takes_seconds() -> None:
    """An operator would wait for torch before seeing anything."""
    code = "import sys, kvledger.cli.top; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
