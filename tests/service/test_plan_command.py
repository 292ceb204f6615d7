"""`kvledger plan`: its figures are those of a server that runs, its refusals are sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hub_models import HubShape, hub_model, save_folder
from server_harness import running
from structlog.testing import CapturingLogger
from tiny_model import TinyShape, write_gguf
from tiny_server import TinyServer

from kvledger import _core, served_model
from kvledger.cli import main, plan
from kvledger.v1 import models_pb2

GIVEN = ("--bandwidth", "40GB/s", "--flops", "200G")
# Mean and most lengths that fit into a tiny model's context.
LOAD = ("--prompt", "40", "--output", "20", "--prompt-p95", "80")
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _this_process_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings in the environment, no figures kept, logging left alone."""
    for name in ("KVLEDGER_MODEL", "KVLEDGER_KV_FORMAT", "KVLEDGER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(plan, "configure", lambda *arguments: None)


def planned(capsys: Captured, *arguments: str) -> dict[str, Any]:
    assert plan.run(["--json", *GIVEN, *LOAD, *arguments]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def refused(capsys: Captured, *arguments: str) -> str:
    assert plan.run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("kvledger plan: ")
    assert shown.err.count("\n") == 1
    return shown.err


def write(path: Path, kind: str) -> Path:
    """A tiny model of some kind, with rows that fill no whole tile."""
    if kind.startswith("folder"):
        _, family = kind.split("-")
        shape = HubShape(family, tied=family == "qwen3")
        return save_folder(path / kind, hub_model(shape))
    shape = TinyShape(heads=6, kv_heads=3, tied=False, context=300)
    return write_gguf(
        path / f"{kind}.gguf", shape, quantization=gguf.GGMLQuantizationType[kind.upper()]
    )


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("f32", ("--kv-blocks", "37")),
        ("q4_1", ("--kv-blocks", "37", "--kv-format", "bf16")),
        ("q8_0", ("--kv-bytes", "1000000", "--block-tokens", "8")),
        ("q4_0", ("--kv-blocks", "2", "--weights", "bf16")),
        ("f16", ("--kv-bytes", "900000", "--weights", "f32", "--block-tokens", "64")),
        ("folder-llama", ("--kv-blocks", "50")),
        ("folder-qwen2", ("--kv-blocks", "50", "--weights", "bf16")),
        ("folder-qwen3", ("--kv-bytes", "2000000", "--kv-format", "bf16")),
    ],
)
async def test_a_plan_has_the_figures_of_the_server(
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    arguments: tuple[str, ...],
) -> None:
    """Who buys memory by a plan would find a server that says otherwise."""
    path = write(tmp_path, kind)
    log = CapturingLogger()
    monkeypatch.setattr(served_model, "_log", log)
    server = TinyServer(path, *arguments)
    async with running(server):
        got = (await server.models.GetModel(models_pb2.GetModelRequest())).model
    # The harness serves in f32 unless told otherwise, and so is the plan made.
    told = planned(capsys, "--model", str(path), "--kv-format", "f32", *arguments)
    pool, model = told["pool"], told["model"]
    assert told["memory"]["weights"] == got.weight_bytes
    assert pool["blocks"] == got.kv_pool.blocks
    assert pool["block_bytes"] == got.kv_pool.block_bytes
    assert pool["tokens"] == got.kv_pool.tokens
    assert pool["format"] == got.kv_pool.format
    assert pool["sequence_tokens_max"] == got.context_tokens
    assert model["vocabulary_tokens"] == got.vocabulary_tokens
    assert (model["name"], model["weights"]) == (got.id, got.weights)
    cost = {cost.format: cost for cost in got.kv_formats}
    assert pool["bytes_per_token"] == cost[pool["format"]].bytes_per_token
    assert pool["tokens_per_block"] == cost[pool["format"]].tokens_per_block
    for each in told["formats"]:
        assert ("missing" in each) == (each["name"] not in cost)
        if "missing" not in each:
            assert each["token_bytes"] == cost[each["name"]].bytes_per_token
    (loaded,) = [call.kwargs for call in log.calls if call.args == ("model_loaded",)]
    assert loaded["kv_blocks"] == pool["blocks"]
    assert loaded["kv_tokens"] == pool["tokens"]
    assert loaded["sequence_tokens_max"] == pool["sequence_tokens_max"]


