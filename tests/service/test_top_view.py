"""What `kvledger top` shows of given messages, at given sizes."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from top_messages import BLOCKS, balance, flooded_diagnosis, flooded_ledger

from kvledger.cli.top_messages import books_of, load_of
from kvledger.top import view
from kvledger.top.blocks import Letters, cells
from kvledger.top.names import fit, fit_end, shown, wrapped
from kvledger.top.picture import Books, Owner
from kvledger.top.table import SORTS
from kvledger.top.viewer import Viewer
from kvledger.top.words import ASCII, count, glyphs_for, rate, size, span, time
from kvledger.top.words import BLOCKS as GLYPHS
from kvledger.v1 import diagnosis_pb2, ledger_pb2

SERVER = "unix:/run/user/1000/kvledger/operators-127.0.0.1-50051.sock"

GOLDEN = """\
kvledger top  smollm2-135m-instruct  up 3 h 12 min  …0.0.1-50051.sock  0.4 s old
memory    91% of 268 MB ██████████████████████████████▓▒░░·                   ▇█
          █ held 308  ▓ reserved 12  ▒ releasing 2  ░ cached 25  · free 6
AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA
AAAAAAAAAAAAAAAAAGGGGGGIITTaagggituu..
a cell is 3 blocks (2.3 MB): CAPITAL held, small cached, ~ releasing, . free
requests  9 running in 8 of 64 places, 1 paused, 34 waiting, 5 at the door
last 30 s   time  tokens/s  step median      p99   batch  bound by, of its peak
prefill      62%      1240        48 ms    51 ms     1.2  compute 71%
decode       36%       210        12 ms   110 ms     7.8  memory 64%
limits    pool 97%: 12 % of the computed tokens had been computed before, after
          12 preemptions; the waterline was 97 % of 353 blocks.
  first   Give the pool more memory (--kv-bytes), or let fewer sequences run
          (--max-sequences).
  also    flooding_tenant 92%
lost      refused 123 (queue_full 120 …), preempted 12 (for_another 11 …)
trend     WORSE in 5 min: waterline 41%→97%, waiting 3%→38%, decode 212→210/s
  owner           held  resv cached share  +-/s  guar   max  open  wait     asks
