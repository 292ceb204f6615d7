"""Charts over time: memory by account, steps by what they did, the queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvledger.report.charts import NO_LOAD, Chart, Key, Marks, finish_time, over_time, plain
from kvledger.report.drawing import SERIES, Size, colour, days, drawn
from kvledger.report.recorded import Recorded
from kvledger.report.timeline import Bucket
from kvledger.report.units import bytes_unit, figure, seconds_text, time_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Tenants, and reasons, that have a colour of their own.
_TENANTS = 6
_REASONS = 5
_LIVE = ("held", "reserved", "releasing")
_MIXTURES = {"decode": "decoding alone", "prefill": "prompts alone", "both": "both"}

Buckets = Sequence[tuple[float, Bucket]]


@dataclass(frozen=True)
class _Layer:
    """What one account had in each bucket, in bytes on average."""

    key: Key
    values: list[float]


def memory_chart(recorded: Recorded, marks: Marks) -> Chart:
    """Who had which part of the KV memory."""
    name, title = "memory", "KV memory by account"
    buckets = [(when, each) for when, each in recorded.timeline.buckets() if each.time]
    if not buckets:
        return Chart(name, title, missing=_NO_MEMORY)
    layers = [*_tenants(buckets), *_rest(buckets)]
    free = _states(buckets, "free")
    live = [sum(each.states[state] for state in _LIVE) / each.time for _, each in buckets]
    whole = [each.states.total() / each.time for _, each in buckets]
    unit, size_of = bytes_unit(whole)
    width = recorded.timeline.width
    middles = [when for when, _ in buckets]

    def draw(panels: Sequence[Axes], size: Size) -> None:
        (axes,) = panels
        scaled = [[value / size_of for value in layer.values] for layer in layers]
        _stack(axes, middles, width, scaled, [layer.key.colour for layer in layers])
        for values, style in ((live, "-"), (whole, ":")):
            _outline(axes, middles, [value / size_of for value in values], width, style)
        axes.set_ylim(bottom=0)
        finish_time(axes, size, marks, "", unit)

    rows = [
        [
            time_text(when - width / 2),
            *(figure(layer.values[at] / size_of) for layer in layers),
            figure(free[at] / size_of),
            f"{_share(live[at], whole[at])} %",
        ]
        for at, when in enumerate(middles)
    ]
    outlines = [Key("ink", "waterline", "line"), Key("ink", "the whole pool", "dotted")]
    names = [layer.key.name for layer in layers]
    return Chart(
        name,
        title,
        _OF_MEMORY,
        drawn(name, title, _OF_MEMORY, 1, draw),
        [*(layer.key for layer in layers), *outlines, *marks.keys],
        ["from (UTC)", *(f"{each} {unit}" for each in names), f"free {unit}", "waterline"],
        rows,
    )


_OF_MEMORY = (
    "Each colour is what one account had of the pool, one above the other: up to the waterline "
    "requests had it, what is cached above it can be had, the rest up to the dotted line was free."
)


def _tenants(buckets: Buckets) -> list[_Layer]:
    """The tenants that had most, and all others as one."""
    sums: Counter[str] = Counter()
    for _, bucket in buckets:
        sums.update(bucket.tenants)
    most = [tenant for tenant, _ in sums.most_common(_TENANTS)]
    layers = [
        _Layer(Key(SERIES[at], tenant), [each.tenants[tenant] / each.time for _, each in buckets])
        for at, tenant in enumerate(most)
    ]
    if len(sums) > len(most):
        values = [
            (each.tenants.total() - sum(each.tenants[tenant] for tenant in most)) / each.time
            for _, each in buckets
        ]
        layers.append(_Layer(Key("rest", f"{len(sums) - len(most)} other tenants"), values))
    return layers


def _rest(buckets: Buckets) -> list[_Layer]:
    """What is no tenant's, as far as there is any."""
    layers = [
        _Layer(Key(SERIES[6], "shared scopes"), [each.scopes / each.time for _, each in buckets]),
        _Layer(Key("ink", "given back, in use by a step"), _states(buckets, "releasing")),
        _Layer(Key("cached", "cached, can be had"), _states(buckets, "cached")),
    ]
    return [layer for layer in layers if any(layer.values)]


_NO_MEMORY = (
    "The files do not say how the blocks of a pool stood in this time: it takes two lines of a "
    "pool, which servers write every ten seconds, with the states of its blocks."
)


