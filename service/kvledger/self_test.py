"""One token from a model, without a server: what `kvledger doctor` proves."""

from __future__ import annotations

import time

import numpy as np

from kvledger import _core
from kvledger.sampling import UNUSABLE, Sampler
from kvledger.served_model import load
from kvledger.settings import Settings


def generate_one_token(settings: Settings) -> int | None:
    """Loads the model with the smallest useful pool and computes one token of a short prompt.

    None if the logits are not finite. Raises ModelRefused or SettingRefused.
    """
    small = settings.model_copy(update={"kv_blocks": 4, "kv_bytes": None})
    model = load(small)
    prompt = model.tokenizer.encode_text("The capital of France is")
    arrivals = _core.Arrivals(
        ids=np.zeros(1, np.uint64),
        tenants=np.zeros(1, np.uint32),
        arrived_at=np.zeros(1, np.int64),
        priorities=np.zeros(1, np.int32),
        output_tokens_max=np.ones(1, np.int64),
        ignore_end_of_text=np.zeros(1, np.bool_),
        offsets=np.array([0, len(prompt)], np.int64),
        tokens=prompt,
    )
    nobody = np.empty(0, np.uint64)
    plan, _ = model.core.plan(time.monotonic_ns(), arrivals, nobody, np.empty(0, np.uint8))
    logits = model.llama.forward(plan)
    sampler = Sampler(small.sequences_max)
    tokens = sampler.sample(logits, plan.logit_rows, plan.positions[plan.logit_tokens])
    offsets = np.arange(len(tokens) + 1, dtype=np.int32)
    model.core.commit(plan.step, tokens, offsets, time.monotonic_ns())
    return None if tokens[0] == UNUSABLE else int(tokens[0])
