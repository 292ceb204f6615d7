"""What every arm is: something that starts, streams tokens, and stops."""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Say = Callable[[str], None]


class NotRun(Exception):
    """An arm that cannot be set up or started; the message is the reason, in one sentence."""


@dataclass(frozen=True)
class ArmSettings:
    """What all arms of a run have in common."""

    cache: Path  # where peers are set up
    model: Path  # the GGUF file
    cores: tuple[int, ...]  # processors that a server may run on
    threads: int = 2
    kv_tokens: int = 32768  # room for keys and values
    sequences: int = 32  # most at once
    context: int = 8192  # longest prompt and output together


def default_cache() -> Path:
    """Where peers are set up: $BENCH_PEERS, else a folder of the user's cache."""
    named = os.environ.get("BENCH_PEERS")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else base / "kvledger-peers"


def default_cores(count: int) -> tuple[int, ...]:
    """The first `count` processors that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0))[:count])


class Arm(ABC):
    """One server with its settings. Use: start, stream as often as you like, stop."""

    name: str

    def __init__(self, settings: ArmSettings) -> None:
        self.settings = settings

    @classmethod
    def set_up(cls, settings: ArmSettings, say: Say) -> None:
        """Builds or installs what the arm needs. Raises NotRun."""
        say(f"{cls.name} needs no set-up")

    @property
    @abstractmethod
    def described(self) -> str:
        """The command or the settings that it runs with, for the head of a table."""

    @abstractmethod
    async def start(self) -> None:
        """Starts the server and waits until it answers. Raises NotRun."""

    @abstractmethod
    def stream(
        self, prompt: Sequence[int], output: int, ignore_eos: bool = True
    ) -> AsyncIterator[Sequence[int]]:
        """Token ids of a greedy answer as they come. Raises CallFailed."""

    @property
    @abstractmethod
    def group(self) -> int:
        """The id of its process group, once started."""

    def suspend(self) -> None:
        """Stops the clock of the server's processes: some wait for work by asking all the time."""
        os.killpg(self.group, signal.SIGSTOP)

    def resume(self) -> None:
        """Lets them go on."""
        os.killpg(self.group, signal.SIGCONT)

    @abstractmethod
    async def stop(self) -> None:
        """Ends the server, also one that has not started."""
