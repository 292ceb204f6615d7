"""A conversation in which the model may call a function, by the protoset alone.

    pip install grpcio protobuf
    python tools.py kvledger.protoset 127.0.0.1:50051 "What is 1234 times 5678?"

The model must be one whose chat template knows tools, such as Qwen 2.5 or 3; GetModel says so in
`model.chat`. With another one the server answers INVALID_ARGUMENT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

ROUNDS_MAX = 4
MULTIPLY = {
    "name": "multiply",
    "description": "Multiplies two numbers.",
    "parameters": json.dumps(
        {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        }
    ),
}


def multiply(arguments: str) -> str:
    """What the function returns, as text for the model; its arguments may be anything."""
    try:
        values = json.loads(arguments)
        return json.dumps(values["a"] * values["b"])
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {type(error).__name__}"


def main(protoset: str, server: str, prompt: str) -> int:
    """Asks, calls what the model wants called, and asks again until it answers."""
    files = descriptor_pb2.FileDescriptorSet.FromString(Path(protoset).read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:  # in the order of their imports
        pool.Add(file)
    method = pool.FindMethodByName("kvledger.v1.GenerationService.Generate")
    request_class = message_factory.GetMessageClass(method.input_type)
    response_class = message_factory.GetMessageClass(method.output_type)

    request = request_class()
    request.chat.messages.add(role="ROLE_USER", content=prompt)
    request.chat.tools.add(**MULTIPLY)
    request.output.parse_chat = True
    request.stop.max_tokens = 512
    with grpc.insecure_channel(server) as channel:
        generate = channel.unary_stream(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=request_class.SerializeToString,
            response_deserializer=response_class.FromString,
        )
        try:
            for _ in range(ROUNDS_MAX):
                responses = generate(request, timeout=120)
                answer = receive(responses, request.chat.messages.add(role="ROLE_ASSISTANT"))
                if not answer.tool_calls:
                    return 0
                for call in answer.tool_calls:
                    result = multiply(call.arguments)
                    print(f"[{call.name}({call.arguments}) is {result}]")
                    request.chat.messages.add(
                        role="ROLE_TOOL", tool_call_id=call.id, name=call.name, content=result
                    )
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    print(f"no answer after {ROUNDS_MAX} rounds", file=sys.stderr)
    return 1


def receive(responses: Any, answer: Any) -> Any:
    """Prints the text of an answer as it comes, and puts all of it into a message."""
    for response in responses:
        if not response.HasField("delta"):
            continue
        delta = response.delta
        print(delta.text, end="", flush=True)
        answer.content += delta.text
        answer.reasoning += delta.reasoning
        for part in delta.tool_calls:
            # Parts with one index belong to one call; the first has its id and its name.
            if part.index == len(answer.tool_calls):
                answer.tool_calls.add(id=part.id, name=part.name)
            answer.tool_calls[part.index].arguments += part.arguments
    print()
    return answer


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: tools.py PROTOSET SERVER PROMPT")
    sys.exit(main(*sys.argv[1:]))
