"""Readers that take nothing: their sequences pause, end in time, and nobody else notices."""

from __future__ import annotations

from http2_client import Http2Client
from server_harness import ServerHarness, request, serving

_LONG = {"text": "a", "max_tokens": 3000, "ignore_eos": True}
_ROOM = {"context_tokens": 4096, "blocks": 2000}


def planned_tokens(server: ServerHarness) -> int:
    """All tokens that steps have computed."""
    return sum(tokens for _, tokens in server.core.steps)


async def test_a_closed_window_pauses_the_sequence_and_an_open_one_resumes_it() -> None:
    """A reader that takes nothing would have everything computed, and kept, for nobody."""
    async with serving("--mailbox-tokens", "16", **_ROOM) as server:
        client = await Http2Client.call(server.address, request(**_LONG))
        await server.until(lambda: server.core.paused)
        stopped_at = planned_tokens(server)
        assert stopped_at < 1000
        plans = server.core.plans
        await server.answer(text="b", max_tokens=50)  # steps go on for others
        assert server.core.plans > plans
        assert planned_tokens(server) <= stopped_at + 60
        await client.open_window(1 << 20)
        await client.read_until_closed()
        assert client.trailers["grpc-status"] == "0"
        assert len(client.data) > 3000
        await server.require_all_free()
        (line,) = [x for x in server.log.of("request_finished") if x["output_tokens"] == 3000]
        assert line["stalled_ms"] > 0
        await client.close()


async def test_a_reader_that_never_comes_back_loses_its_sequence() -> None:
    """Its blocks would be lost to everybody until its connection breaks."""
    async with serving("--mailbox-tokens", "16", "--stall-timeout", "0.1", **_ROOM) as server:
        client = await Http2Client.call(server.address, request(**_LONG))
        await server.until(lambda: server.log.of("request_finished"))
        await server.require_all_free()
        assert server.log.reasons == ["cancelled"]
        assert (await server.answer(text="a", max_tokens=3)).text == "bcd"
        await client.open_window(1 << 20)  # who comes late is told why
        await client.read_until_closed()
        assert client.trailers["grpc-status"] == "10"
        assert "0.1 s" in client.trailers["grpc-message"]
        assert "kvledger-receipt-bin" in client.trailers
        await client.close()


async def test_many_readers_that_take_nothing_do_not_stop_one_that_reads() -> None:
    """A few bad clients would take the service from all."""
    async with serving("--mailbox-tokens", "16", **_ROOM) as server:
        clients = [await Http2Client.call(server.address, request(**_LONG)) for _ in range(6)]
        await server.until(lambda: len(server.core.paused) == 6)
        answer = await server.answer(text="a", max_tokens=200, ignore_eos=True)
        assert answer.reason == "LENGTH"
        assert len(answer.text) == 200
        for client in clients:
            await client.close()
        await server.require_all_free()
        assert sorted(server.log.reasons) == ["cancelled"] * 6 + ["length"]


async def test_a_paused_sequence_gives_its_blocks_to_who_needs_them() -> None:
    """Readers would be preempted again and again beside memory that nobody uses."""
    async with serving("--mailbox-tokens", "16", context_tokens=600, blocks=72) as server:
        slow = request(text="a" * 380, max_tokens=180, ignore_eos=True)
        client = await Http2Client.call(server.address, slow)
        await server.until(lambda: server.core.paused)
        answer = await server.answer(text="a" * 80, max_tokens=200, ignore_eos=True)
        assert len(answer.text) == 200
        assert answer.finished.receipt.preemptions == 0
        await client.open_window(1 << 20)
        await client.read_until_closed()
        assert client.trailers["grpc-status"] == "0"
        (line,) = [x for x in server.log.of("request_finished") if x["output_tokens"] == 180]
        assert line["preemptions"] == 1
        await client.close()
