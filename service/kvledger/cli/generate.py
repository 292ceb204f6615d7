"""`kvledger generate`: sends one prompt and prints what comes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

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
        show(stream(options, apply_arguments(request, options)), options.receipt)
    except SettingRefused as error:
        print(f"kvledger generate: {error}", file=sys.stderr)
        return 2
    except grpc.RpcError as error:
        print(f"kvledger generate: {explain(error, options.server)}", file=sys.stderr)
        return 1
    return 0
