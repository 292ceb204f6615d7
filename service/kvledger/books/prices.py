"""Prices: what an hour of the device costs, and each request's part of it, to the last billionth.

The price of an hour is divided into a share for memory and a share for compute. Memory is paid
for by block-time (blocks held or reserved x time, over blocks of the pool x time), compute by the
part that a request had of the time of steps. What nobody had is not hidden in anybody's price: the
pool's free and cached blocks, and the time in which no step ran, have lines of their own in
statements.

All is computed in whole numbers. What cannot be divided is carried on to the next request, so all
costs together are the price of all that was used, rounded down once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from kvledger.errors import SettingRefused

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# More is no file of prices.
_FILE_BYTES_MAX = 64 << 10
_HOUR = 3600 * 10**9  # in nanoseconds
_BILLION = 10**9


def _exact(value: Any) -> Decimal:
    """A number as it was written; TOML's floats come as decimals."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise PydanticCustomError("no_number", "it is no number such as 2.50")
    number = Decimal(value)
    if not number.is_finite():
        raise PydanticCustomError("no_number", "it is no number such as 2.50")
    return number


_Amount = Annotated[
    Decimal,
    BeforeValidator(_exact),
    Field(ge=0, le=1_000_000_000, max_digits=18, decimal_places=9),
]
_Share = Annotated[Decimal, BeforeValidator(_exact), Field(ge=0, le=1, decimal_places=6)]


class Prices(BaseModel):
    """The file of --prices."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # What the numbers are of: a currency, or any other unit.
    unit: Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,31}$")]
    # Of one device; a server has one.
    per_device_hour: _Amount
    # What part of that is for memory, and what part for compute: 1 together.
    memory_share: _Share
    compute_share: _Share

    @model_validator(mode="after")
    def _shares_are_all(self) -> Prices:
        if self.memory_share + self.compute_share != 1:
            raise PydanticCustomError(
                "shares",
                "memory_share {memory} and compute_share {compute} are {sum} together, not 1",
                {
                    "memory": str(self.memory_share),
                    "compute": str(self.compute_share),
                    "sum": str(self.memory_share + self.compute_share),
                },
            )
        return self

    def facts(self) -> dict[str, str]:
        """As files state them; `Prices.of` reads them again."""
        return {name: str(getattr(self, name)) for name in type(self).model_fields}

    @classmethod
    def of(cls, facts: Mapping[str, str]) -> Prices:
        """Of what `facts` gave. ValueError, or what it is a base of, if it is anything else."""
        names = {name: Decimal(value) for name, value in facts.items() if name != "unit"}
        return cls(unit=facts["unit"], **names)

    def memory_nanos(self, block_time: int, blocks: int) -> Fraction:
        """Billionths of the unit for so many block-nanoseconds of a pool of so many blocks."""
        rate = Fraction(self.per_device_hour) * Fraction(self.memory_share) * _BILLION
        return rate * block_time / (blocks * _HOUR)

    def compute_nanos(self, time: int) -> Fraction:
        """Billionths of the unit for so many nanoseconds of steps."""
        rate = Fraction(self.per_device_hour) * Fraction(self.compute_share) * _BILLION
        return rate * time / _HOUR


def read_prices(path: Path) -> Prices:
    """A file of prices, checked. SettingRefused with what to change."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > _FILE_BYTES_MAX:
                raise SettingRefused(f"--prices {path}: it has more than {_FILE_BYTES_MAX} bytes")
            text = file.read(_FILE_BYTES_MAX).decode("utf-8")
        return Prices.model_validate(tomllib.loads(text, parse_float=Decimal))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        reason = f"{first['msg'][0].lower()}{first['msg'][1:]}"
        raise SettingRefused(f"--prices {path}: {name + ': ' if name else ''}{reason}") from None
    except OSError as error:
        raise SettingRefused(f"--prices {path}: {error.strerror or error}") from None
    except ValueError as error:  # no UTF-8, or no TOML: it names line and column
        raise SettingRefused(f"--prices {path}: {error}") from None


@dataclass(frozen=True)
class Cost:
    """What one request cost, in billionths of the unit."""

    unit: str
    memory_nanos: int
    compute_nanos: int


class Meter:
    """Prices one request after the other. For one thread."""

    def __init__(self, prices: Prices, blocks: int) -> None:
        """`blocks` are those of the pool."""
        self._prices = prices
        self._memory = _Carry(prices.memory_nanos(1, blocks))
        self._compute = _Carry(prices.compute_nanos(1))

    def cost(self, block_time: int, compute_time: int) -> Cost:
        """Of block-nanoseconds held or reserved, and nanoseconds of steps."""
        return Cost(
            self._prices.unit, self._memory.take(block_time), self._compute.take(compute_time)
        )


class _Carry:
    """Multiplies by a fraction; what cannot be divided is added to the next product."""

    def __init__(self, rate: Fraction) -> None:
        self._numerator, self._denominator = rate.numerator, rate.denominator
        self._rest = 0

    def take(self, quantity: int) -> int:
        whole, self._rest = divmod(self._rest + quantity * self._numerator, self._denominator)
        return whole
