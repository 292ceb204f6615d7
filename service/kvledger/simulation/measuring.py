"""How long steps of a model take on this machine: some are run, and a line is put through them."""

from __future__ import annotations

import random
import time

from kvledger import _core
from kvledger.diagnosis.counts import DECODE, PREFILL
from kvledger.diagnosis.observation import UNKNOWN
from kvledger.diagnosis.step_fit import fit_phase
from kvledger.models.llama import Llama
from kvledger.planning.floors import StepCosts
from kvledger.served_model import load
from kvledger.settings import Settings
from kvledger.simulation.costs import Costs
from kvledger.simulation.loop import CoreSettings, Run, Simulation
from kvledger.simulation.traffic import MadeUp, Shape

# Real time that the steps take, about, in seconds; and what they compute.
_SECONDS = 10.0
_CALLERS = (1, 3, 8)
_PROMPTS, _OUTPUTS = (32, 128, 384), (8, 24, 64)


class RealSteps:
    """Steps of a model, which take as long as they take."""

    def __init__(self, model: Llama) -> None:
        self._model = model

    def seconds(self, plan: _core.Plan) -> float:
        """Computes it."""
        began = time.perf_counter()
        self._model.forward(plan).argmax(dim=-1)
        return time.perf_counter() - began


def measured(settings: Settings, context: int, seconds: float = _SECONDS) -> Costs:
    """Of the model that the settings name. Raises ModelRefused or SettingRefused."""
    longest = min(context, max(_PROMPTS) + max(_OUTPUTS))
    blocks = max(_CALLERS) * (2 + longest // 8)
    model = load(settings.model_copy(update={"kv_blocks": blocks, "kv_bytes": None}))
    steps, vocabulary = RealSteps(model.llama), model.tokenizer.vocabulary_size
    core = CoreSettings(
        blocks=blocks,
        token_budget=settings.token_budget,
        sequences_max=settings.sequences_max,
        prefix_reuse=False,
    )

    def lengths(chance: random.Random) -> tuple[int, int]:
        prompt, output = chance.choice(_PROMPTS), chance.choice(_OUTPUTS)
        return min(prompt, longest // 2), min(output, longest // 2)

    for callers in _CALLERS:
        began = time.monotonic_ns()
        shape = Shape(lengths, callers=callers, requests=1 << 30, vocabulary=vocabulary)
        traffic, run = MadeUp(shape, seed=callers), Run(exact=True)
        simulation = Simulation(core, traffic, steps, run, core=model.core, began=began)
        simulation.run(seconds / len(_CALLERS))
        simulation.cancel_all()
    books = model.core.step_books
    floors = StepCosts(**vars(model.work), peaks=UNKNOWN)
    decode, prefill = (fit_phase(books, phase, floors) for phase in (DECODE, PREFILL))
    assert decode is not None
    assert prefill is not None
    return Costs(decode, prefill)
