"""The machine's peaks: measured with the server's kernels, kept for this machine alone."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from kvledger import _core
from kvledger.errors import SettingRefused
from kvledger.machine import kept_peaks, peaks
from kvledger.machine.kept_peaks import machine_peaks, peaks_file
from kvledger.machine.peaks import Machine, MachinePeaks, measure, this_machine

MEASURED = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)


@pytest.fixture(autouse=True)
def _a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    """The machines that were measured, each with figures of its own."""
    machines: list[Machine] = []

    def measure(kernels: _core.CpuKernels) -> MachinePeaks:
        machines.append(this_machine(kernels))
        rate = float(len(machines))
        return MachinePeaks(rate, {"f32": 2 * rate}, 1e-7, 1.0, MEASURED, machines[-1])

    monkeypatch.setattr(kept_peaks, "measure", measure)
    return machines


def test_a_measurement_is_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Floors would be those of a machine that there is not."""
    monkeypatch.setattr(peaks, "_read_bytes", lambda: 8 << 20)
    monkeypatch.setattr(peaks, "_SECONDS_MULTIPLYING", 0.05)
    kernels = _core.CpuKernels(1, "portable")
    found = measure(kernels)
    assert found.machine == Machine(peaks._processor(), 1, "portable")
    # Bounds that every machine keeps, a thousand times slower and faster than any we have seen.
    assert 1e7 < found.read_bytes_per_second < 1e13
    assert 1e7 < found.operations("f32") < 1e14
    assert found.barrier_seconds == 0.0  # one thread meets nobody
    assert found.measured_at is not None
    assert abs((datetime.now(timezone.utc) - found.measured_at).total_seconds()) < 60
    assert found.processor_share is not None
    assert 0.0 < found.processor_share <= 1.0
    together = peaks._barrier_seconds(_core.CpuKernels(2, "portable"))
    assert 0.0 < together < 1.0


def test_every_weight_is_multiplied_as_what_it_becomes() -> None:
    """A format without a figure would fail a plan, or be counted as free."""
    found = MachinePeaks(10.0, {"f32": 40.0, "int8": 160.0})
    assert found.operations("int8") == 160.0
    assert found.operations("q4_1") == found.operations("f32") == 40.0
    assert found.balance == 4.0
    assert MachinePeaks.given(10.0, 40.0).measured_at is None


def test_a_busy_machine_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who measures beside a build would believe that the machine is slow."""
    assert not MachinePeaks.given(1.0, 1.0).is_disturbed
    machine = this_machine(_core.CpuKernels(1))
    busy = MachinePeaks(1.0, {"f32": 1.0}, 0.0, 0.6, MEASURED, machine)
    assert busy.is_disturbed
    assert not replace(busy, processor_share=0.99).is_disturbed
    monkeypatch.setattr(kept_peaks, "measure", lambda kernels: busy)
    said: list[str] = []
    machine_peaks(1, say=said.append)
    assert "too low" in said[-1]
    assert not peaks_file(machine).exists(), "a quiet moment would never be measured"


def test_figures_are_measured_once(measured: list[Machine]) -> None:
    """Every plan would take two seconds and disturb a server that runs."""
    first = machine_peaks(1)
    assert machine_peaks(1) == first
    assert len(measured) == 1
    assert machine_peaks(1, again=True) != first
    assert len(measured) == 2
    assert machine_peaks(1).read_bytes_per_second == 2.0


def test_other_machines_have_their_own(
    measured: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread's figures would be taken for two threads', or another processor's for this."""
    one = machine_peaks(1)
    assert machine_peaks(2) != one
    assert machine_peaks(1, "portable") != one
    monkeypatch.setattr(peaks, "_processor", lambda: "another one")
    assert machine_peaks(1) != one
    assert len(measured) == 4
    monkeypatch.undo()


def test_a_name_that_is_the_same_is_no_proof(measured: list[Machine]) -> None:
    """Two processors whose names differ by a dash would share their figures."""
    machine_peaks(1)
    path = peaks_file(measured[0])
    values = json.loads(path.read_text())
    values["machine"]["processor"] += "-"
    path.write_text(json.dumps(values))
    machine_peaks(1)
    assert len(measured) == 2


def test_another_version_measures_anew(
    measured: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faster kernels would be held to the bounds of slower ones."""
    machine_peaks(1)
    monkeypatch.setattr(kept_peaks, "__version__", "999")
    machine_peaks(1)
    machine_peaks(1)
    assert len(measured) == 2


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", "\xff", '{"kvledger": "0"}', "null", "7"),
        *('"read_bytes_per_second": 0', '"read_bytes_per_second": NaN'),
        *('"operations_per_second": {}', '"machine": 3', '"measured_at": "never"'),
        *('"operations_per_second": []', '"processor_share": null', '"barrier_seconds": null'),
    ],
)
def test_a_damaged_file_is_told_and_replaced(measured: list[Machine], content: str) -> None:
    """A plan would end with a traceback, or go by figures that are none."""
    machine_peaks(1)
    path = peaks_file(measured[0])
    if content.startswith('"'):
        values = json.loads(path.read_text())
        values.update(json.loads(f"{{{content}}}"))
        content = json.dumps(values)
    path.write_bytes(content.encode("latin-1"))
    said: list[str] = []
    machine_peaks(1, say=said.append)
    assert len(measured) == 2
    assert str(path) in said[0]
    assert machine_peaks(1).read_bytes_per_second == 2.0
    assert len(measured) == 2


def test_a_folder_that_cannot_be_written_is_told(
    measured: list[Machine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The measurement would be lost, and each plan measure again without a word."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    said: list[str] = []
    assert machine_peaks(1, say=said.append).read_bytes_per_second == 1.0
    assert "cannot be kept" in said[-1]


def test_an_instruction_set_that_is_none_is_refused() -> None:
    """A misspelt name would be a traceback."""
    with pytest.raises(SettingRefused, match="--instruction-set"):
        machine_peaks(1, "mmx")


@pytest.mark.parametrize(
    ("threads", "processors", "others"),
    [(1, 1, []), (1, 2, [2]), (2, 2, [1]), (4, 8, [2, 8]), (4, 7, [2])],
)
def test_half_and_twice_the_threads_are_measured_too(
    measured: list[Machine], threads: int, processors: int, others: list[int]
) -> None:
    """What other threads would do would be a guess."""
    here = machine_peaks(threads, "portable")
    found = kept_peaks.peaks_of_other_threads(here, "portable", processors)
    assert sorted(found) == others
    assert [machine.threads for machine in measured] == [threads, *others]
    for number, other in found.items():
        assert other.machine is not None
        assert other.machine.threads == number


def test_on_a_busy_machine_no_further_measurement_is_made(measured: list[Machine]) -> None:
    """Every start would take seconds more, for figures that are thrown away."""
    here = replace(machine_peaks(2, "portable"), processor_share=0.5)
    assert kept_peaks.peaks_of_other_threads(here, "portable", 4) == {}
    given = MachinePeaks.given(1e9, 1e10)
    assert kept_peaks.peaks_of_other_threads(given, "portable", 4) == {}
    assert len(measured) == 1
