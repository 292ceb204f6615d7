"""`kvledger plan`: what a model takes, how many fit, and how fast it can be at most."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pydantic import ByteSize, TypeAdapter, ValidationError

from kvledger.errors import ModelRefused, SettingRefused
from kvledger.log import configure
from kvledger.machine.kept_peaks import machine_peaks
from kvledger.machine.peaks import MachinePeaks
from kvledger.memory import memory_available
from kvledger.planning.capacity import Lengths
from kvledger.planning.shapes import SHAPES, shape_of
from kvledger.planning.targets import Targets
from kvledger.settings import Settings, load_settings

if TYPE_CHECKING:
    from kvledger.planning.planned_model import PlannedModel

_SIZES = {
    "layers": "layers",
    "kv_heads": "heads of keys and values",
    "heads": "heads of queries",
    "head_dim": "dimensions of a head",
    "hidden": "hidden size",
    "intermediate": "size of the feed-forward part",
    "vocabulary": "token ids",
    "context_tokens": "tokens of the context window (8192)",
}
# What kvledger reads from files.
_STORED = ("f32", "bf16", "f16", "q8_0", "q4_0", "q4_1")
_COUNT_MAX = 1 << 24
_PROMPT, _OUTPUT = 512, 128
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_RATE = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmgtp]?)(?:b|flops?|ops?)?(?:/s)?", re.I)
_DURATION = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*(s|ms|us)?")


def run(arguments: Sequence[str]) -> int:
    """Prints the plan; 0, or 2 with a sentence that says what to change."""
    configure("console", "error")
    try:
        options, rest = _parser().parse_known_args(list(arguments))
        settings = _settings(options, rest)
        # Torch takes seconds to import; a wrong option should not.
        from kvledger.planning.plan import Question, make_plan
        from kvledger.planning.report import as_json, as_text

        model = _model(options, settings)
        plan = make_plan(
            Question(
                model=model,
                settings=settings,
                lengths=_lengths(options, model.config.context_tokens),
                memory=memory_available() if options.memory is None else options.memory,
                peaks=_peaks(options, settings),
                concurrency=options.concurrency,
                targets=Targets(options.ttft, options.tpot),
            )
        )
    except (SettingRefused, ModelRefused) as error:
        print(f"kvledger plan: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_json(plan), indent=2) if options.json else as_text(plan))
    return 0


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are sentences like all others."""

    def error(self, message: str) -> NoReturn:
        raise SettingRefused(f"{message}; see kvledger plan --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvledger plan",
        description="Plans the capacity of a server: put it in place of `serve` in its command "
        "line. The settings of `serve` count here too (--model, --weights, --kv-format, "
        "--kv-bytes, --token-budget, --threads, ...), and so do KVLEDGER_* variables.",
        epilog="docs/plan.md says what each line means.",
        allow_abbrev=False,
    )
    model = parser.add_argument_group("the model, if not that of --model")
    model.add_argument("--config", type=Path, metavar="FILE", help="a config.json, no weights")
    model.add_argument("--shape", metavar="NAME", help=f"one of {', '.join(SHAPES)}")
    for name, text in _SIZES.items():
        option = f"--{name.replace('_', '-')}"
        model.add_argument(option, type=_count, metavar="N", help=text)
    model.add_argument("--tied-head", action="store_true", default=None, help="embedding as head")
    model.add_argument(
        "--stored",
        choices=_STORED,
        help="what its weights are stored as; default: as config.json says, or bf16",
    )
    load = parser.add_argument_group("the load")
    load.add_argument("--prompt", type=_count, metavar="N", help="mean tokens of a prompt (512)")
    load.add_argument("--output", type=_count, metavar="N", help="mean tokens of an output (128)")
    load.add_argument(
        "--prompt-p95", type=_count, metavar="N", help="the most planned for; default: the mean"
    )
    load.add_argument("--output-p95", type=_count, metavar="N", help="the same for outputs")
    load.add_argument(
        "--concurrency", type=_count, metavar="N", help="sequences at a time; default: what fits"
    )
    load.add_argument("--ttft", type=_duration, metavar="TIME", help="target, such as 0.5 or 500ms")
    load.add_argument("--tpot", type=_duration, metavar="TIME", help="target, such as 50ms")
    machine = parser.add_argument_group("the machine, if not this one")
    machine.add_argument(
        "--memory", type=_size, metavar="SIZE", help="such as 16GiB; default: free"
    )
    machine.add_argument(
        "--bandwidth", type=_rate, metavar="RATE", help="bytes read a second, such as 45GB/s"
    )
    machine.add_argument(
        "--flops", type=_rate, metavar="RATE", help="operations a second, such as 230G or 788T"
    )
    machine.add_argument(
        "--measure-again", action="store_true", help="even if figures of this machine are kept"
    )
    parser.add_argument("--settings", metavar="FILE", help="a TOML file, as --config of serve")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _settings(options: argparse.Namespace, rest: Sequence[str]) -> Settings:
    """What `serve` would be told, and whether the options for the plan alone make a whole."""
    named = [] if options.settings is None else ["--config", options.settings]
    sizes = [name for name in (*_SIZES, "tied_head") if getattr(options, name) is not None]
    shaped = options.shape is not None or bool(sizes)
    models = {
        "--config": options.config is not None,
        "--shape or sizes": shaped,
        "--model": any(each == "--model" or each.startswith("--model=") for each in rest),
    }
    given = [name for name, is_given in models.items() if is_given]
    if len(given) > 1:
        raise SettingRefused(f"{given[0]} and {given[1]} each name a model; give one of them")
    if options.stored is not None and not shaped and options.config is None:
        raise SettingRefused("--stored is for --config or a shape: files say how they are stored")
    if (options.bandwidth is None) != (options.flops is None):
        raise SettingRefused("--bandwidth and --flops describe one machine: give both, or neither")
    settings = load_settings([*named, *rest], command="kvledger plan")
    if settings.kernels != "core":
        raise SettingRefused("--kernels torch is a reference; plans are for --kernels core")
    if settings.device != "cpu" and options.bandwidth is None:
        raise SettingRefused(
            f"--device {settings.device}: only processors are measured; give --bandwidth and "
            f"--flops"
        )
    return settings


