"""`kvledger diagnose`: what limits a server now, in words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
from google.protobuf import duration_pb2
from google.protobuf.json_format import MessageToJson, Parse, ParseError

from kvledger.address import operators_address
from kvledger.cli.client import (
    DEFAULT_SERVER,
    add_identity_arguments,
    add_server_arguments,
    channel,
    explain,
    identity,
    printable,
)
from kvledger.errors import SettingRefused
from kvledger.v1 import diagnosis_pb2, diagnosis_pb2_grpc

_TIMEOUT = 30.0
_CHANGES = tuple(field.name.replace("_", "-") for field in diagnosis_pb2.Change.DESCRIPTOR.fields)


def run(arguments: Sequence[str]) -> int:
    """Prints the diagnosis; 0, 1 if the server refuses or does not answer, 2 for a wrong option."""
    parser = argparse.ArgumentParser(
        prog="kvledger diagnose",
        description="Says what limits a server, what to change first, and what changes would do. "
        "Asks the operators' listener.",
    )
    add_server_arguments(parser, operators_address(DEFAULT_SERVER))
    add_identity_arguments(parser)
    parser.add_argument(
        "--interval", type=seconds, default=60.0, metavar="S", help="seconds to look back (60)"
    )
    parser.add_argument(
        "--against",
        type=_then,
        metavar="S|FILE",
        help="say also what changed since an interval that ended S seconds ago; or since a "
        "diagnosis that --json wrote into a file, and how its predictions turned out",
    )
    parser.add_argument(
        "--if",
        dest="what_if",
        action="append",
        default=[],
        type=_change,
        metavar="NAME=VALUE",
        help=f"say what this would do, too; NAME is one of {', '.join(_CHANGES)}",
    )
    parser.add_argument("--json", action="store_true", help="as the contract names things")
    options = parser.parse_args(list(arguments))
    request = diagnosis_pb2.DiagnoseRequest(
        interval=_duration(options.interval), what_if=options.what_if
    )
    if isinstance(options.against, float):
        request.against.CopyFrom(_duration(options.against))
    elif options.against is not None:
        request.earlier.CopyFrom(options.against)
    try:
        shown = identity(options)
        with channel(options) as connection:
            stub = diagnosis_pb2_grpc.DiagnosisServiceStub(connection)  # type: ignore[no-untyped-call]
            response = stub.Diagnose(request, metadata=shown, timeout=_TIMEOUT)
    except SettingRefused as error:
        print(f"kvledger diagnose: {error}", file=sys.stderr)
        return 2
    except grpc.RpcError as error:
        print(f"kvledger diagnose: {explained(error, options.server)}", file=sys.stderr)
        return 1
    if options.json:
        print(
            MessageToJson(
                response,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            )
        )
    else:
        print("\n".join(map(printable, _lines(response))))
    return 0


def seconds(text: str) -> float:
    """An option's seconds, of at most a day."""
    value = float(text)
    if not 1.0 <= value <= 86_400.0:
        raise argparse.ArgumentTypeError(f"{text} is not from 1 to 86400")
    return value


def _then(text: str) -> float | diagnosis_pb2.Diagnosis:
    """An earlier time: seconds ago, or a file that `--json` wrote."""
    try:
        return seconds(text)
    except ValueError:
        pass
    try:
        written = Parse(Path(text).read_text("utf-8"), diagnosis_pb2.DiagnoseResponse())
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text} is no number of seconds, and no file that can be read: {error.strerror}"
        ) from None
    except (ParseError, UnicodeDecodeError):
        raise argparse.ArgumentTypeError(
            f"{text} holds no diagnosis; write one with: kvledger diagnose --json > {text}"
        ) from None
    if not written.HasField("now"):
        raise argparse.ArgumentTypeError(f"{text} holds a diagnosis of nothing")
    return written.now


def _change(text: str) -> diagnosis_pb2.Change:
    """What `--if` asks about."""
    name, _, value = text.partition("=")
    if name not in _CHANGES or not value:
        raise argparse.ArgumentTypeError(
            f"{text} is not NAME=VALUE with a name of {', '.join(_CHANGES)}"
        )
    kind = name.replace("-", "_")
    if kind == "kv_format":
        return diagnosis_pb2.Change(kv_format=value)
    if not value.isdecimal() or not 0 < int(value) < 1 << 32:
        raise argparse.ArgumentTypeError(f"{text}: {value} is not a whole number above 0")
    change = diagnosis_pb2.Change()
    setattr(change, kind, int(value))
    return change


def explained(error: grpc.RpcError, server: str) -> str:
    """What to do about a refusal."""
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        return (
            f"{server} gives no diagnosis; ask where operators are listened to: the server's log "
            f"names it, at its start"
        )
    return explain(error, server)


