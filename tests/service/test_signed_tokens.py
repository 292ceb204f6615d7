"""Signed tokens: what is believed, and what an attacker may try."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from server_harness import Refusal, refusal_of, serving
from tenants_harness import TenantsOfTest, bearer

from kvledger.errors import SettingRefused
from kvledger.tenants import signed_tokens
from kvledger.tenants.registry import Registry
from kvledger.tenants.signed_tokens import Issuer
from kvledger.tenants.tenants_file import TenantsRefused

jwt = pytest.importorskip("jwt", reason="PyJWT makes the tokens, and the extra verifies them")

ISSUER, AUDIENCE, CLAIM = "https://issuer.example", "kvledger", "tenant"


@cache
def key(name: str) -> Any:
    """A private key; the same one for the same name."""
    if name.startswith("rsa"):
        return rsa.generate_private_key(public_exponent=65537, key_size=2048)
    if name.startswith("ed"):
        return ed25519.Ed25519PrivateKey.generate()
    return ec.generate_private_key(ec.SECP384R1() if "384" in name else ec.SECP256R1())


def pem(name: str) -> str:
    public = key(name).public_key()
    return str(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode())


KEYS = {"one": ("rsa", "RS256"), "two": ("ec", "ES256"), "three": ("ed", "EdDSA")}


def description(**changes: Any) -> dict[str, Any]:
    keys = {
        kid: {"algorithm": algorithm, "pem": pem(name)} for kid, (name, algorithm) in KEYS.items()
    }
    found = {"version": 1, "issuer": ISSUER, "audience": AUDIENCE, "tenant_claim": CLAIM}
    return {**found, "keys": keys, **changes}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "issuer.json"
    found.write_text(json.dumps(description()))
    found.chmod(0o644)
    return found


@pytest.fixture
def issuer(path: Path) -> Issuer:
    return Issuer.read(path)


def claims(**changes: Any) -> dict[str, Any]:
    """Those of a good token; None leaves one out."""
    found = {"iss": ISSUER, "aud": AUDIENCE, "exp": int(time.time()) + 600, CLAIM: "acme"}
    return {name: value for name, value in {**found, **changes}.items() if value is not None}


def signed(
    kid: str | None = "one",
    *,
    by: str | None = None,
    algorithm: str | None = None,
    headers: dict[str, Any] | None = None,
    **changes: Any,
) -> str:
    """A token by a known key, unless told otherwise."""
    name, usual = KEYS.get(kid or "one", KEYS["one"])
    shown = {**({"kid": kid} if kid is not None else {}), **(headers or {})}
    return str(jwt.encode(claims(**changes), key(by or name), algorithm or usual, headers=shown))


def part(value: Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def by_hand(header: Any, body: Any, signature: bytes = b"") -> str:
    return f"{part(header)}.{part(body)}.{part(signature)}"


def with_public_key_as_secret() -> str:
    """The classic: HS256 with what everybody knows."""
    signing = f"{part({'alg': 'HS256', 'typ': 'JWT', 'kid': 'one'})}.{part(claims())}"
    mac = hmac.new(pem("rsa").encode(), signing.encode(), hashlib.sha256).digest()
    return f"{signing}.{part(mac)}"


def own_key(header: str) -> str:
    """Signed by a key that the token brings along, or points at."""
    numbers = key("rsa-attacker").public_key().public_numbers()
    own = {
        "kty": "RSA",
        "kid": "one",
        "n": part(numbers.n.to_bytes(256, "big")),
        "e": part(b"\x01\x00\x01"),
    }
    value = own if header == "jwk" else "https://attacker.example/keys.json"
    return signed(by="rsa-attacker", headers={header: [value] if header == "x5c" else value})


def tampered() -> str:
    header, _, signature = signed().split(".")
    return f"{header}.{part(claims(tenant='globex'))}.{signature}"


NOW = int(time.time())
# Each a token that nobody may be believed for.
ATTACKS: dict[str, Any] = {
    "alg none": lambda: by_hand({"alg": "none", "kid": "one"}, claims()),
    "alg None": lambda: by_hand({"alg": "None", "kid": "one"}, claims(), b"x"),
    "no alg": lambda: by_hand({"kid": "one"}, claims(), b"x"),
    "no signature": lambda: signed().rpartition(".")[0] + ".",
    "HS256 with the public key": with_public_key_as_secret,
    "alg that the key is not for": lambda: signed(algorithm="RS512"),
    "alg of the same key": lambda: signed(algorithm="PS256"),
    "key of another algorithm": lambda: signed("two", by="rsa", algorithm="RS256"),
    "another's key": lambda: signed(by="rsa-attacker"),
    "jku": lambda: own_key("jku"),
    "jwk": lambda: own_key("jwk"),
    "x5u": lambda: own_key("x5u"),
    "x5c": lambda: own_key("x5c"),
    "jku and a good signature": lambda: signed(headers={"jku": "https://issuer.example/k"}),
    "crit": lambda: signed(headers={"crit": ["b64"], "b64": False}),
    "unknown kid": lambda: signed("four", by="rsa"),
    "no kid": lambda: signed(None),
    "kid of a file": lambda: signed("../../dev/null", by="rsa"),
    "kid that is a number": lambda: by_hand({"alg": "RS256", "kid": 1}, claims(), b"x"),
    "kid that is a list": lambda: by_hand({"alg": "RS256", "kid": ["one"]}, claims(), b"x"),
    "tampered": tampered,
    "expired": lambda: signed(exp=NOW - 60),
    "no exp": lambda: signed(exp=None),
    "exp that is no number": lambda: signed(exp="never"),
    "exp beyond numbers": lambda: signed(exp=1e400),
    "exp beyond floats": lambda: signed(exp=10**400),
    "not yet": lambda: signed(nbf=NOW + 100_000),
    "no iss": lambda: signed(iss=None),
    "wrong iss": lambda: signed(iss="https://attacker.example"),
    "iss with a slash more": lambda: signed(iss=ISSUER + "/"),
    "no aud": lambda: signed(aud=None),
    "wrong aud": lambda: signed(aud="another service"),
    "wrong auds": lambda: signed(aud=["another", "third"]),
    "no tenant": lambda: signed(tenant=None),
    "tenant that is a list": lambda: signed(tenant=["acme"]),
    "tenant that is a number": lambda: signed(tenant=1),
    "claims that are a list": lambda: by_hand({"alg": "RS256", "kid": "one"}, [1], b"x"),
    "header that is a list": lambda: by_hand([1], claims(), b"x"),
    "header that is deep": lambda: f"{part(b'[' * 5000)}.{part(claims())}.{part(b'x')}",
    "not base64": lambda: "!!!.!!!.!!!",
    "two parts": lambda: "abc.def",
    "four parts": lambda: signed() + ".abc",
    "encrypted": lambda: "a.b.c.d.e",
    "empty parts": lambda: "..",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_not_to_be_believed(attack: str, issuer: Issuer) -> None:
    """Somebody without the issuer's key would be a tenant."""
    token = ATTACKS[attack]().encode()
    for _ in range(2):  # what is remembered must be as good as what is verified
        assert issuer.claim(token) is None
    for kid in KEYS:
        good = issuer.claim(signed(kid).encode())
        assert good is not None
        assert (good.tenant, good.key_id) == ("acme", kid)


