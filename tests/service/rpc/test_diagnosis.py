"""DiagnosisService in a whole server: what it says of a load, and to whom."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
import pytest_asyncio
from engine_harness import without_forecast
from google.protobuf import duration_pb2
from reuse_harness import BLOCK, TenantsServer, operated_tenants, prompt
from scripted_model import PATIENCE, Gate
from server_harness import Answer, refusal_of, until
from tenants_harness import bearer

from kvledger.cli import main
from kvledger.rpc.translation import told_wait
from kvledger.v1 import diagnosis_pb2 as pb
from kvledger.v1 import diagnosis_pb2_grpc, ledger_pb2, ledger_pb2_grpc

T = TypeVar("T")

LAST = ("longest", "ms", "fit", "helps")
PARTS = ("queued", "preempted", "prefill", "decode", "delayed", "stalled")


def stub_of(channel: grpc.aio.Channel) -> Any:
    return diagnosis_pb2_grpc.DiagnosisServiceStub(channel)  # type: ignore[no-untyped-call]


async def books_of(channel: grpc.aio.Channel, shown: Any) -> ledger_pb2.Ledger:
    stub: Any = ledger_pb2_grpc.LedgerServiceStub(channel)  # type: ignore[no-untyped-call]
    asked = ledger_pb2.GetLedgerRequest()
    ledger: ledger_pb2.Ledger = (await stub.GetLedger(asked, metadata=shown)).ledger
    return ledger


async def let_through(gate: Gate, reading: Coroutine[Any, Any, T]) -> T:
    """What is read between two steps: one is let through once it has been asked for."""
    task = asyncio.create_task(reading)
    await asyncio.sleep(0.1)
    gate.let(1)
    return await task


class Clinic:
    """The two ways to ask a server of tenants."""

    def __init__(self, their: TenantsServer, operators: grpc.aio.Channel) -> None:
        self.their = their
        self.operators = stub_of(operators)
        self.clients = stub_of(their.server.channel)

    def shown(self, who: str) -> Any:
        return bearer(self.their.tenants.tokens[who])

    async def diagnosis(self, who: str = "ops", **fields: Any) -> pb.DiagnoseResponse:
        asked = pb.DiagnoseRequest(**fields)
        answer = await self.operators.Diagnose(asked, metadata=self.shown(who), timeout=PATIENCE)
        assert isinstance(answer, pb.DiagnoseResponse)
        return answer

    async def explained(self, who: str, request_id: str) -> pb.ExplainResponse:
        stub = self.operators if who in ("ops", "eye") else self.clients
        asked = pb.ExplainRequest(request_id=request_id)
        answer = await stub.Explain(asked, metadata=self.shown(who), timeout=PATIENCE)
        assert isinstance(answer, pb.ExplainResponse)
        return answer


@pytest_asyncio.fixture
async def clinic(tmp_path: Path) -> AsyncIterator[Clinic]:
    async with operated_tenants(tmp_path) as (their, channel):
        yield Clinic(their, channel)


@pytest_asyncio.fixture
async def crowded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Clinic]:
    """Of a server that lets in more than it can keep."""
    without_forecast(monkeypatch)
    async with operated_tenants(tmp_path) as (their, channel):
        yield Clinic(their, channel)


async def test_it_counts_what_happened(clinic: Clinic) -> None:
    """An operator would be told of another server's traffic."""
    their = clinic.their
    ids = prompt("same", 3 * BLOCK)
    for _ in range(3):
        await their.ask("acme", ids, max_tokens=5)
    await their.ask("globex", prompt("other", 20), max_tokens=5)
    now = (await clinic.diagnosis("eye")).now
    assert now.traffic.requests == 4
    assert dict(now.traffic.prompt_tokens) == {"acme": 9 * BLOCK, "globex": 20}
    # The second and third time all but the last token could be reused, and were.
    whole = 2 * (3 * BLOCK - 1)
    assert now.traffic.reusable == pytest.approx(whole / (9 * BLOCK + 20))
    assert now.traffic.reused == pytest.approx(whole / (9 * BLOCK + 20))
    assert now.prefill.tokens == 9 * BLOCK + 20 - whole
    assert now.decode.tokens == 4 * 4  # the first token of each comes with its prompt
    assert now.decode.seconds > 0
    assert now.prefill.seconds > 0
    # What steps take, for simulations: over all of them it comes to the time of the phase.
    fit, decode = now.decode.fit, now.decode
    keys = decode.context * decode.tokens
    parts = (
        fit.fixed_seconds * decode.steps,
        fit.token_seconds * decode.tokens,
        fit.key_seconds * keys,
    )
    assert sum(parts) == pytest.approx(decode.seconds)
    assert now.prefill.HasField("fit")
    assert max(decode.steps, now.prefill.steps) <= now.steps
    assert now.steps <= decode.steps + now.prefill.steps
    assert now.setup.slots_per_block == BLOCK
    assert now.busy > 0
    assert not now.HasField("peaks"), "nobody measured this machine"
    assert now.predictions
    assert now.summary


