"""What the benchmarks of the front end count, and that they notice what would spoil them."""

from __future__ import annotations

import struct

import pytest
from bench.front import Turn, check_answer, report
from bench.http2 import frames, messages
from bench.load import CallFailed
from bench.stalled import Findings
from bench.stub_server import LockStep

from kvledger.v1 import generation_pb2


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame."""
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def answer(*tokens: int) -> list[bytes]:
    """An answer whose deltas have so many tokens each."""
    responses = [
        generation_pb2.GenerateResponse(accepted=generation_pb2.Accepted()),
        *(generation_pb2.GenerateResponse(delta=generation_pb2.Delta(tokens=n)) for n in tokens),
        generation_pb2.GenerateResponse(finished=generation_pb2.Finished()),
    ]
    return [response.SerializeToString() for response in responses]


def test_frames_are_found_and_the_one_that_is_not_whole_is_left() -> None:
    """Messages would be lost, or a stream never seen to end."""
    whole = frame(0, 1, 7, b"abc") + frame(6, 0, 0, b"12345678")
    for cut in range(len(frame(0, 0, 1, b"rest"))):
        buffer = whole + frame(0, 0, 1, b"rest")[:cut]
        found, end = frames(buffer)
        assert [(f[:3], buffer[f[3] : f[4]]) for f in found] == [
            ((0, 1, 7), b"abc"),
            ((6, 0, 0), b"12345678"),
        ]
        assert end == len(whole)


def test_messages_of_a_stream_are_told_apart() -> None:
    """Answers would be checked at the wrong borders, and a cut one taken for whole."""
    data = b"\0\0\0\0\x03abc" + b"\0\0\0\0\0" + b"\0\0\0\0\x01d"
    assert messages(data) == [b"abc", b"", b"d"]
    with pytest.raises(ValueError, match="1 bytes after"):
        messages(data[:-1])


def test_a_delta_of_two_tokens_spoils_the_comparison() -> None:
    """A service that sends fewer messages would look faster than it is."""
    check_answer(answer(1, 1, 1), 3)
    with pytest.raises(CallFailed, match="COALESCED"):
        check_answer(answer(1, 2, 1), 3)
    with pytest.raises(CallFailed, match="OTHER_MESSAGES"):
        check_answer(answer(1, 1), 3)


def test_the_report_has_the_median_ratio_and_its_bar() -> None:
    """A missed bar, or a server that only waited, would pass for a good figure."""
    bare = [Turn(1000, 1.0, 0.95)] * 3
    faster = [Turn(1000, 0.5, 0.5)] * 3
    kept = report([Turn(1000, seconds, seconds) for seconds in (1.25, 1.3, 2.0)], bare, faster)
    assert "service / bare 0.769 (0.500 to 0.800); bar 0.75: kept" in kept
    assert "service / bare on uvloop 0.385 (0.250 to 0.400)" in kept
    assert "VOID" not in kept
    missed = report([Turn(1000, 2.0, 2.0)] * 3, bare, faster)
    assert "0.500 (0.500 to 0.500); bar 0.75: MISSED" in missed
    assert "VOID: service" in report([Turn(1000, 1.0, 0.5)] * 3, bare, faster)


def test_lock_step_holds_a_step_back_until_all_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens would coalesce, or a run would hang without a word."""
    monkeypatch.setattr("bench.stub_server._PATIENCE", 0.01)

    class Plan:
        logits = 2

    lock = LockStep()
    lock.wait(Plan())  # type: ignore[arg-type]
    lock.fetched(1)
    with pytest.raises(RuntimeError, match="1 tokens are not fetched"):
        lock.wait(Plan())  # type: ignore[arg-type]
    lock.fetched(1)
    lock.wait(Plan())  # type: ignore[arg-type]


def test_memory_of_a_stalled_reader_is_the_most_less_the_least() -> None:
    """The bars would be held against other figures than those measured."""
    found = Findings([0.01, 0.02], [0.011, 0.02], least_bytes=1000, most_bytes=3000)
    assert found.bytes_each(200) == 10.0
    assert found.ratios == pytest.approx([1.1, 1.0])