A acme FLOODS      280    12      5   83%  +2.8     -   330    40    35    37200
G globex            18     0      9    5%          88     -     4     3     1200
I initech            6     0      3    2%           -     -     1     1      600
T group team         4     0      4    1%           -     -     0     0        0
U umbrella-prod…     0     0      4    0%           -     -     0     0        0
 q quit   s sort: memory   p pause   ? help"""


def flooded() -> Viewer:
    """Who looks at a server that one tenant floods, and has looked for ten seconds."""
    viewer = Viewer(SERVER, 100.0)
    earlier = flooded_ledger(3590)
    earlier.tenants[0].held.blocks -= 28
    earlier.pool.held.blocks -= 28
    earlier.pool.free.blocks += 28
    viewer.show_books(books_of(earlier), 100.0)
    viewer.show_books(books_of(flooded_ledger()), 110.0)
    viewer.show_load(load_of(flooded_diagnosis(), 300.0))
    return viewer


def looks(viewer: Viewer, columns: int = 80, lines: int | None = 24, now: float = 110.4) -> str:
    return view.plain(view.render(viewer.frame(now), columns, lines, GLYPHS))


def books(owners: list[Owner], blocks: int = 1000) -> Books:
    """A pool with these owners, the rest of it free."""
    held, reserved, cached = (
        sum(getattr(owner, state) for owner in owners) for state in ("held", "reserved", "cached")
    )
    free = blocks - held - reserved - cached
    return Books(60.0, blocks, 1000, free, reserved, held, cached, 0, 0, held * 32, owners)


def test_a_flooded_server_at_80_by_24() -> None:
    """Whoever opens it at night would not see who fills the memory, and what to do."""
    assert looks(flooded()) == GOLDEN
    page = Path(__file__).parents[2] / "docs" / "top.md"
    assert GOLDEN in page.read_text(), "the page shows another picture"


def test_a_larger_terminal_shows_more() -> None:
    """Room would be wasted while the operator looks for the second finding."""
    text = looks(flooded(), 120, 40)
    assert "limits    flooding_tenant 92%: Tenant acme sent 92 %" in text
    assert "  first   Give acme running_max, tokens_per_second or kv_max." in text
    assert "refused 123 of 157 (queue_full 120, queued_max 3), preempted 12 (for_ano" in text
    assert "34 waiting (12400 tokens)" in text
    assert "10% of the slots in held blocks are empty" in text
    assert "umbrella-production " in text
    assert "a cell is a block (760 kB)" in text
    # Every block is there once: so many letters of each owner, in both cases.
    mapped = "".join(line for line in text.splitlines() if set(line) <= set("AGITagiutu~."))
    assert len(mapped) == BLOCKS
    assert {mark: mapped.count(mark) for mark in "AGIT~agitu."} == {
        **{"A": 292, "G": 18, "I": 6, "T": 4, "~": 2},
        **{"a": 5, "g": 9, "i": 3, "t": 4, "u": 4, ".": 6},
    }


@pytest.mark.parametrize("glyphs", [GLYPHS, ASCII])
@pytest.mark.parametrize("paused", [False, True])
def test_every_size_is_filled_and_none_is_left(glyphs: object, paused: bool) -> None:
    """A line that wraps moves all others; one too many scrolls the picture away."""
    viewer = flooded()
    viewer.show_trouble("NO ANSWER: " + "x" * 300)
    viewer.show_load_trouble("none: " + "y" * 300)
    if paused:
        viewer.press("p", 110.0)
    for shows_help in (False, True):
        frame = replace(viewer.frame(111.0), shows_help=shows_help)
        for columns in (1, 2, 7, 40, 59, 60, 61, 79, 80, 81, 100, 110, 200, 400):
            for lines in (1, 2, 3, 15, 16, 17, 23, 24, 25, 40, 100):
                drawn = view.render(frame, columns, lines, glyphs)  # type: ignore[arg-type]
                assert len(drawn) == lines
                assert max(cell_len(line.plain) for line in drawn) <= columns
                assert not any("\n" in line.plain for line in drawn)
                if glyphs is ASCII:
                    assert all(line.plain.isascii() for line in drawn)


def test_a_small_terminal_is_told_so() -> None:
    """The operator would see half a table and draw the wrong conclusion."""
    assert looks(flooded(), 59, 24).startswith("kvledger top needs 60 x 16; this is 59 x 24")
    assert looks(flooded(), 80, 15).startswith("kvledger top needs 60 x 16; this is 80 x 15")
    assert "A acme FLOODS" in looks(flooded(), 60, 16)


def test_a_server_that_nobody_asks() -> None:
    """An idle server would look like one that is broken."""
    ledger = ledger_pb2.Ledger(pool=ledger_pb2.PoolAccount(blocks=88, block_bytes=760_320))
    ledger.pool.free.blocks = 88
    ledger.elapsed.FromSeconds(3)
    response = diagnosis_pb2.DiagnoseResponse()
    response.now.summary = "Nobody asked for anything: there is nothing to say."
    response.present.served.FromSeconds(3)
    viewer = Viewer(SERVER, 0.0)
    assert looks(viewer, now=0.2).splitlines()[0].endswith("no picture yet")
    viewer.show_books(books_of(ledger), 0.3)
    assert "diagnosis asked for, not there yet" in looks(viewer, now=0.4)
    viewer.show_load(load_of(response, 0.0))
    text = looks(viewer, now=0.4)
    assert "memory    0% of 66.9 MB" in text
    assert "limits    Nobody asked for anything: there is nothing to say." in text
    assert "trend     nothing to compare with yet: the server has served 3 s" in text
    assert "  no tenant has blocks or requests" in text
    assert "." * 80 in text


def test_forty_tenants_end_in_one_line() -> None:
    """Who is not in the picture would be forgotten, or push the flooding one out of it."""
    viewer = Viewer(SERVER, 0.0)
    owners = [
        Owner(f"t{n}", f"t-{n:02}", held=40 - n, cached=1, queued=1, open=1) for n in range(40)
    ]
    viewer.show_books(books(owners), 0.0)
    load = load_of(flooded_diagnosis(), 300.0)
    viewer.show_load(replace(load, open_tokens={"t-33": 5000, "t-01": 10}))
    lines = looks(viewer).splitlines()
    rows = [line for line in lines if "t-" in line]
    assert rows[0].split()[1:4] == ["t-33", "FLOODS", "7"]
    assert [row.split()[1] for row in rows[1:3]] == ["t-00", "t-01"]
    left = 40 - len(rows)
    assert len(rows) >= 4
    assert lines[-2].startswith(f"… {left} more: ")
    assert lines[-2].endswith(f"{left} cached, {left} waiting")
    every = looks(viewer, 100, None)
    assert all(f"t-{n:02}" in every for n in range(40))
    # More owners than letters: the others are drawn together.
    assert "*" in every
    for _ in range(3):
        viewer.press("j", 0.0)
    assert "t-00" not in looks(viewer)
    assert "from row 4" in looks(viewer)


def test_whoever_floods_is_named_however_long_the_name() -> None:
    """The one thing that must be seen would be cut off."""
    viewer, name = Viewer(SERVER, 0.0), "a" * 63
    viewer.show_books(books([Owner("t1", name, held=5), Owner("t2", "b", held=9)]), 0.0)
    viewer.show_load(replace(load_of(flooded_diagnosis(), 0.0), open_tokens={name: 9, "b": 1}))
    (row,) = [line for line in looks(viewer).splitlines() if " FLOODS " in line]
    assert row.startswith("A aaaaaa… FLOODS ")


@pytest.mark.parametrize("sort", SORTS)
def test_rows_are_sorted(sort: str) -> None:
    """A key that does nothing, or another order than it says."""
    first = Owner("t1", "c", held=9, cached=1, queued=1)
    second = Owner("t2", "b", held=8, cached=9, queued=2)
    third = Owner("t3", "a", held=7, cached=2, at_door=9)
    viewer = Viewer(SERVER, 0.0)
    earlier = [replace(first, held=9), replace(second, held=0), replace(third, held=6)]
    viewer.show_books(replace(books(earlier), elapsed=50.0), 0.0)
    viewer.show_books(books([first, second, third]), 0.0)
    load = replace(load_of(flooded_diagnosis(), 0.0), findings=[])
    viewer.show_load(replace(load, open_tokens={"a": 5, "b": 7, "c": 6}))
    for _ in range(SORTS.index(sort)):
        viewer.press("s", 0.0)
    text = looks(viewer)
    assert f"sort: {sort} " in text
    rows = [line for line in text.splitlines() if line[:2] in ("A ", "B ", "C ")]
    assert (
        "".join(row[2] for row in rows)
        == {
            **{"memory": "cba", "cached": "bac", "waiting": "abc", "growth": "bac"},
            **{"prompts": "bca", "name": "abc"},
        }[sort]
    )


def test_a_pause_holds_the_picture_and_its_age_grows() -> None:
    """What is read would change under the reader, or pass for new."""
    viewer = flooded()
    viewer.press("p", 110.4)
    later = flooded_ledger(3700)
    later.tenants[0].held.blocks = 0
    viewer.show_books(books_of(later), 210.0)
    text = looks(viewer, now=215.0)
    assert "PAUSED, 105 s old" in text.splitlines()[0]
    assert "A acme FLOODS      280" in text
    assert "p go on" in text
    viewer.show_trouble("NO ANSWER")
    assert looks(viewer, now=215.0).splitlines()[1] == "NO ANSWER"
    viewer.press("p", 215.0)
    assert "A acme FLOODS        0" in looks(viewer, now=215.0)


def test_trouble_is_said_above_what_was_so() -> None:
    """An old picture would pass for what is so now."""
    viewer = flooded()
    viewer.show_trouble("NO ANSWER, asked again every 4 s: no server answers at x")
    lines = looks(viewer, now=122.0).splitlines()
    assert lines[0].endswith("  12 s old")
    assert lines[1] == "NO ANSWER, asked again every 4 s: no server answers at x"
    assert any("acme" in line for line in lines)
    viewer.show_books(books_of(flooded_ledger(3620)), 123.0)
    assert "NO ANSWER" not in looks(viewer, now=123.0)


def test_another_server_is_not_held_against_the_one_before() -> None:
    """After a restart every tenant would seem to lose its blocks, at once."""
    viewer = flooded()
    viewer.show_books(books_of(flooded_ledger(5)), 120.0)
    frame = viewer.frame(120.0)
    assert (frame.earlier, frame.load, len(frame.waterlines)) == (None, None, 1)


def test_a_shrinking_pool_of_owners_keeps_letters() -> None:
    """Colours that jump from tenant to tenant tell nothing."""
    letters = Letters()
    many = [Owner(f"t{n}", f"{n}", held=100 - n) for n in range(30)]
    given = letters.give(many)
    assert len({letter for letter, _ in given.values()}) == len(given) == 26
    turned = [replace(owner, held=n + 1) for n, owner in enumerate(many)]
    again = letters.give(turned)
    assert len({letter for letter, _ in again.values()}) == len(again) == 26
    # The four who had none and have most now took letters of those with least, nobody else's.
    assert {f"t{n}" for n in range(26, 30)} <= set(again)
    kept = [key for key in again if key in given]
    assert len(kept) == 22
    assert all(again[key] == given[key] for key in kept)


@given(
    st.lists(st.tuples(*[st.integers(0, 300)] * 3), max_size=40),
    st.integers(0, 500),
    st.integers(1, 400),
)
def test_cells_stand_for_all_blocks(
    owners: list[tuple[int, int, int]], free: int, room: int
) -> None:
    """The map would lie about who has how much."""
    made = [Owner(f"t{n}", f"{n}", "tenant", True, *each) for n, each in enumerate(owners)]
    pool = books(made, free + sum(map(sum, owners)))
    found, each = cells(pool, Letters().give(made), room)
    assert len(found) == -(-pool.blocks // each) <= room
    live = sum(cell.is_live for cell in found)
    under = sum(held + reserved for held, reserved, _ in owners)
    assert abs(live * each - under) <= each
    # One more block to a cell and there would be fewer cells than fit: as fine as can be.
    assert each == 1 or -(-pool.blocks // (each - 1)) > room


@given(st.text(max_size=60))
def test_any_name_is_drawn_in_the_room_it_takes(name: str) -> None:
    """A tenant could move the operator's cursor, or its row would push the others about."""
    safe = shown(name)
    for character in safe:
        assert unicodedata.category(character)[0] in "LNPSZ"
        assert unicodedata.category(character) not in ("Zl", "Zp", "Lm", "Sk") or character < "\x7f"
        assert unicodedata.bidirectional(character) not in ("R", "AL", "AN")
        assert not unicodedata.combining(character)
    assert shown(name, ascii_only=True).isascii()
    for width in (1, 2, 5, 30):
        assert cell_len(fit(safe, width, "…")) == width
        assert cell_len(fit_end(safe, width, "…")) <= width
        lines = wrapped(safe, width, 3, "…")
        assert len(lines) <= 3
        assert all(cell_len(line) <= width for line in lines)


