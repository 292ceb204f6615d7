"""`kvledger doctor --isolation`: it finds servers that mix tenants, and such as reuse nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from server_harness import running
from tenants_harness import TenantsOfTest
from tiny_model import write_gguf
from tiny_server import TinyServer

from kvledger.cli import main
from kvledger.v1 import generation_pb2 as pb
from kvledger.v1 import generation_pb2_grpc, models_pb2, models_pb2_grpc

Captured = pytest.CaptureFixture[str]
FOREIGN = "kvledger_prefix_foreign_blocks_total"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def tenants(tmp_path: Path) -> TenantsOfTest:
    made = TenantsOfTest(tmp_path)
    for name in ("acme", "globex"):
        (tmp_path / name).write_text(made.add(name))
    return made


@pytest_asyncio.fixture
async def server(tiny: Path, tenants: TenantsOfTest, tmp_path: Path) -> AsyncIterator[TinyServer]:
    async with running(tiny_server(tiny, tenants, tmp_path)) as server:
        yield server


def tiny_server(tiny: Path, tenants: TenantsOfTest, folder: Path, *more: str) -> TinyServer:
    metrics = ("--metrics-listen", f"unix:{folder / 'm.sock'}")
    options = (*tenants.options(folder), *metrics, "--kv-blocks", "64", "--threads", "1")
    return TinyServer(tiny, *options, *more)


def arguments(folder: Path, address: str, *more: str, second: str = "globex") -> list[str]:
    tokens = ("--token-file", str(folder / "acme"), "--token-file", str(folder / second))
    return ["doctor", "--isolation", "--address", address, *tokens, *more]


async def examined(folder: Path, server: TinyServer, *more: str, **changes: str) -> int:
    metrics = ("--metrics", f"unix:{folder / 'm.sock'}")
    said = arguments(folder, server.address, *metrics, *more, **changes)
    return await asyncio.to_thread(main, said)


async def test_tenants_that_are_apart_are_called_so(
    server: TinyServer, tmp_path: Path, capsys: Captured
) -> None:
    """An operator would not know whether what the pages promise is so here."""
    assert await examined(tmp_path, server) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown] == [
        ["ok", word] for word in ("own", "other", "namespace", "again", "metrics")
    ]
    assert "a prompt of 129 random tokens: sent again by the same tenant, 128 tokens" in shown[0]
    assert f"{FOREIGN} is 0" in shown[-1]


async def test_a_server_that_reuses_nothing_proves_nothing(
    tiny: Path, tenants: TenantsOfTest, tmp_path: Path, capsys: Captured
) -> None:
    """No hit of a stranger's would be taken for isolation where nobody hits at all."""
    off = tiny_server(tiny, tenants, tmp_path, "--prefix-reuse", "off")
    async with running(off) as server:
        assert await examined(tmp_path, server) == 1
    shown = capsys.readouterr().out
    assert "FAIL  own" in shown
    assert "nothing is shown while a tenant does not find its own" in shown
    assert "ok    other" not in shown


async def test_two_tokens_of_one_tenant_are_found(
    server: TinyServer, tenants: TenantsOfTest, tmp_path: Path, capsys: Captured
) -> None:
    """The check would prove that a tenant is apart from itself, or call that a fault."""
    (tmp_path / "again").write_text(tenants.rotate("acme", 1000))
    await server.until(lambda: server.log.of("tenants_reloaded"))
    assert await examined(tmp_path, server, second="again") == 1
    shown = capsys.readouterr().out
    assert "another one found 128 tokens cached" in shown
    assert "if both tokens are of one tenant, take two" in shown


async def test_who_is_not_let_in_is_told(
    server: TinyServer, tenants: TenantsOfTest, tmp_path: Path, capsys: Captured
) -> None:
    """A refusal would be taken for nothing cached."""
    (tmp_path / "stranger").write_text("kvl_" + "a" * 43)
    assert await examined(tmp_path, server, second="stranger") == 1
    shown = capsys.readouterr().out
    assert "FAIL  isolation   UNAUTHENTICATED" in shown
    assert "ok    other" not in shown


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (["--token-file", "acme"], "--token-file FILE twice"),
        (["--token-file", "acme", "--token-file", "acme"], "both files hold the same token"),
        (["--token-file", "acme", "--token-file", "nowhere"], "nowhere: No such file"),
    ],
)
def test_mistakes_are_refused(
    tenants: TenantsOfTest, tmp_path: Path, capsys: Captured, said: list[str], reason: str
) -> None:
    """It would prove something of one tenant, or of none."""
    assert set(tenants.tokens) == {"acme", "globex"}
    files = [str(tmp_path / each) if not each.startswith("--") else each for each in said]
    assert main(["doctor", "--isolation", "--address", "127.0.0.1:1", *files]) == 2
    assert reason in capsys.readouterr().err


# --- Servers that are broken ----------------------------------------------------------------