async def test_whoever_began_waits_no_longer(clinic: Clinic) -> None:
    """Requests that came together would be said to wait until the first of them ends."""
    gate, came = clinic.their.server.gate(), time.monotonic()
    both = ("acme", "globex")
    asked = [
        asyncio.create_task(clinic.their.ask(who, prompt(who, 30), max_tokens=60)) for who in both
    ]
    # How long they waited until they began depends on the machine; then they run for far longer.
    for done in range(6):
        await until(lambda: gate.arrived > done)  # noqa: B023
        gate.let(1)
    await until(lambda: gate.arrived > 6)
    await asyncio.sleep(0.1 + 4 * (time.monotonic() - came))
    now = (await let_through(gate, clinic.diagnosis())).now
    gate.open()
    await asyncio.gather(*asked)
    assert now.traffic.requests == 2
    assert 0 < now.traffic.waiting < 0.5


async def test_no_less_could_be_reused_than_was(clinic: Clinic) -> None:
    """Parts of blocks are reused too: a reader would find more than all of it."""
    ids = prompt("same", BLOCK + 2)
    await clinic.their.ask("acme", [*ids, 1], max_tokens=12)
    await clinic.their.ask("acme", [*ids[: BLOCK - 1], 99], max_tokens=2)
    traffic = (await clinic.diagnosis()).now.traffic
    assert traffic.reused > 0
    assert traffic.reusable >= traffic.reused


async def test_a_pool_that_is_too_small_is_found_in_a_real_server(crowded: Clinic) -> None:
    """The diagnosis would only know made-up figures."""
    their = crowded.their
    answers: list[Answer] = []
    for _ in range(3):
        asked = [
            their.ask(who, prompt(f"{who}{number}", 40), max_tokens=60)
            for number in range(3)
            for who in ("acme", "globex")
        ]
        answers += await their.server.at_once(*asked)
    now = (await crowded.diagnosis()).now
    assert "pool" in [finding.name for finding in now.findings]
    pool = next(finding for finding in now.findings if finding.name == "pool")
    assert "--kv-bytes" in pool.remedy
    assert pool.in_vain
    assert set(now.preemptions) <= {"for_another", "for_itself", "paused"}
    preempted = sum(their.server.core.core.step_books.preemptions.tolist())
    assert sum(now.preemptions.values()) == preempted > 0
    # What each was preempted for: exactly to operators, without others to its client.
    whys = []
    for answer in answers:
        if answer.finished.receipt.preemptions:
            seen = await crowded.explained("ops", answer.accepted.request_id)
            whys.append(seen.preemption_reasons)
            told = await crowded.explained(seen.tenant, answer.accepted.request_id)
            assert told.preemption_reasons == answer.finished.receipt.preemption_reasons
            assert (told.preemption_reasons.other_tenant, told.preemption_reasons.stepped_back) == (
                0,
                0,
            )
            assert told.recomputed_tokens == answer.finished.receipt.recomputed_tokens
    assert any(why.other_tenant + why.stepped_back for why in whys)
    assert all(why.shared_capacity == why.other_tenant + why.stepped_back for why in whys)


