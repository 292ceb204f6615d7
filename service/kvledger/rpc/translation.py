"""Between messages of the contract and the service's own types."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Literal

from google.protobuf import duration_pb2

from kvledger import _core
from kvledger.constraints.source import ConstraintSource
from kvledger.logit_changes import ChangeOptions, Constraint
from kvledger.logprobs import PromptLogprobs, TokenLogprobs
from kvledger.rpc.answers import chat_support
from kvledger.sampling import SamplingParameters
from kvledger.scopes.claims import CacheWish
from kvledger.served_model import ServedModel
from kvledger.streams import Receipt
from kvledger.v1 import generation_pb2, models_pb2


def constraint_source(constraint: generation_pb2.Constraint) -> ConstraintSource:
    """A validated Constraint."""
    kind = constraint.WhichOneof("kind")
    assert kind is not None
    if kind == "json_object":
        return ConstraintSource(kind)
    text: str = getattr(constraint, kind)
    return ConstraintSource(kind, text)


def sampling_parameters(
    request: generation_pb2.GenerateRequest,
    end_of_text: Collection[int],
    constraint: Constraint | None = None,
) -> SamplingParameters:
    """A validated request's options, defaults filled in; a seed is drawn where none is given.

    `end_of_text` are the tokens that end every text of the model; `constraint` is the request's,
    compiled.
    """
    options, output = request.sampling, request.output
    return SamplingParameters(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p if options.HasField("top_p") else 1.0,
        min_p=options.min_p,
        seed=options.seed if options.HasField("seed") else secrets.randbits(64),
        changes=_change_options(options, request.stop, end_of_text, constraint),
        top_logprobs=output.top_logprobs if output.HasField("top_logprobs") else None,
    )


def _change_options(
    options: generation_pb2.SamplingOptions,
    stop: generation_pb2.StopOptions,
    end_of_text: Collection[int],
    constraint: Constraint | None,
) -> ChangeOptions:
    penalty = options.repetition_penalty if options.HasField("repetition_penalty") else 1.0
    ending_ids: set[int] = set()
    if stop.min_tokens:
        # A token that ends nothing, for ignore_eos, may come at any time.
        ending_ids.update(stop.token_ids, () if stop.ignore_eos else end_of_text)
    return ChangeOptions(
        repetition_penalty=penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in options.logit_bias),
        min_tokens=stop.min_tokens,
        ending_ids=tuple(sorted(ending_ids)),
        constraint=constraint,
        last_ids=tuple(sorted(end_of_text)) if constraint is not None and stop.ignore_eos else (),
    )


def ignores_end_of_text(request: generation_pb2.GenerateRequest) -> bool:
    """Whether the end-of-text token ends nothing.

    With a constraint it does: with ignore_eos too, it comes only where nothing else can.
    """
    return request.stop.ignore_eos and not request.HasField("constraint")


_SCOPES: dict[int, Literal["tenant", "namespace", "none"]] = {
    generation_pb2.CACHE_SCOPE_UNSPECIFIED: "tenant",
    generation_pb2.CACHE_SCOPE_TENANT: "tenant",
    generation_pb2.CACHE_SCOPE_NAMESPACE: "namespace",
    generation_pb2.CACHE_SCOPE_NONE: "none",
}


def cache_wish(cache: generation_pb2.CacheOptions, shared_tokens: int) -> CacheWish:
    """Validated CacheOptions; `shared_tokens` of the prompt lie in what they share."""
    return CacheWish(
        scope=_SCOPES[cache.scope],
        namespace=cache.namespace,
        shared_scope=cache.shared_scope,
        shared_tokens=shared_tokens,
        count_field="cache.shared_messages" if cache.shared_messages else "cache.shared_tokens",
    )


def logprobs_message(logprobs: TokenLogprobs) -> generation_pb2.TokenLogprobs:
    """A token's log-probabilities as the contract says them."""
    return generation_pb2.TokenLogprobs(
        chosen=generation_pb2.TokenLogprob(token_id=logprobs.token, logprob=logprobs.logprob),
        top=[
            generation_pb2.TokenLogprob(token_id=token, logprob=logprob)
            for token, logprob in logprobs.top
        ],
    )


# Tokens of a prompt in one message: with 20 others each, some 40 KB.
_PROMPT_PIECE = 128


