"""Plans: how many fit, how fast at most, how far until a target; against plain counting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepping import settings

from kvledger import _core
from kvledger.errors import SettingRefused
from kvledger.machine.peaks import MachinePeaks
from kvledger.planning import plan as planning
from kvledger.planning.capacity import Lengths, Pool
from kvledger.planning.floors import StepCosts
from kvledger.planning.plan import Plan, Question, make_layout, make_plan
from kvledger.planning.planned_model import plain_model
from kvledger.planning.shapes import SHAPES
from kvledger.planning.targets import Reaching, Targets
from kvledger.served_model import make_core

LAYOUT = _core.KvLayout(layers=2, kv_heads=2, head_dim=16, block_tokens=32)
SMOL = SHAPES["smollm2-135m"]
MODEL = plain_model(SMOL.config("smol"), SMOL.vocabulary, "bf16")
PEAKS = MachinePeaks.given(40e9, 200e9)
LENGTHS = Lengths(512, 128, 1024, 256)


def plan(*arguments: str, memory: int = 8 << 30, **changes: Any) -> Plan:
    question = Question(MODEL, settings(*arguments), LENGTHS, memory, PEAKS)
    return make_plan(replace(question, **changes))


def costs(kv_format: str = "bf16", peaks: MachinePeaks = PEAKS) -> StepCosts:
    token_bytes = make_layout(MODEL.config, 32).token_bytes(kv_format)
    return StepCosts.of(MODEL.config, MODEL.weights("stored"), token_bytes, peaks)


@given(st.sampled_from(_core.KV_FORMATS), st.integers(1, 60), st.integers(2, 600))
def test_a_sequence_is_as_long_as_the_core_lets_it_be(
    kv_format: str, blocks: int, context: int
) -> None:
    """A plan would promise a context at whose end the server stops."""
    pool = Pool(LAYOUT, kv_format, blocks, context)
    core = make_core(
        blocks=blocks,
        slots_per_block=pool.slots_per_block,
        context_tokens=context,
        token_budget=8,
        sequences_max=1,
        end_of_text=[],
        priority_aging=1.0,
        tpot_target=None,
        step_stretch=0.0,
    )
    assert pool.sequence_tokens_max == core.sequence_tokens_max == pool.longest(1)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 200))
def test_what_fits_is_what_blocks_there_are_for(prompt: int, output: int, blocks: int) -> None:
    """Sequences would be preempted that a plan had found room for."""
    pool = Pool(LAYOUT, "f32", blocks, 512)
    total = prompt + output
    each = max(1, -(-(total - 1) // 16))  # 16 slots a block in f32; the last token has none
    assert pool.fit(total) == (blocks // each if total <= 512 else 0)
    ages = [-(-(prompt + made) // 16) for made in range(output)]
    mean = sum(ages) / output
    assert pool.fit_living(Lengths(prompt, output, prompt, output)) == pytest.approx(
        blocks / mean, abs=1.0
    )
    assert pool.fit_living(Lengths(prompt, output, prompt, output)) >= pool.fit(total)


@given(st.integers(1, 64), st.integers(1, 400))
def test_the_longest_is_the_longest(sequences: int, blocks: int) -> None:
    """One more token, and somebody would be preempted; or room would be left unused."""
    pool = Pool(LAYOUT, "bf16", blocks, 100_000)
    longest = pool.longest(sequences)
    if longest == 0:
        assert sequences > blocks
        return
    assert pool.fit(longest) >= sequences
    assert pool.fit(longest + 1) < sequences


def test_decoding_reads_weights_and_keys_and_multiplies() -> None:
    """The floor would forget a part, and a server be called slow that is as fast as can be."""
    layer = 576 * (576 + 2 * 192) + 576 * 576 + 3 * 576 * 1536
    head = 576 * 49152
    floor = costs().decode(4, 1000)
    assert floor.weight_bytes == 2 * (30 * layer + head)
    assert floor.kv_bytes == 4 * 1000 * 23_040
    attention = 4 * 1000 * 30 * 9 * 64 * 4
    assert floor.operations == 4 * 2 * (30 * layer + head) + attention
    assert floor.memory_seconds == (floor.weight_bytes + floor.kv_bytes) / 40e9
    assert floor.compute_seconds == pytest.approx(floor.operations / 200e9)
    assert floor.seconds == max(floor.memory_seconds, floor.compute_seconds)
    assert floor.intensity == floor.operations / (floor.weight_bytes + floor.kv_bytes)


def test_what_binds_is_the_largest_part() -> None:
    """An operator would buy memory where arithmetic is short."""
    fast = costs(peaks=MachinePeaks.given(40e9, 1e15))
    assert fast.decode(1, 10).binds == "weights"
    assert fast.decode(1, 100_000).binds == "kv"
    assert costs(peaks=MachinePeaks.given(1e15, 1e9)).decode(1, 10).binds == "compute"
    assert costs().prefill(4096, 256).binds == "compute"
    assert costs(peaks=MachinePeaks.given(1e9, 1e15)).prefill(16, 256).binds == "weights"


@pytest.mark.parametrize(("prompt", "budget"), [(1, 256), (256, 256), (257, 256), (1000, 64)])
def test_a_prompt_is_its_chunks(prompt: int, budget: int) -> None:
    """Chunks that read the weights again would be counted as one pass, or keys be left out."""
    found = costs()
    floor = found.prefill(prompt, budget)
    weight_bytes, keys, attended, done = found.head_bytes, 0, 0, 0
    while done < prompt:
        chunk = min(budget, prompt - done)
        weight_bytes += found.layer_bytes
        keys += done
        attended += sum(done + i + 1 for i in range(chunk))
        done += chunk
    assert floor.weight_bytes == weight_bytes
    assert floor.kv_bytes == keys * 23_040
    linear = prompt * sum(found.layer_operations.values()) + sum(found.head_operations.values())
    assert floor.operations == pytest.approx(linear + attended * found.key_operations)


def test_others_that_decode_take_part_of_each_step() -> None:
    """A first token would be promised as if nobody else were there."""
    found = costs()
    alone, beside = found.prefill(512, 256), found.prefill(512, 256, 128, 600)
    assert beside.weight_bytes == 4 * (found.layer_bytes + found.head_bytes)  # 128 a step
    assert beside.kv_bytes == (128 * (1 + 2 + 3) + 4 * 128 * 600) * 23_040
    assert beside.compute_seconds > alone.compute_seconds + 4 * (
        128 * sum(found.layer_operations.values()) / 200e9
    )


@given(st.floats(1.0, 5000.0), st.floats(1e10, 1e14))
def test_weights_bind_until_they_do_not(context: float, flops: float) -> None:
    """The batch at which more sequences stop being free would be another one."""
    found = costs(peaks=MachinePeaks.given(40e9, flops))
    until, then = found.weights_bind_until(context)

    def parts(sequences: int) -> tuple[float, float, float]:
        floor = found.decode(sequences, context)
        return floor.weight_bytes / 40e9, floor.kv_bytes / 40e9, floor.compute_seconds

    weights, kv, compute = parts(until)
    assert max(kv, compute) >= weights * (1 - 1e-6)
    assert (compute >= kv * (1 - 1e-6)) if then == "compute" else (kv >= compute * (1 - 1e-6))
    if until > 1:
        weights, kv, compute = parts(until - 1)
        assert weights > max(kv, compute) * (1 - 1e-6)


@given(
    st.integers(1, 40),
    st.one_of(st.none(), st.floats(1e-3, 2.0)),
    st.one_of(st.none(), st.floats(1e-2, 20.0)),
    st.integers(8, 64),
)
def test_a_reach_is_the_last_that_holds(
    fit: int, tpot: float | None, ttft: float | None, budget: int
) -> None:
    """One more would be promised that misses a target, or one less than could be."""
    pool = Pool(make_layout(MODEL.config, 32), "bf16", 40 * fit, 2048)
    reaching = Reaching(costs(), pool, Targets(ttft, tpot), budget)

    def holds(sequences: int, prompt: int, context: int) -> bool:
        first = reaching.costs.prefill(prompt, budget, sequences - 1, context).seconds
        step = reaching.costs.decode(sequences, context).seconds
        return (ttft is None or first <= ttft) and (tpot is None or step <= tpot)

    reach = reaching.concurrency(512, 64, 600, fit)
    allowed = [n for n in range(1, min(fit, budget) + 1) if holds(n, 512, 600)]
    assert reach.most == max(allowed, default=0)
    if reach.stopped_by == "memory":
        assert reach.most == fit
    reach = reaching.context(3, 64)
    longest = min(2048, pool.longest(3))
    tokens = [n for n in range(2, longest + 1) if holds(3, max(1, n - 64), n)]
    assert reach.most == max(tokens, default=0)


def test_without_targets_memory_and_budget_stop() -> None:
    """A person would be told that a target is missed which nobody has."""
    small = plan("--kv-blocks", "100", "--token-budget", "1024")
    assert small.mean.concurrency.stopped_by == "memory"
    assert small.mean.concurrency.most == small.fit.living
    assert small.most.concurrency.most == small.fit.most == 100 // 40
    assert plan().mean.concurrency.stopped_by == "token budget"
    assert plan(concurrency=2).mean.context.stopped_by == "context window"
    assert plan("--kv-blocks", "100", concurrency=4).mean.context == planning.Reach(801, "memory")


def test_a_pool_that_is_told_is_taken() -> None:
    """The plan would be of another pool than the server's."""
    block = make_layout(MODEL.config, 32).block_bytes
    assert plan("--kv-blocks", "77").pool.blocks == 77
    assert plan("--kv-bytes", str(5 * block + 1)).pool.blocks == 5
    rest = plan()
    assert rest.pool.blocks == rest.memory.left // block
    assert rest.memory.left == (8 << 30) - rest.memory.weights - rest.memory.process - (
        rest.memory.step
    )
    assert rest.default_blocks == rest.memory.left // 4 // block


