"""One token from a model, without a server: what `kvledger doctor` proves."""

from __future__ import annotations

import queue
import time

from kvledger.engine import Engine, Job, StepOutcome
from kvledger.sampling import Sampler, SamplingParameters
from kvledger.served_model import load
from kvledger.settings import Settings


def generate_one_token(settings: Settings) -> int | None:
    """Loads the model with the smallest useful pool and computes one token of a short prompt.

    None if the model's output is unusable. Raises ModelRefused or SettingRefused.
    """
    small = settings.model_copy(update={"kv_blocks": 4, "kv_bytes": None})
    model = load(small)
    outcomes: queue.SimpleQueue[StepOutcome | None] = queue.SimpleQueue()
    engine = Engine(
        model.core,
        model.llama,
        Sampler(small.sequences_max),
        publish=outcomes.put,
        on_death=lambda: outcomes.put(None),
    )
    engine.start()
    try:
        engine.submit(
            Job(
                sequence=1,
                tenant=0,
                prompt=model.tokenizer.encode_text("The capital of France is")[
                    : model.tokens_max - 1
                ],
                arrived_at=time.monotonic_ns(),
                max_tokens=1,
                sampling=SamplingParameters(),
            )
        )
        while (outcome := outcomes.get()) is not None:
            if outcome.report.tokens.size:
                return int(outcome.report.tokens[0]["token"])
            if outcome.report.receipts.size or outcome.report.refusals.size:
                return None
        return None
    finally:
        engine.stop()
