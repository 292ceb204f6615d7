"""`kvledger doctor --isolation`: two tenants of a running server, and what each finds cached."""

from __future__ import annotations

import argparse
import copy
import http.client
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvledger.address import socket_path
from kvledger.cli.client import add_server_arguments, channel, explain, identity
from kvledger.cli.findings import Finding, show
from kvledger.errors import SettingRefused
from kvledger.v1 import generation_pb2, generation_pb2_grpc, models_pb2, models_pb2_grpc

# Blocks of the prompt that is sent, besides the token that is always computed.
_BLOCKS = 4
_BLOCKS_LEAST = 2
# How often a tenant may ask until it finds its own: others may have taken the blocks meanwhile.
_ATTEMPTS = 3
_FOREIGN = "kvledger_prefix_foreign_blocks_total"
_METRICS_SECONDS = 5.0
_METRICS_BYTES_MAX = 1 << 20

_Metadata = tuple[tuple[str, str], ...]


class _Unable(Exception):
    """It cannot be told; the sentence says why."""


@dataclass(frozen=True)
class _Answer:
    cached: int
    receipt: generation_pb2.Receipt

    @property
    def reused(self) -> int:
        """All tokens that were not computed, whichever field says so."""
        receipt = self.receipt
        return max(
            self.cached,
            receipt.reused_own_tokens + receipt.reused_group_tokens + receipt.reused_public_tokens,
        )


