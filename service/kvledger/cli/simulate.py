"""`kvledger simulate`: what a server would do with some traffic, under a virtual clock."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from kvledger.cli.simulate_options import parser, variants
from kvledger.errors import ModelRefused, SettingRefused
from kvledger.log import configure
from kvledger.settings import load_settings


def run(arguments: Sequence[str]) -> int:
    """Prints what came of each run; 0, 1 if the books disagree, 2 for what cannot be simulated."""
    configure("console", "error")
    try:
        options, _ = parser().parse_known_args(list(arguments))
        asked = variants(options.vary)
        # Torch takes seconds to import; a wrong option should not.
        from kvledger.simulation.scenario import Known, scenario

        known = Known()
        # All are made before the first one runs: a wrong value should not cost the others' time.
        scenarios = []
        for title, more in asked:
            each, rest = parser().parse_known_args([*arguments, *more])
            named = [] if each.settings is None else ["--config", each.settings]
            settings = load_settings([*named, *rest], command="kvledger simulate")
            scenarios.append((title, scenario(each, settings, known)))
        runs = [(title, each.run().figures(each.targets)) for title, each in scenarios]
    except (SettingRefused, ModelRefused) as error:
        print(f"kvledger simulate: {error}", file=sys.stderr)
        return 2
    notes = list(dict.fromkeys(note for _, each in scenarios for note in each.notes))
    print(_json(runs, notes) if options.json else _text(runs, notes))
    return int(any(figures["audit"] != "clean" for _, figures in runs))


def _text(runs: Sequence[tuple[str, dict[str, Any]]], notes: Sequence[str]) -> str:
    from kvledger.simulation.table import table

    return "\n".join([table(runs), *(f"\n{note}" for note in notes)])


def _json(runs: Sequence[tuple[str, dict[str, Any]]], notes: Sequence[str]) -> str:
    content = {"runs": [{"run": title, **figures} for title, figures in runs], "notes": list(notes)}
    return json.dumps(content, indent=2)
