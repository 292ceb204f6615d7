"""The file of tenants: what is refused, by which path, and how it is written."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tenants_harness import TenantsOfTest

from kvledger.tenants import editing, tenants_file
from kvledger.tenants.tenants_file import TenantsRefused, parse, read

TOKEN = {"id": "0" * 8, "sha256": "a" * 64, "created_at": 1}
OTHER = {"id": "1" * 8, "sha256": "b" * 64, "created_at": 1}


_WORDS = st.sampled_from(["a", "b", "tokens", "roles", "limits", "epoch", "kv_max", "client"])
_PARTS = ("tenants", "groups", "gateways", "removed")


def file(**parts: Any) -> bytes:
    return json.dumps({"version": 1, **parts}).encode()


def tenant(**fields: Any) -> bytes:
    return file(tenants={"acme": fields})


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (b"", "line 1"),
        (b"[]", "not an object"),
        (b'{"version": 1, "version": 1}', "stands twice"),
        (b'{"version": 1, "tenants": {"a": {}, "a": {}}}', "stands twice"),
        (b"[" * 100_000, "nested too deep"),
        (b"\xff", "UTF-8"),
        (b"{}", "version: "),
        (b'{"version": 2}', "version: "),
        (b'{"version": "1"}', "version: "),
        (b'{"version": true}', "version: "),
        (file(tenant={}), "tenant: there is no such field"),
        (tenant(token=[]), "tenants.acme.token: there is no such field"),
        (tenant(tokens=[{**TOKEN, "revoked": True}]), "tenants.acme.tokens.0.revoked: there is no"),
        (tenant(tokens=[{**TOKEN, "token": "kvl_x"}]), "tenants.acme.tokens.0.token: there is no"),
        (tenant(tokens=[{**TOKEN, "sha256": "A" * 64}]), "tenants.acme.tokens.0.sha256: "),
        (tenant(tokens=[{**TOKEN, "sha256": "a" * 63}]), "tenants.acme.tokens.0.sha256: "),
        (tenant(tokens=[{**TOKEN, "sha256": "a" * 64 + "\n"}]), "tenants.acme.tokens.0.sha256: "),
        (tenant(tokens=[{**TOKEN, "created_at": "1"}]), "tenants.acme.tokens.0.created_at: "),
        (tenant(tokens=[{**TOKEN, "expires_at": -1}]), "tenants.acme.tokens.0.expires_at: "),
        (tenant(tokens=[TOKEN, TOKEN]), "tenants.acme.tokens: two have the same id"),
        (tenant(tokens=[TOKEN, {**OTHER, "sha256": "a" * 64}]), "tenants.acme.tokens: one is a"),
        (tenant(tokens=[TOKEN] * 9), "tenants.acme.tokens: "),
        (
            tenant(tokens=[{**TOKEN, "expires_at": 253402300800}]),
            "tenants.acme.tokens.0.expires_at: ",
        ),
        (tenant(roles=[]), "tenants.acme.roles: "),
        (tenant(roles=["anyone"]), "tenants.acme.roles.0: "),
        (tenant(roles=["client", "client"]), "tenants.acme.roles: one stands twice"),
        (tenant(roles="client"), "tenants.acme.roles: "),
        (tenant(epoch=0), "tenants.acme.epoch: "),
        (tenant(epoch=1.5), "tenants.acme.epoch: "),
        (tenant(epoch=1 << 40), "tenants.acme.epoch: "),
        (tenant(certificates=["acme.example"]), "tenants.acme.certificates.0: "),
        (tenant(certificates=["ip:10.0.0.1"]), "tenants.acme.certificates.0: "),
        (tenant(certificates=["dns:a", "dns:A"]), "tenants.acme.certificates: one is a name"),
        (tenant(limits={"queued": 1}), "tenants.acme.limits.queued: there is no such field"),
        (tenant(limits={"queued_max": -1}), "tenants.acme.limits.queued_max: "),
        (tenant(limits={"queued_max": True}), "tenants.acme.limits.queued_max: "),
        (tenant(limits={"queued_max": 1 << 31}), "tenants.acme.limits.queued_max: "),
        (tenant(limits={"tokens_per_second": 0}), "tenants.acme.limits.tokens_per_second: "),
        (
            tenant(limits={"tokens_per_second": 0.0009}),
            "tenants.acme.limits.tokens_per_second: input should be greater than or equal to 0.001",
        ),
        (
            tenant(limits={"kv_bytes_max": 0}),
            "tenants.acme.limits.kv_bytes_max: input should be greater than or equal to 1",
        ),
        (tenant(limits={"kv_max": 1.01}), "tenants.acme.limits.kv_max: "),
        (tenant(limits={"kv_guaranteed": 0.5, "kv_max": 0.4}), "tenants.acme.limits: kv_guar"),
        (tenant(limits={"sealed": True}), "tenants.acme.limits: sealed needs kv_guaranteed"),
        (tenant(limits={"sealed": 1}), "tenants.acme.limits.sealed: "),
        (b'{"version": 1, "tenants": {"a": {"limits": {"kv_max": NaN}}}}', "NaN is no number"),
        (file(tenants={"Acme": {}}), "tenants.Acme: "),
        (file(tenants={"a" * 64: {}}), "tenants." + "a" * 64),
        (file(tenants={"": {}}), "tenants.: "),
        (file(tenants={"dev": {}}), "tenants.dev: the name is that of --dev"),
        (
            file(tenants={"a": {"tokens": [TOKEN]}, "b": {"tokens": [TOKEN]}}),
            "tenants.b.tokens: one is a token of tenants.a",
        ),
        (
            file(tenants={"a": {"certificates": ["cn:x"]}, "b": {"certificates": ["cn:x"]}}),
            "tenants.b.certificates: one is a name of tenants.a",
        ),
        (
            file(tenants={n: {"limits": {"kv_guaranteed": 0.6}} for n in "ab"}),
            "tenants: kv_guaranteed adds up to 1.2",
        ),
        (file(groups={"g": ["acme"]}), "groups.g.0: it is no tenant"),
        (file(tenants={"a": {}}, groups={"g": ["a", "a"]}), "groups.g: a name stands twice"),
        (file(tenants={"a": {"roles": ["viewer"]}}, groups={"g": ["a"]}), "groups.g.0: "),
        (file(tenants={"a": {}}, groups={"g": "a"}), "groups.g: "),
        (file(tenants={"a": {}}, gateways={"e": ["a"]}), "gateways.e: tenants.e has to be there"),
        (file(tenants={"a": {}, "e": {}}, gateways={"e": ["e"]}), "gateways.e.0: "),
        (
            file(tenants={"a": {}, "e": {"roles": ["client", "operator"]}}, gateways={"e": ["a"]}),
            "gateways.e: tenants.e has to be there, with the role client alone",
        ),
        (
            file(tenants={"a": {}, "e": {"limits": {"kv_max": 0.5}}}, gateways={"e": ["a"]}),
            "tenants.e.limits: a gateway has none",
        ),
        (file(tenants={"a": {}}, removed={"a": 1}), "tenants.a.epoch: 1 was used up"),
        (file(removed={"a": 0}), "removed.a: "),
    ],
)
def test_what_is_wrong_is_named_by_its_path(data: bytes, path: str) -> None:
    """A limit or a revocation that is misspelt would be ignored; or nobody find it."""
    with pytest.raises(ValueError) as refused:
        parse(data)
    sentence = str(refused.value)
    assert sentence.startswith(path) or path in sentence.split(": ")[-1], sentence
    assert "a" * 65 not in sentence
    assert len(sentence) < 500


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3),
    max_leaves=12,
)


@given(st.fixed_dictionaries({"version": st.just(1)}, optional=dict.fromkeys(_PARTS, _VALUES)))
def test_whatever_it_holds_there_is_a_sentence_or_a_file(values: dict[str, Any]) -> None:
    """A hand's slip would be an error that nobody thought of, and end the looking."""
    refused = ValueError("none")
    try:
        parse(json.dumps(values).encode())
    except ValueError as error:
        refused = error
    assert type(refused) is ValueError
    assert str(refused).isprintable()