class _Tenants:
    """Calls of both tenants to one server."""

    def __init__(self, connection: grpc.Channel, shown: Sequence[_Metadata], seconds: float):
        self._shown, self._seconds = shown, seconds
        self._generation = generation_pb2_grpc.GenerationServiceStub(connection)  # type: ignore[no-untyped-call]
        self._models = models_pb2_grpc.ModelServiceStub(connection)  # type: ignore[no-untyped-call]

    def draw_prompt(self) -> list[int]:
        """Random token ids, of several blocks and one more. Raises _Unable."""
        answer = self._models.GetModel(
            models_pb2.GetModelRequest(), metadata=self._shown[0], timeout=self._seconds
        )
        model = answer.model
        block = max((kind.tokens_per_block for kind in model.kv_formats), default=0)
        blocks = min(_BLOCKS, (model.context_tokens - 2) // block if block else 0)
        if blocks < _BLOCKS_LEAST:
            raise _Unable(
                f"sequences have {model.context_tokens} tokens at most, a block {block}: a prompt "
                f"of {_BLOCKS_LEAST} blocks does not fit; give the server a larger --kv-blocks"
            )
        # The commoner half, without the special ones before it.
        vocabulary, chance = model.vocabulary_tokens, secrets.SystemRandom()
        least = min(1000, vocabulary // 4)
        return [chance.randrange(least, vocabulary // 2) for _ in range(blocks * block + 1)]

    def ask(self, who: int, prompt: Sequence[int], namespace: str = "") -> _Answer:
        """Sends the prompt for one token. Raises grpc.RpcError, _Unable."""
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=prompt),
            stop=generation_pb2.StopOptions(max_tokens=1),
            output=generation_pb2.OutputOptions(final_only=True),
        )
        if namespace:
            request.cache.scope = generation_pb2.CACHE_SCOPE_NAMESPACE
            request.cache.namespace = namespace
        for response in self._generation.Generate(
            request, metadata=self._shown[who], timeout=self._seconds
        ):
            if response.HasField("finished"):
                finished = response.finished
                return _Answer(finished.usage.cached_prompt_tokens, finished.receipt)
        raise _Unable("an answer ended without its receipt")

    def finds_its_own(self, who: int, prompt: Sequence[int]) -> int:
        """Tokens that a tenant which has sent the prompt finds when it sends it again."""
        for _ in range(_ATTEMPTS):
            if found := self.ask(who, prompt).cached:
                return found
        return 0


def run(arguments: Sequence[str]) -> int:
    """Prints what was found; 0 if the tenants are apart, 1 if not or if nothing is shown."""
    options = _parser().parse_args(list(arguments))
    try:
        if len(options.token_file) != 2:
            raise SettingRefused(
                "--token-file FILE twice: a token of one tenant and a token of another"
            )
        shown = [identity(_with_token_file(options, path)) for path in options.token_file]
        if shown[0] == shown[1]:
            raise SettingRefused("--token-file: both files hold the same token; take two tenants")
        with channel(options) as connection:
            tenants = _Tenants(connection, shown, options.timeout)
            findings = _examined(tenants, options)
            good = [show(finding) for finding in findings]
    except SettingRefused as error:
        print(f"kvledger doctor: {error}", file=sys.stderr)
        return 2
    return 0 if all(good) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvledger doctor --isolation",
        description="Proves on a running server that one tenant does not begin with what another "
        "has cached, and that a tenant does with its own.",
    )
    add_server_arguments(parser)
    parser.add_argument("--address", dest="server", help="the same as --server")
    parser.add_argument(
        "--token-file",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="twice: a file with a token of one tenant, and one of another",
    )
    parser.add_argument(
        "--metrics",
        metavar="ADDRESS",
        help="host:port or unix:/path of --metrics-listen: the server's own count is looked at too",
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds for each request (%(default)s)"
    )
    return parser


def _with_token_file(options: argparse.Namespace, path: Path) -> argparse.Namespace:
    changed = copy.copy(options)
    changed.token_file = path
    return changed


def _examined(tenants: _Tenants, options: argparse.Namespace) -> Iterator[Finding]:
    """Each finding as it comes; what cannot be told is one that is not good."""
    yield from _told("isolation", options.server, lambda: _between(tenants))
    yield from _told("metrics", options.server, lambda: _counted(options.metrics))


def _told(subject: str, server: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except grpc.RpcError as error:
        yield Finding(False, subject, explain(error, server))
    except _Unable as error:
        yield Finding(False, subject, str(error))


def _between(tenants: _Tenants) -> Iterator[Finding]:
    prompt = tenants.draw_prompt()
    sent = f"a prompt of {len(prompt)} random tokens"
    first = tenants.ask(0, prompt).reused
    if first:
        yield _broken(f"{sent} that nobody had sent began with {first} cached tokens")
        return
    own = tenants.finds_its_own(0, prompt)
    yield Finding(
        own > 0,
        "own",
        f"{sent}: sent again by the same tenant, {own} tokens of it were cached",
        "nothing is shown while a tenant does not find its own: turn --prefix-reuse on, and try "
        "again when the server has less to do",
    )
    if not own:
        return
    other = tenants.ask(1, prompt).reused
    if other:
        yield _broken(f"of a tenant's prompt another one found {other} tokens cached")
        return
    yield Finding(True, "other", "sent by the other tenant, 0 tokens of it were cached")
    space = tenants.ask(0, prompt, namespace=secrets.token_hex(8)).reused
    if space:
        yield _broken(f"of a tenant's prompt one of its namespaces found {space} tokens cached")
        return
    yield Finding(True, "namespace", "sent in a namespace of its own, 0 tokens of it were cached")
    if not (still := tenants.finds_its_own(0, prompt)):
        yield Finding(False, "own", "then its own was gone: nothing is shown", "try it again")
    elif not tenants.finds_its_own(1, prompt):
        yield Finding(False, "own", "the other tenant does not find its own: nothing is shown")
    else:
        yield Finding(True, "again", f"both find their own again, the first {still} tokens")


def _broken(text: str) -> Finding:
    return Finding(
        False,
        "isolation",
        text,
        "if both tokens are of one tenant, take two; else turn reuse off (--prefix-reuse off) and "
        "report it",
    )


def _counted(address: str | None) -> Iterator[Finding]:
    """The server's own count of blocks that the index named for the wrong owner."""
    if address is None:
        return
    try:
        text = _fetched(address)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _Unable(f"--metrics {address}: {error}") from None
    values = [line.split()[1] for line in text.splitlines() if line.startswith(f"{_FOREIGN} ")]
    if not values:
        raise _Unable(f"--metrics {address}: there is no {_FOREIGN}")
    yield Finding(
        float(values[0]) == 0,
        "metrics",
        f"{_FOREIGN} is {float(values[0]):g}",
        "the server found blocks of another owner and did not use them: report it",
    )


class _OverUnix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_METRICS_SECONDS)
        self._path = path

    def connect(self) -> None:
        """To the socket's file."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _fetched(address: str) -> str:
    path = socket_path(address)
    connection = (
        _OverUnix(path)
        if path is not None
        else http.client.HTTPConnection(address, timeout=_METRICS_SECONDS)
    )
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise ValueError(f"HTTP status {response.status}")
        return response.read(_METRICS_BYTES_MAX).decode("utf-8", "replace")
    finally:
        connection.close()