def prompt_messages(logprobs: PromptLogprobs) -> list[generation_pb2.PromptLogprobs]:
    """Log-probabilities of a prompt as the contract says them, in pieces."""
    return [
        generation_pb2.PromptLogprobs(
            first=logprobs.first + start,
            logprobs=[logprobs_message(row) for row in logprobs.rows(start, _PROMPT_PIECE)],
        )
        for start in range(0, len(logprobs.tokens), _PROMPT_PIECE)
    ]


def duration(nanoseconds: int) -> duration_pb2.Duration:
    """A Duration of that many nanoseconds, not negative."""
    seconds, nanos = divmod(nanoseconds, 1_000_000_000)
    return duration_pb2.Duration(seconds=seconds, nanos=nanos)


_WAIT_LEAST = 100_000_000


def told_wait(nanoseconds: int) -> int:
    """A wait as its tenant is told: rounded up to 100 ms, 200 ms, 400 ms and so on; 0 stays 0.

    Exactly, it would tell how busy others are.
    """
    if nanoseconds <= 0:
        return 0
    return _WAIT_LEAST << (-(-nanoseconds // _WAIT_LEAST) - 1).bit_length()


def block_time(nanoseconds: int) -> generation_pb2.BlockTime:
    """A BlockTime of that many block-nanoseconds, not negative."""
    seconds, nanos = divmod(nanoseconds, 1_000_000_000)
    return generation_pb2.BlockTime(seconds=seconds, nanos=nanos)


def preemption_reasons(
    receipt: Receipt, *, for_client: bool
) -> generation_pb2.PreemptionReasons | None:
    """What a request was preempted for; None if it was not.

    A client is not told who else needed room that all share, nor that nobody else did.
    """
    if not receipt.preemptions:
        return None
    reasons = generation_pb2.PreemptionReasons(
        own_tenant=receipt.preempted_own,
        shared_capacity=receipt.preempted_others + receipt.preempted_itself,
        unread=receipt.preempted_paused,
    )
    if not for_client:
        reasons.other_tenant = receipt.preempted_others
        reasons.stepped_back = receipt.preempted_itself
    return reasons


def receipt_message(
    receipt: Receipt,
    request_id: str,
    kv_format: str,
    block_bytes: int,
    shares_public: bool = False,
    label: str = "",
    saved_by_format: int = 0,
) -> generation_pb2.Receipt:
    """A receipt as its client gets it; `shares_public`: not a group's, if anything is shared;
    `saved_by_format`: block-nanoseconds."""
    return generation_pb2.Receipt(
        request_id=request_id,
        peak_blocks=receipt.peak_blocks,
        held=generation_pb2.BlockTime(seconds=receipt.held_seconds, nanos=receipt.held_nanos),
        reserved=generation_pb2.BlockTime(
            seconds=receipt.reserved_seconds, nanos=receipt.reserved_nanos
        ),
        computed_tokens=receipt.computed_tokens,
        recomputed_tokens=receipt.recomputed_tokens,
        shared_tokens=receipt.shared_tokens,
        reused_own_tokens=receipt.reused_own,
        reused_group_tokens=0 if shares_public else receipt.reused_shared,
        reused_public_tokens=receipt.reused_shared if shares_public else 0,
        shared_scope=generation_pb2.BlockTime(
            seconds=receipt.scope_seconds, nanos=receipt.scope_nanos
        ),
        preemptions=receipt.preemptions,
        queue_time=duration(told_wait(receipt.queued)),
        prefill_time=duration(receipt.prefill),
        decode_time=duration(receipt.decode),
        stall_time=duration(receipt.paused),
        kv_format=kv_format,
        block_bytes=block_bytes,
        compute_time=duration(receipt.compute),
        cost=None if receipt.cost is None else generation_pb2.Cost(**vars(receipt.cost)),
        uncached_tokens=receipt.uncached_tokens,
        sharing_saved=generation_pb2.BlockTime(
            seconds=receipt.saved_seconds, nanos=receipt.saved_nanos
        ),
        preempted_time=duration(told_wait(receipt.requeued)),
        client_request_id=label,
        format_saved=block_time(saved_by_format),
        preemption_reasons=preemption_reasons(receipt, for_client=True),
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
        chat=chat_support(model),
    )
