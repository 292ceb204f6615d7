"""Who is there, at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Present:
    """Requests and sequences."""

    waiting_requests: int  # to run for the first time
    waiting_tokens: int  # of their prompts
    held_requests: int  # at the door, for others of their own tenant to end
    running_requests: int  # admitted and not ended, preempted ones among them
    paused_requests: int  # of these, whose tokens are not read
    running_sequences: int  # with a place in steps
