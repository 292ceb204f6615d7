"""What the view shows of a server, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Owner:
    """A tenant, a share group or a public prefix, and what it has of the pool, in blocks."""

    key: str  # the same as long as it exists
    name: str
    kind: str = "tenant"  # or "group", "public"
    is_served: bool = True
    held: int = 0
    reserved: int = 0
    cached: int = 0
    guaranteed: int = 0
    most: int | None = None  # blocks; None: as many as there are
    open: int = 0  # requests in the books
    queued: int = 0  # of these, those that never ran yet
    at_door: int = 0  # requests that wait for others of the tenant to end

    @property
    def live(self) -> int:
        """Blocks under the waterline."""
        return self.held + self.reserved

    @property
    def waiting(self) -> int:
        """Requests that never ran yet, wherever they wait."""
        return self.queued + self.at_door

    @property
    def is_nobody(self) -> bool:
        """Whether there is nothing to show of it: it may not call, and has nothing."""
        return not (self.is_served or self.live or self.cached or self.open or self.waiting)


@dataclass(frozen=True)
class Books:
    """The pool at one moment, in blocks."""

    elapsed: float  # seconds since the pool was taken
    blocks: int
    block_bytes: int
    free: int
    reserved: int
    held: int
    cached: int
    releasing: int
    empty_slots: int
    held_slots: int
    owners: Sequence[Owner] = ()

    @property
    def waterline(self) -> float:
        """From 0 to 1."""
        live = self.held + self.reserved + self.releasing
        return live / self.blocks if self.blocks else 0.0


@dataclass(frozen=True)
class Phase:
    """What prefill or decode did over an interval."""

    share: float = 0.0  # of the time
    tokens_per_second: float = 0.0
    step_median: float = 0.0  # seconds
    step_p99: float = 0.0
    sequences: float = 0.0  # in a step, on average
    bound_by: str = ""  # empty where the machine was not measured
    of_peak: float = 0.0  # of what binds it


@dataclass(frozen=True)
class Finding:
    """What limits the service."""

    name: str
    weight: float  # from 0 to 1
    sentence: str
    remedy: str
    in_vain: str = ""  # what looks right and would not help


@dataclass(frozen=True)
class Marks:
    """What can get better or worse, over an interval."""

    waterline: float
    waiting: float  # of the requests' time
    decode_rate: float  # tokens a second
    decode_p99: float  # seconds
    refused: float  # of those that came


@dataclass(frozen=True)
class Load:
    """What the server did over the interval just gone, and who is there now."""

    seconds: float
    model: str
    version: str
    served: float  # seconds
    running: int
    paused: int
    sequences: int
    sequences_max: int
    waiting: int
    waiting_tokens: int
    at_door: int
    prefill: Phase
    decode: Phase
    summary: str
    marks: Marks
    findings: Sequence[Finding] = ()
    requests: int = 0  # that entered
    refused: Mapping[str, int] = field(default_factory=dict)  # by reason
    preempted: Mapping[str, int] = field(default_factory=dict)  # by reason
    # By tenant, prompt tokens of its open requests at a time.
    open_tokens: Mapping[str, float] = field(default_factory=dict)
    before: Marks | None = None  # of an interval that ended `ago` seconds ago
    ago: float = 0.0

    @property
    def flooding(self) -> str | None:
        """The tenant that asks for most while others wait, if one does."""
        if not self.open_tokens or all(f.name != "flooding_tenant" for f in self.findings):
            return None
        return max(self.open_tokens, key=lambda name: self.open_tokens[name])


@dataclass(frozen=True)
class Frame:
    """All that is on the screen."""

    server: str
    books: Books | None = None
    earlier: Books | None = None  # some seconds before, for rates
    load: Load | None = None
    age: float = 0.0  # seconds since `books` came, or since the first question if none did
    trouble: str = ""  # why nothing newer comes
    load_trouble: str = ""
    waterlines: Sequence[float] = ()  # the last ones, the newest at the end
    letters: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # and colours, by key
    sort: str = "memory"
    first: int = 0  # row of the table that is shown first
    is_paused: bool = False
    shows_help: bool = False
