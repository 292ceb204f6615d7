"""A tenant's tokens per second: a bucket that fills at its rate and may be overdrawn.

It holds at most what its rate brings in BURST_SECONDS, and begins full. A prompt enters when the
bucket has as many tokens as it takes, or is full where it takes more than the bucket can hold, and
is charged at once; output is charged as it comes and may leave a debt, which only keeps the next
ones out. So over any time a tenant gets its burst, its rate times that time, and at most what its
last request overdrew.

All counts are integers, so that no rounding adds up: a part is a million-millionth of a token.
"""

from __future__ import annotations

# Seconds of its rate that a bucket holds.
BURST_SECONDS = 10
# Parts of a token: a rate has steps of 1/1000 token per second, a time has nanoseconds.
_PARTS = 10**12


class TokenBucket:
    """Tokens that may be used now, at a time that each call names in nanoseconds."""

    def __init__(self, tokens_per_second: float, now: int) -> None:
        """A full one. The rate is rounded to 1/1000, and at least that."""
        self._rate = _parts_per_nanosecond(tokens_per_second)
        self._level = self._most
        self._filled_at = now

    @property
    def _most(self) -> int:
        return self._rate * BURST_SECONDS * 10**9

    @property
    def burst_tokens(self) -> float:
        """Tokens that it holds when it is full."""
        return self._most / _PARTS

    def tokens(self, now: int) -> float:
        """Tokens that are in it; below 0 it is overdrawn."""
        self._fill(now)
        return self._level / _PARTS

    def change_rate(self, tokens_per_second: float, now: int) -> None:
        """Goes on at another rate from now on, with what is in it and fits."""
        self._fill(now)
        self._rate = _parts_per_nanosecond(tokens_per_second)
        self._level = min(self._level, self._most)

    def wait_for(self, tokens: int, now: int) -> int:
        """Nanoseconds until a prompt of so many tokens may enter; 0 if it may now."""
        self._fill(now)
        missing = min(tokens * _PARTS, self._most) - self._level
        return max(0, -(-missing // self._rate))

    def charge(self, tokens: int, now: int) -> None:
        """Takes tokens out, down to any debt."""
        self._fill(now)
        self._level -= tokens * _PARTS

    def give_back(self, tokens: int, now: int) -> None:
        """Puts tokens back that were charged and not used."""
        self._fill(now)
        self._level = min(self._most, self._level + tokens * _PARTS)

    def _fill(self, now: int) -> None:
        # Calls may come with a time that is a little older than the last one's.
        elapsed = max(0, now - self._filled_at)
        self._filled_at += elapsed
        self._level = min(self._most, self._level + elapsed * self._rate)


def _parts_per_nanosecond(tokens_per_second: float) -> int:
    return max(1, round(tokens_per_second * 1000))
