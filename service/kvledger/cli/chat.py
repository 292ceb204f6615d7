"""`kvledger chat`: a conversation in the terminal."""

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
    """Talks until the end of input; 1 if the server refused or is not there, 2 for wrong files."""
    parser = argparse.ArgumentParser(
        prog="kvledger chat",
        description="A conversation in the terminal; an empty line or Ctrl-D ends it.",
    )
    parser.add_argument("--system", help="instructions for the model")
    add_arguments(parser)
    options = parser.parse_args(list(arguments))
    be_lenient()
    messages = []
    if options.system:
        messages.append(
            generation_pb2.ChatMessage(
                role=generation_pb2.ROLE_SYSTEM, content=readable(options.system)
            )
        )
    while text := _line():
        messages.append(generation_pb2.ChatMessage(role=generation_pb2.ROLE_USER, content=text))
        request = generation_pb2.GenerateRequest(chat=generation_pb2.ChatPrompt(messages=messages))
        try:
            answer = show(stream(options, apply_arguments(request, options)), options.receipt)
        except SettingRefused as error:
            print(f"kvledger chat: {error}", file=sys.stderr)
            return 2
        except grpc.RpcError as error:
            print(f"kvledger chat: {explain(error, options.server)}", file=sys.stderr)
            return 1
        messages.append(
            generation_pb2.ChatMessage(role=generation_pb2.ROLE_ASSISTANT, content=answer)
        )
    return 0


def _line() -> str:
    """What the person types, without surrounding space; empty at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
