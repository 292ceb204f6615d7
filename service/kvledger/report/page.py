"""The page: one HTML file with everything in it, and nothing that runs or asks the network.

Whatever stands in the books is escaped by the template, without exception; only figures, in which
no text of the books stands, are put in as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from kvledger import __version__
from kvledger.books.file_statement import Statement, state
from kvledger.books.statement_rows import compute_rows, memory_rows, notes_of, sums_rows
from kvledger.diagnosis.diagnosis import Diagnosis
from kvledger.diagnosis.findings import percent
from kvledger.report.charts import NO_LOAD, Chart, Marks
from kvledger.report.costs import cost_bars
from kvledger.report.diagnoses import diagnosis_of
from kvledger.report.drawing import SERIES, require_library
from kvledger.report.recorded import Recorded, ReplicaRecord
from kvledger.report.settings_of import settings_of
from kvledger.report.step_charts import batch_chart, decode_chart, roofline_chart
from kvledger.report.time_charts import memory_chart, mixture_chart, queue_chart
from kvledger.report.units import bytes_text

# Rows of the statement; those with fewest block-seconds are one line beyond that.
STATEMENT_MAX = 1000
# Replicas whose findings are told: those whose steps took most time.
_DIAGNOSES_MAX = 6

# What nothing may come from but the page itself: no script, no picture, no font, no request.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True)
class Told:
    """What limited one replica."""

    replica: str
    diagnosis: Diagnosis


def report_page(folders: Sequence[Path], since: str = "", until: str = "") -> str:
    """The page about the files in some folders. `since` and `until` are as in the files.

    Raises SettingRefused if there are no files that can be read, or nothing to draw with.
    """
    require_library()
    recorded = Recorded(since, until)
    statement = state(folders, ("tenant",), since, until, recorded)
    marks, present = Marks.of(recorded), recorded.present
    charts = [
        memory_chart(recorded, marks),
        decode_chart(recorded),
        roofline_chart(recorded),
        batch_chart(recorded),
        mixture_chart(recorded, marks),
        queue_chart(recorded, marks),
    ]
    heads, rows = sums_rows(statement, ("tenant",))
    machines = statement.machines
    facts = {
        "policy": POLICY,
        "version": __version__,
        "series": SERIES,
        "asked": _asked(since, until),
        "interval": _interval(statement),
        "replicas": present,
        "models": _each(present, "model"),
        "formats": _each(present, "kv_format"),
        "tiles": _tiles(statement, recorded),
        "told": _told(present),
        "untold": NO_LOAD,
        "charts": charts,
        "bars": cost_bars(statement),
        "settings": settings_of(present),
        "heads": heads,
        "rows": [*rows[:STATEMENT_MAX], rows[-1]] if len(rows) > STATEMENT_MAX + 1 else rows,
        "more_rows": max(0, len(rows) - 1 - STATEMENT_MAX),
        "accounts": [memory_rows(machines), compute_rows(machines)] if machines.replicas else [],
        "notes": [*notes_of(statement), *_unplaced(recorded)],
    }
    return _template().render(facts, figure=_figure)


def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")


def _figure(chart: Chart) -> Markup:
    return Markup(chart.figure)  # noqa: S704  # made in drawing.py, without any text of the books


def _asked(since: str, until: str) -> str:
    words = [f"from {since}"] if since else []
    return " ".join([*words, f"to {until}"] if until else words)


def _interval(statement: Statement) -> str:
    machines = statement.machines
    if not machines.replicas:
        return ""
    return f"{machines.since[:19]}Z to {machines.until[:19]}Z"


def _each(present: Sequence[ReplicaRecord], name: str) -> list[str]:
    return sorted({str(record.facts.get(name) or "not stated") for record in present})


def _tiles(statement: Statement, recorded: Recorded) -> list[tuple[str, str]]:
    """The first numbers that somebody asks for."""
    total, counts = statement.total, statement.total.counts
    reused = sum(counts[f"reused_{whose}_tokens"] for whose in ("own", "group", "public"))
    tiles = [
        ("requests", f"{total.requests:,}"),
        ("output tokens", f"{counts['output_tokens']:,}"),
        ("prompt tokens", f"{counts['prompt_tokens']:,}"),
    ]
    if counts["prompt_tokens"]:
        tiles.append(("of them reused", percent(reused / counts["prompt_tokens"])))
    buckets = [bucket for _, bucket in recorded.timeline.buckets() if bucket.time]
    whole = sum(bucket.states.total() for bucket in buckets)
    if whole:
        live = sum(
            bucket.states[name] for bucket in buckets for name in ("held", "reserved", "releasing")
        )
        tiles.append(("waterline, mean", percent(live / whole)))
        most = max(bucket.states.total() / bucket.time for bucket in buckets)
        tiles.append(("pools together", bytes_text(most)))
    loads = [record.load for record in recorded.present]
    covered = sum(load.covered for load in loads)
    if covered:
        tiles.append(("busy", percent(min(1.0, sum(load.step_time for load in loads) / covered))))
        refused = sum(load.refused.total() for load in loads)
        tiles.append(("refused", f"{refused:,}"))
        preempted = sum(load.preemptions.total() for load in loads)
        tiles.append(("preempted", f"{preempted:,}"))
    return tiles


def _told(present: Sequence[ReplicaRecord]) -> list[Told]:
    busiest = sorted(present, key=lambda each: -each.load.step_time)[:_DIAGNOSES_MAX]
    found = ((each.id, diagnosis_of(each)) for each in busiest)
    return [Told(replica, diagnosis) for replica, diagnosis in found if diagnosis is not None]


def _unplaced(recorded: Recorded) -> list[str]:
    count = recorded.unplaced_lines
    return [f"{count} line(s) name a time or numbers that cannot be, and are in no chart"] * (
        count > 0
    )
