"""Fuzz program of model folders: whatever is in their files, a model or one ModelRefused comes out.

    python tests/fuzz/model_folder.py --runs 100000 --seed 1

A valid folder's config.json, tokenizer.json, tokenizer_config.json, generation_config.json, weight
index and safetensors are changed, as JSON values or as bytes, and the folder is opened and, where
that works, its weights are loaded.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / "service"), str(Path(__file__).parent)]

from driver import check_sentence, drive, json_bytes, mutate_bytes, mutate_json
from hub_models import HubShape, hub_model, save_folder

from kvledger.errors import ModelRefused
from kvledger.models.llama import load_weights
from kvledger.models.opening import open_model
from kvledger.ops.cpu import CpuOps

_FAMILIES = ("llama", "qwen2", "qwen3", "smollm3")
_WEIGHTS = "model.safetensors"


@cache
def _folders() -> list[Path]:
    """A valid folder of each family, and one whose weights are in shards."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    root = Path(tempfile.mkdtemp(prefix="kvledger-fuzz-"))
    folders = [save_folder(root / name, hub_model(HubShape(name))) for name in _FAMILIES]
    sharded = hub_model(HubShape("llama"))
    return [*folders, save_folder(root / "sharded", sharded, shard_bytes=100_000)]


@cache
def _ops() -> CpuOps:
    return CpuOps(1)


def target(chance: random.Random) -> str:
    """One folder with some of its files changed: opened, or refused in one sentence."""
    valid = chance.choice(_folders())
    with tempfile.TemporaryDirectory(prefix="kvledger-fuzz-") as parent:
        folder = Path(shutil.copytree(valid, Path(parent) / "m"))
        names = sorted(path.name for path in folder.iterdir())
        # Weights are the largest part of a folder, and what is read first should be changed most.
        for name in chance.sample(names, chance.choice((1, 1, 1, 2))):
            path = folder / name
            path.write_bytes(_changed(chance, path))
        try:
            with open_model(str(folder)) as opened:
                load_weights(
                    opened.tensors,
                    opened.config,
                    opened.tokenizer.vocabulary_size,
                    _ops(),
                    "stored",
                )
        except ModelRefused as refused:
            check_sentence(str(refused))
            return "refused"
    return "loaded"


def _changed(chance: random.Random, path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        return _changed_weights(chance, data)
    if path.suffix == ".json" and chance.random() < 0.85:
        value = json.loads(data)
        for _ in range(chance.choice((1, 1, 2, 4))):
            value = mutate_json(chance, value)
        return json_bytes(value)
    return mutate_bytes(chance, data)


def _changed_weights(chance: random.Random, data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    kind = chance.random()
    if kind < 0.15:
        return mutate_bytes(chance, data)
    if kind < 0.3:
        return mutate_bytes(chance, data[: 8 + length]) + data[8 + length :]
    header = mutate_json(chance, json.loads(data[8 : 8 + length]))
    if chance.random() < 0.5:
        header = mutate_json(chance, header)
    text = json_bytes(header)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


if __name__ == "__main__":
    drive("model_folder", target)
