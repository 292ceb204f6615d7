"""Options of the whole test run."""

from __future__ import annotations

from collections.abc import Generator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--no-skips`: where everything a test needs is promised, a skip is a failure.

    `--soak`: also the tests marked soak, which take minutes and prove what others prove faster.
    """
    parser.addoption("--no-skips", action="store_true", help="turn every skip into a failure")
    parser.addoption("--soak", action="store_true", help="run the tests marked soak too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Applies `--soak`."""
    if config.getoption("--soak"):
        return
    long = [item for item in items if item.get_closest_marker("soak")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]


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