def _states(buckets: Buckets, state: str) -> list[float]:
    return [each.states[state] / each.time for _, each in buckets]


def _share(part: float, whole: float) -> str:
    return figure(100 * part / whole) if whole else "0"


def _stack(
    axes: Axes,
    middles: Sequence[float],
    width: float,
    columns: Sequence[Sequence[float]],
    colours: Sequence[str],
) -> None:
    """Layers over buckets of time, with nothing where there is no bucket."""
    for first, last in _runs(middles, width):
        edges = [
            days(edge)
            for when in middles[first:last]
            for edge in (when - width / 2, when + width / 2)
        ]
        below = [0.0] * (last - first)
        for name, column in zip(colours, columns, strict=True):
            top = [low + more for low, more in zip(below, column[first:last], strict=True)]
            axes.fill_between(
                edges,
                [value for value in below for _ in range(2)],
                [value for value in top for _ in range(2)],
                facecolor=colour(name),
                edgecolor=colour("ground"),
                linewidth=0.5,
            )
            below = top


def _outline(
    axes: Axes, middles: Sequence[float], values: Sequence[float], width: float, style: str
) -> None:
    for first, last in _runs(middles, width):
        x = [days(when + side) for when in middles[first:last] for side in (-width / 2, width / 2)]
        y = [value for value in values[first:last] for _ in range(2)]
        axes.plot(x, y, style, color=colour("ink"), linewidth=1.4)


def _runs(moments: Sequence[float], width: float) -> list[tuple[int, int]]:
    """From and to of moments without a gap."""
    borders = [at for at in range(1, len(moments)) if moments[at] - moments[at - 1] > 2.5 * width]
    return list(zip([0, *borders], [*borders, len(moments)], strict=True))


def mixture_chart(recorded: Recorded, marks: Marks) -> Chart:
    """How long steps took, by what they did."""
    name, title = "steps", "Time of a step, by what it did"
    buckets = [
        (when, each.load)
        for when, each in recorded.timeline.buckets()
        if any(steps.steps for steps in each.load.mixtures.values())
    ]
    if not buckets:
        return Chart(name, title, missing=_no_steps(recorded))
    width = recorded.timeline.width
    shown = dict(zip(_MIXTURES, (SERIES[0], SERIES[5], SERIES[2]), strict=True))
    values = {
        (mixture, share): [(when, load.mixtures[mixture].quantile(share)) for when, load in buckets]
        for mixture in _MIXTURES
        for share in (0.5, 0.99)
    }

    def draw(panels: Sequence[Axes], size: Size) -> None:
        for at, (mixture, words) in enumerate(_MIXTURES.items()):
            axes = panels[at]
            axes.set_yscale("log")
            median, most = (
                [(when, seconds * 1e3) for when, seconds in values[mixture, share] if seconds]
                for share in (0.5, 0.99)
            )
            _band(axes, median, most, width, shown[mixture])
            unit = "ms" if at == 0 or not size.is_wide else ""
            finish_time(axes, size, marks, words, unit, len(panels))
        _alike(
            panels, [seconds * 1e3 for each in values.values() for _, seconds in each if seconds]
        )
        for axes in panels:
            plain(axes.yaxis)

    rows = [
        [time_text(when - width / 2)]
        + [
            text
            for mixture in _MIXTURES
            for text in (
                str(load.mixtures[mixture].steps),
                seconds_text(values[mixture, 0.5][at][1]),
                seconds_text(values[mixture, 0.99][at][1]),
            )
        ]
        for at, (when, load) in enumerate(buckets)
    ]
    reading = (
        "Steps that decode alone set the pace of everybody's tokens; where steps that also compute "
        "prompts stand far above them, prompts make those who decode wait."
    )
    return Chart(
        name,
        title,
        reading,
        drawn(name, title, reading, 3, draw),
        [
            *(Key(shown[mixture], words) for mixture, words in _MIXTURES.items()),
            Key("ink", "median", "line"),
            Key("ink", "99th percentile, to a fifth", "dotted"),
            *marks.keys,
        ],
        [
            "from (UTC)",
            *(f"{words}: {what}" for words in _MIXTURES.values() for what in _OF_STEPS),
        ],
        rows,
    )