@pytest.mark.parametrize(
    "data",
    [
        b'{"version": 1, "tenants": {"a": {"limits": {"kv_max": 1' + b"0" * 400 + b"}}}}",
        b'{"version": 1, "tenants": {"a": {"limits": {"kv_max": 1' + b"0" * 5000 + b"}}}}",
        b'{"version": 1, "tenants": {"a": {"limits": {"kv_max": 1e999}}}}',
        b'{"version": 1, "tenants": {"\\ud800": {}}}',
        b'{"version": 1, "groups": {"g": ["\\ud800"]}}',
        b'{"version": 1, "tenants": {"a": {"certificates": ["cn:\\u0000"]}}}',
        b'{"version": 1, "tenants": {"a\\n": {}}}',
    ],
)
def test_numbers_and_texts_beyond_all_bounds(data: bytes) -> None:
    """The same, of what no generator thinks of."""
    with pytest.raises(ValueError) as refused:
        parse(data)
    assert str(refused.value).isprintable()


def test_a_full_one_is_taken() -> None:
    """The cases above could be refused for another reason."""
    found = parse(
        file(
            tenants={
                "acme": {
                    "epoch": 3,
                    "roles": ["client", "viewer"],
                    "tokens": [TOKEN, {**OTHER, "expires_at": 5}],
                    "certificates": ["dns:acme.example", "uri:spiffe://x/acme", "cn:the acme"],
                    "limits": {
                        "running_max": 1,
                        "queued_max": 0,
                        "queued_tokens_max": 10,
                        "tokens_per_second": 5,
                        "kv_bytes_max": 1 << 40,
                        "kv_guaranteed": 0.5,
                        "kv_max": 0.5,
                        "sealed": True,
                    },
                },
                "edge": {},
                "globex": {"limits": {"kv_guaranteed": 0.5}},
            },
            groups={"g": ["acme", "globex"], "empty": []},
            gateways={"edge": ["acme"]},
            removed={"acme": 2, "old": 7},
        )
    )
    limits = found.tenants["acme"].limits.limits()
    assert (limits.running_max, limits.queued_max, limits.tokens_per_second) == (1, 0, 5.0)
    assert (limits.kv_guaranteed, limits.kv_max, limits.sealed) == (0.5, 0.5, True)
    assert found.tenants["edge"].epoch == 1


