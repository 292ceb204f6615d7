"""Options of the whole test run."""

from __future__ import annotations

from collections.abc import Generator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--no-skips`: where everything a test needs is promised, a skip is a failure."""
    parser.addoption("--no-skips", action="store_true", help="turn every skip into a failure")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Applies `--no-skips`."""
    report = yield
    if report.skipped and item.config.getoption("--no-skips"):
        assert isinstance(report.longrepr, tuple)
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be skipped: {report.longrepr[2]}"
    return report
