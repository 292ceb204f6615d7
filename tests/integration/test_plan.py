"""`kvledger plan` beside `kvledger serve`: two processes that must say the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request

from server_process import PATIENCE, environment, models, server_process

from kvledger.v1 import models_pb2

SETTINGS = ("--kv-bytes", "100MB", "--block-tokens", "16")


def test_the_default_model_is_planned_as_it_is_served() -> None:
    """Who follows the first page would see a plan that the server does not keep."""
    options = ("--json", "--bandwidth", "40GB/s", "--flops", "200G")
    command = [sys.executable, "-m", "kvledger", "plan", *options, *SETTINGS]
    with server_process(*SETTINGS, "--metrics-listen", "127.0.0.1:0") as server:
        with server.channel() as channel:
            got = models(channel).GetModel(models_pb2.GetModelRequest(), timeout=PATIENCE).model
        address = server.event("serving")["metrics"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE) as response:
            metrics = response.read().decode()
        loaded = server.event("model_loaded")
    result = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    told = json.loads(result.stdout)
    pool = told["pool"]
    assert told["model"]["name"] == got.id
    assert told["memory"]["weights"] == got.weight_bytes
    assert round(told["memory"]["weights"] / 1e6, 1) == loaded["weight_mb"]
    assert pool["block_bytes"] == got.kv_pool.block_bytes == loaded["kv_block_bytes"]
    assert pool["blocks"] == got.kv_pool.blocks == loaded["kv_blocks"]
    states = re.findall(r"^kvledger_kv_blocks\{state=\"\w+\"\} (\S+)$", metrics, re.MULTILINE)
    assert pool["blocks"] == sum(map(float, states))
    assert pool["tokens"] == got.kv_pool.tokens == loaded["kv_tokens"]
    assert pool["sequence_tokens_max"] == got.context_tokens == loaded["sequence_tokens_max"]
    costs = {cost.format: cost.bytes_per_token for cost in got.kv_formats}
    assert pool["bytes_per_token"] == costs[pool["format"]]
