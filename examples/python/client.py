"""A client that knows kvledger only by its protoset: no generated code, no kvledger installed.

    pip install grpcio protobuf
    python client.py kvledger.protoset 127.0.0.1:50051 "What is the capital of France?"

The protoset is in the package (kvledger/v1/kvledger.protoset), or made from proto/ with
`protoc --include_imports --descriptor_set_out`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def main(protoset: str, server: str, prompt: str) -> int:
    """Prints the answer as it comes, and what it cost."""
    files = descriptor_pb2.FileDescriptorSet.FromString(Path(protoset).read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:  # in the order of their imports
        pool.Add(file)
    method = pool.FindMethodByName("kvledger.v1.GenerationService.Generate")
    request_class = message_factory.GetMessageClass(method.input_type)
    response_class = message_factory.GetMessageClass(method.output_type)

    request = request_class()
    request.chat.messages.add(role="ROLE_USER", content=prompt)
    request.stop.max_tokens = 32
    # unix:/path works as well. For TLS: secure_channel(server, ssl_channel_credentials(ca)).
    with grpc.insecure_channel(server) as channel:
        generate = channel.unary_stream(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=request_class.SerializeToString,
            response_deserializer=response_class.FromString,
        )
        try:
            # A deadline is part of every call: what nobody waits for any more is not computed.
            for response in generate(request, timeout=120):
                if response.HasField("delta"):
                    print(response.delta.text, end="", flush=True)
                elif response.HasField("finished"):
                    usage = response.finished.usage
                    print(f"\n[{usage.prompt_tokens} + {usage.completion_tokens} tokens]")
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: client.py PROTOSET SERVER PROMPT")
    sys.exit(main(*sys.argv[1:]))
