"""Prints, saves and draws what a load test found."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.load import OK, STOPPED, Interference, Limits, Record, Summary, percentile


def milliseconds(seconds: float) -> str:
    """A time for a table; a dash where there is none."""
    if math.isnan(seconds):
        return "-"
    return f"{seconds * 1e3:.1f}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def status_line(statuses: dict[str, int], reasons: dict[str, str]) -> str:
    """How requests ended, with the first sentence of each kind of failure."""
    counts = ", ".join(f"{status} {count}" for status, count in sorted(statuses.items()))
    lines = [f"requests {sum(statuses.values())}: {counts}"]
    lines += [f"  {status}: {reason[:300]}" for status, reason in sorted(reasons.items())]
    return "\n".join(lines)


def summary_text(summary: Summary, limits: Limits) -> str:
    """The figures of a run, as docs/load.md defines them."""
    lines = [status_line(summary.statuses, summary.reasons), ""]
    lines.append(f"{'ms':16}{'p50':>10}{'p90':>10}{'p99':>10}")
    for name, row in (("TTFT", summary.ttft), ("TPOT", summary.tpot), ("ITL", summary.itl)):
        shown = "".join(f"{milliseconds(row[p]):>10}" for p in ("p50", "p90", "p99"))
        lines.append(f"{name:16}{shown}")
    lines.append(f"{'longest stall':16}{milliseconds(summary.longest_stall):>10}")
    lines.append("")
    prompts = summary.prompt_tokens / summary.seconds if summary.seconds > 0 else math.nan
    lines.append(
        f"throughput  {summary.output_tokens_per_second:.1f} output tokens/s, "
        f"{prompts:.1f} prompt tokens/s, over {summary.seconds:.1f} s"
    )
    kept = [
        f"{name} {limit:g} s"
        for name, limit in (("TTFT", limits.ttft), ("TPOT", limits.tpot))
        if limit is not None
    ]
    lines.append(
        f"goodput     {summary.goodput:.2f} requests/s: {summary.good_requests} of "
        f"{summary.requests} complete" + (f" and within {' and '.join(kept)}" if kept else "")
    )
    return "\n".join(lines)


def interference_text(result: Interference) -> str:
    """What a long prompt did to those who were decoding."""
    lines = [status_line(result.statuses, result.reasons), ""]
    lines.append(f"{'longest gap of a stream, ms':34}{'p50':>10}{'p99':>10}{'max':>10}")
    rows = (
        ("before the long prompt", result.before),
        ("while it waits for its first token", result.during),
    )
    for name, gaps in rows:
        figures = (percentile(gaps, 50), percentile(gaps, 99), max(gaps, default=math.nan))
        lines.append(f"{name:34}" + "".join(f"{milliseconds(f):>10}" for f in figures))
    alone, loaded = (
        statistics.median(times) if times else math.nan for times in (result.alone, result.loaded)
    )
    lines.append("")
    lines.append(
        f"TTFT of the long prompt, ms: alone {milliseconds(alone)}, "
        f"beside the streams {milliseconds(loaded)}: {loaded / alone:.2f}x"
    )
    return "\n".join(lines)


def without_nan(value: Any) -> Any:
    """The same with None for numbers that are none, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value


def record_json(record: Record, started: float) -> dict[str, Any]:
    """A request with its times in seconds from the start of the run."""
    return {
        "prompt_tokens": record.prompt_tokens,
        "wanted_tokens": record.wanted_tokens,
        "status": record.status,
        "due": round(record.due - started, 6),
        "arrivals": [round(time - started, 6) for time in record.arrivals],
    }


def save_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file that any reader of JSON takes."""
    path.write_text(json.dumps(without_nan(content), indent=1) + "\n")


def save_png(path: Path, records: Sequence[Record], title: str) -> str:
    """Draws the times and the tokens of a run; returns a sentence about it."""
    try:
        import matplotlib
    except ImportError:
        return f"{path} not drawn: matplotlib is missing; pip install matplotlib brings it"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (first, gaps, life) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    done = [record for record in records if record.status in (OK, STOPPED)]
    _draw_shares(first, [r.ttft for r in done if r.ttft is not None], "time to first token, ms")
    _draw_shares(gaps, [gap for r in done for gap in r.gaps if gap > 0], "gap between tokens, ms")
    started = min((record.due for record in records), default=0.0)
    for row, record in enumerate(sorted(records, key=lambda r: r.due)):
        good = record.status in (OK, STOPPED)
        times = [time - started for time in record.arrivals]
        life.plot([record.due - started], [row], "|", color="black", markersize=4)
        life.plot(times, [row] * len(times), ".", color="C0" if good else "C3", markersize=2)
    life.set_xlabel("seconds; a bar is a request, a dot is a token")
    life.set_ylabel("request")
    life.yaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"drawn: {path}"


def _draw_shares(axes: Any, seconds: Sequence[float], label: str) -> None:
    """The share of values up to each value."""
    ordered = sorted(value * 1e3 for value in seconds)
    shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
    axes.step(ordered, shares, where="post")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.set_xlabel(label)
    axes.set_ylabel("share of all")
