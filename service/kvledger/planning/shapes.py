"""Models by the numbers that their makers published, for plans without any file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvledger.errors import SettingRefused
from kvledger.models.config import LlamaConfig


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; counts."""

    layers: int
    kv_heads: int
    heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    context_tokens: int = 8192
    tied_head: bool = False

    def config(self, name: str) -> LlamaConfig:
        """The configuration of a model of these sizes. ModelRefused if kernels run no such."""
        config = LlamaConfig(
            name=name,
            layers=self.layers,
            hidden=self.hidden,
            feed_forward=self.intermediate,
            query_heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            context_tokens=self.context_tokens,
            rope_base=10_000.0,  # turns what is kept, and takes no memory
            rms_epsilon=1e-5,
            tied_head=self.tied_head,
        )
        config.check_sizes()
        return config


SHAPES = {
    "smollm2-135m": Shape(30, 3, 9, 64, 576, 1536, 49152, 8192, tied_head=True),
    "qwen2.5-0.5b": Shape(24, 2, 14, 64, 896, 4864, 151936, 32768, tied_head=True),
    "qwen2.5-7b": Shape(28, 4, 28, 128, 3584, 18944, 152064, 32768),
    "qwen3-0.6b": Shape(28, 8, 16, 128, 1024, 3072, 151936, 40960, tied_head=True),
    "qwen3-8b": Shape(36, 8, 32, 128, 4096, 12288, 151936, 40960),
    "llama-3-8b": Shape(32, 8, 32, 128, 4096, 14336, 128256, 8192),
    "llama-3-70b": Shape(80, 8, 64, 128, 8192, 28672, 128256, 8192),
}


def shape_of(name: str | None, given: Mapping[str, Any]) -> Shape:
    """A shape by name with the sizes that are given in place of its own; or of sizes alone.

    Raises SettingRefused, in one sentence.
    """
    if name is not None and name not in SHAPES:
        raise SettingRefused(f"--shape {name}: known are {', '.join(SHAPES)}; or give the sizes")
    sizes: dict[str, Any] = {}
    if name is not None:
        sizes = {field.name: getattr(SHAPES[name], field.name) for field in fields(Shape)}
    sizes.update(given)
    missing = [
        f"--{field.name.replace('_', '-')}"
        for field in fields(Shape)
        if field.name not in sizes and field.name not in ("context_tokens", "tied_head")
    ]
    if missing:
        raise SettingRefused(
            f"a shape given by numbers needs {', '.join(missing)} too; or --shape NAME, one of "
            f"{', '.join(SHAPES)}"
        )
    return Shape(**sizes)
