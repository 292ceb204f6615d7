"""`kvledger explain ID`: where a request's time went."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import grpc
from google.protobuf.json_format import MessageToJson

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

_TIMEOUT = 10.0
_PARTS = {
    "queued": "waited for room",
    "preempted": "waited for room again, after it was preempted",
    "prefill": "its prompt",
    "decode": "its tokens",
    "delayed": "prompts of others in the same steps",
    "stalled": "not read by its client",
}


def run(arguments: Sequence[str]) -> int:
    """Prints the parts; 0, 1 if the server refuses or does not answer, 2 for a wrong option."""
    parser = argparse.ArgumentParser(
        prog="kvledger explain",
        description="Splits the time of a request that has ended. Clients ask for their own; "
        "operators for any, on the operators' listener.",
    )
    parser.add_argument("id", help="the server's name for it: Accepted.request_id")
    add_server_arguments(parser, DEFAULT_SERVER)
    add_identity_arguments(parser)
    parser.add_argument("--json", action="store_true", help="as the contract names things")
    options = parser.parse_args(list(arguments))
    try:
        shown = identity(options)
        with channel(options) as connection:
            stub = diagnosis_pb2_grpc.DiagnosisServiceStub(connection)  # type: ignore[no-untyped-call]
            request = diagnosis_pb2.ExplainRequest(request_id=options.id)
            response = stub.Explain(request, metadata=shown, timeout=_TIMEOUT)
    except SettingRefused as error:
        print(f"kvledger explain: {error}", file=sys.stderr)
        return 2
    except grpc.RpcError as error:
        print(f"kvledger explain: {explain(error, options.server)}", file=sys.stderr)
        return 1
    if options.json:
        print(MessageToJson(response, preserving_proto_field_name=True))
    else:
        print("\n".join(map(printable, table(response).splitlines())))
    return 0


def table(response: diagnosis_pb2.ExplainResponse) -> str:
    """A line for each part."""
    total = response.total.ToNanoseconds()
    lines = [response.summary]
    for name, words in _PARTS.items():
        part = getattr(response, name).ToNanoseconds()
        share = part / total if total else 0.0
        bar = "#" * round(40 * share)
        lines.append(f"{name:9} {part / 1e6:10.1f} ms {share * 100:5.1f} %  {bar:40} {words}")
    lines.append(f"{'total':9} {total / 1e6:10.1f} ms")
    if not response.tenant:
        lines.append(
            "waits are rounded up, and what others' prompts took is part of prefill and decode: "
            "operators are told exactly, at their own listener"
        )
    lines.append(
        f"{response.prompt_tokens} prompt tokens, {response.reused_tokens} of them reused; "
        f"{response.output_tokens} made; preempted {times(response.preemptions)}"
    )
    if response.preemptions:
        lines.append(why_preempted(response))
    return "\n".join(line.rstrip() for line in lines)


def why_preempted(response: diagnosis_pb2.ExplainResponse) -> str:
    """A sentence: for what a request lost its blocks, and what that cost it."""
    reasons = response.preemption_reasons
    told = reasons.other_tenant + reasons.stepped_back
    counts = {
        "for others of its own tenant": reasons.own_tenant,
        "for another tenant": reasons.other_tenant,
        "because nobody behind it had blocks to give": reasons.stepped_back,
        "for room that all share": reasons.shared_capacity - told,
        "while its tokens were not read": reasons.unread,
    }
    why = ", ".join(f"{times(count)} {words}" for words, count in counts.items() if count)
    waited = response.preempted.ToNanoseconds() / 1e6
    return (
        f"it lost its blocks {why}; that cost it {response.recomputed_tokens} tokens computed "
        f"again and {waited:.1f} ms of waiting"
    )


def times(count: int) -> str:
    """How often, in words."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
