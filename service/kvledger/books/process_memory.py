"""Where the memory of the server's process is.

What the server took itself is counted: weights, workspace, pool. What libraries take is measured
as growth of resident memory, at the points of the start where one thing at a time happens. What no
part explains is `other`, and stays small: docs/ledger.md names what is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from kvledger.memory import Resident, resident


@dataclass(frozen=True)
class LoadedMemory:
    """What loading a model was measured to take, in bytes."""

    # Of the process itself, without pages of files, before it began and when it was done.
    before: int = 0
    after: int = 0
    tokenizer: int = 0


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of the process by what they are for; they add up to what is resident."""

    weights: int
    workspace: int
    pool: int
    host_arena: int
    runtime: int
    tokenizer: int
    constraints: int
    service: int
    other: int

    @property
    def resident(self) -> int:
        """All of it."""
        return sum(int(getattr(self, part.name)) for part in fields(self))


class ProcessMemory:
    """Follows the memory of one server's process."""

    def __init__(
        self,
        loaded: LoadedMemory,
        weights: int,
        pool: int,
        workspace: Callable[[], int],
        constraints: int,
        look: Callable[[], Resident] = resident,
    ) -> None:
        """`weights`, `pool` and `workspace` are counted bytes; the last may grow.

        `constraints` were measured, after loading.
        """
        self._loaded = loaded
        self._weights = weights
        self._pool = pool
        self._workspace = workspace
        self._constraints = constraints
        self._look = look
        self._workspace_loaded = workspace()
        self._service = 0

    def serving(self) -> None:
        """The server is ready: what has come since it was loaded is the service's."""
        grown = self._workspace() - self._workspace_loaded + self._constraints
        self._service = max(0, self._look().own - self._loaded.after - grown)

    def parts(self) -> MemoryParts:
        """As of now."""
        now, workspace = self._look(), self._workspace()
        # Pages of programs and libraries come as they are used; nothing else is mapped.
        runtime = self._loaded.before + now.files
        made = self._loaded.tokenizer + self._constraints + self._service
        known = self._weights + workspace + self._pool + made
        return MemoryParts(
            weights=self._weights,
            workspace=workspace,
            pool=self._pool,
            host_arena=0,
            runtime=runtime,
            tokenizer=self._loaded.tokenizer,
            constraints=self._constraints,
            service=self._service,
            other=now.total - runtime - known,
        )
