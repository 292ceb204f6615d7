"""Running a model step by step without a server: what several tests need."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvledger import _core
from kvledger.served_model import ServedModel, load
from kvledger.settings import Settings, load_settings

NOBODY = np.empty(0, dtype=np.uint64)
NO_REASONS = np.empty(0, dtype=np.uint8)


def settings(*arguments: str) -> Settings:
    """Settings of a command line, with nothing of this machine's environment."""
    return load_settings(["--dev", *arguments], {})


def served(path: Path, *arguments: str) -> ServedModel:
    """A model loaded with a small pool."""
    return load(settings("--model", str(path), "--kv-blocks", "64", *arguments))


def arrivals(
    prompts: Sequence[Sequence[int]], max_tokens: int = 1, first_id: int = 0, **changes: Any
) -> _core.Arrivals:
    """Arrivals of some prompts, all at time 0 of tenant 0."""
    count = len(prompts)
    arrays: dict[str, npt.NDArray[Any]] = {
        "ids": np.arange(first_id, first_id + count, dtype=np.uint64),
        "tenants": np.zeros(count, np.uint32),
        "arrived_at": np.zeros(count, np.int64),
        "priorities": np.zeros(count, np.int32),
        "output_tokens_max": np.full(count, max_tokens, np.int64),
        "ignore_end_of_text": np.ones(count, np.bool_),
        "samples": np.ones(count, np.int64),
        "offsets": np.cumsum([0, *map(len, prompts)]).astype(np.int64),
        "tokens": np.array([token for prompt in prompts for token in prompt], dtype=np.int32),
    }
    arrays.update(changes)
    return _core.Arrivals(**arrays)


def logits_after(model: ServedModel, prompt: Sequence[int]) -> torch.Tensor:
    """float32 [vocabulary]: logits after the last token of a prompt, run alone."""
    pending: _core.Arrivals | None = arrivals([prompt], first_id=time.monotonic_ns())
    while True:
        plan, _ = model.core.plan(time.monotonic_ns(), pending, NOBODY, NO_REASONS)
        pending = None
        assert plan.tokens > 0
        logits = model.llama.forward(plan)
        result = logits.clone()
        tokens = np.zeros(plan.logits, dtype=np.int32)
        offsets = np.arange(plan.logits + 1, dtype=np.int32)
        model.core.commit(plan.step, tokens, offsets, time.monotonic_ns())
        if plan.logits:
            return result[0]
