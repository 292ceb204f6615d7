"""What the commands that talk to a server share: connecting, streaming, and showing errors."""

from __future__ import annotations

import argparse
import io
import sys
import unicodedata
from collections.abc import Callable, Iterator

import grpc

from kvledger.v1 import generation_pb2, generation_pb2_grpc

DEFAULT_SERVER = "127.0.0.1:50051"

# Metadata of every refusal that a server of ours sends.
_DETAILS = "grpc-status-details-bin"

# Categories of characters that could move the cursor, change colours or reorder text.
_CONTROL = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_KEPT = {"\n", "\t", "\u200d"}  # the last joins emoji


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every command that generates."""
    parser.add_argument(
        "--server", type=readable, default=DEFAULT_SERVER, help="host:port (%(default)s)"
    )
    parser.add_argument("--max-tokens", type=_whole(32), help="most tokens to generate")
    parser.add_argument("--temperature", type=float, help="0 is greedy, the default")
    parser.add_argument("--top-p", type=float, help="nucleus mass in (0, 1]")
    parser.add_argument("--seed", type=_whole(64), help="same seed, same answer")
    parser.add_argument("--receipt", action="store_true", help="show what the request cost")


def _whole(bits: int) -> Callable[[str], int]:
    """A reader of whole numbers that the contract's field of so many bits can hold."""

    def read(text: str) -> int:
        value = int(text)
        if not 0 <= value < 1 << bits:
            raise argparse.ArgumentTypeError(f"{text} is not from 0 to {(1 << bits) - 1}")
        return value

    return read


def apply_arguments(
    request: generation_pb2.GenerateRequest, arguments: argparse.Namespace
) -> generation_pb2.GenerateRequest:
    """Fills in what the options say."""
    if arguments.max_tokens is not None:
        request.stop.max_tokens = arguments.max_tokens
    if arguments.temperature is not None:
        request.sampling.temperature = arguments.temperature
    if arguments.top_p is not None:
        request.sampling.top_p = arguments.top_p
    if arguments.seed is not None:
        request.sampling.seed = arguments.seed
    return request


def stream(
    server: str, request: generation_pb2.GenerateRequest
) -> Iterator[generation_pb2.GenerateResponse]:
    """The responses of one Generate call; raises grpc.RpcError."""
    with grpc.insecure_channel(server) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        yield from stub.Generate(request)


def show(responses: Iterator[generation_pb2.GenerateResponse], receipt: bool) -> str:
    """Prints text as it comes and returns all of it."""
    parts = []
    for response in responses:
        if response.HasField("delta"):
            parts.append(response.delta.text)
            print(printable(response.delta.text), end="", flush=True)
        elif response.HasField("finished"):
            print()
            if receipt:
                print(summary(response.finished), file=sys.stderr)
    return "".join(parts)


def be_lenient() -> None:
    """Lets input hold bytes that are no UTF-8, and output characters that the terminal lacks."""
    for terminal in (sys.stdin, sys.stdout):
        if isinstance(terminal, io.TextIOWrapper):
            terminal.reconfigure(errors="replace")


def readable(text: str) -> str:
    """An argument of the command line, with U+FFFD where its bytes are no UTF-8."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def printable(text: str) -> str:
    """The text without characters that a terminal would act on."""
    return "".join(c for c in text if c in _KEPT or unicodedata.category(c) not in _CONTROL)


def summary(finished: generation_pb2.Finished) -> str:
    """One line about what the request cost."""
    usage, receipt = finished.usage, finished.receipt
    decode = receipt.decode_time.ToTimedelta().total_seconds()
    held = receipt.held.seconds + receipt.held.nanos / 1e9
    rate = f", {(usage.completion_tokens - 1) / decode:.1f} tokens/s" if decode > 0 else ""
    return (
        f"[{usage.prompt_tokens} + {usage.completion_tokens} tokens{rate}; "
        f"{receipt.peak_blocks} KV blocks of {receipt.block_bytes} bytes at most, "
        f"{held * receipt.block_bytes / 1e6:.3f} MB x s held]"
    )


def explain(error: grpc.RpcError, server: str) -> str:
    """One sentence for a person about a call that failed."""
    code, details = error.code(), printable(error.details() or "")
    answered = any(key == _DETAILS for key, _ in error.trailing_metadata() or ())
    if code == grpc.StatusCode.UNAVAILABLE and not answered:
        return f"no server answers at {server} (kvledger serve --dev starts one): {details}"
    return f"{code.name}: {details}"
