"""What one connection, and all of them, may take: gRPC's options, each with its reason."""

from __future__ import annotations

from kvledger.limits import MESSAGE_BYTES_MAX, METADATA_BYTES_MAX

# Calls at once on one connection. More than can wait and run by default, so that a gateway with
# one connection meets the queue's refusal, which says when to come back, and not a silent wait.
STREAMS_PER_CONNECTION_MAX = 4096

# A silent connection is asked after so many seconds whether anybody is there ...
KEEPALIVE_SECONDS = 30
# ... and is closed if nobody has answered so much later: a client that vanished is noticed in 40 s.
KEEPALIVE_ANSWER_SECONDS = 10
# A client that pings more often than this without a call is sent away: it would only cost.
CLIENT_PING_SECONDS_MIN = 5

# What gRPC buffers of a stream that is not read. What a reader leaves lying belongs into its
# mailbox, which counts it.
WRITE_BUFFER_BYTES = 1024


def options(max_connections: int) -> tuple[tuple[str, int], ...]:
    """The options of a gRPC server that holds at most so many connections."""
    return (
        # One more is closed as soon as it is accepted; who is connected is not disturbed.
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.http2.write_buffer_size", WRITE_BUFFER_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_SECONDS * 1000),
        # gRPC also pings to measure the line, and while that waits for an answer, by itself for a
        # minute, it does not ask whether anybody is there.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_ANSWER_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", CLIENT_PING_SECONDS_MIN * 1000),
        ("grpc.http2.max_pings_without_data", 0),
        # Two servers on one port would share its connections without a word.
        ("grpc.so_reuseport", 0),
    )
