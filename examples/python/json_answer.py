"""Asks for an answer as JSON of a schema, and reads it. Knows kvledger only by its protoset.

    pip install grpcio protobuf
    python json_answer.py kvledger.protoset 127.0.0.1:50051 "Who was Ada Lovelace?"

The server needs its extra: pip install "kvledger[grammar]".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "born": {"type": "integer", "minimum": 0, "maximum": 2100},
        "known_for": {
            "type": "array",
            "items": {"type": "string", "maxLength": 40},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "born", "known_for"],
    "additionalProperties": False,  # or the model may go on inventing properties
}


def main(protoset: str, server: str, prompt: str) -> int:
    """Prints the answer's fields."""
    files = descriptor_pb2.FileDescriptorSet.FromString(Path(protoset).read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:  # in the order of their imports
        pool.Add(file)
    method = pool.FindMethodByName("kvledger.v1.GenerationService.Generate")
    request_class = message_factory.GetMessageClass(method.input_type)
    response_class = message_factory.GetMessageClass(method.output_type)
    request = request_class()
    # The schema shapes the answer; only the prompt tells the model what is asked.
    request.chat.messages.add(
        role="ROLE_USER", content=f"{prompt} Answer in JSON with name, born and known_for."
    )
    request.constraint.json_schema = json.dumps(SCHEMA)
    request.stop.max_tokens = 300
    request.output.final_only = True
    with grpc.insecure_channel(server) as channel:
        generate = channel.unary_stream(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=request_class.SerializeToString,
            response_deserializer=response_class.FromString,
        )
        try:
            (sample,) = list(generate(request, timeout=120))[-1].finished.samples
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    reason = sample.DESCRIPTOR.fields_by_name["finish_reason"].enum_type.values_by_number
    if reason[sample.finish_reason].name != "FINISH_REASON_STOP":
        print("the answer is not complete; raise max_tokens", file=sys.stderr)
        return 1
    for name, value in json.loads(sample.text).items():
        print(f"{name}: {value}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: json_answer.py PROTOSET SERVER PROMPT")
    sys.exit(main(*sys.argv[1:]))
