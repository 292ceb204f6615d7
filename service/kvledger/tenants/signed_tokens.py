"""Signed tokens (JWT) of an issuer that the operator trusts: `kvledger[jwt]`.

What verifies one is chosen by the settings alone: the header only says which of the known keys, and
each key has its one algorithm, which is never a symmetric one. No key and no address of a key is
taken from a token.
"""

from __future__ import annotations

import importlib.util
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from kvledger.errors import SettingRefused
from kvledger.models.json_file import parse_object
from kvledger.tenants.tenants_file import TenantsRefused, Version, read_owners, sentence
from kvledger.tenants.tokens import digest

_Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]
# Headers that would choose a key, or change what is signed.
_FORBIDDEN_HEADERS = frozenset({"jku", "jwk", "x5u", "x5c", "crit", "b64", "zip", "enc"})
# How far the issuer's clock and ours may differ, in seconds.
_LEEWAY = 10
# Tokens whose signature was found good, and that need not be verified again until they expire.
_KNOWN_MAX = 4096
_KEYS_MAX = 64
_RSA_BITS_MIN = 2048
_CURVES = {"ES256": "secp256r1", "ES384": "secp384r1", "ES512": "secp521r1"}

_Text = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _KeyRow(_Strict):
    algorithm: _Algorithm
    pem: Annotated[str, StringConstraints(min_length=1, max_length=16384)]


class _IssuerFile(_Strict):
    version: Version
    issuer: _Text
    audience: _Text
    # The claim that holds the tenant's name.
    tenant_claim: _Text
    keys: Annotated[dict[_Text, _KeyRow], Field(min_length=1, max_length=_KEYS_MAX)]


@dataclass(frozen=True)
class SignedClaim:
    """What a good token says: a tenant's name, by which key, and until when."""

    tenant: str
    key_id: str
    expires_at: float


class Issuer:
    """Whose tokens are trusted. Belongs to one thread."""

    def __init__(self, file: _IssuerFile, keys: Mapping[str, Any]) -> None:
        """`keys` are the public keys by id, as `cryptography` has them."""
        self._file = file
        self._keys = keys
        self._known: OrderedDict[bytes, SignedClaim] = OrderedDict()

    @classmethod
    def read(cls, path: Path) -> Issuer:
        """The issuer that a file describes. SettingRefused, in one sentence."""
        if importlib.util.find_spec("jwt") is None:
            raise SettingRefused("--jwt needs the extra: pip install 'kvledger[jwt]'")
        # Whoever can write it can be anybody; to read it is no harm.
        data = read_owners(path, 0o022, "chmod go-w")
        try:
            file = _IssuerFile.model_validate(parse_object(data))
            keys = {key_id: _public_key(key_id, row) for key_id, row in file.keys.items()}
        except ValidationError as error:
            raise TenantsRefused("not_valid", f"{path}: {sentence(error)}") from None
        except ValueError as error:
            raise TenantsRefused("not_valid", f"{path}: {error}") from None
        return cls(file, keys)

    def has_key(self, key_id: str) -> bool:
        """Whether tokens by this key are still trusted."""
        return key_id in self._keys

    def claim(self, token: bytes) -> SignedClaim | None:
        """What a token says; None if it is not to be believed, for whatever reason."""
        name = digest(token)
        known = self._known.get(name)
        if known is None:
            known = self._verified(token)
            if known is None:
                return None
            self._known[name] = known
            if len(self._known) > _KNOWN_MAX:
                self._known.popitem(last=False)
        return known if time.time() < known.expires_at + _LEEWAY else None

    def _verified(self, token: bytes) -> SignedClaim | None:
        import jwt  # an extra; and most servers have no issuer

        file = self._file
        try:
            header = jwt.get_unverified_header(token)
            key_id = str(header.get("kid"))
            row = file.keys.get(key_id)
            if row is None or not _FORBIDDEN_HEADERS.isdisjoint(header):
                return None
            claims = jwt.decode(
                token,
                key=self._keys[key_id],
                algorithms=[row.algorithm],
                audience=file.audience,
                issuer=file.issuer,
                leeway=_LEEWAY,
                options={"require": ["exp", "iss", "aud", file.tenant_claim]},
            )
            # JSON's whole numbers have no end, those of a float do.
            expires_at = float(claims["exp"])
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError, OverflowError):
            # The library raises more than its own kinds on what strangers make up.
            return None
        tenant = claims.get(file.tenant_claim)
        return SignedClaim(tenant, key_id, expires_at) if isinstance(tenant, str) else None


def _public_key(key_id: str, row: _KeyRow) -> Any:
    """The key, which must fit its algorithm. ValueError."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    path = f"keys.{key_id[:64]}"
    try:
        key = load_pem_public_key(row.pem.encode())
    except Exception:  # the library has many kinds, and some texts quote what was read
        raise ValueError(f"{path}.pem: it is no public key in PEM") from None
    kinds: dict[str, type] = {
        "RS": rsa.RSAPublicKey,
        "PS": rsa.RSAPublicKey,
        "ES": ec.EllipticCurvePublicKey,
        "Ed": ed25519.Ed25519PublicKey,
    }
    kind = kinds[row.algorithm[:2]]
    if not isinstance(key, kind):
        raise ValueError(f"{path}.pem: it is no key for {row.algorithm}")
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name != _CURVES[row.algorithm]:
        raise ValueError(f"{path}.pem: {row.algorithm} needs a key on {_CURVES[row.algorithm]}")
    if isinstance(key, rsa.RSAPublicKey) and key.key_size < _RSA_BITS_MIN:
        raise ValueError(f"{path}.pem: {key.key_size} bits are too few; {_RSA_BITS_MIN} at least")
    return key
