"""What goes wrong in a simulation, drawn from a seed of its own.

slow_step=0.01x10     one step of a hundred takes ten times as long
fail_step=0.001       one of a thousand fails: all that took part in it end
cancel=0.05x3         one request of twenty is left by its caller, after three seconds on
                      average (5 unless told otherwise); those that have ended by then are not
stall=0.02x4          one of fifty is not read for four seconds (5), from its first token on
clock_jump=0.001x-2   after one step of a thousand the clock is set back by two seconds, or
                      with x2 forward
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

_SECONDS = 5.0


@dataclass(frozen=True)
class Chance:
    """How likely something is, and how much of it comes then."""

    probability: float = 0.0
    size: float = 1.0


@dataclass(frozen=True)
class Faults:
    """All of them; none unless told."""

    slow_step: Chance = Chance(0.0, 10.0)
    fail_step: Chance = Chance()
    cancel: Chance = Chance(0.0, _SECONDS)
    stall: Chance = Chance(0.0, _SECONDS)
    clock_jump: Chance = Chance(0.0, _SECONDS)

    @classmethod
    def parse(cls, text: str) -> Faults:
        """As the option has them, with commas between; ValueError for what is none."""
        defaults = {field.name: getattr(cls(), field.name) for field in fields(cls)}
        given: dict[str, Chance] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in defaults:
                raise ValueError(f"{name!r} is no fault; there are {', '.join(defaults)}")
            probability, _, size = value.partition("x")
            try:
                chance = Chance(float(probability), float(size or defaults[name].size))
            except ValueError:
                raise ValueError(f"{part!r} is not {name}=PROBABILITY or {name}=0.01x10") from None
            if not 0.0 <= chance.probability <= 1.0:
                raise ValueError(f"{part!r}: a probability lies between 0 and 1")
            if size and name == "fail_step":
                raise ValueError(f"{part!r}: a step fails or it does not; leave out x{size}")
            least = -1e6 if name == "clock_jump" else 0.0
            if not least < chance.size <= 1e6:
                raise ValueError(f"{part!r}: {size} is not more than {least:g} and at most 1e6")
            given[name] = chance
        return cls(**given)


NO_FAULTS = Faults()


class FaultsDrawn:
    """Faults as they come, step after step and request after request."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self._faults = faults
        self._steps = random.Random(f"{seed}:steps")
        # Apart: how many steps there are depends on the settings, which requests are hit does not.
        self._requests = random.Random(f"{seed}:requests")

    def slower(self) -> float:
        """How many times longer this step takes."""
        return self._size(self._faults.slow_step, self._steps, 1.0)

    def fails(self) -> bool:
        """Whether this step does."""
        return self._happens(self._faults.fail_step, self._steps)

    def jump(self) -> float:
        """Seconds by which the clock is set forward after this step."""
        return self._size(self._faults.clock_jump, self._steps, 0.0)

    def leaves_after(self) -> float | None:
        """Seconds after which the caller of this request leaves; None if it stays."""
        cancel, chance = self._faults.cancel, self._requests
        return chance.expovariate(1.0 / cancel.size) if self._happens(cancel, chance) else None

    def stalls_for(self) -> float | None:
        """Seconds for which nobody reads this request; None if somebody does."""
        stall = self._faults.stall
        return stall.size if self._happens(stall, self._requests) else None

    @staticmethod
    def _happens(what: Chance, chance: random.Random) -> bool:
        return what.probability > 0.0 and chance.random() < what.probability

    def _size(self, what: Chance, chance: random.Random, otherwise: float) -> float:
        return what.size if self._happens(what, chance) else otherwise