def test_audiences_may_be_several(issuer: Issuer) -> None:
    """Tokens of issuers that write a list would be refused."""
    assert issuer.claim(signed(aud=["another", AUDIENCE]).encode()) is not None


def test_a_known_token_ends_too(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remembered once, it would be good for ever."""
    token = signed().encode()
    assert issuer.claim(token) is not None
    verified: list[bytes] = []
    monkeypatch.setattr(issuer, "_verified", verified.append)
    assert issuer.claim(token) is not None
    assert verified == [], "its signature is not looked at again"
    monkeypatch.setattr(signed_tokens.time, "time", lambda: NOW + 100_000)
    assert issuer.claim(token) is None


def test_what_is_remembered_is_bounded(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An issuer of many short tokens would fill the memory."""
    monkeypatch.setattr(signed_tokens, "_KNOWN_MAX", 4)
    for index in range(8):
        assert issuer.claim(signed("three", jti=str(index)).encode()) is not None
    assert len(issuer._known) == 4


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"algorithm": "HS256"}, "keys.one.algorithm: "),
        ({"algorithm": "none"}, "keys.one.algorithm: "),
        ({"algorithm": "ES256"}, "keys.one.pem: it is no key for ES256"),
        ({"algorithm": "EdDSA"}, "keys.one.pem: it is no key for EdDSA"),
        ({"pem": "nothing"}, "keys.one.pem: it is no public key"),
        ({"url": "https://issuer.example"}, "keys.one.url: there is no such field"),
    ],
)
def test_keys_that_cannot_be_used_are_refused(
    change: dict[str, str], path: str, tmp_path: Path
) -> None:
    """A symmetric key would make everybody who can verify one who can sign."""
    found = description()
    found["keys"]["one"].update(change)
    file = tmp_path / "issuer.json"
    file.write_text(json.dumps(found))
    with pytest.raises(TenantsRefused) as refused:
        Issuer.read(file)
    assert f"{file}: {path}" in str(refused.value)