def _lengths(options: argparse.Namespace, context: int) -> Lengths:
    """Lengths as given; unless given, less than the usual where the context window is small."""
    prompt = options.prompt or min(_PROMPT, max(1, context // 2))
    output = options.output or min(_OUTPUT, max(1, context // 4))
    most = [options.prompt_p95 or prompt, options.output_p95 or output]
    for name, mean, p95 in (("prompt", prompt, most[0]), ("output", output, most[1])):
        if p95 < mean:
            raise SettingRefused(f"--{name}-p95 {p95} is less than the mean, {mean}; raise it")
    return Lengths(prompt, output, *most)


def _peaks(options: argparse.Namespace, settings: Settings) -> MachinePeaks:
    if options.bandwidth is not None:
        return MachinePeaks.given(options.bandwidth, options.flops)
    return machine_peaks(
        settings.kernel_threads, settings.instruction_set, again=options.measure_again, say=_say
    )


def _model(options: argparse.Namespace, settings: Settings) -> PlannedModel:
    from kvledger.planning import planned_model

    if options.config is not None:
        return planned_model.configured_model(options.config, options.stored)
    sizes = {name: getattr(options, name) for name in (*_SIZES, "tied_head")}
    given = {name: value for name, value in sizes.items() if value is not None}
    if options.shape is not None or given:
        shape = shape_of(options.shape, given)
        config = shape.config(options.shape or "a model of these sizes")
        return planned_model.plain_model(config, shape.vocabulary, options.stored or "bf16")
    return planned_model.served_model(settings.model, settings.download, _say)


def _count(text: str) -> int:
    digits = text.replace("_", "").replace(",", "")
    if not digits.isascii() or not digits.isdigit() or not 1 <= int(digits) <= _COUNT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {_COUNT_MAX}")
    return int(digits)


def _size(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 16GiB") from None


def _rate(text: str) -> float:
    match = _RATE.fullmatch(text.strip())
    number = _number(match.group(1)) * _PREFIXES[match.group(2).lower()] if match else 0.0
    if not 1.0 <= number <= 1e21:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate such as 45GB/s, 788T or 2.3e11")
    return number


def _duration(text: str) -> float:
    match = _DURATION.fullmatch(text.strip())
    unit = {None: 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
    seconds = _number(match.group(1)) * unit[match.group(2)] if match else 0.0
    if not 0.0 < seconds <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 0.5, 500ms or 2s")
    return seconds


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # more than one point
        return 0.0


def _say(line: str) -> None:
    print(f"kvledger: {line}", file=sys.stderr, flush=True)
