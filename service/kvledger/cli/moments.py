"""Moments as options of commands name them."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone

from kvledger.books.lines import timestamp


def moment(text: str) -> str:
    """A moment as the files of --books have it. For argparse."""
    try:
        # Python 3.10 does not read the Z.
        when = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith("Z") else text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time such as 2026-11-30 or 2026-11-30T12:00:00+01:00"
        ) from None
    return timestamp(when if when.tzinfo is not None else when.replace(tzinfo=timezone.utc))
