"""The options of `kvledger simulate`, beside those of `serve`."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from kvledger.errors import SettingRefused
from kvledger.simulation.costs import phase_fit, seconds_of
from kvledger.simulation.faults import Faults

_Value = TypeVar("_Value")
_COUNT_MAX = 1 << 24
_RUNS_MAX = 32
# What --vary can change: settings of `serve` that the core or its queue look at, and the load.
_SETTINGS = (
    *("kv_blocks", "kv_bytes", "block_tokens", "kv_format", "token_budget", "max_sequences"),
    *("step_stretch", "tpot_target", "prefill_step", "prefix_reuse", "priority_aging"),
    *("max_queued", "tenants"),
)
_LOAD = ("rate", "rate_scale", "callers", "prompt", "output", "spread", "turns", "think", "seed")
VARIABLE = (*_SETTINGS, *_LOAD)


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are sentences like all others."""

    def error(self, message: str) -> NoReturn:
        raise SettingRefused(f"{message}; see kvledger simulate --help")


def parser() -> argparse.ArgumentParser:
    """Knows what is not `serve`'s."""
    found = _Parser(
        prog="kvledger simulate",
        description="Runs traffic through a server's real scheduler, memory and books under a "
        "virtual clock, without a model: what would these settings do? The settings of `serve` "
        "count here too (--kv-blocks, --max-sequences, --token-budget, --tenants, ...).",
        epilog="docs/simulate.md says what each line means.",
        allow_abbrev=False,
    )
    _add_traffic(
        found.add_argument_group("the traffic: one of --trace, --books, --rate, --callers")
    )
    _add_costs(found.add_argument_group("how long steps take"))
    _add_run(found.add_argument_group("the run"))
    return found


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--trace", type=Path, metavar="FILE", help="a CSV file, a request a line")
    group.add_argument("--books", type=Path, metavar="DIR", help="what a server's --books recorded")
    group.add_argument("--rate-scale", type=_above_0, metavar="X", help="so much faster (1)")
    group.add_argument("--limit", type=_count, metavar="N", help="only the first requests of it")
    group.add_argument(
        "--rate", type=_above_0, metavar="R", help="conversations that begin, a second on average"
    )
    group.add_argument("--callers", type=_count, metavar="N", help="so many at any time instead")
    group.add_argument("--requests", type=_count, metavar="N", help="in all (1000)")
    group.add_argument("--prompt", type=_count, metavar="N", help="mean tokens of a turn (500)")
    group.add_argument("--output", type=_count, metavar="N", help="mean tokens of an answer (200)")
    group.add_argument(
        "--spread",
        type=_not_negative,
        metavar="S",
        help="standard deviation of the lengths' logarithms; 0 is all alike (0.7)",
    )
    group.add_argument("--turns", type=_count, metavar="N", help="of a conversation (1)")
    group.add_argument("--think", type=_time, metavar="TIME", help="between two turns (0)")
    group.add_argument(
        "--from",
        dest="senders",
        type=_senders,
        metavar="NAME=WEIGHT,...",
        help="tenants, and how many of the requests are whose; default: those of --tenants alike",
    )
    group.add_argument(
        "--max-tokens", type=_count, metavar="N", help="the limit that callers set; default: none"
    )
    group.add_argument(
        "--exact", action="store_true", help="callers ask for exactly their answer's tokens"
    )


def _add_costs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="what `kvledger diagnose --json` wrote, or - for its output: the steps of a server, "
        "and its settings as far as none are given here",
    )
    group.add_argument(
        "--decode",
        type=_converted(phase_fit),
        metavar="FIXED,TOKEN,KEY",
        help="of a step's decoding, such as 5ms,1.4ms,20ns",
    )
    group.add_argument(
        "--prefill",
        type=_converted(phase_fit),
        metavar="FIXED,TOKEN,KEY",
        help="and of its prompts, such as 1.5ms,0.5ms,10ns",
    )
    group.add_argument(
        "--measure", action="store_true", help="run steps of --model here, for ten seconds"
    )
    group.add_argument("--gap", type=_time, metavar="TIME", help="between two steps (0)")
    group.add_argument(
        "--noise", type=_share, metavar="X", help="a step takes so much more or less, at most (0)"
    )


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--faults",
        type=_converted(Faults.parse),
        metavar="NAME=P,...",
        help="such as slow_step=0.01x10,fail_step=0.001,cancel=0.05x3,stall=0.02x4,"
        "clock_jump=0.001x-2",
    )
    group.add_argument("--seed", type=_seed, metavar="N", help="of all that is drawn (1)")
    group.add_argument("--ttft", type=_time, metavar="TIME", help="what a good request keeps")
    group.add_argument("--tpot", type=_time, metavar="TIME", help="the same")
    group.add_argument(
        "--context",
        type=_count,
        metavar="N",
        help="tokens of a sequence; default: the model's, or 8192",
    )
    group.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="NAME=V,V,...",
        help="a run for each value, side by side; several are combined; NAME is one of "
        f"{', '.join(VARIABLE)}",
    )
    group.add_argument("--settings", metavar="FILE", help="a TOML file, as --config of serve")
    group.add_argument("--json", action="store_true", help="for programs")


def variants(asked: Sequence[str]) -> list[tuple[str, list[str]]]:
    """What --vary asks for: a title and further arguments for each run. Raises SettingRefused."""
    choices = []
    for text in asked:
        name, _, values = text.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if name not in VARIABLE:
            raise SettingRefused(
                f"--vary {text}: {name!r} changes nothing in a simulation; there are "
                f"{', '.join(VARIABLE)}"
            )
        if not values or not all(values.split(",")):
            raise SettingRefused(f"--vary {text}: give values, such as --vary {name}=4,8,16")
        choices.append([(name, value) for value in values.split(",")])
    runs = [
        (
            " ".join(f"{name}={value}" for name, value in chosen) or "run",
            [f"--{name.replace('_', '-')}={value}" for name, value in chosen],
        )
        for chosen in itertools.product(*choices)
    ]
    if len(runs) > _RUNS_MAX:
        raise SettingRefused(f"--vary asks for {len(runs)} runs, at most {_RUNS_MAX}; give fewer")
    return runs


def _converted(convert: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """A converter whose own sentence is what is told."""

    def converted(text: str) -> _Value:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return converted


_time = _converted(seconds_of)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _COUNT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {_COUNT_MAX}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 to 2^63 - 1")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def _above_0(text: str) -> float:
    value = _number(text)
    if not 0.0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1e6")
    return value


def _not_negative(text: str) -> float:
    value = _number(text)
    if not 0.0 <= value <= 3.0:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 3")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to less than 1")
    return value


def _senders(text: str) -> dict[str, float]:
    found = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        if not name or name in found:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=WEIGHT,... with each name once")
        found[name] = _above_0(weight or "1")
    return found
