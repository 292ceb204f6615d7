"""Ten prompts whose greedy continuations in float32 are known, through the whole engine.

With weights and KV in f32 the outputs must be the file's, in whatever company a prompt runs.
Weights as the file stores them are the same numbers in fewer bytes, so the fast tier uses them in
most arms, and in arms that are about company and chunks it makes the beginning of each answer;
`--soak` runs every arm in f32 too, and to the end. With anything rounded, the first difference of
each prompt is printed (pytest -rP shows it).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from golden import (
    GOLDEN,
    ITEMS,
    TIE,
    Harness,
    all_at_once,
    among_cancelled_neighbours,
    differences,
    longest_first,
    one_by_one,
)

from kvledger import _core
from kvledger.engine import EndReason
from kvledger.models.catalogue import CATALOGUE

MODEL = CATALOGUE["smollm2-135m-instruct"]
# Where a rounded model may choose another token; beyond it the difference would be a bug.
ROUNDING_GAP = 0.5


@pytest.fixture(autouse=True)
def _model_is_there() -> None:
    if not MODEL.is_fetched:
        pytest.skip(f"{MODEL.name} is not fetched; kvledger models fetch does it")


def check_identical(harness: Harness) -> None:
    """Every output is the golden one; ties are counted and printed."""
    found = differences(harness)
    ties = [difference for difference in found if difference.gap < TIE]
    print(f"{len(ITEMS) - len(found)} of {len(ITEMS)} identical, {len(ties)} ties")
    assert [str(difference) for difference in found if difference.gap >= TIE] == []


# Of each continuation, where the fast tier makes only its beginning.
BEGINNING = 32
WHOLE = GOLDEN["n_new"]
# Weights that are the model's own numbers.
unrounded = pytest.mark.parametrize(
    "weights", ["stored", pytest.param("f32", marks=pytest.mark.soak)]
)


@pytest.mark.parametrize(
    ("weights", "tokens"),
    [
        ("stored", BEGINNING),
        pytest.param("stored", WHOLE, marks=pytest.mark.soak),
        pytest.param("f32", WHOLE, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize(
    "schedule",
    [pytest.param(one_by_one, marks=pytest.mark.soak), among_cancelled_neighbours],
    ids=lambda s: s.__name__,
)
def test_company_does_not_matter(
    schedule: Callable[[Harness], None], weights: str, tokens: int
) -> None:
    """A token that depended on neighbours would make answers irreproducible."""
    arguments = ("--weights", weights, "--kv-format", "f32", "--kv-blocks", "1200")
    with Harness(*arguments, tokens=tokens) as harness:
        schedule(harness)
    check_identical(harness)
    cancelled = [
        sequence
        for sequence, outcome in harness.outcomes.items()
        if outcome.end_reason == EndReason.CANCELLED
    ]
    assert bool(cancelled) == (schedule is among_cancelled_neighbours)


@pytest.mark.parametrize(
    ("budget", "weights", "tokens"),
    [
        (64, "stored", BEGINNING),
        *(
            pytest.param(budget, weights, WHOLE, marks=pytest.mark.soak)
            for weights in ("stored", "f32")
            for budget in (16, 64, 512)
        ),
    ],
)
def test_chunks_do_not_matter(budget: int, weights: str, tokens: int) -> None:
    """A prompt cut into chunks must give what the whole prompt gives (B25)."""
    arguments = ("--weights", weights, "--kv-format", "f32", "--kv-blocks", "600")
    with Harness(*arguments, "--token-budget", str(budget), tokens=tokens) as harness:
        all_at_once(harness)
    check_identical(harness)
    longest = max(len(item["prompt_ids"]) for item in ITEMS)
    assert longest > budget  # or nothing was cut


@unrounded
def test_preemption_does_not_matter(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that lost its blocks and was computed again must go on as before."""
    # Who looks ahead lets nobody in who would have to go again.
    monkeypatch.setattr(
        "kvledger.engine.CoreEngine",
        lambda **settings: _core.Engine(**{**settings, "forecast": False}),
    )
    with Harness("--weights", weights, "--kv-format", "f32", "--kv-blocks", "150") as harness:
        longest_first(harness)
    check_identical(harness)
    preemptions = sum(outcome.preemptions for outcome in harness.outcomes.values())
    print(f"{preemptions} preemptions")
    assert preemptions > 0
    assert any(outcome.recomputed_tokens for outcome in harness.outcomes.values())


@pytest.mark.parametrize("weights", ["f32", pytest.param("stored", marks=pytest.mark.soak)])
def test_the_model_is_the_reference(weights: str) -> None:
    """Weights kept as the file stores them must not round anything, nor must floats."""
    with Harness("--weights", weights, "--kv-format", "f32", "--kv-blocks", "600") as harness:
        all_at_once(harness)
    check_identical(harness)


@pytest.mark.parametrize(
    ("weights", "kv_format"),
    [
        ("stored", "bf16"),
        pytest.param("bf16", "bf16", marks=pytest.mark.soak),
        pytest.param("bf16", "f32", marks=pytest.mark.soak),
    ],
)
def test_rounding_changes_only_what_is_nearly_undecided(weights: str, kv_format: str) -> None:
    """A rounded model that leaves the reference where that is sure of itself is a wrong one."""
    arguments = ("--weights", weights, "--kv-format", kv_format, "--kv-blocks", "600")
    with Harness(*arguments) as harness:
        all_at_once(harness)
    found = differences(harness)
    print(f"weights {weights}, KV {kv_format}: {len(ITEMS) - len(found)} of {len(ITEMS)} identical")
    for difference in found:
        print(f"  {difference}")
    assert [str(d) for d in found if d.gap > ROUNDING_GAP] == []


def test_the_copy_is_the_file() -> None:
    """A golden file that was edited here would prove nothing."""
    original = Path(__file__).parents[2] / "../shared/golden/smollm2_greedy_fp32.json"
    if not original.exists():
        pytest.skip("the original golden file is not beside this checkout")
    copy = Path(__file__).parent.parent / "data" / "smollm2_greedy_fp32.json"
    assert copy.read_bytes() == original.read_bytes()
