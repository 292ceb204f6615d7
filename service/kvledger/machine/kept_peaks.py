"""The machine's peaks, measured once and kept in the user's cache folder.

A file holds the figures of one machine: processor, threads, instruction set. Those of another
version of kvledger, whose kernels may be others, are measured anew.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from kvledger import __version__, _core
from kvledger.errors import SettingRefused
from kvledger.machine.peaks import Machine, MachinePeaks, measure, this_machine
from kvledger.models.catalogue import cache_folder


def machine_peaks(
    threads: int,
    instruction_set: str = "auto",
    *,
    again: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> MachinePeaks:
    """The peaks of this machine with so many threads, as kept, or measured now (two seconds).

    `again` measures in any case. What was measured beside other programs is not kept. Raises
    SettingRefused for an instruction set that this machine has not got.
    """
    try:
        kernels = _core.CpuKernels(threads, instruction_set)
    except ValueError as error:
        raise SettingRefused(f"--instruction-set: {error}") from None
    machine = this_machine(kernels)
    path = peaks_file(machine)
    if not again and (kept := _kept(path, machine, say)) is not None:
        return kept
    say("measuring this machine for about two seconds; other programs would lower the figures")
    peaks = measure(kernels)
    if peaks.is_disturbed:
        say("other programs were running: the figures are too low, and are not kept")
        return peaks
    try:
        _keep(path, peaks)
    except OSError as error:
        say(f"the figures cannot be kept in {path}: {error.strerror or error}; measured each time")
    return peaks


def peaks_of_other_threads(
    peaks: MachinePeaks,
    instruction_set: str,
    processors: int,
    *,
    say: Callable[[str], None] = lambda line: None,
) -> dict[int, MachinePeaks]:
    """The peaks with half and twice the threads of `peaks`, as far as there are processors for
    them: what a diagnosis needs to say what other threads would do.

    Empty where `peaks` were not measured or were measured beside other programs: so would these be.
    """
    if peaks.machine is None or peaks.is_disturbed:
        return {}
    threads = peaks.machine.threads
    numbers = [number for number in (threads // 2, 2 * threads) if 1 <= number <= processors]
    return {number: machine_peaks(number, instruction_set, say=say) for number in numbers}


def peaks_file(machine: Machine) -> Path:
    """Where the figures of a machine are kept."""
    text = f"{machine.processor} {machine.threads} threads {machine.instruction_set}"
    return cache_folder() / "peaks" / f"{re.sub(r'[^a-z0-9]+', '-', text.lower()).strip('-')}.json"


def _keep(path: Path, peaks: MachinePeaks) -> None:
    values = {"kvledger": __version__, **asdict(peaks)}
    assert peaks.measured_at is not None
    values["measured_at"] = peaks.measured_at.isoformat()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        json.dump(values, file, indent=1)
    os.replace(file.name, path)


def _kept(path: Path, machine: Machine, say: Callable[[str], None]) -> MachinePeaks | None:
    """The figures in a file, or None if there are none that hold for this machine and version."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        values = None
    peaks = _read(values) if isinstance(values, dict) else None
    if peaks is None:
        say(f"{path} holds no figures that can be read; they are measured anew")
        return None
    if peaks.machine != machine or values["kvledger"] != __version__:
        return None
    return peaks


def _read(values: Mapping[str, Any]) -> MachinePeaks | None:
    try:
        of = values["machine"]
        peaks = MachinePeaks(
            read_bytes_per_second=_positive(values["read_bytes_per_second"]),
            operations_per_second={
                str(name): _positive(rate) for name, rate in values["operations_per_second"].items()
            },
            barrier_seconds=float(values["barrier_seconds"]),
            processor_share=_positive(values["processor_share"]),
            measured_at=datetime.fromisoformat(values["measured_at"]),
            machine=Machine(str(of["processor"]), int(of["threads"]), str(of["instruction_set"])),
        )
        peaks.operations("f32")
        str(values["kvledger"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return peaks


def _positive(value: object) -> float:
    number = float(value)  # type: ignore[arg-type]
    if not (math.isfinite(number) and number > 0.0):
        raise ValueError
    return number
