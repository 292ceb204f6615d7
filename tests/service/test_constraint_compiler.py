"""Compiling what clients send: bounded, judged once, and nobody's harm but the sender's."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from constrained import PERSON, allowed, lark, regex, schema
from scripted_model import VOCABULARY
from server_harness import tiny, until

from kvledger.constraints import compiler as module
from kvledger.constraints.compiler import ConstraintCompiler, Verdicts
from kvledger.constraints.source import ConstraintSource
from kvledger.constraints.worker import Verdict, frame, frame_length
from kvledger.errors import ConstraintsFull, ConstraintsUnavailable, InvalidRequest, QueueFull


@pytest_asyncio.fixture
async def compiler() -> AsyncIterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(tiny().tokenizer)
    yield compiler
    await compiler.stop()


async def reason(compiler: ConstraintCompiler, source: ConstraintSource, client: str = "a") -> str:
    """Why a source is refused; nothing if it is not."""
    try:
        await compiler.compile(source, 0, client)
    except InvalidRequest as error:
        (violation,) = error.violations
        assert violation.field == source.field
        return violation.reason
    return ""


async def test_what_is_compiled_can_be_followed(compiler: ConstraintCompiler) -> None:
    """The other process would say yes to what this one then cannot do."""
    constraint = await compiler.compile(regex("ab|cd"), 0, "a")
    assert allowed(constraint.start(), VOCABULARY) == {ord("a"), ord("c")}
    assert await reason(compiler, schema(PERSON)) == ""
    assert "not a regular expression" in await reason(compiler, regex("("))


async def test_a_source_is_judged_once(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request would pay for a process's look at what it has seen before."""
    judged: list[str] = []
    judge = module._Worker.judge

    async def counted(self: Any, vocabulary: Any, source: ConstraintSource) -> Verdict:
        judged.append(source.text)
        return await judge(self, vocabulary, source)

    monkeypatch.setattr(module._Worker, "judge", counted)
    for _ in range(3):
        await compiler.compile(regex("ab"), 0, "a")
        assert await reason(compiler, regex("(")) != ""
    assert judged == ["ab", "("]
    await compiler.compile(regex("ab"), 1, "a")
    assert judged == ["ab", "(", "ab"], "how fast it is would tell another tenant's secret"
    await compiler.compile(lark('start: "ab"\n'), 0, "a")
    assert len(judged) == 4


async def test_two_requests_share_no_grammar(compiler: ConstraintCompiler) -> None:
    """What breaks one of llguidance's copies breaks all of them."""
    first = await compiler.compile(regex("ab"), 0, "a")
    second = await compiler.compile(regex("ab"), 0, "a")
    assert first is not second
    assert first._matcher is not second._matcher


