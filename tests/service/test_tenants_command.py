"""`kvledger tenants`, and the token that the client commands show."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from test_client_commands import FakeService, type_in

from kvledger.cli import main
from kvledger.cli.client import identity
from kvledger.tenants.tenants_file import SECONDS_MAX, TenantsFile, read
from kvledger.tenants.tokens import digest, new_token
from kvledger.v1 import generation_pb2_grpc

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLEDGER_TENANTS", raising=False)
    monkeypatch.delenv("KVLEDGER_TOKEN", raising=False)


class Command:
    """The command on one file."""

    def __init__(self, path: Path, capsys: Captured) -> None:
        self.path = path
        self._capsys = capsys

    def __call__(self, *arguments: str) -> str:
        """What it prints; it must succeed."""
        assert main(["tenants", *arguments, "--file", str(self.path)]) == 0
        return self._capsys.readouterr().out.strip()

    def refusal(self, *arguments: str) -> str:
        """Its one sentence; it must fail and change nothing."""
        before = self.path.read_bytes() if self.path.exists() else None
        assert main(["tenants", *arguments, "--file", str(self.path)]) == 2
        assert (self.path.read_bytes() if self.path.exists() else None) == before
        shown = self._capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        return line.removeprefix("kvledger tenants: ")

    @property
    def file(self) -> TenantsFile:
        return read(self.path)


@pytest.fixture
def tenants(tmp_path: Path, capsys: Captured) -> Command:
    return Command(tmp_path / "tenants.json", capsys)


def test_add_prints_the_token_once(tenants: Command) -> None:
    """Nobody could call; or everybody who reads the file."""
    token = tenants("add", "acme")
    (row,) = tenants.file.tenants["acme"].tokens
    assert bytes.fromhex(row.sha256) == digest(token.encode())
    assert token not in tenants.path.read_text()
    assert token not in tenants("list")
    assert "there already" in tenants.refusal("add", "acme")
    assert tenants("add", "quiet", "--no-token", "--certificate", "dns:a.example") == ""
    assert tenants.file.tenants["quiet"].tokens == ()


def test_rotate_keeps_the_old_one_for_its_grace(tenants: Command) -> None:
    """Clients would be thrown out by a rotation; or old tokens be good for ever."""
    first = tenants("add", "acme")
    for arguments, seconds in ((("--grace", "30m"), 1800), ((), 86400)):
        tenants("rotate", "acme", *arguments)
        row = tenants.file.tenants["acme"]
        old = next(t for t in row.tokens if t.sha256 == digest(first.encode()).hex())
        assert old.expires_at is not None
        # A longer grace gives nothing back that a shorter one has taken.
        assert old.expires_at <= time.time() + 1800
        assert max(t.expires_at or 0 for t in row.tokens) <= time.time() + seconds
    last = tenants("rotate", "acme", "--at-once")
    (row_,) = tenants.file.tenants["acme"].tokens
    assert (row_.sha256, row_.expires_at) == (digest(last.encode()).hex(), None)
    for _ in range(7):
        tenants("rotate", "acme")
    assert "as many as may" in tenants.refusal("rotate", "acme")
    with pytest.raises(SystemExit):
        tenants("rotate", "acme", "--grace", "0")
    with pytest.raises(SystemExit):
        tenants("rotate", "acme", "--grace", "1h", "--at-once")


def test_revoke_takes_one_or_all(tenants: Command) -> None:
    """A token that was lost would be good, or its neighbours with it gone."""
    tenants("add", "acme")
    kept = tenants("rotate", "acme", "--grace", "1h")
    first = next(t for t in tenants.file.tenants["acme"].tokens if t.expires_at)
    assert first.id in tenants("list")
    tenants("revoke", "acme", "--token", first.id)
    (row,) = tenants.file.tenants["acme"].tokens
    assert row.sha256 == digest(kept.encode()).hex()
    assert "none to revoke" in tenants.refusal("revoke", "acme", "--token", "00000000")
    tenants("revoke", "acme")
    assert tenants.file.tenants["acme"].tokens == ()
    assert "none to revoke" in tenants.refusal("revoke", "acme")
    assert "no such tenant" in tenants.refusal("revoke", "nobody")


def test_who_comes_back_is_another(tenants: Command) -> None:
    """A new tenant would find what its predecessor left."""
    for epoch in (1, 2, 3):
        tenants("add", "acme")
        assert tenants.file.tenants["acme"].epoch == epoch
        tenants("remove", "acme")
        assert tenants.file.removed == {"acme": epoch}
    assert "no such tenant" in tenants.refusal("remove", "acme")


def test_groups_gateways_and_limits(tenants: Command) -> None:
    """What cannot be set by the command would be edited by hand, with mistakes."""
    for name in ("acme", "globex", "edge"):
        tenants("add", name)
    tenants("group", "g", "--members", "acme, globex")
    tenants("gateway", "edge", "--tenants", "acme,globex")
    tenants("set", "acme", "--queued-max", "10", "--tokens-per-second", "2.5")
    tenants("set", "acme", "--kv-guaranteed", "0.25", "--sealed", "true", "--role", "client")
    file = tenants.file
    assert file.groups == {"g": ("acme", "globex")}
    assert file.gateways == {"edge": ("acme", "globex")}
    limits = file.tenants["acme"].limits
    assert (limits.queued_max, limits.tokens_per_second) == (10, 2.5)
    assert (limits.kv_guaranteed, limits.sealed) == (0.25, True)
    listed = tenants("list").splitlines()
    assert [line.split()[0] for line in listed] == ["acme", "edge", "globex", "group"]
    assert "queued_max 10" in listed[0]
    assert "gateway for acme, globex" in listed[1]
    tenants("set", "acme", "--queued-max", "none")
    assert tenants.file.tenants["acme"].limits.queued_max is None
    assert "kv_max" in tenants.refusal("set", "acme", "--kv-max", "0.1")
    assert "groups.h.0" in tenants.refusal("group", "h", "--members", "nobody")
    assert "groups.g.0" in tenants.refusal("gateway", "acme", "--tenants", "globex")
    assert "gateways.nobody" in tenants.refusal("gateway", "nobody", "--tenants", "globex")
    tenants("remove", "globex")
    assert (tenants.file.groups, tenants.file.gateways) == ({"g": ("acme",)}, {"edge": ("acme",)})
    tenants("group", "g", "--members", "")
    tenants("gateway", "edge", "--tenants", "")
    assert (tenants.file.groups, tenants.file.gateways) == ({}, {})


def test_rotate_does_not_revive_what_has_ended(tenants: Command) -> None:
    """A token that ended in 1970 would be good for another day."""
    tenants("add", "acme")
    values = json.loads(tenants.path.read_text())
    values["tenants"]["acme"]["tokens"][0]["expires_at"] = 0
    tenants.path.write_text(json.dumps(values))
    last = tenants("rotate", "acme")
    (row,) = tenants.file.tenants["acme"].tokens
    assert row.sha256 == digest(last.encode()).hex()


def test_list_shows_the_latest_time(tenants: Command) -> None:
    """A file that a server serves could not be shown."""
    tenants("add", "acme")
    values = json.loads(tenants.path.read_text())
    values["tenants"]["acme"]["tokens"][0]["expires_at"] = SECONDS_MAX
    tenants.path.write_text(json.dumps(values))
    assert "ends 9999-12-31 23:59" in tenants("list")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("set", "acme", "--running-max", "x"), "--running-max: it is not a whole number, or none"),
        (("set", "acme", "--kv-max", "half"), "--kv-max: it is not a number, or none"),
        (("set", "acme", "--sealed", "yes"), "--sealed: it is not true or false, or none"),
        (("rotate", "acme", "--grace", "abc"), "--grace: it is no time such as 90, 30m, 24h or 7d"),
        (("rotate", "acme", "--grace", "h"), "--grace: it is no time such as 90, 30m, 24h or 7d"),
        (("rotate", "acme", "--grace", ""), "--grace: it is no time such as 90, 30m, 24h or 7d"),
        (("rotate", "acme", "--grace", "91d"), "--grace: it is not from 1 to 7776000 seconds"),
    ],
)
def test_values_that_cannot_be_read_have_a_sentence(
    arguments: tuple[str, ...], said: str, tenants: Command, capsys: Captured
) -> None:
    """Who mistypes would read the name of a function."""
    tenants("add", "acme")
    with pytest.raises(SystemExit) as ended:
        tenants(*arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.rstrip().endswith(f"argument {said}")


def test_set_without_options_says_so(tenants: Command) -> None:
    """A script that lost its options would believe that a limit is set."""
    tenants("add", "acme")
    assert "there is nothing to set" in tenants.refusal("set", "acme")
    tenants("set", "acme", "--queued-max", "none")


def test_the_file_is_named_or_in_the_environment(
    tenants: Command, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """The server and the command would look at different files."""
    assert main(["tenants", "list"]) == 2
    assert "--file" in capsys.readouterr().err
    tenants("add", "acme")
    monkeypatch.setenv("KVLEDGER_TENANTS", str(tenants.path))
    assert main(["tenants", "list"]) == 0
    assert capsys.readouterr().out.startswith("acme  client")


def test_a_file_that_is_wrong_is_left_alone(tenants: Command) -> None:
    """A change would write over what somebody still wants to mend."""
    assert "no such file" in tenants.refusal("list")
    assert "no such file" in tenants.refusal("rotate", "acme")
    tenants("add", "acme")
    tenants.path.chmod(0o644)
    assert "chmod 600" in tenants.refusal("add", "globex")
    tenants.path.chmod(0o600)
    values = json.loads(tenants.path.read_text())
    tenants.path.write_text(json.dumps({**values, "more": 1}))
    assert "more: there is no such field" in tenants.refusal("add", "globex")


class Listening(FakeService):
    """Remembers what calls showed."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []
        self.refuse = lambda context: self.shown.extend(
            str(value) for key, value in context.invocation_metadata() if key == "authorization"
        )