def _duration(value: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromMilliseconds(round(value * 1000))
    return duration


def _lines(response: diagnosis_pb2.DiagnoseResponse) -> Iterator[str]:
    now = response.now
    yield f"Over the last {now.interval.ToMilliseconds() / 1000:.0f} s:"
    yield ""
    if not now.findings:
        yield now.summary
    for place, finding in enumerate(now.findings, 1):
        yield f"{place}. {finding.name} ({_percent(finding.weight)})"
        yield f"   {finding.sentence}"
        yield f"   First: {finding.remedy}" + (
            f" Helps {finding.helps}." if finding.helps != "none" else ""
        )
        yield f"   Not: {finding.in_vain}"
    yield ""
    yield (
        f"A step ran {_percent(now.busy)} of the time; prompts took {_percent(now.prefill_share)} "
        f"of it. Waterline {_percent(now.waterline)}, cached {_percent(now.cached)} of the pool."
    )
    yield from _phases(now)
    yield now.utilization_explained
    yield from _traffic(now.traffic)
    if now.predictions:
        yield ""
        yield "What changes would do, to steps and to requests like these, while a step runs:"
        yield from _predictions(now)
    if response.changes:
        yield ""
        yield "Since then:"
        yield from (f"  {line}" for line in response.changes)
    for outcome in response.outcomes:
        yield f"How the prediction for {outcome.change} turned out:"
        yield from (
            f"  {_name(figure.name)}: {figure.predicted:.3g} predicted, {figure.came:.3g} came "
            f"({figure.predicted / figure.came - 1:+.0%})"
            for figure in outcome.figures
        )


def _phases(now: diagnosis_pb2.Diagnosis) -> Iterator[str]:
    measured = now.HasField("peaks")
    for name, phase in (("decode", now.decode), ("prefill", now.prefill)):
        if not phase.steps:
            continue
        line = (
            f"{name:8}{phase.tokens} tokens in {phase.steps} steps, {phase.sequences:.1f} "
            f"sequences at a time, {phase.context:.0f} tokens before each"
        )
        if phase.step_median > 0:
            line += (
                f"; steps of it alone {_ms(phase.step_median)} ms, 99th percentile "
                f"{_ms(phase.step_p99)} (to a fifth)"
            )
        if measured:
            line += (
                f"; {_percent(phase.memory_share)} of the memory's speed, "
                f"{_percent(phase.compute_share)} of the arithmetic, bound by {phase.bound_by}; KV "
                f"is {_percent(phase.kv_share)} of the bytes"
            )
        yield line
    if not measured:
        yield (
            "The machine was not measured, or other programs ran meanwhile: no shares of its peaks "
            "(--machine-peaks)."
        )


def _traffic(traffic: diagnosis_pb2.Traffic) -> Iterator[str]:
    refused = sum(traffic.refused.values())
    yield (
        f"traffic {traffic.requests} requests entered, {refused} refused; half of the prompts have "
        f"at most {traffic.prompt_median} tokens, 95 % at most {traffic.prompt_p95}; of the "
        f"answers {traffic.output_median} and {traffic.output_p95} (to a factor of two); "
        f"{_percent(traffic.reused)} of the prompts reused, {_percent(traffic.reusable)} with a "
        f"cache without limit"
    )
    yield (
        f"        of their time requests waited {_percent(traffic.waiting)}, sat in others' "
        f"prompts {_percent(traffic.delayed)}, stood unread {_percent(traffic.stalled)}"
    )


_COLUMNS = (
    ("step ms", "decode_step_seconds", 1e3),
    ("tokens/s", "tokens_per_second", 1.0),
    ("prompt tok/s", "prefill_tokens_per_second", 1.0),
    ("requests/s", "requests_per_second", 1.0),
    ("longest ms", "longest_step_seconds", 1e3),
    ("fit", "sequences", 1.0),
)


def _predictions(now: diagnosis_pb2.Diagnosis) -> Iterator[str]:
    """A table: what is, and what each change would come to."""
    rows = [["", *(head for head, _, _ in _COLUMNS), "helps"], _as_it_is(now)]
    notes = [""] * len(rows)
    for each in now.predictions:
        figures = [
            _figure(getattr(each, name) * factor) if each.HasField(name) else "-"
            for _, name, factor in _COLUMNS
        ]
        helps = "" if each.helps == "none" else each.helps
        rows.append([each.change, *figures, helps])
        notes.append(each.caution)
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row, note in zip(rows, notes, strict=True):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        yield f"  {'  '.join([*cells, row[-1]])}".rstrip()
        if note:
            yield f"    {note}"


def _as_it_is(now: diagnosis_pb2.Diagnosis) -> list[str]:
    decode, prefill = now.decode, now.prefill
    shares = {
        "decode_step_seconds": (decode.seconds, decode.steps),
        "tokens_per_second": (decode.tokens, decode.seconds),
        "prefill_tokens_per_second": (prefill.tokens, prefill.seconds),
        "requests_per_second": (now.traffic.ended, decode.seconds + prefill.seconds),
    }
    figures = []
    for _, name, factor in _COLUMNS:
        part, whole = shares.get(name, (0.0, 0.0))
        figures.append(_figure(part / whole * factor) if part and whole else "-")
    return ["now", *figures, ""]


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _name(figure: str) -> str:
    return figure.replace("_per_second", " a second").replace("_", " ")


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _ms(value: float) -> str:
    return f"{value * 1e3:.3g}"
