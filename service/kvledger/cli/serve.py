"""`kvledger serve`: loads a model and serves it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvledger import event_loop
from kvledger.address import why_not_free
from kvledger.errors import ModelRefused, SettingRefused
from kvledger.log import configure
from kvledger.settings import Settings, load_settings

if TYPE_CHECKING:
    from kvledger.machine.peaks import MachinePeaks


def run(arguments: Sequence[str]) -> int:
    """Serves until stopped. 0 after a clean stop, 2 if it cannot start, 70 if the server broke."""
    try:
        settings = load_settings(arguments)
        settings.require_identity()
        settings.require_closed_doors()
        configure(settings.log_format, settings.log_level)
        # Told at once, not after a model has been loaded.
        settings.registry()
        settings.certificates()
        settings.operators_certificates()
        settings.require_books()
        for file in settings.public_files():
            file.text()
        for option, address in settings.addresses.items():
            if (reason := why_not_free(address)) is not None:
                raise SettingRefused(f"{option} {address}: {reason}; choose another address")
        # Torch takes seconds to import; a wrong setting should not.
        from kvledger.self_test import tell_history, warn_unless_reused
        from kvledger.served_model import load
        from kvledger.server import BROKE, Server

        async def serve() -> int:
            model = load(settings, _say)
            tell_history(settings, model)
            warn_unless_reused(settings, model)
            peaks = _peaks(settings)
            others = _peaks_of_other_threads(settings, peaks)
            return await Server(settings, model, peaks=peaks, peaks_by_threads=others).run()

        status = event_loop.run(serve())
        if status == BROKE:
            # A thread that hangs or a device that is lost could keep the interpreter from ending.
            os._exit(status)
        return status
    except (SettingRefused, ModelRefused) as error:
        print(f"kvledger serve: {error}", file=sys.stderr)
        return 2


def _peaks(settings: Settings) -> MachinePeaks | None:
    if settings.machine_peaks == "skip" or settings.device != "cpu":
        return None
    from kvledger.machine.kept_peaks import machine_peaks

    return machine_peaks(settings.kernel_threads, settings.instruction_set, say=_say)


def _peaks_of_other_threads(
    settings: Settings, peaks: MachinePeaks | None
) -> dict[int, MachinePeaks]:
    if peaks is None:
        return {}
    from kvledger.diagnosis.setup import processors
    from kvledger.machine.kept_peaks import peaks_of_other_threads

    return peaks_of_other_threads(peaks, settings.instruction_set, processors(), say=_say)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk, or nobody who reads it
        print(f"kvledger: {line}", file=sys.stderr, flush=True)