def test_names_are_escaped_so_that_they_can_be_told_apart() -> None:
    """Two names would look the same, or one like another's."""
    assert shown("acme-1.eu_x") == "acme-1.eu_x"
    assert shown("a\x1b[2Jb\r\n") == "a\\x1b[2Jb\\x0d\\x0a"
    assert shown("\u202eevil\u2066") == "\\u202eevil\\u2066"
    assert shown("e\u0301\u200d\ufe0f") == "e\\u0301\\u200d\\ufe0f"
    assert shown("שלום") == "\\u05e9\\u05dc\\u05d5\\u05dd"
    assert shown("顧客 é") == "顧客 é"
    assert shown("a\\x1b") == "a\\\\x1b"
    assert shown("é", ascii_only=True) == "\\xe9"


def test_a_wide_name_keeps_columns_where_they_are() -> None:
    """Figures would stand under another column's head."""
    viewer = Viewer(SERVER, 0.0)
    viewer.show_books(
        books([Owner("t1", "顧客" * 20, held=7), Owner("t2", "b\x1b[H", held=5)]), 0.0
    )
    drawn = view.render(viewer.frame(0.0), 80, 24, GLYPHS)
    wide, other = [line.plain for line in drawn if "顧客" in line.plain or "\\x1b" in line.plain]
    assert cell_len(wide[: wide.index("7")]) == cell_len(other[: other.index("5")])
    assert cell_len(wide) == cell_len(other) == 80


