"""`kvledger generate`: sends one prompt and prints what comes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc

from kvledger.cli.client import (
    add_arguments,
    apply_arguments,
    be_lenient,
    explain,
    readable,
    show,
    stream,
)
from kvledger.errors import SettingRefused
from kvledger.v1 import generation_pb2


def run(arguments: Sequence[str]) -> int:
    """Prints the continuation; 0, 1 if the server refused or is not there, 2 for wrong options."""
    parser = argparse.ArgumentParser(
        prog="kvledger generate", description="Sends one prompt to a server and prints the answer."
    )
    parser.add_argument("prompt", nargs="?", help="the text; read from standard input if missing")
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--json-schema", type=Path, metavar="FILE", help="the answer is JSON of this schema"
    )
    only.add_argument(
        "--regex", type=readable, help="the whole answer matches this regular expression"
    )
    only.add_argument(
        "--lark", type=Path, metavar="FILE", help="the answer matches this grammar, a Lark file"
    )
    parser.add_argument(
        "--samples",
        type=int,
        choices=range(1, 17),
        metavar="N",
        help="answers to one prompt, 1 to 16, printed when all have ended",
    )
    parser.add_argument("--raw", action="store_true", help="continue the text: no chat template")
    add_arguments(parser)
    options = parser.parse_args(list(arguments))
    be_lenient()
    prompt = readable(options.prompt) if options.prompt is not None else sys.stdin.read()
    if options.raw:
        request = generation_pb2.GenerateRequest(text=prompt)
    else:
        message = generation_pb2.ChatMessage(role=generation_pb2.ROLE_USER, content=prompt)
        request = generation_pb2.GenerateRequest(chat=generation_pb2.ChatPrompt(messages=[message]))
    try:
        _constrain(request, options)
        if options.samples is not None:
            request.samples = options.samples
            request.output.final_only = options.samples > 1
        show(stream(options, apply_arguments(request, options)), options.receipt)
    except SettingRefused as error:
        print(f"kvledger generate: {error}", file=sys.stderr)
        return 2
    except grpc.RpcError as error:
        print(f"kvledger generate: {explain(error, options.server)}", file=sys.stderr)
        return 1
    return 0


def _constrain(request: generation_pb2.GenerateRequest, options: argparse.Namespace) -> None:
    """Fills in what the answer must match. Raises SettingRefused."""
    if options.json_schema is not None:
        request.constraint.json_schema = _text("--json-schema", options.json_schema)
    elif options.regex is not None:
        request.constraint.regex = options.regex
    elif options.lark is not None:
        request.constraint.lark_grammar = _text("--lark", options.lark)


def _text(option: str, path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a zero byte in the path
        reason = getattr(error, "strerror", None) or "is no text in UTF-8"
        raise SettingRefused(f"{option} {path}: {reason}") from None
