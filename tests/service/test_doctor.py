"""`kvledger doctor`: each fault is found, named, and told how to mend, whatever else is wrong."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from authorities import Files
from structlog.testing import CapturingLogger
from tenants_harness import TenantsOfTest
from tiny_model import CHAT_TEMPLATE, TinyShape, random_weights, write_gguf

from kvledger import served_model
from kvledger.cli import doctor
from kvledger.models.catalogue import CATALOGUE, KnownModel

SUBJECTS = ["processor", "memory", "model", "port", "tls", "tenants", "self-test"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(autouse=True)
def _a_healthy_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Memory enough, no settings in the environment, no model fetched, logging left alone."""
    for variable in [name for name in os.environ if name.startswith("KVLEDGER_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "configure", lambda *arguments: None)
    monkeypatch.setattr(served_model, "_log", CapturingLogger())
    monkeypatch.setattr(doctor, "memory_available", lambda: 3 << 30)
    monkeypatch.setattr(doctor, "memory_limit", lambda: 4 << 30)
    monkeypatch.setattr(doctor, "_barrier_seconds", lambda kernels: 250e-9)


@dataclass
class Report:
    """What doctor printed."""

    status: int
    findings: dict[str, tuple[bool, str]]  # by subject: whether it is good, and the text
    mends: list[str]
    errors: str


Captured = pytest.CaptureFixture[str]


def examine(capsys: Captured, *arguments: str) -> Report:
    status = doctor.run(["--listen", "127.0.0.1:0", "--kv-blocks", "4", *arguments])
    shown = capsys.readouterr()
    findings, mends = {}, []
    for line in shown.out.splitlines():
        if line.startswith(("ok  ", "FAIL")):
            state, subject, text = line.split(None, 2)
            if subject in findings:  # of what is told in several lines
                text = f"{findings[subject][1]}\n{text}"
            findings[subject] = (state == "ok", text)
        else:
            mends.append(line.split("to mend it: ")[1])
    return Report(status, findings, mends, shown.err)


def bad(report: Report) -> list[str]:
    """Subjects of what is not good; every subject must be there."""
    further = ["history"] if "history" in report.findings else []
    assert list(report.findings) == [*SUBJECTS, *further], "one fault must not hide the others"
    assert report.errors == ""
    return [subject for subject, (good, _) in report.findings.items() if not good]


def test_a_healthy_machine_is_called_so(tiny: Path, capsys: Captured) -> None:
    """A person would look for faults that are none."""
    report = examine(capsys, "--model", str(tiny), "--threads", "2")
    assert bad(report) == []
    assert report.status == 0
    assert report.mends == []
    assert "2 threads, meeting takes 250 ns" in report.findings["processor"][1]
    fingerprint = hashlib.sha256(tiny.read_bytes()).hexdigest()
    assert fingerprint[:16] in report.findings["model"][1]
    assert "generated one token" in report.findings["self-test"][1]
    kept = "text, system, blanks: the next turn begins with all that was computed"
    assert report.findings["history"] == (True, kept)


def test_a_template_that_rewrites_earlier_turns_is_told(tmp_path: Path, capsys: Captured) -> None:
    """Nobody would know why conversations are computed anew; and it is no fault to mend."""
    template = CHAT_TEMPLATE.replace("m.content", "m.content | trim")
    changes = {"tokenizer.chat_template": template}
    path = write_gguf(tmp_path / "trims.gguf", changes=changes)
    report = examine(capsys, "--model", str(path))
    assert report.status == 0
    assert bad(report) == []
    kept, lost = report.findings["history"][1].splitlines()
    assert kept.startswith("text, system: ")
    assert lost.startswith("blanks: of the 29 tokens of turn 1 the next one begins with 23; ")
    assert "then it has 70 'F'" in lost
    assert "where 32 ' '" in lost


def test_a_model_without_a_template_has_no_history(tmp_path: Path, capsys: Captured) -> None:
    """The report would speak of conversations that cannot be had."""
    path = write_gguf(tmp_path / "plain.gguf", changes={"tokenizer.chat_template": None})
    report = examine(capsys, "--model", str(path))
    assert bad(report) == []
    assert "history" not in report.findings


def test_one_thread_has_nobody_to_meet(tiny: Path, capsys: Captured) -> None:
    """The measurement would wait for threads that do not exist."""
    report = examine(capsys, "--model", str(tiny), "--threads", "1")
    assert "meeting" not in report.findings["processor"][1]


def test_little_memory_is_found(
    tiny: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server would be started where it will be killed."""
    monkeypatch.setattr(doctor, "memory_available", lambda: (1 << 30) - 1)
    report = examine(capsys, "--model", str(tiny))
    assert bad(report) == ["memory"]
    assert report.status == 1
    assert "1.1 GB free of 4.3 GB" in report.findings["memory"][1]
    assert "free at least 1 GB" in report.mends[0]
    monkeypatch.setattr(doctor, "memory_available", lambda: 1 << 30)
    assert bad(examine(capsys, "--model", str(tiny))) == []


def test_a_port_in_use_is_found(tiny: Path, capsys: Captured) -> None:
    """The server would say so only after it has loaded the model."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        report = examine(capsys, "--model", str(tiny), "--listen", f"127.0.0.1:{port}")
    assert bad(report) == ["port"]
    assert "in use" in report.findings["port"][1]
    assert "--listen" in report.mends[0]
    assert bad(examine(capsys, "--model", str(tiny), "--listen", f"127.0.0.1:{port}")) == []


@pytest.mark.parametrize(
    "listen", ["192.0.2.1:5", "x..y:5", "h" * 64 + ":5", "[fe80::1%nothing]:5"]
)
def test_an_address_that_is_not_this_machines_is_found(
    tiny: Path, capsys: Captured, listen: str
) -> None:
    """A wrong host name would end the report with a traceback."""
    report = examine(capsys, "--model", str(tiny), "--listen", listen)
    assert bad(report) == ["port"]
    assert listen in report.findings["port"][1]


def test_a_unix_socket_in_use_is_found(tiny: Path, tmp_path: Path, capsys: Captured) -> None:
    """The same for a server that listens on a file."""
    path = tmp_path / "s"
    arguments = ["--model", str(tiny), "--listen", f"unix:{path}"]
    assert bad(examine(capsys, *arguments)) == []
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        report = examine(capsys, *arguments)
    assert bad(report) == ["port"]
    assert "another server listens there" in report.findings["port"][1]


def test_certificates_are_looked_at(tiny: Path, tmp_path: Path, capsys: Captured) -> None:
    """A certificate with another one's key would be found at the next restart."""
    files = Files(tmp_path).write("ours", clients="theirs")
    report = examine(capsys, "--model", str(tiny), *files.options)
    assert bad(report) == []
    assert "asks clients for theirs" in report.findings["tls"][1]
    files.key.write_bytes(Files(tmp_path).write("ours").cert.read_bytes())
    report = examine(capsys, "--model", str(tiny), *files.options)
    assert bad(report) == ["tls"]
    assert f"--tls-key {files.key}" in report.findings["tls"][1]


def test_tenants_are_looked_at(tiny: Path, tmp_path: Path, capsys: Captured) -> None:
    """A file that others can read would be found at the start, and not before."""
    tenants = TenantsOfTest(tmp_path)
    tenants.add("acme")
    options = ("--model", str(tiny), "--tenants", str(tenants.path))
    good, text = examine(capsys, *options).findings["tenants"]
    assert (good, text) == (True, f"{tenants.path} has 1")
    tenants.path.chmod(0o644)
    good, text = examine(capsys, *options).findings["tenants"]
    assert not good
    assert "chmod 600" in text


def test_the_end_of_a_certificate_is_told(tiny: Path, tmp_path: Path, capsys: Captured) -> None:
    """Clients would be turned away one day, and nobody have been told."""
    now = datetime.now(timezone.utc)
    began = now - timedelta(days=90)
    model = ("--model", str(tiny))
    for ends, good, words in (
        (now - timedelta(days=1), False, "expired on"),
        (now + timedelta(days=3), True, "expires soon, on"),
        (now + timedelta(days=60), True, "expires on"),
    ):
        files = Files(tmp_path).write("ours", begins=began, ends=ends)
        report = examine(capsys, *model, *files.options)
        assert bad(report) == ([] if good else ["tls"])
        assert words in report.findings["tls"][1]
        assert f"{ends:%Y-%m-%d %H:%M} UTC" in report.findings["tls"][1]
    files = Files(tmp_path).write("ours", begins=now + timedelta(days=1))
    report = examine(capsys, *model, *files.options)
    assert bad(report) == ["tls"]
    assert "is not valid before" in report.findings["tls"][1]


def test_every_address_is_looked_at(tiny: Path, capsys: Captured) -> None:
    """The server would say so only after it has loaded the model."""
    for option in ("--operators-listen", "--metrics-listen"):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            report = examine(capsys, "--model", str(tiny), option, address)
        assert bad(report) == ["port"]
        assert option in report.mends[0]
        report = examine(capsys, "--model", str(tiny), option, address)
        assert bad(report) == []
        assert f"{address} are free" in report.findings["port"][1]


@pytest.mark.parametrize(
    ("listen", "host", "family"),
    [
        ("[::1]:7", "::1", socket.AF_INET6),
        ("127.0.0.1:7", "127.0.0.1", socket.AF_INET),
        ("localhost:7", "localhost", socket.AF_INET),
    ],
)
def test_a_port_is_looked_for_in_its_own_family(
    tiny: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    listen: str,
    host: str,
    family: socket.AddressFamily,
) -> None:
    """A taken port would be called free, because the other family was asked."""
    asked: list[object] = []

    def create_server(address: object, *, family: socket.AddressFamily) -> socket.socket:
        asked.append((address, family))
        return socket.socket()

    monkeypatch.setattr(socket, "create_server", create_server)
    assert bad(examine(capsys, "--model", str(tiny), "--listen", listen)) == []
    assert asked == [((host, 7), family)]


def known(monkeypatch: pytest.MonkeyPatch, path: Path) -> KnownModel:
    """A catalogue's entry for that file, not fetched."""
    data = path.read_bytes()
    model = KnownModel(
        name="known",
        package="some-package",
        version="1",
        member="m",
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )
    monkeypatch.setitem(CATALOGUE, "known", model)
    return model


def test_a_model_that_is_not_fetched_is_found_and_not_fetched(
    tiny: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person who asks what is wrong would start a download."""
    monkeypatch.setattr("kvledger.models.catalogue.fetch", None)
    known(monkeypatch, tiny)
    report = examine(capsys, "--model", "known")
    assert bad(report) == ["model", "self-test"]
    assert report.mends == ["kvledger models fetch known", "fetch the model first"]


def test_a_damaged_model_is_found(
    tiny: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that rotted on the disk would be found at the next start."""
    model = known(monkeypatch, tiny)
    model.path.parent.mkdir()
    model.path.write_bytes(tiny.read_bytes())
    assert bad(examine(capsys, "--model", "known")) == []
    data = bytearray(tiny.read_bytes())
    data[-5] ^= 1
    model.path.write_bytes(data)
    report = examine(capsys, "--model", "known")
    assert bad(report) == ["model", "self-test"]
    assert f"delete {model.path}" in report.mends[0]
    assert "damaged" in report.findings["self-test"][1]


@pytest.mark.parametrize("content", [None, b"", b"no model"])
def test_a_file_that_is_no_model_is_found(
    tmp_path: Path, capsys: Captured, content: bytes | None
) -> None:
    """The report would end at the first fault, with a traceback."""
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    report = examine(capsys, "--model", str(path))
    assert bad(report) == ["model", "self-test"]
    assert report.status == 1
    assert str(path) in report.findings["model"][1]


def test_a_model_that_computes_nonsense_is_found(tmp_path: Path, capsys: Captured) -> None:
    """A file of the right shape with broken weights would be called good."""
    weights = random_weights(TinyShape(), seed=0)
    weights["model.norm.weight"][:] = float("nan")
    path = write_gguf(tmp_path / "broken.gguf", weights=weights)
    report = examine(capsys, "--model", str(path))
    assert bad(report) == ["self-test"]
    assert "not a number" in report.findings["self-test"][1]
    assert "try another one" in report.mends[0]


def test_what_this_build_lacks_is_found(tiny: Path, capsys: Captured) -> None:
    """A device that the build has no kernels for would be found at the start."""
    report = examine(capsys, "--model", str(tiny), "--device", "cuda")
    assert bad(report) == ["self-test"]
    assert "--device cuda" in report.findings["self-test"][1]


def test_wrong_settings_are_refused_as_the_server_does(capsys: Captured) -> None:
    """Doctor would look at other settings than the server that is in trouble."""
    report = examine(capsys, "--token-budgt", "5")
    assert report.status == 2
    assert report.findings == {}
    assert report.errors.startswith("kvledger doctor: ")
    assert "--token-budget" in report.errors


def test_settings_of_the_environment_count(
    tiny: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model that a deployment names would not be the one that is examined."""
    monkeypatch.setenv("KVLEDGER_MODEL", str(tiny))
    assert str(tiny) in examine(capsys).findings["model"][1]


def test_the_barrier_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement would be one of nothing, or take minutes on a slow machine."""
    monkeypatch.undo()
    rounds: list[int] = []
    clock = [0.0]

    class Kernels:
        def barriers(self, count: int) -> None:
            rounds.append(count)
            clock[0] += count * 1e-6

    monkeypatch.setattr(doctor.time, "perf_counter", lambda: clock[0])
    assert doctor._barrier_seconds(Kernels()) == pytest.approx(1e-6)  # type: ignore[arg-type]
    assert 0.02 < rounds[-1] * 1e-6 < 0.1
