"""The lines of what `kvledger doctor` reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report; `mend` says what to do if it is not good."""

    good: bool
    subject: str
    text: str
    mend: str = ""
    # What else was found on the way, shown below it.
    further: tuple[Finding, ...] = ()


def show(finding: Finding) -> bool:
    """Prints it and what is further found; whether all of it is good."""
    print(f"{'ok  ' if finding.good else 'FAIL'}  {finding.subject:10}  {finding.text}", flush=True)
    if not finding.good and finding.mend:
        print(f"      {'':10}  to mend it: {finding.mend}", flush=True)
    good = [show(each) for each in finding.further]
    return finding.good and all(good)
