"""Requests that may still be asked about."""

from __future__ import annotations

from kvledger.books.lines import EndedRequest
from kvledger.books.recent import RecentRequests
from kvledger.engine import EndReason
from kvledger.streams import receipt_of_waiting


def ended(name: str, tenant: int) -> EndedRequest:
    return EndedRequest(
        name, "t", tenant, 1, "", False, receipt_of_waiting(EndReason.CANCELLED, 1, 1)
    )


def test_a_tenants_requests_stay_whatever_others_send() -> None:
    """A client would learn from its own old request how many requests others had."""
    recent = RecentRequests(of_a_tenant=3, in_all=100)
    recent.note(ended("mine", 1))
    for number in range(50):
        recent.note(ended(f"theirs {number}", 2))
    assert recent.find("mine", 1) is not None
    assert recent.find("theirs 46", 2) is None
    assert recent.find("theirs 47", 2) is not None
    assert recent.find("mine", 2) is None
    assert recent.find("mine") is not None


def test_all_together_are_bounded_too() -> None:
    """Memory would grow with the number of tenants."""
    recent = RecentRequests(of_a_tenant=1000, in_all=100)
    recent.note(ended("mine", 1))
    for number in range(300):
        recent.note(ended(f"theirs {number}", 2))
    kept = [number for number in range(300) if recent.find(f"theirs {number}") is not None]
    assert len(kept) == 99
    assert recent.find("mine") is not None, "of whoever has most"


def test_what_has_no_receipt_is_not_kept() -> None:
    """It would be explained with nothing."""
    recent = RecentRequests()
    recent.note(EndedRequest("lost", "t", 1, 1, "", False, None))
    assert recent.find("lost") is None