async def test_it_says_who_is_there_now(tmp_path: Path) -> None:
    """An operator could not see the queue, nor which server this is."""
    one_place = ("--max-sequences", "1")
    async with operated_tenants(tmp_path, *one_place) as (their, channel):
        clinic = Clinic(their, channel)
        await their.changed(
            lambda: their.tenants.change(
                lambda values: values["tenants"]["globex"].update(limits={"running_max": 1})
            )
        )
        gate = their.server.gate()
        asked = []
        for who in ("acme", "acme", "globex", "globex"):
            asked.append(asyncio.create_task(their.ask(who, prompt(who, 20))))
            arrived = len(asked)
            await until(lambda: len(their.server.server._admission.open_requests) == arrived)  # noqa: B023
            await until(lambda: gate.arrived == 1)
        present = (await let_through(gate, clinic.diagnosis("eye"))).present
        ledger = await let_through(gate, books_of(channel, clinic.shown("eye")))
        assert present.served.ToNanoseconds() > 0
        assert (present.waiting_requests, present.waiting_tokens) == (2, 40)
        assert (present.held_requests, present.paused_requests) == (1, 0)
        assert (present.running_requests, present.running_sequences) == (1, 1)
        queued = {tenant.name: tenant.queued_requests for tenant in ledger.tenants}
        assert (queued["acme"], queued["globex"]) == (1, 1)
        gate.open()
        await asyncio.gather(*asked)
        assert (await clinic.diagnosis()).present.waiting_requests == 0


async def test_an_interval_is_held_against_an_earlier_one(clinic: Clinic) -> None:
    """Nobody could tell what changed since yesterday."""
    await asyncio.sleep(0.1)
    response = await clinic.diagnosis(against=duration_pb2.Duration(nanos=50_000_000))
    assert response.HasField("before")
    assert list(response.changes) == ["Nothing that is counted differs by a quarter."]


async def test_what_was_before_the_start_is_not_made_up(clinic: Clinic) -> None:
    """A young server would be held against a day without traffic."""
    response = await clinic.diagnosis(against=duration_pb2.Duration(seconds=86_400))
    assert not response.HasField("before")
    (said,) = response.changes
    assert said.startswith("Nothing is kept of 86400 s ago: the server began ")


@pytest.mark.parametrize("field", ["interval", "against"])
@pytest.mark.parametrize("seconds", [-1, 86_401])
async def test_an_interval_has_limits(clinic: Clinic, field: str, seconds: int) -> None:
    """A wrong one would be answered with nonsense."""
    asked = {field: duration_pb2.Duration(seconds=seconds)}
    refusal = await refusal_of(clinic.diagnosis(**asked))
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert list(refusal.violations) == [field]


async def test_a_requests_time_is_split_and_adds_up(clinic: Clinic) -> None:
    """Somebody looks for the slow part in the wrong place."""
    answer = await clinic.their.ask("acme", prompt("a", 30), max_tokens=8)
    receipt = answer.finished.receipt
    explained = await clinic.explained("ops", answer.accepted.request_id)
    assert explained.tenant == "acme"
    parts = {name: getattr(explained, name).ToNanoseconds() for name in PARTS}
    assert sum(parts.values()) == explained.total.ToNanoseconds()
    assert parts["prefill"] + parts["decode"] + parts["delayed"] == (
        receipt.prefill_time.ToNanoseconds() + receipt.decode_time.ToNanoseconds()
    )
    assert parts["stalled"] == receipt.stall_time.ToNanoseconds()
    assert told_wait(parts["queued"]) == receipt.queue_time.ToNanoseconds()
    assert parts["decode"] > 0
    assert explained.output_tokens == 8
    assert " of its " in explained.summary


