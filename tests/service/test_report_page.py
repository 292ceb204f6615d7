"""The page of a report: its numbers, what it says where it lacks some; and it is only a page."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest
from book_writer import PRICES, SECOND, START, Writer, receipt
from planted_books import SETUP, Planted, ends_some, slower

from kvledger.books.file_statement import state
from kvledger.books.lines import timestamp
from kvledger.books.statement_rows import compute_rows, memory_rows, sums_rows
from kvledger.cli.report import run
from kvledger.report.costs import cost_bars
from kvledger.report.page import POLICY, STATEMENT_MAX, report_page

EVIL = ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "$\\frac{a}$ & {{ 7 * 7 }}")
CHARTS = ("memory", "decode", "roofline", "batches", "steps", "queue")


class Page(HTMLParser):
    """A page as a browser takes it apart: elements, attributes, tables by section, texts."""

    VOID = {"meta", "br", "img", "link", "input", "base"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: dict[str, str] = {}
        self.policy = ""
        self._section = "head"
        self._cell: list[str] | None = None
        self._open: list[str] = []
        self.feed(text)
        assert self._open == [], "an element was not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        named = dict(attrs)
        if "id" in named:
            self.ids.append(named["id"] or "")
        if named.get("http-equiv") == "Content-Security-Policy":
            self.policy = named["content"] or ""
        if tag == "section":
            self._section = named["id"] or ""
        if tag == "tr":
            self.tables.setdefault(self._section, []).append([])
        if tag in ("td", "th"):
            self._cell = []
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag in ("td", "th") and self._cell is not None:
            self.tables[self._section][-1].append(" ".join("".join(self._cell).split()))
            self._cell = None

    def handle_data(self, data: str) -> None:
        self.texts[self._section] = self.texts.get(self._section, "") + data
        if self._cell is not None:
            self._cell.append(data)


def page_of(folder: Path, since: str = "", until: str = "") -> Page:
    return Page(report_page([folder], since, until))


def plant(folder: Path, rounds: int = 12, **changes: object) -> Planted:
    """A replica with some of everything."""
    books = Planted(folder, **changes)  # type: ignore[arg-type]
    for at in range(rounds):
        books.passes({"acme": 20 + at, "zoo": 10}, cached=20, scopes={"group": 4})
        books.steps.decode(200, 0.02, 1 + at, 300)
        books.steps.prefill(20, 0.08, 128)
        books.steps.prefill(10, 0.1, 128, beside=4)
        books.came(10, waiting=2, open_=8, queue_full=1)
        ends_some(books, {"acme": 2, "zoo": 1}, at * 10 + 5.0)
        books.looks(last=at == rounds - 1)
    return books


@dataclass(frozen=True)
class Two:
    """Books of two replicas, and their page: drawing takes seconds."""

    folder: Path
    first: Planted
    second: Planted
    text: str
    page: Page


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    folder = tmp_path_factory.mktemp("two") / "books"
    first = plant(folder)
    second = plant(folder, after=300.0, setup=slower(SETUP))
    text = report_page([folder])
    return Two(folder, first, second, text, Page(text))


def test_numbers_are_those_of_the_statement(two: Two) -> None:
    """Two papers about one month would name two sums."""
    page, statement = two.page, state([two.folder], ("tenant",))
    expected: list[list[str]] = []
    for heads, rows in (
        sums_rows(statement, ("tenant",)),
        memory_rows(statement.machines),
        compute_rows(statement.machines),
    ):
        expected += [heads, *rows]
    assert page.tables["statement"] == expected
    assert len(expected) == 18
    (cost,) = [row[-1] for row in page.tables["costs"] if row[0] == "acme"]
    assert cost == next(row[-1] for row in expected if row[0] == "acme")
    assert "24 requests" not in page.texts["head"]
    assert re.search(r"\b48\s+requests", page.texts["head"])


def test_charts_show_what_was_recorded(tmp_path: Path) -> None:
    """A colleague would be sent pictures of something else."""
    plant(tmp_path / "books")
    page = page_of(tmp_path / "books")
    heads, *rows = page.tables["memory"]
    assert heads[1:] == ["acme MiB", "zoo MiB", "shared scopes MiB",
                         "cached, can be had MiB", "free MiB", "waterline"]  # fmt: skip
    assert rows[0][1:] == ["20", "10", "4", "20", "46", "34 %"]  # of 100 MiB
    assert rows[-1][1] == "31"
    heads, *rows = page.tables["batches"]
    assert [row[0] for row in rows] == ["1", "2", "3-4", "5-8", "9-16"]
    assert rows[0][1:4] == ["200", "200", "50"]  # one token in 20 ms
    assert sum(int(row[1]) for row in rows) == 12 * 200
    heads, *rows = page.tables["queue"]
    assert rows[0][1:] == ["8", "2", "2", "10", "1"]
    heads, *rows = page.tables["steps"]
    assert [rows[0][at] for at in (1, 4, 7)] == ["200", "20", "10"]
    heads, *rows = page.tables["roofline"]
    assert [row[:2] for row in rows[:2]] == [["all", "decoding"], ["all", "prompts"]]
    assert len(page.tables["decode"]) == 13
    for name in CHARTS:
        assert f"{name}-wide-title" in page.ids
        assert f"{name}-narrow-title" in page.ids
    assert len(set(page.ids)) == len(page.ids)


def test_findings_and_changes_stand_in_words(two: Two, tmp_path: Path) -> None:
    """The reader would have to find out alone what the figures mean, and what was turned."""
    first, second, page = two.first, two.second, two.page
    assert "The queue was full for 12 of 132 requests (9 %)" in page.texts["findings"]
    assert "Raise --max-queued" in page.texts["findings"]
    changed = f"Replica {second.replica.id} (started 2026-11-30 12:05:00): --max-sequences 16, not"
    assert changed in page.texts["settings"]
    assert first.replica.id in page.texts["settings"]
    starts = page.texts["memory"].count("a replica started")
    assert starts == 1
    plant(tmp_path / "same", rounds=2)
    plant(tmp_path / "same", rounds=2)
    assert "Nothing changed" in page_of(tmp_path / "same").texts["settings"]


def test_names_are_texts_wherever_they_stand(tmp_path: Path) -> None:
    """Whoever names a tenant, a model or a file would run a program at the reader's."""
    books = Planted(tmp_path / "books")
    writer_model = Writer(tmp_path / "books", model=EVIL[0])
    writer_model.ends(receipt(5 * SECOND, 7), EVIL[1])
    for at in range(4):
        books.passes(dict.fromkeys(EVIL, 5), scopes={EVIL[0]: 2})
        books.came(1, **{EVIL[1]: 3})
        ends_some(books, dict.fromkeys(EVIL, 1), at * 10 + 5.0)
        books.steps.decode(50, 0.01, 3, 10)
        books.looks()
    text = report_page([tmp_path / "books"])
    page = Page(text)
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert [name for name, _ in page.attributes if name.startswith("on")] == []
    for name in EVIL:
        assert name in page.texts["memory"]
        assert name in page.texts["costs"]
        assert name in page.texts["statement"]
    assert EVIL[0] in page.texts["head"]
    assert f"refused: {EVIL[1]}" in page.texts["queue"]
    assert "<script" not in text
    assert "alert(1)</" not in text


