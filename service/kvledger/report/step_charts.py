"""Charts of what steps did, over all of the time: decoding, the roofline, batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvledger.books.load_lines import PHASES
from kvledger.diagnosis.observation import Setup
from kvledger.diagnosis.setup_facts import setup_from
from kvledger.report.charts import NO_LOAD, Chart, Key, Shape, plain
from kvledger.report.drawing import SERIES, Size, colour, drawn
from kvledger.report.recorded import Recorded
from kvledger.report.steps import Steps
from kvledger.report.units import bytes_text, bytes_unit, figure, rate_text, seconds_text, time_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WORDS = {"decode": "decoding", "prefill": "prompts"}
_SHAPES: dict[str, Shape] = {"decode": "point", "prefill": "square"}
# The last class of batches has no bound.
_CLASS_LAST = 1 << 12
_MARKERS = {"decode": "o", "prefill": "s"}
_COLOURS = {"decode": SERIES[0], "prefill": SERIES[5]}


def decode_chart(recorded: Recorded) -> Chart:
    """What reading keys and values does to the time of a decode step."""
    name, title = "decode", "Bytes of keys and values read, and the time of a decode step"
    found = [
        (when, phase["kv_bytes"] / phase["steps"], phase["time"] / phase["steps"], phase)
        for when, bucket in recorded.timeline.buckets()
        if (phase := bucket.load.phases["decode"])["steps"]
    ]
    if not found:
        return Chart(name, title, missing=_nothing(recorded, "Nothing was decoded in this time."))
    unit, size_of = bytes_unit([read for _, read, _, _ in found])
    floor = _floor(recorded)

    def draw(panels: Sequence[Axes], size: Size) -> None:
        (axes,) = panels
        x = [read / size_of for _, read, _, _ in found]
        axes.plot(x, [time / 1e6 for _, _, time, _ in found], "o", color=colour(SERIES[0]),
                  markersize=6, alpha=0.65)  # fmt: skip
        if floor is not None:
            ends = [0.0, max(x) * 1.05]
            least = [(floor.weights + end * size_of) / floor.speed * 1e3 for end in ends]
            axes.plot(ends, least, "--", color=colour("ink"))
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"{unit} of keys and values read in a step")
        axes.set_ylabel("ms a step")

    rows = [
        [time_text(when), bytes_text(read), seconds_text(time / 1e9),
         figure(phase["sequences"] / phase["steps"]), str(phase["steps"])]
        for when, read, time, phase in found
    ]  # fmt: skip
    keys = [Key(SERIES[0], f"mean of {recorded.timeline.width:.0f} s", "point")]
    if floor is not None:
        keys.append(
            Key("ink", "the least: weights, keys and values at the memory's speed", "dashed")
        )
    return Chart(
        name,
        title,
        _OF_DECODE,
        drawn(name, title, _OF_DECODE, 1, draw),
        keys,
        ["at (UTC)", "keys and values", "step", "sequences", "steps"],
        rows,
    )  # fmt: skip


_OF_DECODE = (
    "Where points rise to the right, a step takes longer because it reads more keys and values; "
    "where they lie flat, something else sets its time, mostly the weights."
)


@dataclass(frozen=True)
class _Floor:
    weights: int  # bytes
    speed: float  # bytes a second


def _setups(recorded: Recorded) -> list[Setup]:
    """Of the replicas whose steps are recorded, as far as they state it."""
    found = (setup_from(each.facts) for each in recorded.present if each.load.covered)
    return [each for each in found if each is not None]


def _floor(recorded: Recorded) -> _Floor | None:
    """What decode steps took at least; None if no replica knows it, or they differ."""
    costs = [each.costs for each in _setups(recorded) if each.is_measured]
    floors = {
        _Floor(each.layer_bytes + each.head_bytes, each.peaks.read_bytes_per_second)
        for each in costs
    }
    return floors.pop() if len(floors) == 1 else None


def roofline_chart(recorded: Recorded) -> Chart:
    """How near each phase came to what the machine can do."""
    name, title = "roofline", "Roofline: arithmetic against memory"
    sums = {phase: Counter[str]() for phase in PHASES}
    parts: list[tuple[float, str, Counter[str]]] = []
    for when, bucket in recorded.timeline.buckets():
        for phase, counts in bucket.load.phases.items():
            if counts["time"] and counts["operations"] and _bytes(counts):
                sums[phase].update(counts)
                parts.append((when, phase, counts))
    if not parts:
        return Chart(name, title, missing=_nothing(recorded, "No step ran in this time."))
    peaks = _peaks(recorded)

    def draw(panels: Sequence[Axes], size: Size) -> None:
        (axes,) = panels
        axes.set_xscale("log")
        axes.set_yscale("log")
        for name in PHASES:
            _points(axes, name, [counts for _, phase, counts in parts if phase == name], 3.5, 0.35)
        for phase, counts in sums.items():
            _points(axes, phase, [counts] if counts["time"] else [], 10, 1.0)
        x = [_intensity(counts) for _, _, counts in parts]
        ends = [min(x) / 3, max(x) * 3]
        for speed, operations in peaks:
            middle = operations / speed
            ends = [min(ends[0], middle / 3), max(ends[1], middle * 3)]
        for speed, operations in peaks:
            roof = [ends[0], operations / speed, ends[1]]
            axes.plot(roof, [min(each * speed, operations) / 1e9 for each in roof],
                      color=colour("ink"))  # fmt: skip
        axes.set_xlabel("operations for each byte read")
        axes.set_ylabel("Gop/s")
        plain(axes.xaxis)
        plain(axes.yaxis)

    rows = [_roof_row("all", phase, counts) for phase, counts in sums.items() if counts["time"]]
    rows += [_roof_row(time_text(when), phase, counts) for when, phase, counts in parts]
    keys = [
        Key(each, f"{_WORDS[phase]}: large, all of the time; small, parts of it", _SHAPES[phase])
        for phase, each in _COLOURS.items()
    ]
    keys += [
        Key("ink", f"at most {bytes_text(speed)}/s and {rate_text(operations, 'op/s')}", "line")
        for speed, operations in peaks
    ]
    reading = _OF_ROOFLINE if peaks else f"{_OF_ROOFLINE} {_NO_PEAKS}"
    return Chart(
        name,
        title,
        reading,
        drawn(name, title, reading, 1, draw),
        keys,
        ["at (UTC)", "phase", "operations a byte", "operations/s", "bytes/s", "step time"],
        rows,
    )


_OF_ROOFLINE = (
    "Under the slope the memory's speed is the limit, under the flat part arithmetic is; how far "
    "below the line a point lies is what kernels, bookkeeping and other programs took."
)
_NO_PEAKS = (
    "The line is missing: no replica knew what its machine can do (--machine-peaks measures it, on "
    "a quiet machine)."
)


def _bytes(counts: Counter[str]) -> int:
    return counts["weight_bytes"] + counts["kv_bytes"]


def _intensity(counts: Counter[str]) -> float:
    return counts["operations"] / _bytes(counts)


def _points(
    axes: Axes, phase: str, found: Sequence[Counter[str]], size: float, alpha: float
) -> None:
    axes.plot(
        [_intensity(counts) for counts in found],
        [counts["operations"] / counts["time"] for counts in found],
        _MARKERS[phase],
        color=colour(_COLOURS[phase]),
        markersize=size,
        alpha=alpha,
        markeredgewidth=1.5 if alpha == 1.0 else 0,
        markeredgecolor=colour("ground"),
        zorder=3 if alpha == 1.0 else 2,
    )


def _roof_row(when: str, phase: str, counts: Counter[str]) -> list[str]:
    seconds = counts["time"] / 1e9
    return [
        when,
        _WORDS[phase],
        figure(_intensity(counts)),
        rate_text(counts["operations"] / seconds, "op/s"),
        f"{bytes_text(_bytes(counts) / seconds)}/s",
        seconds_text(seconds),
    ]


def _peaks(recorded: Recorded) -> list[tuple[float, float]]:
    """Bytes and operations a second that the machines can do at most, each once."""
    found = {
        (
            each.costs.peaks.read_bytes_per_second,
            max(each.costs.peaks.operations_per_second.values()),
        )
        for each in _setups(recorded)
        if each.is_measured
    }
    return sorted(found)[:4]


def batch_chart(recorded: Recorded) -> Chart:
    """What larger batches give and cost."""
    name, title = "batches", "Batch against throughput and tail"
    batches: dict[int, Steps] = {}
    for _, bucket in recorded.timeline.buckets():
        for most, steps in bucket.load.batches.items():
            batches.setdefault(most, Steps()).merge(steps)
    classes = sorted(most for most, steps in batches.items() if steps.time)
    if not classes:
        return Chart(name, title, missing=_nothing(recorded, _NO_BATCHES))
    labels = [_class_text(most) for most in classes]
    rates = [batches[most].tokens * 1e9 / batches[most].time for most in classes]
    quantiles = {
        share: [batches[most].quantile(share) or 0.0 for most in classes] for share in (0.5, 0.99)
    }

    def draw(panels: Sequence[Axes], size: Size) -> None:
        throughput, tail = panels
        x = range(len(classes))
        throughput.bar(x, rates, color=colour(SERIES[2]), width=0.7)
        throughput.set_title("output tokens a second")
        tail.plot(x, [each * 1e3 for each in quantiles[0.99]], "s--", color=colour(SERIES[5]))
        tail.plot(x, [each * 1e3 for each in quantiles[0.5]], "o-", color=colour(SERIES[0]))
        tail.set_title("ms a step")
        for axes in panels:
            axes.set_xlim(-0.6, max(5, len(classes)) - 0.4)  # one bar alone is no wall
            axes.set_xticks(list(x), labels)
            axes.set_xlabel("sequences that decode in the step")
            axes.set_ylim(bottom=0)
            axes.grid(visible=False, axis="x")

    rows = [
        [label, str(batches[most].steps), str(batches[most].tokens), figure(rates[at]),
         seconds_text(quantiles[0.5][at]), seconds_text(quantiles[0.99][at])]
        for at, (most, label) in enumerate(zip(classes, labels, strict=True))
    ]  # fmt: skip
    return Chart(
        name,
        title,
        _OF_BATCHES,
        drawn(name, title, _OF_BATCHES, 2, draw),
        [
            Key(SERIES[2], "tokens a second"),
            Key(SERIES[0], "median step", "line"),
            Key(SERIES[5], "99th percentile", "dashed"),
        ],
        ["sequences", "steps", "tokens", "tokens/s", "median", "p99"],
        rows,
    )


_OF_BATCHES = (
    "Larger batches are worth while as long as tokens a second grow and the tail on the right "
    "stays below what users feel; only steps that decode alone are counted."
)
_NO_BATCHES = "No step decoded without computing a prompt in this time."


def _class_text(most: int) -> str:
    """A class of batches: from more than half of its most."""
    least = most // 2 + 1
    if most == _CLASS_LAST:
        return f"{least} or more"
    return str(most) if least >= most else f"{least}-{most}"


def _nothing(recorded: Recorded, why: str) -> str:
    return why if recorded.has_load else NO_LOAD
