"""`kvledger health`: asks a server how it is, for probes that run a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvledger.cli.client import add_server_arguments, channel, explain
from kvledger.errors import SettingRefused


def run(arguments: Sequence[str]) -> int:
    """Prints the status; 0 if it serves, 1 if it does not or nobody answers."""
    parser = argparse.ArgumentParser(
        prog="kvledger health",
        description="Asks a server how it is: exit status 0 if it serves, 1 if not.",
    )
    add_server_arguments(parser)
    parser.add_argument("--service", default="", help="a service's full name; default: the server")
    parser.add_argument(
        "--timeout", type=float, default=5.0, help="seconds to wait for an answer (%(default)s)"
    )
    options = parser.parse_args(list(arguments))
    try:
        with channel(options) as connection:
            stub = health_pb2_grpc.HealthStub(connection)
            request = health_pb2.HealthCheckRequest(service=options.service)
            status = stub.Check(request, timeout=options.timeout).status
    except SettingRefused as error:
        print(f"kvledger health: {error}", file=sys.stderr)
        return 2
    except grpc.RpcError as error:
        print(f"kvledger health: {explain(error, options.server)}", file=sys.stderr)
        return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(status))
    return 0 if status == health_pb2.HealthCheckResponse.SERVING else 1