def test_a_page_asks_for_nothing(two: Two) -> None:
    """Opening it would tell somebody elsewhere, or it would be empty without a network."""
    page, text = two.page, two.text
    assert page.policy == POLICY
    assert "default-src 'none'" in POLICY
    assert "script-src" not in POLICY
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "form", "base"})
    for name, value in page.attributes:
        if name in ("href", "src", "clip-path", "xlink:href"):
            assert value.startswith(("#", "url(#")), value
            assert value.removeprefix("url(").strip("#)") in page.ids, value
    assert re.search(r"https?:|//|@import|url\([^#]", text.replace('"url(#', "")) is None
    assert "text/html" not in text
    assert len(text.encode()) < 1 << 20


def test_a_page_is_the_same_each_time(two: Two) -> None:
    """Nobody could tell whether a report that was sent is of the same books."""
    assert report_page([two.folder]) == two.text


def _without_load(folder: Path) -> None:
    books = Planted(folder)
    for at in range(3):
        books.passes({"a": 3})
        ends_some(books, {"a": 1}, at * 10 + 5.0)
        books.states_pool()


def _without_states(folder: Path) -> None:
    books = Writer(folder)
    books.ends(receipt(SECOND, 5), "a")
    books.pool(10 * SECOND, SECOND)


def _one_request(folder: Path) -> None:
    Writer(folder).ends(receipt(SECOND, 5), "a")


def _idle(folder: Path) -> None:
    books = Planted(folder)
    for _ in range(3):
        books.passes({})
        books.looks()


@pytest.mark.parametrize(
    ("made", "lacking", "said"),
    [
        (_without_load, {"decode", "roofline", "batches", "steps", "queue"}, "no lines of load"),
        (_without_states, set(CHARTS), "how the blocks of a pool stood"),
        (_one_request, set(CHARTS), "how the blocks of a pool stood"),
        (_idle, {"decode", "roofline", "batches", "steps"}, "No step ran in this time"),
    ],
)
def test_a_chart_that_lacks_numbers_says_which(
    tmp_path: Path, made: Callable[[Path], None], lacking: set[str], said: str
) -> None:
    """An empty picture looks like a server that did nothing."""
    made(tmp_path / "books")
    page = page_of(tmp_path / "books")
    drawn = {name for name in CHARTS if f"{name}-wide-title" in page.ids}
    assert drawn == set(CHARTS) - lacking
    assert said in " ".join(page.texts[name] for name in lacking)
    for name in lacking:
        assert name not in page.tables
    if made is not _idle:
        assert "a" in [row[0] for row in page.tables["statement"]]
        assert "no lines of load" in page.texts["findings"]


