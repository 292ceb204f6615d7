"""What one connection, and all of them, may take: gRPC's options, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from grpc_channelz.v1 import channelz_pb2
from grpc_channelz.v1.channelz import ChannelzServicer

from kvledger.limits import MESSAGE_BYTES_MAX, METADATA_BYTES_MAX

# Calls at once on one connection. More than can wait and run by default, so that a gateway with
# one connection meets the queue's refusal, which says when to come back, and not a silent wait.
STREAMS_PER_CONNECTION_MAX = 4096

# How long a call may wait to be taken in, in seconds: as good as forever, since those that wait are
# counted. gRPC drops what waits for longer, by itself after 30 s (see `_untaken`).
UNTAKEN_SECONDS = 3600

# Connections of operators: probes, a person, a collector; few, so that clients have the rest.
OPERATOR_CONNECTIONS_MAX = 64


@dataclass(frozen=True)
class Keepalive:
    """How silent connections are treated, in seconds."""

    # A silent connection is asked after so many seconds whether anybody is there ...
    ask: float = 20.0
    # ... and is closed if nobody has answered so much later: who vanished is noticed in 30 s.
    answer: float = 10.0
    # A client that pings more often than this is sent away: it would only cost. Those that ping
    # every 10 s, as many do, stay.
    client_pings: float = 5.0


# What gRPC buffers of a stream that is not read. What a reader leaves lying belongs into its
# mailbox, which counts it.
WRITE_BUFFER_BYTES = 1024

KEEPALIVE = Keepalive()


def options(
    max_connections: int, keepalive: Keepalive = KEEPALIVE, *, max_queued: int = 0
) -> tuple[tuple[str, int], ...]:
    """The options of a gRPC server that holds at most so many connections.

    `max_queued` is how many of its calls may wait for others to end.
    """
    return (
        # One more is closed as soon as it is accepted; who is connected is not disturbed.
        ("grpc.max_allowed_incoming_connections", max_connections),
        *_untaken(max_connections + max_queued + STREAMS_PER_CONNECTION_MAX),
        ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.http2.write_buffer_size", WRITE_BUFFER_BYTES),
        ("grpc.keepalive_time_ms", round(keepalive.ask * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive.answer * 1000)),
        # gRPC also pings to measure the line, and while that waits for an answer, by itself for a
        # minute, it does not ask whether anybody is there.
        ("grpc.http2.ping_timeout_ms", round(keepalive.answer * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        (
            "grpc.http2.min_ping_interval_without_data_ms",
            round(keepalive.client_pings * 1000),
        ),
        ("grpc.http2.max_pings_without_data", 0),
        # What operators look at with channelz; the number of open connections comes from it.
        ("grpc.enable_channelz", 1),
        # Two servers on one port would share its connections without a word.
        ("grpc.so_reuseport", 0),
    )


def _untaken(most: int) -> tuple[tuple[str, int], ...]:
    """For calls that have come and that the event loop has not taken in yet.

    One more is dropped with CANCELLED, as if its caller had gone away: it is not told to come back,
    and nothing here hears of it but a count of channelz (`calls_come`). So there is room for a call
    on each connection, a full queue, and all that one gateway has on its one connection. gRPC by
    itself begins to drop at 1,000, at random (seen with grpcio 1.85.3).
    """
    return (
        ("grpc.server.max_pending_requests", most),
        ("grpc.server.max_pending_requests_hard_limit", most),
        ("grpc.server_max_unrequested_time_in_server", UNTAKEN_SECONDS),
    )


def newest_server() -> int:
    """gRPC's own number of the server that this process made last; 0 if there is none."""
    newest = 0
    while True:
        asked = channelz_pb2.GetServersRequest(start_server_id=newest + 1)
        answer = ChannelzServicer.GetServers(asked, None)
        newest = max((server.ref.server_id for server in answer.server), default=newest)
        if answer.end or not answer.server:
            return int(newest)


def calls_come(server: int) -> int:
    """Calls that ever came to a server by gRPC's own number, dropped ones too; 0 if it is gone."""
    asked = channelz_pb2.GetServerRequest(server_id=server)
    try:
        answer = ChannelzServicer.GetServer(asked, None)
    except (ValueError, AttributeError):  # gRPC knows it no more
        return 0
    return int(answer.server.data.calls_started)


def open_count(server: int) -> int:
    """Connections of a server by gRPC's own number; 0 if it is gone."""
    count, start = 0, 0
    while True:
        asked = channelz_pb2.GetServerSocketsRequest(server_id=server, start_socket_id=start)
        try:
            answer = ChannelzServicer.GetServerSockets(asked, None)
        except (ValueError, AttributeError):  # gRPC knows it no more
            return count
        count += len(answer.socket_ref)
        if answer.end or not answer.socket_ref:
            return count
        start = max(socket.socket_id for socket in answer.socket_ref) + 1
