"""A report as a browser shows it, without a network."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from book_writer import SECOND, receipt
from planted_books import Planted, ends_some

from kvledger.report.page import POLICY, report_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: chromium)"),
]
EVIL = ("<script>alert(1)</script>", '"><img src="https://example.com/x" onerror="alert(1)">')
_PATIENCE = 120.0


def console(path: Path, folder: Path, width: int = 1000) -> str:
    """What a browser's console says of a page; a picture of it lies beside the page then."""
    assert CHROMIUM is not None
    picture = path.with_suffix(f".{width}.png")
    result = subprocess.run(
        [
            CHROMIUM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--enable-logging=stderr", "--v=0", f"--user-data-dir={folder / 'profile'}"),
            # Names are looked up nowhere, and whatever would be asked all the same goes nowhere.
            *("--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9"),
            *(f"--window-size={width},2000", f"--screenshot={picture}", path.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    assert picture.exists(), result.stderr
    assert picture.stat().st_size > 20_000, "the page is empty"
    return "\n".join(line for line in result.stderr.splitlines() if "CONSOLE" in line)


def test_a_browser_finds_nothing_wrong(tmp_path: Path) -> None:
    """The page would be broken, or ask the network, where nobody of us has looked."""
    books = Planted(tmp_path / "books")
    for at in range(8):
        books.passes({"acme": 20 + at, **dict.fromkeys(EVIL, 5)}, cached=9, scopes={EVIL[0]: 2})
        books.steps.decode(100, 0.02, 1 + at, 300)
        books.steps.prefill(9, 0.08, 128, beside=at)
        books.came(10, waiting=2, open_=8, **{EVIL[1]: 1})
        ends_some(books, {"acme": 2, **dict.fromkeys(EVIL, 1)}, at * 10 + 5.0)
        books.looks()
    books.ends(receipt(SECOND, 5), EVIL[1])
    path = tmp_path / "page.html"
    path.write_text(report_page([tmp_path / "books"]), encoding="utf-8")
    for width in (400, 1000):
        assert console(path, tmp_path, width) == ""


def test_the_policy_of_the_page_is_obeyed(tmp_path: Path) -> None:
    """The test above would find nothing whatever the page did."""
    path = tmp_path / "page.html"
    head = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    body = "<h1>no</h1>" * 400
    for what in ("<script>1</script>", '<img src="https://example.com/x">'):
        path.write_text(f"<!DOCTYPE html><html><head>{head}</head><body>{what}{body}")
        assert "Content Security Policy" in console(path, tmp_path)
