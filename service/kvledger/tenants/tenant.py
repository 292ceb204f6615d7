"""One tenant, as the door and the books know it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TenantLimits:
    """What one tenant may use at once; None is no limit of its own."""

    # Requests that run, and that wait.
    running_max: int | None = None
    queued_max: int | None = None
    # Prompt tokens of requests that wait.
    queued_tokens_max: int | None = None
    # Prompt and output tokens, averaged.
    tokens_per_second: float | None = None
    # Seconds that a step may take while one of its requests decodes.
    tpot_target: float | None = None
    # Bytes of KV blocks that its requests hold or have reserved.
    kv_bytes_max: int | None = None
    # Shares of the KV pool, from 0 to 1: what others leave to it, and the most that it takes,
    # cached blocks included.
    kv_guaranteed: float = 0.0
    kv_max: float = 1.0
    # Others' blocks never lie in its guaranteed share, and it takes no more than that.
    sealed: bool = False


@dataclass(frozen=True)
class Tenant:
    """A tenant by name, and by the number that the core books under."""

    name: str
    # Below 2**31, never used twice within a process.
    number: int
    # One more each time a tenant of this name is made anew: nothing of its predecessor is its own.
    epoch: int = 1
    limits: TenantLimits = field(default_factory=TenantLimits)