def _band(
    axes: Axes,
    median: Sequence[tuple[float, float]],
    most: Sequence[tuple[float, float]],
    width: float,
    name: str,
) -> None:
    """From medians up to the 99th percentiles of the same moments."""
    for first, last in _runs([when for when, _ in median], width):
        axes.fill_between(
            [days(when) for when, _ in median[first:last]],
            [value for _, value in median[first:last]],
            [value for _, value in most[first:last]],
            color=colour(name),
            alpha=0.3,
            linewidth=0,
        )
    over_time(axes, median, width, name)
    over_time(axes, most, width, name, ":")
    if not median:
        axes.text(0.5, 0.5, "no such step", transform=axes.transAxes, ha="center")


_OF_STEPS = ("steps", "median", "p99")


def queue_chart(recorded: Recorded, marks: Marks) -> Chart:
    """Who waited, who came, and who was refused."""
    name, title = "queue", "Queue and refusals"
    buckets = [(when, each) for when, each in recorded.timeline.buckets() if each.load_time]
    if not buckets:
        return Chart(name, title, missing=NO_LOAD)
    width = recorded.timeline.width
    refusals = _refusals(buckets)
    waiting, opened = (
        [(when, getattr(each.load, what) / each.load_time) for when, each in buckets]
        for what in ("waits", "open_time")
    )

    def a_minute(count: float, bucket: Bucket) -> float:
        return count * 60e9 / bucket.load_time

    def draw(panels: Sequence[Axes], size: Size) -> None:
        queue, arrivals = panels
        over_time(queue, opened, width, SERIES[1])
        over_time(queue, waiting, width, SERIES[0], "--")
        finish_time(queue, size, marks, "here at a time", "requests")
        over_time(
            arrivals, [(when, a_minute(each.load.came, each)) for when, each in buckets], width,
            SERIES[1],
        )  # fmt: skip
        columns = [
            [a_minute(count, each) for count, (_, each) in zip(layer.values, buckets, strict=True)]
            for layer in refusals
        ]
        middles = [when for when, _ in buckets]
        _stack(arrivals, middles, width, columns, [layer.key.colour for layer in refusals])
        finish_time(arrivals, size, marks, "entered and refused", "a minute")
        for axes in panels:
            axes.set_ylim(bottom=0, top=None if axes.get_ylim()[1] > 0.5 else 1)

    rows = [
        [
            time_text(when - width / 2),
            *(figure(values[at][1]) for values in (opened, waiting)),
            *(str(count) for count in (each.load.waiting_most, each.load.came)),
            *(figure(layer.values[at]) for layer in refusals),
        ]
        for at, (when, each) in enumerate(buckets)
    ]
    lines = [Key(SERIES[1], "open; entered", "line"), Key(SERIES[0], "waiting", "dashed")]
    heads = ["from (UTC)", "open", "waiting", "most waiting at a look", "entered"]
    return Chart(
        name,
        title,
        _OF_QUEUE,
        drawn(name, title, _OF_QUEUE, 2, draw),
        [*lines, *(layer.key for layer in refusals), *marks.keys],
        [*heads, *(layer.key.name for layer in refusals)],
        rows,
    )


_OF_QUEUE = (
    "Requests that wait while few come lack memory or a place in the batch; where they wait while "
    "many come, or are refused, there is more to do than the replicas can."
)


def _refusals(buckets: Buckets) -> list[_Layer]:
    """How many were refused in each bucket, by the reason."""
    reasons: Counter[str] = Counter()
    for _, bucket in buckets:
        reasons.update(bucket.load.refused)
    shown = [reason for reason, count in reasons.most_common(_REASONS) if count]
    layers = [
        _Layer(
            Key(SERIES[2 + at], f"refused: {reason}"),
            [each.load.refused[reason] for _, each in buckets],
        )
        for at, reason in enumerate(shown)
    ]
    if len(+reasons) > len(shown):
        values: list[float] = [
            each.load.refused.total() - sum(each.load.refused[reason] for reason in shown)
            for _, each in buckets
        ]
        layers.append(_Layer(Key("rest", "refused for another reason"), values))
    return layers


def _no_steps(recorded: Recorded) -> str:
    return "No step ran in this time." if recorded.has_load else NO_LOAD


def _alike(panels: Sequence[Axes], values: Sequence[float]) -> None:
    """One range for all, so that they can be compared, and wide enough for more than one tick."""
    low, high = min(values) / 1.2, max(values) * 1.2
    if high < 10 * low:
        low, high = low / 3, high * 3
    for axes in panels:
        axes.set_ylim(low, high)
