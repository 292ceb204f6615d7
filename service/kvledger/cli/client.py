"""What the commands that talk to a server share: connecting, streaming, and showing errors."""

from __future__ import annotations

import argparse
import contextlib
import io
import ipaddress
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc

from kvledger.address import socket_path
from kvledger.errors import SettingRefused
from kvledger.v1 import generation_pb2, generation_pb2_grpc

DEFAULT_SERVER = "127.0.0.1:50051"

# A token in an argument could be read by everybody on the machine.
TOKEN_VARIABLE = "KVLEDGER_TOKEN"  # noqa: S105  # a name
_TOKEN_CHARACTERS_MAX = 8192

# $http_proxy is for what is elsewhere; gRPC would also take it for this machine and for sockets.
_NO_PROXY = (("grpc.enable_http_proxy", 0),)

# Metadata of every refusal that a server of ours sends.
_DETAILS = "grpc-status-details-bin"

# Categories of characters that could move the cursor, change colours or reorder text.
_CONTROL = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_KEPT = {"\n", "\t", "\u200d"}  # the last joins emoji


def add_server_arguments(
    parser: argparse.ArgumentParser, default: str | None = DEFAULT_SERVER
) -> None:
    """Options of every command that talks to a server; without a default one must be named."""
    parser.add_argument(
        "--server",
        type=readable,
        default=default,
        required=default is None,
        help="host:port or unix:/path" + ("" if default is None else " (%(default)s)"),
    )
    parser.add_argument(
        "--tls-ca",
        type=Path,
        help="PEM file with the authorities that may vouch for the server; turns TLS on",
    )
    parser.add_argument(
        "--tls-cert", type=Path, help="PEM file with the certificate to show to the server"
    )
    parser.add_argument("--tls-key", type=Path, help="PEM file with that certificate's private key")


def add_identity_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every command that a server asks who calls."""
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"file with the token that says who you are; default: ${TOKEN_VARIABLE}",
    )
    parser.add_argument("--token", action=_TokenRefused, help=argparse.SUPPRESS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every command that generates."""
    add_server_arguments(parser)
    add_identity_arguments(parser)
    parser.add_argument("--max-tokens", type=_whole(32), help="most tokens to generate")
    parser.add_argument("--temperature", type=float, help="0 is greedy, the default")
    parser.add_argument("--top-p", type=float, help="nucleus mass in (0, 1]")
    parser.add_argument("--seed", type=_whole(64), help="same seed, same answer")
    parser.add_argument("--receipt", action="store_true", help="show what the request cost")


class _TokenRefused(argparse.Action):
    """Says what to do instead; the parser would take it for a short --token-file, and quote it."""

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> None:
        parser.error(
            f"--token: everybody on this machine can read arguments; use --token-file FILE or "
            f"${TOKEN_VARIABLE}, and get another token"
        )


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
    options: argparse.Namespace, request: generation_pb2.GenerateRequest
) -> Iterator[generation_pb2.GenerateResponse]:
    """The responses of one Generate call; raises grpc.RpcError, or SettingRefused."""
    shown = identity(options)
    with channel(options) as connection:
        stub = generation_pb2_grpc.GenerationServiceStub(connection)  # type: ignore[no-untyped-call]
        yield from stub.Generate(request, metadata=shown)


def identity(options: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """The metadata that says who calls; empty without a token. Raises SettingRefused."""
    if options.token_file is not None:
        source = f"--token-file {options.token_file}"
        try:
            with options.token_file.open("rb") as file:
                text = file.read(_TOKEN_CHARACTERS_MAX + 3).decode("ascii", "replace")
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            reason = getattr(error, "strerror", None) or "cannot be read"
            raise SettingRefused(f"{source}: {reason}") from None
    elif (text := os.environ.get(TOKEN_VARIABLE, "")) != "":
        source = f"${TOKEN_VARIABLE}"
    else:
        return ()
    token = text.strip()
    if not 1 <= len(token) <= _TOKEN_CHARACTERS_MAX or any(not "!" <= c <= "~" for c in token):
        raise SettingRefused(f"{source}: it is not a token: one line of printable characters")
    if options.tls_ca is None and not _is_here(options.server):
        if options.server.startswith(("/", "./", "~")):
            return ()  # no address at all, which is told when it is connected
        raise SettingRefused(
            f"{source}: without --tls-ca a token goes to this machine only, because others on the "
            f"line could read it"
        )
    return (("authorization", f"Bearer {token}"),)


def channel(options: argparse.Namespace) -> grpc.Channel:
    """A connection to the server that the options name; raises SettingRefused.

    What goes to this machine, and with it every token without TLS, passes no proxy.
    """
    if options.server.startswith(("/", "./", "~")):
        raise SettingRefused(f"--server {options.server}: a socket is named unix:{options.server}")
    cert, key = options.tls_cert, options.tls_key
    if (cert is None) != (key is None):
        raise SettingRefused("--tls-cert and --tls-key go together; give both, or neither")
    settings = _NO_PROXY if _is_here(options.server) else ()
    if options.tls_ca is None:
        if cert is not None:
            raise SettingRefused(
                "--tls-cert needs --tls-ca: it is shown only to a server that shows its own"
            )
        return grpc.insecure_channel(options.server, settings)
    if socket_path(options.server) is not None:
        raise SettingRefused("--tls-ca is for host:port: there is no TLS on a unix socket")
    credentials = grpc.ssl_channel_credentials(
        _read("--tls-ca", options.tls_ca), _read("--tls-key", key), _read("--tls-cert", cert)
    )
    return grpc.secure_channel(options.server, credentials, settings)


def _is_here(server: str) -> bool:
    """Whether an address is this machine's own, however it is written."""
    if socket_path(server) is not None:
        return True
    host = server.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _read(option: str, path: Path | None) -> bytes | None:
    """A file's bytes, which must look like PEM; gRPC would only say that a handshake failed."""
    if path is None:
        return None
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or "cannot be read"
        raise SettingRefused(f"{option} {path}: {reason}") from None
    if b"-----BEGIN " not in data:
        raise SettingRefused(f"{option} {path}: it is not PEM")
    return data


def show(responses: Iterator[generation_pb2.GenerateResponse], receipt: bool) -> str:
    """Prints text as it comes and returns all of it."""
    parts = []
    for response in responses:
        if response.HasField("delta"):
            parts.append(response.delta.text)
            print(printable(response.delta.text), end="", flush=True)
        elif response.HasField("finished"):
            print()
            for sample in response.finished.samples:
                if sample.text:  # of several; one comes in deltas
                    print(f"--- sample {sample.index}\n{printable(sample.text)}")
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
        if "handshake" in details or "erification" in details:
            return f"no TLS with {server}: {details}"
        return (
            f"no server answers at {server} (--server names another, as the server's log does at "
            f"its start; kvledger serve --dev starts one): {details}"
        )
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return f"{code.name}: {details} (--token-file FILE, or ${TOKEN_VARIABLE})"
    return f"{code.name}: {details}"