@dataclass
class Broken(generation_pb2_grpc.GenerationServiceServicer, models_pb2_grpc.ModelServiceServicer):
    """Says that so much was cached, by who asks (0 or 1), in a namespace or not, and how often."""

    cached: Callable[[int, bool, int], int]
    hides_usage: bool = False
    context: int = 512

    def __post_init__(self) -> None:
        self.tokens: list[str] = []
        self.asked: dict[tuple[int, bool], int] = {}

    def GetModel(self, request: Any, context: Any) -> models_pb2.GetModelResponse:
        cost = models_pb2.KvFormatCost(format="f32", tokens_per_block=16)
        model = models_pb2.Model(
            context_tokens=self.context, vocabulary_tokens=300, kv_formats=[cost]
        )
        return models_pb2.GetModelResponse(model=model)

    def Generate(self, request: Any, context: Any) -> Iterator[pb.GenerateResponse]:
        token = dict(context.invocation_metadata())["authorization"]
        if token not in self.tokens:
            self.tokens.append(token)
        key = (self.tokens.index(token), request.cache.namespace != "")
        before = self.asked.get(key, 0)
        self.asked[key] = before + 1
        found = self.cached(*key, before)
        finished = pb.Finished(receipt=pb.Receipt(reused_own_tokens=found))
        finished.usage.cached_prompt_tokens = 0 if self.hides_usage and key[0] else found
        yield pb.GenerateResponse(finished=finished)


def own_only(who: int, namespace: bool, before: int) -> int:
    return 48 if before and not namespace else 0


def verdict(broken: Broken, folder: Path, *more: str) -> int:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(broken, server)  # type: ignore[no-untyped-call]
    models_pb2_grpc.add_ModelServiceServicer_to_server(broken, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        return main(arguments(folder, f"127.0.0.1:{port}", *more))
    finally:
        server.stop(None).wait()


def strangers_too(who: int, namespace: bool, before: int) -> int:
    return 16 if who else own_only(who, namespace, before)


def namespaces_too(who: int, namespace: bool, before: int) -> int:
    return 16 if namespace else own_only(who, namespace, before)


def first_alone(who: int, namespace: bool, before: int) -> int:
    return 0 if who else own_only(who, namespace, before)


def once(who: int, namespace: bool, before: int) -> int:
    return own_only(who, namespace, before) if before == 1 else 0


FAULTS: dict[str, tuple[Broken, str]] = {
    "everybody hits": (Broken(strangers_too), "another one found 16 tokens cached"),
    "only the receipt says so": (
        Broken(strangers_too, hides_usage=True),
        "another one found 16 tokens cached",
    ),
    "a namespace hits": (Broken(namespaces_too), "one of its namespaces found 16"),
    "what nobody sent hits": (Broken(lambda *_: 16), "that nobody had sent began with 16"),
    "nobody hits": (Broken(lambda *_: 0), "nothing is shown while a tenant does not"),
    "the other never hits": (Broken(first_alone), "the other tenant does not find its own"),
    "its own goes": (Broken(once), "then its own was gone"),
    "no room": (Broken(own_only, context=33), "a prompt of 2 blocks does not fit"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_server_is_called_broken(
    fault: str, tenants: TenantsOfTest, tmp_path: Path, capsys: Captured
) -> None:
    """A check that cannot fail proves nothing."""
    assert len(tenants.tokens) == 2
    broken, sentence = FAULTS[fault]
    assert verdict(broken, tmp_path) == 1
    assert sentence in capsys.readouterr().out


def test_a_whole_fake_is_let_pass(tenants: TenantsOfTest, tmp_path: Path, capsys: Captured) -> None:
    """The fakes would be refused for something else; and metrics that are not there are no zero."""
    assert len(tenants.tokens) == 2
    assert verdict(Broken(own_only), tmp_path) == 0
    capsys.readouterr()
    assert verdict(Broken(own_only), tmp_path, "--metrics", f"unix:{tmp_path / 'none'}") == 1
    assert "FAIL  metrics     --metrics unix:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "status", "shown"),
    [
        (f"{FOREIGN} 0.0\n", 0, f"{FOREIGN} is 0"),
        (f"{FOREIGN} 2.0\n", 1, f"FAIL  metrics     {FOREIGN} is 2"),
        ("# HELP\nother 0.0\n", 1, f"there is no {FOREIGN}"),
    ],
)
def test_the_servers_own_count_is_believed_only_if_it_is_there(
    tenants: TenantsOfTest,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    status: int,
    shown: str,
) -> None:
    """Blocks that were named for the wrong owner would go unnoticed."""
    assert len(tenants.tokens) == 2
    monkeypatch.setattr("kvledger.cli.isolation._fetched", lambda address: text)
    assert verdict(Broken(own_only), tmp_path, "--metrics", "unix:x") == status
    assert shown in capsys.readouterr().out
