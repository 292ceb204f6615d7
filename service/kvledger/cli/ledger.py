"""`kvledger ledger`: who has which part of a server's KV memory, and for how long."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import grpc
from google.protobuf import duration_pb2
from google.protobuf.json_format import MessageToJson

from kvledger.address import operators_address
from kvledger.cli.client import (
    DEFAULT_SERVER,
    add_identity_arguments,
    add_server_arguments,
    channel,
    explain,
    identity,
)
from kvledger.cli.ledger_table import ledger_table, statement_table
from kvledger.errors import SettingRefused
from kvledger.v1 import ledger_pb2, ledger_pb2_grpc

# Longest answer: that of a server with many thousands of tenants.
_TIMEOUT = 30.0
# Puts the next table where the last one was.
_CLEAR = "\x1b[H\x1b[J"


def run(arguments: Sequence[str]) -> int:
    """Prints the books; 0, 1 if the server refuses or does not answer, 2 for a wrong option."""
    options = _options(arguments)
    try:
        for message in _messages(options):
            _show(message, options)
    except SettingRefused as error:
        print(f"kvledger ledger: {error}", file=sys.stderr)
        return 2
    except grpc.RpcError as error:
        print(f"kvledger ledger: {explained(error, options)}", file=sys.stderr)
        return 1
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kvledger ledger",
        description="Shows who has which part of a server's KV memory, and for how long. Asks the "
        "operators' listener, unless --tenant is given with a --server for clients.",
    )
    add_server_arguments(parser, operators_address(DEFAULT_SERVER))
    add_identity_arguments(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--watch", action="store_true", help="show it again and again")
    what.add_argument(
        "--tenant",
        metavar="NAME",
        help='one tenant\'s account; clients may ask for their own, also as ""',
    )
    parser.add_argument(
        "--interval", type=interval, default=1.0, help="of --watch, in seconds (%(default)g)"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line, as the contract names things"
    )
    return parser.parse_args(list(arguments))


def interval(text: str) -> float:
    """An option's seconds from one picture to the next."""
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not from 0.1 to 3600")
    return value


def _messages(
    options: argparse.Namespace,
) -> Iterator[ledger_pb2.Ledger | ledger_pb2.Statement]:
    shown = identity(options)
    with channel(options) as connection:
        stub = ledger_pb2_grpc.LedgerServiceStub(connection)  # type: ignore[no-untyped-call]
        if options.tenant is not None:
            asked = ledger_pb2.GetStatementRequest(tenant=options.tenant)
            yield stub.GetStatement(asked, metadata=shown, timeout=_TIMEOUT).statement
        elif options.watch:
            interval = duration_pb2.Duration()
            interval.FromMilliseconds(round(options.interval * 1000))
            watch = ledger_pb2.WatchLedgerRequest(interval=interval)
            for response in stub.WatchLedger(watch, metadata=shown):
                yield response.ledger
        else:
            nothing = ledger_pb2.GetLedgerRequest()
            yield stub.GetLedger(nothing, metadata=shown, timeout=_TIMEOUT).ledger


def _show(message: ledger_pb2.Ledger | ledger_pb2.Statement, options: argparse.Namespace) -> None:
    if options.json:
        line = MessageToJson(
            message,
            indent=None,
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )
        print(line, flush=True)
        return
    if options.watch and sys.stdout.isatty():
        print(_CLEAR, end="")
    table = ledger_table if isinstance(message, ledger_pb2.Ledger) else statement_table
    print(table(message), flush=True)  # type: ignore[arg-type]  # each has its own


def explained(error: grpc.RpcError, options: argparse.Namespace) -> str:
    """What to do about a refusal."""
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        return (
            f"{options.server} does not show the books; ask where operators are listened to: the "
            f"server's log names it, at its start"
        )
    return explain(error, options.server)