async def test_a_client_hears_of_its_own_requests_only(clinic: Clinic) -> None:
    """A tenant could ask about what others sent (S06, S08)."""
    answer = await clinic.their.ask("acme", prompt("a", 30), max_tokens=4)
    request_id = answer.accepted.request_id
    own = await clinic.explained("acme", request_id)
    assert own.tenant == ""
    assert own.delayed.ToNanoseconds() == 0, "what others take is not told"
    receipt = answer.finished.receipt
    assert own.prefill == receipt.prefill_time
    assert own.decode == receipt.decode_time
    exact = await clinic.explained("ops", request_id)
    assert own.queued == receipt.queue_time
    assert own.queued.ToNanoseconds() == told_wait(exact.queued.ToNanoseconds())
    parts = (getattr(own, name).ToNanoseconds() for name in PARTS)
    assert sum(parts) == own.total.ToNanoseconds()
    refusals = [
        await refusal_of(clinic.explained("globex", asked))
        for asked in (request_id, "0" * 32, "", "x" * 5000)
    ]
    assert {refusal.code for refusal in refusals} == {grpc.StatusCode.NOT_FOUND}
    assert len({refusal.everything() for refusal in refusals}) == 1
    assert refusals[0].reason == "REQUEST_UNKNOWN"


async def test_a_tenant_made_anew_hears_nothing_of_the_one_before(clinic: Clinic) -> None:
    """Whoever gets a name gets the requests of whom had it."""
    their = clinic.their
    answer = await their.ask("acme", prompt("a", 30), max_tokens=4)

    def anew() -> None:
        their.tenants.remove("acme")
        their.tenants.add("acme")

    await their.changed(anew)
    refusal = await refusal_of(clinic.explained("acme", answer.accepted.request_id))
    assert refusal.reason == "REQUEST_UNKNOWN"


async def test_clients_get_no_diagnosis(clinic: Clinic) -> None:
    """A tenant could read what all others do."""
    assert (await refusal_of(clinic.diagnosis("acme"))).reason == "ROLE_MISSING"
    call = clinic.their.server.channel.unary_unary("/kvledger.v1.DiagnosisService/Diagnose")
    refusal = await refusal_of(call(b"", metadata=clinic.shown("acme"), timeout=PATIENCE))
    assert refusal.code == grpc.StatusCode.UNIMPLEMENTED


async def test_the_commands_print_it(
    clinic: Clinic, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Operators read sentences, not messages."""
    answer = await clinic.their.ask("acme", prompt("a", 30), max_tokens=8)
    token = tmp_path / "token"
    token.write_text(clinic.their.tenants.tokens["ops"])
    token.chmod(0o600)
    address = clinic.their.server.server.operators_address
    shown = ["--server", str(address), "--token-file", str(token)]
    assert await asyncio.to_thread(main, ["diagnose", *shown, "--against", "60"]) == 0
    said = capsys.readouterr().out
    assert "A step ran" in said
    assert "What changes would do" in said
    assert "Since then:" in said
    assert await asyncio.to_thread(main, ["diagnose", *shown, "--json"]) == 0
    earlier = tmp_path / "before.json"
    earlier.write_text(capsys.readouterr().out)
    asked = ["--rate", "5", "--requests", "5", "--prompt", "20", "--output", "5", "--spread", "0"]
    simulate = ["simulate", "--costs", str(earlier), "--context", "200", *asked]
    assert await asyncio.to_thread(main, simulate) == 0
    assert ["answered", "5"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    against = ["--against", str(earlier), "--if", "max-sequences=2", "--if", "kv-format=bf16"]
    assert await asyncio.to_thread(main, ["diagnose", *shown, *against]) == 0
    said = capsys.readouterr().out
    assert "Nothing that is counted differs by a quarter." in said
    table = said[said.index("What changes would do") :].splitlines()
    assert table[1].split() == ["step", "ms", "tokens/s", "prompt", "tok/s", "requests/s", *LAST]
    assert table[2].split()[0] == "now"
    assert any(line.startswith("  --max-sequences 2 ") for line in table)
    assert max(map(len, table)) <= 110
    explain = ["explain", answer.accepted.request_id, *shown]
    assert await asyncio.to_thread(main, explain) == 0
    said = capsys.readouterr().out
    assert "total" in said
    assert "8 made" in said
    assert await asyncio.to_thread(main, ["explain", "0" * 32, *shown]) == 1
    assert "request_id: no request" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--if", "batch=3"], "a name of more-sequences"),
        (["--if", "threads"], "is not NAME=VALUE"),
        (["--if", "threads=-2"], "not a whole number above 0"),
        (["--if", f"kv-blocks={1 << 32}"], "not a whole number above 0"),
        (["--against", "nowhere.json"], "no file that can be read"),
        (["--against", __file__], "kvledger diagnose --json"),
        (["--against", "-5"], "is not from 1 to 86400"),
    ],
)
def test_the_command_says_what_it_does_not_understand(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped option would be answered with something else."""
    with pytest.raises(SystemExit):
        main(["diagnose", *options])
    assert sentence in capsys.readouterr().err


async def test_a_change_that_is_asked_about_is_predicted(clinic: Clinic) -> None:
    """Only the usual changes could be looked at before they are made."""
    for _ in range(3):
        await clinic.their.ask("acme", prompt("some", 30), max_tokens=10)
    asked = [pb.Change(max_sequences=3), pb.Change(kv_format="bf16"), pb.Change(threads=77)]
    now = (await clinic.diagnosis(what_if=asked)).now
    first, second, *_ = now.predictions
    assert (first.change, first.what.max_sequences) == ("--max-sequences 3", 3)
    assert (second.change, second.what.kv_format) == ("KV in bf16", "bf16")
    assert first.HasField("requests_per_second")
    # Nobody measured this machine with so many threads.
    assert "threads" not in [each.what.WhichOneof("what") for each in now.predictions]


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        ([pb.Change()], "what_if[0]"),
        ([pb.Change(replicas=2), pb.Change(kv_blocks=0)], "what_if[1].kv_blocks"),
        ([pb.Change(kv_format="")], "what_if[0].kv_format"),
        ([pb.Change(replicas=2)] * 17, "what_if"),
    ],
)
async def test_what_is_no_change_is_refused(
    clinic: Clinic, asked: list[pb.Change], path: str
) -> None:
    """An answer about something else would be believed."""
    refusal = await refusal_of(clinic.diagnosis(what_if=asked))
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert path in refusal.message