def test_numbers_fit_into_their_columns() -> None:
    """Two columns would run into one number."""
    for number in (0, 9, 99_999, 100_000, 999_999, 9_999_499, 10**7, 10**9, 10**12):
        assert len(count(number)) <= 5
        assert len(rate(number + 0.04)) <= 5
    assert [count(n) for n in (99_999, 100_000, 12_345_678)] == ["99999", "100k", "12M"]
    assert [rate(n) for n in (0.0, 0.06, 12.34, 99.94, 99.96)] == [
        "0",
        "0.1",
        "12.3",
        "99.9",
        "100",
    ]
    assert [size(n) for n in (12, 760_320, 268_392_960, 1.5e12)] == [
        *("12 B", "760 kB", "268 MB", "1.5 TB")
    ]
    assert [time(t) for t in (0.0004, 0.048, 0.9996, 12.3)] == ["0.4 ms", "48 ms", "1.0 s", "12 s"]
    assert [span(t) for t in (119.9, 120, 7_200, 172_800)] == [
        *("119 s", "2 min", "2 h 0 min", "2 d 0 h")
    ]


def test_a_terminal_without_unicode_gets_none() -> None:
    """It would show question marks instead of bars."""
    assert glyphs_for("UTF-8") is glyphs_for("utf8") is GLYPHS
    assert glyphs_for("iso8859-1") is glyphs_for("ANSI_X3.4-1968") is glyphs_for(None) is ASCII


def test_what_the_messages_say_is_what_is_shown() -> None:
    """A figure would stand under another's name."""
    ledger = flooded_ledger()
    found = books_of(ledger)
    assert (found.held, found.reserved, found.cached) == (308, 12, 25)
    assert found.waterline == pytest.approx(ledger.pool.waterline)
    acme = next(owner for owner in found.owners if owner.name == "acme")
    assert (acme.most, acme.guaranteed, acme.waiting) == (330, 0, 35)
    ledger.tenants[0].ClearField("max_blocks")
    ledger.tenants[0].cached.CopyFrom(balance(6))
    assert books_of(ledger).owners[0].most is None
    load = load_of(flooded_diagnosis(), 300.0)
    assert load.flooding == "acme"
    assert load.marks.refused == pytest.approx(123 / 157)
    assert load.before is not None
    assert load.before.decode_rate == 212
    unmeasured = flooded_diagnosis()
    unmeasured.now.ClearField("peaks")
    assert load_of(unmeasured, 0.0).decode.bound_by == ""