@pytest.mark.parametrize("field", ["issuer", "audience", "tenant_claim", "keys", "version"])
def test_all_of_it_is_required(field: str, tmp_path: Path) -> None:
    """A check that nobody asked for would be left out."""
    found = description()
    del found[field]
    file = tmp_path / "issuer.json"
    file.write_text(json.dumps(found))
    with pytest.raises(TenantsRefused, match=f"{field}: "):
        Issuer.read(file)


def test_a_curve_and_a_size_must_fit(tmp_path: Path) -> None:
    """A weak key could be computed; one of another curve never verifies anything."""
    file = tmp_path / "issuer.json"
    small = rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key()
    text = small.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    for row, why in (
        ({"algorithm": "ES256", "pem": pem("ec384")}, "needs a key on secp256r1"),
        ({"algorithm": "RS256", "pem": text}, "1024 bits are too few"),
    ):
        file.write_text(json.dumps(description(keys={"one": row})))
        with pytest.raises(TenantsRefused, match=why):
            Issuer.read(file)


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o622])
def test_a_file_that_others_can_write_is_refused(mode: int, path: Path) -> None:
    """Whoever adds a key can be anybody."""
    path.chmod(mode)
    with pytest.raises(TenantsRefused, match="chmod go-w"):
        Issuer.read(path)


def test_without_the_extra_the_start_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every signed token would be refused, and nobody know why."""
    monkeypatch.setattr(signed_tokens.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingRefused, match=r"kvledger\[jwt\]"):
        Issuer.read(path)


def test_an_issuer_speaks_for_tenants_only(path: Path, tmp_path: Path) -> None:
    """Who runs the issuer would be operator, or every tenant of a gateway."""
    tenants = TenantsOfTest(tmp_path)
    tenants.add("acme")
    tenants.add("operator", roles=["operator"])
    tenants.add("both", roles=["client", "operator"])
    tenants.add("edge")
    tenants.gateway("edge", "acme")
    now = Registry(tenants.path, issuer_path=path, dev=True).now
    for name in ("operator", "both", "edge", "nobody", "dev", "Acme", ""):
        assert now.by_signed_token(signed(tenant=name).encode()) is None, name
    good = now.by_signed_token(signed().encode())
    assert good is not None
    assert good[0] is now.principal("acme")


async def test_a_server_believes_them_until_the_key_goes(path: Path, tmp_path: Path) -> None:
    """The whole way: in, refused, and out again."""
    tenants = TenantsOfTest(tmp_path)
    tenants.add("acme")
    options = (*tenants.options(tmp_path), "--jwt", str(path))
    token = signed("two")
    async with serving(*options) as server:
        await server.answer(text="a", metadata=bearer(token))
        assert server.log.of("request_finished")[0]["tenant"] == "acme"
        for wrong in (with_public_key_as_secret(), signed(exp=NOW - 60), signed("four", by="rsa")):
            refusal = await refusal_of(server.answer(text="a", metadata=bearer(wrong)))
            assert refusal.reason == "CREDENTIAL_INVALID"
        found = description()
        del found["keys"]["two"]
        path.write_text(json.dumps(found))  # noqa: ASYNC240
        await server.until(lambda: server.log.of("tenants_reloaded"))
        last: Refusal = await refusal_of(server.answer(text="a", metadata=bearer(token)))
        assert last.reason == "CREDENTIAL_INVALID"
        await server.answer(text="a", metadata=bearer(signed("one")))
        assert token not in str(server.log.lines)