def test_what_cannot_be_is_refused_in_a_sentence() -> None:
    """A plan would be made of a server that does not start."""
    for changes, reason in (
        ({"memory": 100 << 20}, "plan for more --memory"),
        ({"lengths": Lengths(8000, 200, 8000, 200)}, "plan for less"),
        ({"concurrency": 65}, "--max-sequences 65"),
    ):
        with pytest.raises(SettingRefused, match=reason) as refused:
            plan(**changes)
        assert "\n" not in str(refused.value)
    with pytest.raises(SettingRefused, match="--kv-bytes"):
        plan("--kv-bytes", "1TiB")
    assert plan("--max-sequences", "65", concurrency=65).sequences == 65


def test_formats_are_those_that_the_core_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without int8 would promise it, or one with it hide it."""
    found = {each.name: each for each in plan().formats}
    assert list(found)[:4] == ["f32", "bf16", "int8", "int4"]
    for name, each in found.items():
        assert (each.missing == "") == (name in _core.KV_FORMATS)
    assert found["f32"].token_bytes == 2 * found["bf16"].token_bytes
    assert found["f32"].fit.most == found["bf16"].fit.most // 2
    monkeypatch.setattr(planning._core, "KV_FORMATS", ("bf16",))
    assert [each.name for each in plan().formats if not each.missing] == ["bf16"]


def test_fewer_kv_heads_hold_more() -> None:
    """The row of the model itself would not be what the plan says above it."""
    whole = plan(concurrency=8)
    found = {each.kv_heads: each for each in whole.groups}
    assert list(found) == [1, 3, 9]
    assert [each.name for each in whole.groups] == ["MQA", "GQA", "MHA"]
    own = found[3]
    assert own.fit == whole.fit
    assert own.decode_seconds == whole.mean.decode.seconds
    assert own.token_bytes == 3 * found[1].token_bytes
    assert found[1].weight_bytes < own.weight_bytes < found[9].weight_bytes
    small = plan("--kv-blocks", "100")
    for each in small.groups:
        layout = make_layout(MODEL.with_kv_heads(each.kv_heads).config, 32)
        room = small.pool.bytes + small.memory.weights - each.weight_bytes
        assert each.fit.most == room // layout.block_bytes // 40
    assert [each.fit.most for each in small.groups] == [8, 2, 0]


def test_tokens_a_second_count_the_prompts() -> None:
    """A rate would be promised that leaves no time for prompts."""
    found = costs(peaks=MachinePeaks.given(1e15, 200e9))  # arithmetic alone
    step, first = found.decode(8, 600), found.prefill(512, 256)
    seconds = 127 * step.compute_seconds + 8 * first.compute_seconds
    assert found.tokens_per_second_max(8, 512, 128, 600, 256) == pytest.approx(8 * 128 / seconds)
    assert found.tokens_per_second_max(8, 512, 1, 600, 256) == pytest.approx(
        1 / first.compute_seconds
    )