def test_no_value_is_quoted() -> None:
    """A secret that somebody put into the wrong field would be in the log."""
    secret = "kvl_" + "s" * 43
    for data in (
        tenant(tokens=[{**TOKEN, "sha256": secret}]),
        tenant(epoch=secret),
        tenant(certificates=[secret]),
        tenant(limits={"kv_max": secret}),
        file(groups={"g": [secret]}),
        file(version_=secret),
    ):
        with pytest.raises(ValueError) as refused:
            parse(data)
        assert secret not in str(refused.value)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_for_its_owner_is_read(tmp_path: Path, mode: int) -> None:
    """The refusals below could be for another reason."""
    tenants = TenantsOfTest(tmp_path)
    tenants.add("acme")
    tenants.path.chmod(mode)
    assert set(read(tenants.path).tenants) == {"acme"}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o700, 0o610, 0o601, 0o602])
def test_a_wider_mode_is_refused(tmp_path: Path, mode: int) -> None:
    """Others of the machine could read who may call, or write it."""
    tenants = TenantsOfTest(tmp_path)
    tenants.add("acme")
    tenants.path.chmod(mode)
    with pytest.raises(TenantsRefused, match=f"mode {mode:04o} .* chmod 600") as refused:
        read(tenants.path)
    assert refused.value.kind == "mode"


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A pipe in its place would keep the server waiting for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(TenantsRefused, match="not a regular file"):
        read(pipe)
    with pytest.raises(TenantsRefused, match="no such file"):
        read(tmp_path / "nothing")
    folder = tmp_path / "folder"
    folder.mkdir(0o700)
    with pytest.raises(TenantsRefused):
        read(folder)


def test_it_is_written_whole_and_for_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk in the middle would throw everybody out; a wide umask show the file to others."""
    tenants = TenantsOfTest(tmp_path)
    mask = os.umask(0)
    try:
        tenants.add("acme")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(tenants.path.stat().st_mode) == 0o600
    before = tenants.path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("kvledger.tenants.tenants_file.os.fsync", full)
        with pytest.raises(editing.ChangeRefused, match="No space left"):
            tenants.add("globex")
    assert tenants.path.read_bytes() == before
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".tenants.json.lock", "tenants.json"]
    (tmp_path / ".tenants.json.new").write_text("what a killed one left")
    tenants.add("globex")
    assert set(read(tenants.path).tenants) == {"acme", "globex"}


def test_a_link_stays_one(tmp_path: Path) -> None:
    """The file that a server reads through a link would no longer be the one that is changed."""
    tenants = TenantsOfTest(tmp_path)
    tenants.add("acme")
    link = TenantsOfTest(tmp_path)
    link.path = tmp_path / "link.json"
    link.path.symlink_to(tenants.path)
    link.add("globex")
    assert link.path.is_symlink()
    assert set(read(tenants.path).tenants) == {"acme", "globex"}


def test_no_token_is_kept(tmp_path: Path) -> None:
    """Who reads the file, or a copy of it, would be everybody."""
    tenants = TenantsOfTest(tmp_path)
    tokens = [tenants.add("acme"), tenants.add("globex"), tenants.rotate("acme", 60)]
    for path in tmp_path.iterdir():
        for token in tokens:
            assert token not in path.read_text()
            assert token.removeprefix("kvl_") not in path.read_text()


def _adds(folder: Path, first: int, count: int) -> None:
    tenants = TenantsOfTest(folder)
    for index in range(first, first + count):
        tenants.add(f"t{index}")


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    """A tenant that was just revoked would come back with another's change."""
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_adds, args=(tmp_path, 100 * i, 8)) for i in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert len(read(tmp_path / "tenants.json").tenants) == 24


def test_a_writer_that_stays_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command would hang without a word."""
    monkeypatch.setattr(tenants_file, "LOCK_SECONDS", 0.1)
    tenants = TenantsOfTest(tmp_path)
    tenants.add("acme")
    other = pytest.raises(TenantsRefused, match="somebody else is changing it")
    with tenants_file.locked(tenants.path), other:
        tenants.add("globex")
    tenants.add("globex")


def test_a_change_that_would_be_refused_is_not_written(tmp_path: Path) -> None:
    """A running server would keep the last good one, and nobody notice that a change is lost."""
    tenants = TenantsOfTest(tmp_path)
    tenants.add("acme")
    before = tenants.path.read_bytes()
    with pytest.raises(editing.ChangeRefused, match=r"^tenants.acme.limits.kv_max: "):
        tenants.change(lambda values: editing.set_limits(values, "acme", {"kv_max": 2.0}))
    with pytest.raises(editing.ChangeRefused, match=r"^groups.g.0: "):
        tenants.change(lambda values: editing.set_list(values, "groups", "g", ["nobody"]))
    assert tenants.path.read_bytes() == before
