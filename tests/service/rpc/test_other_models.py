"""Blocks of another model, configuration, KV format or adapter are never begun with (S12, B20).

A server serves one model as long as it runs. So what would have to be kept apart if another model
took its place is brought together here: the identity that a server makes of another model, which
was really loaded, is given to one that runs, and whose cached blocks stay where they are.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hub_models import HubShape, change_json, hub_model, save_folder
from reuse_harness import BLOCK, ReuseServer, found, namespace, prompt, shared
from server_harness import running
from stepping import settings

from kvledger.scopes.keys import KvIdentity, ScopeKeys
from kvledger.served_model import load
from kvledger.v1 import models_pb2

TERMS = "x" * (3 * BLOCK)
PROMPT = prompt("p", 3 * BLOCK + 3)
_LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}


class SwappedServer(ReuseServer):
    """A server that can take its model for another one."""

    @contextmanager
    def as_if(self, kv: KvIdentity) -> Iterator[None]:
        """While it lasts, requests look for blocks of that model, and leave such."""
        table = self.server._scopes._table
        before = table._keys
        table._keys = ScopeKeys(kv, before._secret)
        try:
            yield
        finally:
            table._keys = before

    @property
    def kv(self) -> KvIdentity:
        """What the keys of the server's scopes are made of."""
        return self.server._scopes._table._keys._kv


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("hub") / "model", hub_model(HubShape("llama")))


@pytest_asyncio.fixture
async def server(folder: Path, tmp_path: Path) -> AsyncIterator[SwappedServer]:
    terms = tmp_path / "terms.txt"
    terms.write_text(TERMS)
    server = SwappedServer("--model", str(folder), "--public-prefix", f"terms={terms}")
    async with running(server):
        yield server


def identity(folder: Path, *options: str) -> KvIdentity:
    """What a server would make of a model."""
    asked = settings("--model", str(folder), "--kv-blocks", "4", "--kv-format", "f32", *options)
    return load(asked).kv_identity


def differing(one: KvIdentity, other: KvIdentity) -> list[str]:
    names = [field.name for field in fields(KvIdentity)]
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def same(folder: Path) -> None:
    """The same files."""


def flip_a_bit(folder: Path) -> None:
    """One, of the last weight."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / "config.json", changes)


# What makes another model, or another server of the same: what is done to the files, the options,
# and the one field of the identity that must tell.
CHANGES: dict[str, tuple[Callable[[Path], None], tuple[str, ...], str]] = {
    "one bit of the weights": (flip_a_bit, (), "model"),
    "rope base": (config(rope_theta=12345.0, rope_parameters=...), (), "config"),
    "rope scaling": (config(rope_theta=..., rope_parameters=_LINEAR), (), "config"),
    "epsilon of norms": (config(rms_norm_eps=1e-3), (), "config"),
    "weights in bf16": (same, ("--weights", "bf16"), "config"),
    "keys and values in bf16": (same, ("--kv-format", "bf16"), "kv_format"),
}


async def require_nothing_found(server: SwappedServer, other: KvIdentity) -> None:
    """Nothing of what the server has cached, in scopes of its own, and all of it afterwards."""
    for number, cache in enumerate(({}, {"cache": namespace("n")})):
        ids = prompt(f"own {number}", len(PROMPT))
        assert found(await server.ids(ids, **cache)) == (0, 0, 0)
        assert found(await server.ids(ids, **cache)) == (3 * BLOCK, 0, 0), "the same model does"
        with server.as_if(other):
            assert found(await server.ids(ids, **cache)) == (0, 0, 0)
            assert found(await server.ids(ids, **cache)) == (3 * BLOCK, 0, 0), "and finds its own"
        assert found(await server.ids(ids, **cache)) == (3 * BLOCK, 0, 0), "they were there"


async def require_no_terms(server: SwappedServer, other: KvIdentity) -> None:
    """The same of a public prefix, which the server has computed when it started."""
    request = models_pb2.TokenizeRequest(text=TERMS)
    terms = list((await server.models.Tokenize(request)).token_ids)
    assert len(terms) == 3 * BLOCK
    cache = shared("terms", len(terms))
    with server.as_if(other):
        assert found(await server.ids([*terms, 1, 2], cache=cache)) == (0, 0, 0)
    assert found(await server.ids([*terms, 1, 2], cache=cache)) == (0, 0, 3 * BLOCK)


@pytest.mark.parametrize("change", CHANGES)
async def test_another_model_begins_with_nothing(
    server: SwappedServer, folder: Path, tmp_path: Path, change: str
) -> None:
    """Its answers would be made of keys and values that another model has computed."""
    alter, options, field = CHANGES[change]
    copy = shutil.copytree(folder, tmp_path / folder.name)
    alter(copy)
    other = identity(copy, *options)
    assert differing(server.kv, other) == [field]
    await require_nothing_found(server, other)
    await require_no_terms(server, other)
    await server.require_nothing_held(staying=3)


@pytest.mark.parametrize("field", [field.name for field in fields(KvIdentity)])
async def test_each_field_alone_is_enough(server: SwappedServer, field: str) -> None:
    """The same, of what no file here can change: an adapter."""
    other = replace(server.kv, **{field: "other"})
    await require_nothing_found(server, other)
    await require_no_terms(server, other)


async def test_the_same_model_finds_its_own(
    server: SwappedServer, folder: Path, tmp_path: Path
) -> None:
    """The tests above would pass because a swap loses everything."""
    other = identity(shutil.copytree(folder, tmp_path / folder.name))
    assert other == server.kv
    await server.ids(PROMPT)
    with server.as_if(other):
        assert found(await server.ids(PROMPT)) == (3 * BLOCK, 0, 0)
