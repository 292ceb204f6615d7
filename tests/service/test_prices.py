"""Prices: a file that is checked as a whole, and costs that add up to the last billionth."""

from __future__ import annotations

import random
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from kvledger.books.prices import Meter, Prices, read_prices
from kvledger.errors import SettingRefused

_HOUR = 3600 * 10**9
GOOD = 'unit = "EUR"\nper_device_hour = 2.50\nmemory_share = 0.6\ncompute_share = 0.4\n'


def prices(per_hour: str, memory: str) -> Prices:
    share = Decimal(memory)
    return Prices(
        unit="EUR",
        per_device_hour=Decimal(per_hour),
        memory_share=share,
        compute_share=1 - share,
    )


def test_a_file_is_read_as_it_is_written(tmp_path: Path) -> None:
    """2.50 read as a binary number would never add up."""
    path = tmp_path / "prices.toml"
    path.write_text(GOOD)
    read = read_prices(path)
    assert (read.unit, read.per_device_hour) == ("EUR", Decimal("2.50"))
    assert read.memory_share == Decimal("0.6")
    assert Prices.of(read.facts()) == read
    path.write_text('unit = "credits"\nper_device_hour = 3\nmemory_share = 1\ncompute_share = 0\n')
    assert read_prices(path).per_device_hour == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("2.50", "-1"), "per_device_hour: input should be greater than or equal to 0"),
        (("2.50", '"2.50"'), "per_device_hour: it is no number such as 2.50"),
        (("2.50", "true"), "per_device_hour: it is no number such as 2.50"),
        (("2.50", "nan"), "per_device_hour: it is no number such as 2.50"),
        (("2.50", "0.1234567891"), "per_device_hour: decimal input should have no more than 9"),
        (("0.6", "0.5"), "memory_share 0.5 and compute_share 0.4 are 0.9 together, not 1"),
        (("compute_share", "comptue_share"), "compute_share: field required"),
        (("unit", "unit = 1\nunits"), "unit: input should be a valid string"),
        (('"EUR"', '"E\\nUR"'), "unit: string should match"),
        (('"EUR"', '"EUR\\n"'), "unit: string should match"),
        (('"EUR"', "EUR"), "Invalid value"),
    ],
)
def test_a_file_that_is_wrong_says_what_to_change(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    """A price that was misread would be noticed when the bills are out."""
    path = tmp_path / "prices.toml"
    path.write_text(GOOD.replace(*change))
    with pytest.raises(SettingRefused) as raised:
        read_prices(path)
    assert str(raised.value).startswith(f"--prices {path}: ")
    assert said in str(raised.value)


def test_a_file_that_is_none_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """A traceback would be all that an operator is told."""
    for path, said in (
        (tmp_path / "missing", "No such file"),
        (tmp_path, "directory"),
        (tmp_path / "binary", "utf-8"),
        (tmp_path / "large", "more than"),
    ):
        if path.name == "binary":
            path.write_bytes(b"\xff\xfe")
        if path.name == "large":
            path.write_bytes(b"#" * (1 << 17))
        with pytest.raises(SettingRefused, match=said):
            read_prices(path)


def test_costs_by_hand() -> None:
    """The simplest bill would be wrong."""
    # 3.60 an hour are 1,000,000 billionths a second: 250,000 of them for memory.
    meter = Meter(prices("3.60", "0.25"), blocks=10)
    cost = meter.cost(5 * 10**9, 2 * 10**9)  # half of the pool for a second; two seconds of steps
    assert (cost.unit, cost.memory_nanos, cost.compute_nanos) == ("EUR", 125_000, 1_500_000)


def test_what_cannot_be_divided_goes_to_the_next() -> None:
    """A hundred thousand small requests would cost nothing."""
    # A billionth for each third of a block-second.
    rate = prices(str(Decimal(3 * 3600) / 10**9), "1")
    meter = Meter(rate, blocks=1)
    costs = [meter.cost(10**9 // 9, 0).memory_nanos for _ in range(9)]
    assert costs == [0, 0, 0, 0, 0, 0, 0, 0, 2] or sum(costs) == 2  # 9 x 111,111,111 ns
    assert meter.cost(9 * (10**9 - 9 * (10**9 // 9)), 0).memory_nanos in (0, 1)


def test_all_costs_together_are_the_price_of_all_that_was_used() -> None:
    """Bills would drift away from what the machine costs."""
    drawn = random.Random(7)
    for _ in range(20):
        price = prices(f"{drawn.randrange(10**12)}e-9", f"{drawn.randrange(10**6)}e-6")
        blocks = drawn.randrange(1, 10**5)
        meter = Meter(price, blocks)
        used = [(drawn.randrange(10**15), drawn.randrange(10**12)) for _ in range(200)]
        costs = [meter.cost(*each) for each in used]
        memory, compute = (sum(column) for column in zip(*used, strict=True))
        assert sum(c.memory_nanos for c in costs) == price.memory_nanos(memory, blocks) // 1
        assert sum(c.compute_nanos for c in costs) == price.compute_nanos(compute) // 1
        for cost, (block_time, time) in zip(costs, used, strict=True):
            assert abs(cost.memory_nanos - price.memory_nanos(block_time, blocks)) < 1
            assert abs(cost.compute_nanos - price.compute_nanos(time)) < 1


def test_a_whole_machine_for_an_hour_costs_its_price() -> None:
    """The shares of memory and compute would not be the whole price."""
    price = prices("2.50", "0.6")
    whole = price.memory_nanos(64 * _HOUR, 64) + price.compute_nanos(_HOUR)
    assert whole == Fraction(25, 10) * 10**9
