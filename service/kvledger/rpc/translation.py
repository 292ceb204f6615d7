"""Between messages of the contract and the service's own types."""

from __future__ import annotations

import secrets

from google.protobuf import duration_pb2

from kvledger import _core
from kvledger.sampling import SamplingParameters
from kvledger.served_model import ServedModel
from kvledger.streams import Receipt
from kvledger.tokenizer import ChatMessage, Role
from kvledger.v1 import generation_pb2, models_pb2

_ROLES: dict[int, Role] = {
    generation_pb2.ROLE_SYSTEM: "system",
    generation_pb2.ROLE_USER: "user",
    generation_pb2.ROLE_ASSISTANT: "assistant",
}


def chat_messages(chat: generation_pb2.ChatPrompt) -> list[ChatMessage]:
    """The messages of a validated ChatPrompt."""
    return [ChatMessage(_ROLES[message.role], message.content) for message in chat.messages]


def sampling_parameters(options: generation_pb2.SamplingOptions) -> SamplingParameters:
    """Validated options with their defaults filled in; a seed is drawn where none is given."""
    return SamplingParameters(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p if options.HasField("top_p") else 1.0,
        min_p=options.min_p,
        seed=options.seed if options.HasField("seed") else secrets.randbits(64),
    )


def duration(nanoseconds: int) -> duration_pb2.Duration:
    """A Duration of that many nanoseconds, not negative."""
    seconds, nanos = divmod(nanoseconds, 1_000_000_000)
    return duration_pb2.Duration(seconds=seconds, nanos=nanos)


def receipt_message(
    receipt: Receipt, request_id: str, kv_format: str, block_bytes: int
) -> generation_pb2.Receipt:
    """A receipt as the contract says it."""
    return generation_pb2.Receipt(
        request_id=request_id,
        peak_blocks=receipt.peak_blocks,
        held=generation_pb2.BlockTime(seconds=receipt.held_seconds, nanos=receipt.held_nanos),
        reserved=generation_pb2.BlockTime(
            seconds=receipt.reserved_seconds, nanos=receipt.reserved_nanos
        ),
        computed_tokens=receipt.computed_tokens,
        recomputed_tokens=receipt.recomputed_tokens,
        preemptions=receipt.preemptions,
        queue_time=duration(receipt.queued),
        prefill_time=duration(receipt.prefill),
        decode_time=duration(receipt.decode),
        stall_time=duration(receipt.paused),
        kv_format=kv_format,
        block_bytes=block_bytes,
    )


def model_message(model: ServedModel) -> models_pb2.Model:
    """A served model as the contract describes it."""
    config, layout = model.config, model.layout
    return models_pb2.Model(
        id=model.id,
        architecture="llama",
        context_tokens=model.tokens_max,
        vocabulary_tokens=model.tokenizer.vocabulary_size,
        has_chat_template=model.tokenizer.has_chat_template,
        weights=model.weights_mode,
        weight_bytes=model.weight_bytes,
        fingerprint=model.fingerprint,
        kv_geometry=models_pb2.KvGeometry(
            layers=config.layers,
            query_heads=config.query_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
        ),
        kv_formats=[
            models_pb2.KvFormatCost(
                format=format,
                bytes_per_token=layout.token_bytes(format),
                tokens_per_block=layout.slots_per_block(format),
            )
            for format in _core.KV_FORMATS
        ],
        kv_pool=models_pb2.KvPool(
            format=model.kv_format,
            blocks=model.blocks,
            block_bytes=layout.block_bytes,
            tokens=model.blocks * layout.slots_per_block(model.kv_format),
        ),
    )