async def test_an_earlier_diagnosis_is_held_against_now(clinic: Clinic) -> None:
    """After a restart with another setting nobody could tell what came of the prediction."""
    for _ in range(3):
        await clinic.their.ask("acme", prompt("some", 30), max_tokens=10)
    response = await clinic.diagnosis()
    earlier = response.now
    most = earlier.setup.max_sequences
    same = await clinic.diagnosis(earlier=earlier)
    assert not same.outcomes
    # As if it had been another server, that predicted what this one does.
    earlier.setup.max_sequences = most + 5
    foretold = earlier.predictions.add(
        what=pb.Change(max_sequences=most), decode_step_seconds=0.5, tokens_per_second=7.0
    )
    then = await clinic.diagnosis(earlier=earlier)
    assert f"--max-sequences is {most}, not {most + 5}." in then.changes
    [outcome] = then.outcomes
    assert outcome.change == f"--max-sequences {most}"
    came = {figure.name: (figure.predicted, figure.came) for figure in outcome.figures}
    assert came["decode_step_seconds"][0] == foretold.decode_step_seconds
    assert came["decode_step_seconds"][1] == pytest.approx(
        then.now.decode.seconds / then.now.decode.steps
    )
    assert came["tokens_per_second"][0] == 7.0
    earlier.setup.threads += 1  # of two changes at once nothing was predicted
    assert not (await clinic.diagnosis(earlier=earlier)).outcomes
    both = clinic.diagnosis(earlier=earlier, against=duration_pb2.Duration(seconds=1))
    assert (await refusal_of(both)).code == grpc.StatusCode.INVALID_ARGUMENT


async def test_what_the_operating_system_counts_stands_beside_ours(clinic: Clinic) -> None:
    """A monitor's 100 % would look like a server that computes all the time."""
    await clinic.their.ask("acme", prompt("some", 30), max_tokens=10)
    now = (await clinic.diagnosis()).now
    assert now.utilization > 0.0
    assert "operating system counts" in now.utilization_explained
    assert now.setup.threads == 1
    assert now.setup.fingerprint
    assert now.ended_at.seconds > 1_700_000_000