HOSTILE = {
    "a megabyte": ConstraintSource("json_schema", json.dumps({"enum": ["x" * 1_000_000]})),
    "many words": schema({"enum": [f"x{i}" * 3 for i in range(9000)]}),
    "many lists": schema({"enum": [[i, i + 1, i + 2] for i in range(6000)]}),
    "many properties": schema(
        {"properties": {f"k{i}": {"type": "string", "maxLength": i % 50 + 1} for i in range(2500)}}
    ),
    "a large divisor": schema({"type": "integer", "multipleOf": 999_983}),
    "branches": schema(
        {"allOf": [{"anyOf": [{"properties": {f"{n}{i}": {}}} for n in "ab"]} for i in range(40)]}
    ),
    "references that double": schema(
        {
            "$ref": "#/$defs/n0",
            "$defs": {
                f"n{i}": {"allOf": [{"$ref": f"#/$defs/n{i + 1}"}] * 2} if i < 40 else {}
                for i in range(41)
            },
        }
    ),
    "references that turn": schema(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "many times": schema({"type": "array", "minItems": 10**9, "items": {"type": "string"}}),
    "brackets": ConstraintSource("json_schema", "[" * 100_000),
    "objects": ConstraintSource("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "repetitions": regex("((((a{1000}){1000}){1000}){1000}b){1000}"),
    "optional": regex("(a?){5000}a{5000}"),
    "classes": regex(r"(\p{L}{1,500}|\w{1,500}\d{1,500}){1,500}"),
    "parentheses": regex("(" * 4000 + "a" + ")" * 4000),
    "groups": regex("(?:" * 2000 + "a" + "*)" * 2000),
    "intersections": lark("start: A\nA: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(20)) + "\n"),
    "terminals that double": lark(
        "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "a"\n'
    ),
    "many rules": lark(
        "start: " + " ".join(f"r{i}?" for i in range(3000)) + "\n"
        + "".join(f'r{i}: "a"\n' for i in range(3000))
    ),
    "nothing but itself": lark("start: start\n"),
    "nothing and itself": lark("start: a\na: a a a | \n"),
}  # fmt: skip


# Those that take their whole time are long runs; what stops them stops these.
SLOW = {"large divisor", "many lists", "many properties", "intersections"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.soak) if name.removeprefix("a ") in SLOW else name
        for name in HOSTILE
    ],
)
async def test_no_source_takes_more_than_its_time(compiler: ConstraintCompiler, name: str) -> None:
    """One request would keep the compiler, or end the server. It may be followed or refused."""
    await compiler.compile(regex("warm"), 0, "b")
    started = time.monotonic()
    why = await reason(compiler, HOSTILE[name])
    # The other process's limit, and the same work once more in this one.
    assert time.monotonic() - started < 4 * module.CLOCK_SECONDS
    assert "x0" not in why
    assert await reason(compiler, regex("x+"), "b") == "", "everything goes on"


async def test_the_sender_of_heavy_sources_waits_for_itself(compiler: ConstraintCompiler) -> None:
    """One client with hostile schemas would keep all the others from having theirs."""
    for client in "ab":
        await compiler.compile(regex(client), 0, client)
    heavy = [
        asyncio.create_task(
            reason(compiler, schema({"type": "integer", "multipleOf": 999_983 + i}), "hostile")
        )
        for i in range(module._WAITING_MAX + 1)
    ]
    await asyncio.sleep(0.1)
    with pytest.raises(QueueFull):
        await compiler.compile(regex("y"), 0, "hostile")
    for i in range(5):
        assert await reason(compiler, regex(f"z{{{i + 1}}}"), "polite") == ""
    assert sum(task.done() for task in heavy) < len(heavy) // 2, "it did not wait for them"
    for task in heavy:
        task.cancel()
    await asyncio.gather(*heavy, return_exceptions=True)


async def test_who_goes_away_costs_no_process(compiler: ConstraintCompiler) -> None:
    """Whoever sends and cancels would have a process started for each call."""
    await compiler.compile(regex("warm"), 0, "a")
    (worker,) = [each for each in compiler._workers if each._process is not None]
    assert worker._process is not None
    pid = worker._process.pid
    for i in range(5):
        task = asyncio.create_task(compiler.compile(regex(f"a{{{i + 1}}}"), 0, "a"))
        await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await reason(compiler, regex("b+")) == ""
    assert worker._process is not None
    assert worker._process.pid == pid


async def test_a_process_that_dies_is_replaced(compiler: ConstraintCompiler) -> None:
    """After one death no constraint could be compiled any more."""
    await compiler.compile(regex("warm"), 0, "a")
    (worker,) = [each for each in compiler._workers if each._process is not None]
    assert worker._process is not None
    os.kill(worker._process.pid, signal.SIGSTOP)
    task = asyncio.create_task(reason(compiler, regex("a+b")))
    await asyncio.sleep(0.05)
    os.kill(worker._process.pid, signal.SIGKILL)
    assert await task == ""
    assert await reason(compiler, regex("b+")) == ""


async def test_a_process_that_dies_while_idle_is_no_zombie(compiler: ConstraintCompiler) -> None:
    """It would keep its number, and look like a fault to whoever watches the processes."""
    await compiler.compile(regex("warm"), 0, "a")
    (worker,) = [each for each in compiler._workers if each._process is not None]
    assert worker._process is not None
    assert worker._watched is not None
    os.kill(worker._process.pid, signal.SIGKILL)
    await until(lambda: not os.path.exists(f"/proc/{worker._process.pid}"))
    assert worker._watched is None
    assert worker._process.returncode == -signal.SIGKILL
    assert await reason(compiler, regex("b+")) == ""


def watches() -> int:
    """File descriptors of this process that tell of another one's end."""
    count = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed in the meantime
            count += "pidfd" in os.readlink(each)
    return count


async def test_a_watch_on_a_process_ends_with_it(compiler: ConstraintCompiler) -> None:
    """Each process that is replaced would leave a file descriptor behind."""
    before = watches()
    for worker in compiler._workers:
        for _ in range(2):
            assert (await worker.judge(compiler._vocabulary, regex("a"))).refused is None
            assert watches() == before + 1
            await worker.stop()
            assert watches() == before


async def test_a_system_without_such_a_watch_does_without(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old kernel, or a sandbox, would keep a server from following constraints."""

    def refused(pid: int) -> int:
        raise PermissionError(pid)

    monkeypatch.setattr(os, "pidfd_open", refused)
    assert await reason(compiler, regex("a+")) == ""
    (worker,) = [each for each in compiler._workers if each._process is not None]
    assert worker._process is not None
    os.kill(worker._process.pid, signal.SIGKILL)
    assert await reason(compiler, regex("b+")) == ""


async def test_a_process_that_dies_of_everything_is_no_lasting_verdict(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema would be refused for ever because the machine was short of memory once."""
    ask = module._Worker._ask

    async def dying(self: Any, source: ConstraintSource) -> Verdict:
        if source.kind == "regex":
            self._process.kill()
        return await ask(self, source)

    with monkeypatch.context() as patch:
        patch.setattr(module._Worker, "_ask", dying)
        assert "nests too deeply, or takes more than" in await reason(compiler, regex("b+"))
    assert await reason(compiler, regex("b+")) == ""


async def test_memory_of_open_requests_has_a_limit(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that wait with large grammars would fill the memory."""
    source = schema({"enum": [f"x{i}" * 3 for i in range(4000)]})
    first = await compiler.compile(source, 0, "a")
    held = compiler._held.total
    assert held > 1_000_000
    monkeypatch.setattr(module, "_HELD_BYTES_MAX", held + 1000)
    with pytest.raises(ConstraintsFull, match=f"more than {held + 1000} bytes"):
        await compiler.compile(source, 0, "a")
    del first
    gc.collect()
    assert compiler._held.total == 0
    await compiler.compile(source, 0, "a")


async def test_a_tenant_that_fills_the_memory_refuses_no_other(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tenant's open requests would leave all others without constraints."""
    source = schema({"enum": [f"x{i}" * 3 for i in range(4000)]})
    flood = await compiler.compile(source, 1, "a")
    monkeypatch.setattr(module, "_HELD_BYTES_MAX", compiler._held.total)
    with pytest.raises(ConstraintsFull):
        await compiler.compile(source, 1, "a")
    assert allowed((await compiler.compile(regex("ab|cd"), 2, "a")).start(), VOCABULARY)
    assert await compiler.compile(source, 2, "a")
    del flood


async def test_without_the_extra_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller would get an error that nobody can act on, or the server not start."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.delitem(sys.modules, "kvledger.constraints.vocabulary")
    compiler = ConstraintCompiler(tiny().tokenizer)
    with pytest.raises(ConstraintsUnavailable, match=r"install the extra kvledger\[grammar\]"):
        await compiler.compile(regex("a"), 0, "a")
    await compiler.stop()


def test_verdicts_make_room_where_there_are_most() -> None:
    """One tenant's many sources would push out those of all others."""
    verdicts = Verdicts(4)
    ok = Verdict()
    verdicts.keep(1, b"one", ok)
    for i in range(10):
        verdicts.keep(2, bytes([i]), ok)
    assert verdicts.find(1, b"one") is ok
    assert verdicts.find(2, b"one") is None
    assert [i for i in range(10) if verdicts.find(2, bytes([i]))] == [7, 8, 9]
    verdicts.find(2, bytes([7]))
    verdicts.keep(2, b"new", ok)
    assert verdicts.find(2, bytes([7])) is ok, "what was asked for last stays"
    assert verdicts.find(2, bytes([8])) is None
    verdicts.keep(2, b"new", ok)
    assert verdicts.find(1, b"one") is ok


# What a child does instead of compiling, and what is said of it.
BREAKING = {
    "overflows": ("import ctypes; ctypes.string_at(0)", "nests too deeply"),
    "aborts": ("import os; os.abort()", "nests too deeply"),
    "fills": ("x = bytearray(2**30); x[::4096] = b'x' * 2**18", "takes more than 256 MiB"),
    "turns": ("while True: pass", "takes more than 1 s"),
    "sleeps": ("import time; time.sleep(60)", "takes more than 1 s"),
    "panics": ("raise BaseException(source.text)", "nests too deeply"),
}


@pytest.mark.parametrize("how", BREAKING)
def test_a_child_that_breaks_is_all_that_breaks(how: str) -> None:
    """Native code that fails would end the process that others wait for."""
    code, said = BREAKING[how]
    script = f"""
import kvledger.constraints.matcher as matcher, kvledger.constraints.worker as worker
compiling = matcher.compile_constraint
def breaking(tokenizer, source):
    if source.kind == "regex":
        {code}
    return compiling(tokenizer, source)
matcher.compile_constraint = breaking
worker.PROCESSOR_SECONDS, worker.CLOCK_SECONDS = 1, 3.0
worker.TOOK_TOO_LONG = worker.Verdict("takes more than 1 s", lasting=False)
worker.main()
"""
    compiler = ConstraintCompiler(tiny().tokenizer)
    sources = [regex("canary"), ConstraintSource("json_object")]
    questions = [json.dumps({"kind": each.kind, "text": each.text}).encode() for each in sources]
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=b"".join(map(frame, [compiler._vocabulary.pack(), *questions])),
        capture_output=True,
        timeout=60,
        check=True,
    )
    first, second = _verdicts(done.stdout)
    assert said in str(first.refused)
    assert first.lasting == ("takes more than 1 s" not in said)
    assert second.refused is None
    assert "canary" not in done.stdout.decode()


def _verdicts(output: bytes) -> list[Verdict]:
    found = []
    while output:
        length = frame_length(output[:4])
        found.append(Verdict(**json.loads(output[4 : 4 + length])))
        output = output[4 + length :]
    return found
