"""Runs side by side, a column each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_Figures = Mapping[str, Any]


def table(runs: Sequence[tuple[str, _Figures]]) -> str:
    """`runs` are titles and what Outcome.figures told."""
    figures = [each for _, each in runs]
    rows = [["", *(title for title, _ in runs)], *_load(figures), *_memory(figures)]
    rows += [*_tenants(figures), *_end(figures)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in rows
    )


def _load(runs: Sequence[_Figures]) -> Iterator[list[str]]:
    """Who was answered, and how fast; what no run has is left out."""
    yield ["requests", *(str(run["requests"]) for run in runs)]
    yield ["answered", *(str(run["answered"]) for run in runs)]
    for name in ("cancelled", "failed"):
        if any(run[name] for run in runs):
            yield [name, *(str(run[name]) for run in runs)]
    for why in sorted({why for run in runs for why in run["refused"]}):
        yield [f"refused: {why}", *(str(run["refused"].get(why, 0)) for run in runs)]
    for title, name in (
        ("answered a second", "requests_per_second"),
        ("output tokens a second", "tokens_per_second"),
        ("  of good requests", "good_tokens_per_second"),
    ):
        yield [title, *(_number(run[name]) for run in runs)]
    yield ["good requests", *(_share(run["good_requests"]) for run in runs)]
    for name in ("ttft", "tpot"):
        for quantile in ("p50", "p99"):
            yield [f"{name.upper()} {quantile}", *(_time(run[name][quantile]) for run in runs)]
    yield ["sequences in a step", *(_number(run["sequences_per_step"]) for run in runs)]
    yield ["a step runs", *(_share(run["busy"]) for run in runs)]


def _memory(runs: Sequence[_Figures]) -> Iterator[list[str]]:
    for title, name in (
        ("waterline, on average", "waterline"),
        ("  at most", "waterline_most"),
        ("cached", "cached"),
        ("prompts reused", "reused"),
    ):
        yield [title, *(_share(run[name]) for run in runs)]
    yield ["preemptions", *(str(run["preemptions"]) for run in runs)]
    yield ["  most of one request", *(str(run["preemptions_of_one"]) for run in runs)]
    yield ["computed again", *(f"{100 * run['recomputed']:.2f} %" for run in runs)]
    for what in runs[0]["waited"]:
        yield [f"waited for {what}", *(_share(run["waited"][what]) for run in runs)]


def _tenants(runs: Sequence[_Figures]) -> Iterator[list[str]]:
    names = list(runs[0]["tenants"])
    for name in names if len(names) > 1 else ():
        mine = [run["tenants"][name] for run in runs]
        yield [f"{name}: tokens", *(_share(each["tokens"]) for each in mine)]
        yield ["  memory", *(_share(each["memory"]) for each in mine)]
        yield ["  TTFT p99", *(_time(each["ttft"]["p99"]) for each in mine)]


def _end(runs: Sequence[_Figures]) -> Iterator[list[str]]:
    yield ["simulated", *(f"{run['seconds']:.0f} s" for run in runs)]
    yield ["steps", *(str(run["steps"]) for run in runs)]
    yield ["books", *(str(run["audit"]) for run in runs)]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{1e3 * seconds:.1f} ms"