def test_a_time_without_anything_says_so(tmp_path: Path) -> None:
    """A wrong date would look like a day without requests."""
    plant(tmp_path / "books", rounds=2)
    since = timestamp(START.replace(year=2027))
    page = page_of(tmp_path / "books", since)
    assert "Nothing is recorded in this time" in page.texts["head"]
    assert f"asked: from {since}" in page.texts["head"]
    assert "No request ended in this time" in page.texts["costs"]
    assert "No replica wrote anything" in page.texts["settings"]


def test_without_prices_bars_are_of_what_was_used(tmp_path: Path) -> None:
    """Who has no prices would not see who uses the machine."""
    books = plant(tmp_path / "books", prices=None)
    texts = page_of(tmp_path / "books").texts["costs"]
    assert "Block-seconds by tenant" in texts
    assert "Seconds of compute by tenant" in texts
    assert "EUR" not in texts
    assert books.meter is None
    plant(tmp_path / "books", prices=PRICES)
    (bars,) = cost_bars(state([tmp_path / "books"], ("tenant",)))
    assert (bars.title, bars.parts) == ("EUR by tenant", ("memory", "compute"))
    assert [bar.name for bar in bars.rows] == ["acme", "zoo"]
    assert sum(bars.rows[0].parts) == pytest.approx(100, abs=0.02)
    assert sum(bars.rows[1].parts) == pytest.approx(50, abs=0.02)


def test_damage_is_told_and_ends_nothing(tmp_path: Path) -> None:
    """After a crash there would be no report, or one that hides what is missing."""
    books = plant(tmp_path / "books")
    with books.path.open("ab") as file:
        file.write(b'{"kind":"load"}\n\0\0\0\n{"kind":"rec')
    page = page_of(tmp_path / "books")
    assert "1 line(s) were torn" in page.texts["statement"]
    assert "2 line(s) could not be read" in page.texts["statement"]


def test_thousands_of_tenants_fit(tmp_path: Path) -> None:
    """The page of a large service could not be opened, or not be sent."""
    books = Planted(tmp_path / "books")
    tenants = [f"tenant-{number:05}-of-some-length" for number in range(STATEMENT_MAX + 500)]
    for at in range(400):
        books.passes(dict.fromkeys(tenants[at % 50 : at % 50 + 40], 1), cached=9)
        books.steps.decode(20, 0.02, 1 + at % 30, 100 + at)
        books.steps.prefill(3, 0.05, 100)
        books.came(3, waiting=at % 5, open_=at % 9, queue_full=at % 3)
        books.looks()
    for number, tenant in enumerate(tenants):
        books.ends(receipt(number * SECOND, 7), tenant)
    text = report_page([tmp_path / "books"])
    assert len(text.encode()) < 2 << 20
    page = Page(text)
    rows = [row for row in page.tables["statement"] if row[0].startswith("tenant-")]
    assert len(rows) == STATEMENT_MAX
    assert "500 more tenants are in the total" in page.texts["statement"]
    total = sums_rows(state([tmp_path / "books"], ("tenant",)), ("tenant",))[1][-1]
    assert total in page.tables["statement"]
    assert len(page.tables["costs"]) == 1 + 20 + 1
    assert f"{len(tenants) - 20} other tenants" in page.texts["costs"]
    assert page.texts["memory"].count("other tenants") >= 1


def test_the_command_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page would be nowhere, or half of it."""
    plant(tmp_path / "books", rounds=2)
    output = tmp_path / "page.html"
    output.write_text("before")
    assert run([str(tmp_path / "books"), "--output", str(output)]) == 0
    assert output.read_text().startswith("<!DOCTYPE html>")
    assert output.read_text().endswith("</html>")
    assert str(output) in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"books", "page.html"}
    lone = Writer(tmp_path / "books")
    lone.ends(receipt(1), "\ud800")  # which no UTF-8 has
    assert run([str(tmp_path / "books"), "--output", str(output)]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing"], "there is no such folder; give that of --books"),
        (["."], "it has no files of --books"),
        (["books", "--from", "2026-12-01", "--to", "2026-12-01"], "is not before --to"),
        (["books", "--output", "books"], "it is a folder; name a file in it"),
        (
            ["books", "--output", "missing/page.html"],
            "page.html: there is no folder missing",
        ),
    ],
)
def test_what_cannot_be_written_says_what_to_change(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    """Whoever mistypes would get a traceback."""
    monkeypatch.chdir(tmp_path)
    plant(tmp_path / "books", rounds=2)
    assert run(arguments) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(["books", "--from", "yesterday"])
    assert "'yesterday' is no time such as 2026-11-30" in capsys.readouterr().err


def test_without_its_library_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever installed the server alone would get a traceback."""
    import sys

    plant(tmp_path / "books", rounds=2)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run([str(tmp_path / "books"), "--output", str(tmp_path / "page.html")]) == 2
    assert "pip install 'kvledger[report]'" in capsys.readouterr().err