def test_a_pool_of_no_size_is_that_of_a_server(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `serve` takes by itself would be another pool than the plan says."""
    from stepping import settings

    path = write(tmp_path, "q4_1")
    told = planned(capsys, "--model", str(path), "--memory", "421MB", "--block-tokens", "64")
    # The server asks what is free when its weights are loaded; here, what the plan found left.
    monkeypatch.setattr(served_model, "memory_available", lambda: told["memory"]["left"])
    loaded = served_model.load(settings("--model", str(path), "--block-tokens", "64"))
    assert 0 < loaded.blocks == told["pool"]["default_blocks"] < told["pool"]["blocks"]


def test_the_table_says_what_the_json_says(tmp_path: Path, capsys: Captured) -> None:
    """Two readers of one plan would see two plans."""
    path = write(tmp_path, "f32")
    arguments = ("--model", str(path), "--kv-blocks", "37", "--concurrency", "5", "--tpot", "50ms")
    values = planned(capsys, *arguments)
    assert main(["plan", *GIVEN, *LOAD, *arguments]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    pool, mean = values["pool"], values["floors"]["mean"]
    assert any(f"37 blocks of {pool['block_bytes']} bytes" in line for line in lines)
    assert f"a sequence can have {pool['sequence_tokens_max']} tokens" in lines
    assert any(line.endswith(f"(optimistic) {pool['fit']['living']}") for line in lines)
    assert any(line.endswith(f"safe) {pool['fit']['most']}") for line in lines)
    reach = mean["concurrency_reach"]
    assert f"mean lengths, at a time {reach['most']} sequences; then {reach['stopped_by']}" in lines
    assert "int8 not available in this build" in lines or "int8" in _core.KV_FORMATS
    assert values["question"]["targets"] == {"ttft": None, "tpot": 0.05}
    assert values["machine"]["read_bytes_per_second"] == 40e9
    assert values["machine"]["operations_per_second"] == {"f32": 200e9}


def test_a_machine_is_measured_unless_it_is_given(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Floors would be those of no machine."""
    from kvledger.machine import peaks

    monkeypatch.setattr(peaks, "_read_bytes", lambda: 8 << 20)
    monkeypatch.setattr(peaks, "_SECONDS_MULTIPLYING", 0.02)
    monkeypatch.setattr(peaks, "_SHARE_LEAST", 0.0)  # whatever else this machine does
    path = write(tmp_path, "f32")
    arguments = ["--json", "--model", str(path), "--threads", "1", *LOAD]
    assert plan.run(arguments) == 0
    first, again = capsys.readouterr(), plan.run(arguments)
    second = capsys.readouterr()
    assert again == 0
    assert "measuring" in first.err
    assert "measuring" not in second.err
    machine = json.loads(second.out)["machine"]
    assert machine == json.loads(first.out)["machine"]
    assert machine["machine"]["threads"] == 1


def test_shapes_need_no_file(capsys: Captured) -> None:
    """A model that is not at hand could not be planned for."""
    sizes = "--layers 32 --kv-heads 8 --heads 32 --head-dim 128 --hidden 4096 --intermediate 14336"
    by_numbers = planned(capsys, *sizes.split(), "--vocabulary", "128256", "--memory", "80GiB")
    by_name = planned(capsys, "--shape", "llama-3-8b", "--memory", "80GiB")
    by_numbers["model"]["name"] = by_name["model"]["name"]
    assert by_numbers == by_name
    assert by_name["memory"]["weights"] == 2 * (32 * 218_103_808 + 2 * 4096 * 128_256)
    assert by_name["pool"]["pool_bytes_per_token"] == 133_120


def test_a_configuration_needs_no_weights(tmp_path: Path, capsys: Captured) -> None:
    """A plan would need the download that it shall decide about."""
    folder = write(tmp_path, "folder-llama")
    pool = ("--memory", "2GB", "--kv-blocks", "9")
    whole = planned(capsys, "--model", str(folder), *pool)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    alone = planned(capsys, "--config", str(folder / "config.json"), *pool)
    assert alone == whole


def test_settings_come_from_a_file_too(tmp_path: Path, capsys: Captured) -> None:
    """A server that is configured by a file would be planned without it."""
    (tmp_path / "serve.toml").write_text('kv-blocks = 11\nkv-format = "f32"\n')
    told = planned(capsys, "--shape", "smollm2-135m", "--settings", str(tmp_path / "serve.toml"))
    assert (told["pool"]["blocks"], told["pool"]["format"]) == (11, "f32")


def test_lengths_are_less_where_the_context_is_small(tmp_path: Path, capsys: Captured) -> None:
    """A tiny model could not be planned without saying lengths."""
    path = write(tmp_path, "f32")
    assert plan.run(["--json", *GIVEN, "--model", str(path), "--kv-blocks", "9"]) == 0
    lengths = json.loads(capsys.readouterr().out)["question"]["lengths"]
    assert (lengths["prompt"], lengths["output"]) == (150, 75)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--prompt 0", "--prompt: '0' is no whole number from 1"),
        ("--prompt x", "--prompt: 'x'"),
        ("--prompt", "--prompt"),
        ("--output 1e3", "--output: '1e3'"),
        ("--prompt 100 --prompt-p95 99", "--prompt-p95 99 is less than the mean, 100"),
        ("--output 100 --output-p95 9", "--output-p95 9 is less"),
        ("--concurrency -1", "--concurrency"),
        ("--concurrency 65", "give --max-sequences 65"),
        ("--memory lots", "--memory: 'lots' is no size such as 16GiB"),
        ("--memory 100MB", "plan for more --memory"),
        ("--bandwidth 45GB/s", "give both, or neither"),
        ("--flops 1T", "give both, or neither"),
        ("--bandwidth fast --flops 1T", "--bandwidth: 'fast' is no rate"),
        ("--bandwidth 0 --flops 1T", "--bandwidth: '0' is no rate"),
        ("--bandwidth 1.2.3G --flops 1T", "'1.2.3G' is no rate"),
        ("--ttft 0", "--ttft: '0' is no time such as 0.5"),
        ("--tpot 5h", "--tpot: '5h' is no time"),
        ("--shape gpt-5", "--shape gpt-5: known are"),
        ("--layers 4", "needs --kv-heads, --heads"),
        ("--kv-heads 5", "cannot share 5 KV heads"),
        ("--head-dim 24", "multiple of 16"),
        ("--head-dim 512", "the KV layout: head_dim"),
        ("--hidden 100", "multiple of 32"),
        ("--stored q2_k", "--stored: invalid choice"),
        ("--prompt 9000", "the context window of smollm2-135m has 8192"),
        ("--kv-blocks 0", "--kv-blocks"),
        ("--kv-bytes 5", "less than one block"),
        ("--kv-bytes 1PiB", "lower it"),
        ("--kv-format int3", "--kv-format"),
        ("--block-tokens 33", "not a power of two"),
        ("--kv-block 5", "did you mean --kv-blocks"),
        ("--config missing.json", "missing.json cannot be read"),
        ("--settings missing.toml", "missing.toml"),
        ("--model nothing", "each name a model"),
        ("stray", "stray"),
        ("--kernels torch", "plans are for --kernels core"),
    ],
)
def test_wrong_input_is_a_sentence(capsys: Captured, arguments: str, says: str) -> None:
    """A person would read a traceback, or a plan of something else."""
    named = "--shape" in arguments or "--layers" in arguments or "--config" in arguments
    shape = () if named else ("--shape", "smollm2-135m")
    machine = () if "--bandwidth" in arguments or "--flops" in arguments else GIVEN
    assert says in refused(capsys, *shape, *machine, *arguments.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "nothing-of-that-name"), "neither a file nor a known model"),
        (("--device", "cuda"), "give --bandwidth and --flops"),
        (("--stored", "f32"), "--stored is for --config or a shape"),
        (("--config", "a", "--layers", "3"), "each name a model"),
    ],
)
def test_a_model_that_is_none_is_a_sentence(
    capsys: Captured, arguments: tuple[str, ...], says: str
) -> None:
    """The same, of what names the model."""
    machine = () if "--device" in arguments else GIVEN
    assert says in refused(capsys, *machine, *arguments)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("45GB/s", 45e9),
        ("4.3 TB/s", 4.3e12),
        ("2.3e11", 2.3e11),
        ("788T", 788e12),
        ("9gflops", 9e9),
    ],
)
def test_rates_are_read_as_people_write_them(text: str, rate: float) -> None:
    """A factor of a thousand would be lost on the way."""
    assert plan._rate(text) == pytest.approx(rate)


def test_times_are_read_as_people_write_them() -> None:
    """A target of 50 ms would be one of 50 s."""
    times = {"0.5": 0.5, "2s": 2.0, "50ms": 0.05, "10us": 1e-5}
    assert {text: plan._duration(text) for text in times} == pytest.approx(times)