@pytest.fixture
def listening() -> Iterator[tuple[Listening, str]]:
    service, server = Listening(), grpc.server(futures.ThreadPoolExecutor(2))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"127.0.0.1:{port}"
    server.stop(0)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_token_of_a_file_or_the_environment_is_shown(
    command: str,
    listening: tuple[Listening, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Our own commands could not call a server that asks who they are."""
    service, address = listening
    tokens = [new_token() for _ in range(2)]
    path = tmp_path / "token"
    path.write_text(tokens[0] + "\n")
    monkeypatch.setenv("KVLEDGER_TOKEN", tokens[1])
    for options in ([], ["--token-file", str(path)]):
        type_in(monkeypatch, b"hello\n")
        assert main([command, "--server", address, *options]) == 0
    assert service.shown == [f"Bearer {tokens[1]}", f"Bearer {tokens[0]}"]
    monkeypatch.delenv("KVLEDGER_TOKEN")
    type_in(monkeypatch, b"hello\n")
    assert main([command, "--server", address]) == 0
    assert len(service.shown) == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"", "not a token"),
        (b"\n", "not a token"),
        (b"two words", "not a token"),
        (b"two\nlines", "not a token"),
        (b"kvl_\xff", "not a token"),
        (b"a" * 9000, "not a token"),
    ],
)
def test_what_is_no_token_is_not_sent(
    content: bytes | None, reason: str, tmp_path: Path, capsys: Captured
) -> None:
    """A wrong file would go over the wire, line by line."""
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    assert main(["generate", "x", "--token-file", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvledger generate: --token-file {path}: ")
    assert reason in line
    assert "two" not in line.removeprefix(f"kvledger generate: --token-file {path}: ")


@pytest.mark.parametrize(
    ("server", "here"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:/x", True),
        ("host.example:1", False),
        ("127.example:1", False),
        ("localhost.example:1", False),
        ("10.0.0.1:1", False),
        ("[::2]:1", False),
    ],
)
def test_a_token_leaves_this_machine_over_tls_only(
    server: str, here: bool, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Whoever is on the line could read it."""
    secret = new_token()
    monkeypatch.setenv("KVLEDGER_TOKEN", secret)
    if here:
        assert identity(options(server)) == (("authorization", f"Bearer {secret}"),)
        return
    assert main(["generate", "x", "--server", server]) == 2
    error = capsys.readouterr().err
    assert "without --tls-ca" in error
    assert secret not in error


def options(server: str) -> object:
    """Those of a command that names a server and nothing else."""

    class Options:
        token_file = None
        tls_ca = None

    Options.server = server  # type: ignore[attr-defined]
    return Options()


def test_no_argument_holds_a_token(capsys: Captured) -> None:
    """Everybody on the machine can read arguments."""
    secret = new_token()
    for command in ("generate", "chat"):
        for arguments in (["--token", secret], [f"--token={secret}"]):
            with pytest.raises(SystemExit):
                main([command, *arguments])
            error = capsys.readouterr().err
            assert "use --token-file" in error
            assert secret not in error
