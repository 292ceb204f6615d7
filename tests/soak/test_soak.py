"""The long runs, for a moment: that they find nothing, and that they would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mixed_load
import pytest
from drawn_requests import Manner, draw, templates
from drift import Look, drift, grown
from engine_harness import without_forecast
from mixed_load import Load, loaded

from kvledger.streams import Streams


async def test_mixed_requests_end_as_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load a request would get another's tokens, two receipts or none, or hang."""
    without_forecast(monkeypatch)
    verdict = await loaded(requests=300, seed=1, workers=24, asked=40)
    assert verdict.wrong == []
    assert verdict.requests == 300
    assert verdict.compared > 150
    assert verdict.ties == 0
    assert verdict.preemptions > 0, "the pool was to be too small"
    assert verdict.cut_prompts > 0, "the budget was to be too small"
    assert verdict.codes["INVALID_ARGUMENT"] > 0
    assert verdict.codes["CANCELLED"] > 0


async def test_an_answer_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that compares nothing would praise a server that mixes up its callers."""
    monkeypatch.setattr(Load, "_is_tie", lambda *arguments: False)
    answer_alone = Load.answer_alone

    async def answered(self: Load) -> None:
        await answer_alone(self)
        for received in self._alone:
            received.tokens = [token + 1 for token in received.tokens]

    monkeypatch.setattr(Load, "answer_alone", answered)
    verdict = await loaded(requests=20, seed=2, workers=4, asked=5)
    assert any("differs" in fault for fault in verdict.wrong)


async def test_a_receipt_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of receipts would be right because nobody counts what entered."""
    told: list[Any] = []

    def forget(self: mixed_load.ReceiptLog, event: str, **facts: Any) -> None:
        if event == "request_finished" and not told:
            told.append(event)
        else:
            info(self, event, **facts)

    info = mixed_load.ReceiptLog.info
    monkeypatch.setattr(mixed_load.ReceiptLog, "info", forget)
    verdict = await loaded(requests=20, seed=3, workers=4, asked=5)
    assert any("receipts" in fault for fault in verdict.wrong)


async def test_a_receipt_that_comes_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody would be billed twice."""
    close = Streams._close

    def twice(self: Streams, sequence: int, receipt: Any) -> None:
        close(self, sequence, receipt)
        mixed_load.ReceiptLog.info(
            self._on_end.__self__._log_for_test,  # type: ignore[attr-defined]
            "request_finished",
            reason="length",
            request_id="a second one",
        )

    monkeypatch.setattr(Streams, "_close", twice)
    made = mixed_load.ReceiptLog.__init__

    def remember(self: mixed_load.ReceiptLog) -> None:
        made(self)
        monkeypatch.setattr("kvledger.admission.Admission._log_for_test", self, raising=False)

    monkeypatch.setattr(mixed_load.ReceiptLog, "__init__", remember)
    verdict = await loaded(requests=5, seed=4, workers=2, asked=3)
    assert any("second one" in fault for fault in verdict.wrong)


@pytest.mark.soak
async def test_nothing_grows() -> None:
    """A server would be out of memory, descriptors or threads after a week."""
    verdict, looks = await drift(minutes=1.0, seed=5, workers=8, asked=10, most=30)
    assert verdict.wrong == []
    assert verdict.requests == 120
    first, last = looks[0], looks[-1]
    assert grown(replace(first, rss=last.rss), last) == [], "too short a run to judge memory by"


def test_what_grows_is_found() -> None:
    """Thresholds that nothing passes would call every leak flat."""
    flat = Look(rss=100 << 20, descriptors=50, threads=9, blocks_in_use=0, open_requests=0)
    assert grown(flat, flat) == []
    assert grown(flat, replace(flat, rss=101 << 20)) == []
    for worse in (
        replace(flat, rss=120 << 20),
        replace(flat, descriptors=60),
        replace(flat, threads=14),
        replace(flat, blocks_in_use=1),
        replace(flat, open_requests=1),
    ):
        assert len(grown(flat, worse)) == 1


def test_a_seed_draws_the_same_requests_again() -> None:
    """A failure of a long run could not be looked at again."""
    assert templates(7, 30) == templates(7, 30)
    asked = templates(7, 30)
    drawn = [draw(asked, 7, number) for number in range(500)]
    assert drawn == [draw(asked, 7, number) for number in range(500)]
    assert {one.manner for one in drawn} == set(Manner)
