"""One run, made of options and of the settings that `serve` would have."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from kvledger import _core
from kvledger.errors import SettingRefused
from kvledger.memory import memory_available
from kvledger.planning.planned_model import PlannedModel, served_model
from kvledger.served_model import pool_blocks
from kvledger.settings import Settings
from kvledger.simulation.costs import Costs, ServedCosts, costs_from
from kvledger.simulation.faults import Faults
from kvledger.simulation.loop import CoreSettings, Run, Simulation
from kvledger.simulation.measuring import measured
from kvledger.simulation.outcome import Outcome, Targets
from kvledger.simulation.recorded import Recorded, read_books
from kvledger.simulation.trace import read_trace
from kvledger.simulation.traffic import LogNormal, MadeUp, Replay, Row, Shape, Traffic
from kvledger.tenants.shares import CoreShare, PoolShape, core_shares
from kvledger.tenants.tenant import Tenant
from kvledger.tpot_targets import step_time_max

_CONTEXT = 8192
_REQUESTS, _PROMPT, _OUTPUT, _SPREAD = 1000, 500, 200, 0.7
_MADE_UP = ("requests", "prompt", "output", "spread", "turns", "think", "senders")
# Limits of tenants that the door keeps, and no simulation.
_AT_THE_DOOR = ("running_max", "queued_max", "queued_tokens_max", "tokens_per_second")


@dataclass
class Known:
    """What several runs of a command share, read once."""

    _rows: dict[tuple[Path, int | None], list[Row]] = field(default_factory=dict)
    _books: dict[tuple[Path, int | None], Recorded] = field(default_factory=dict)
    _costs: dict[Path, ServedCosts] = field(default_factory=dict)
    _measured: Costs | None = None

    def trace(self, path: Path, limit: int | None) -> list[Row]:
        """See read_trace."""
        if (path, limit) not in self._rows:
            self._rows[path, limit] = read_trace(path, limit)
        return self._rows[path, limit]

    def books(self, folder: Path, limit: int | None) -> Recorded:
        """See read_books."""
        if (folder, limit) not in self._books:
            self._books[folder, limit] = read_books(folder, limit)
        return self._books[folder, limit]

    def costs(self, path: Path) -> ServedCosts:
        """See costs_from; `-` is what comes in. Raises SettingRefused."""
        if path not in self._costs:
            try:
                text = sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is no text"
                raise SettingRefused(f"--costs {path}: {reason or error}") from None
            self._costs[path] = costs_from(path, text)
        return self._costs[path]

    def measured(self, settings: Settings, context: int) -> Costs:
        """Of the first run's model: --vary changes what does not matter to it."""
        if self._measured is None:
            self._measured = measured(settings, context)
        return self._measured


@dataclass(frozen=True)
class Scenario:
    """One run, ready to begin."""

    settings: CoreSettings
    traffic: Traffic
    costs: Costs
    how: Run
    targets: Targets
    numbers: Mapping[str, int]
    shares: Sequence[CoreShare]
    step_times: Mapping[str, int]
    notes: Sequence[str]

    def run(self) -> Outcome:
        """From its beginning to the last answer."""
        return Simulation(
            self.settings,
            self.traffic,
            self.costs,
            self.how,
            numbers=self.numbers,
            shares=self.shares,
            step_times=self.step_times,
        ).run()


def scenario(options: argparse.Namespace, settings: Settings, known: Known) -> Scenario:
    """What cli/simulate_options.py's options and serve's settings ask for.

    Raises SettingRefused or ModelRefused.
    """
    return _Maker(options, settings, known).make()


class _Maker:
    """Works out what is not given from what is."""

    def __init__(self, options: argparse.Namespace, settings: Settings, known: Known) -> None:
        self._options, self._known = options, known
        self._check()
        self._served = known.costs(options.costs) if options.costs is not None else None
        self._settings = settings.model_copy(update=self._server_settings(settings))
        if self._settings.token_budget < self._settings.sequences_max:
            raise SettingRefused(
                f"--token-budget {self._settings.token_budget} is less than --max-sequences "
                f"{self._settings.sequences_max}; raise the one or lower the other"
            )
        self._keeps_blocks = not {"block_tokens", "kv_format"} & settings.model_fields_set

    def make(self) -> Scenario:
        """All of it."""
        options = self._options
        core = self._core_settings()
        tenants = self._tenants()
        traffic = self._traffic(tenants)
        return Scenario(
            settings=core,
            traffic=traffic,
            costs=self._costs(core),
            how=Run(
                seed=self._seed,
                noise=options.noise or 0.0,
                gap=options.gap or 0.0,
                faults=options.faults or Faults(),
                max_tokens=options.max_tokens,
                exact=options.exact,
            ),
            targets=Targets(options.ttft, options.tpot),
            numbers={tenant.name: tenant.number for tenant in tenants},
            shares=self._shares(tenants, core),
            step_times={
                tenant.name: step_time_max(None, tenant.limits, None) for tenant in tenants
            },
            notes=_notes(tenants, self._settings),
        )

    @property
    def _seed(self) -> int:
        return 1 if self._options.seed is None else int(self._options.seed)

    def _check(self) -> None:
        """That the options make a whole."""
        options = self._options
        sources = [
            f"--{name}"
            for name in ("trace", "books", "rate", "callers")
            if getattr(options, name) is not None
        ]
        if len(sources) != 1:
            said = " and ".join(sources) if sources else "nothing"
            raise SettingRefused(
                f"{said} says what the traffic is; give one of --trace, --books, --rate, --callers"
            )
        replayed = sources[0] in ("--trace", "--books")
        for name in _MADE_UP if replayed else ("rate_scale", "limit"):
            if getattr(options, name) is not None:
                option = "--from" if name == "senders" else f"--{name.replace('_', '-')}"
                raise SettingRefused(f"{option} is not for {sources[0]}; leave it out")
        if (options.decode is None) != (options.prefill is None):
            raise SettingRefused(
                "--decode and --prefill describe one server: give both, or neither"
            )
        given = [
            f"--{name}"
            for name in ("costs", "decode", "measure")
            if getattr(options, name) not in (None, False)
        ]
        if len(given) > 1:
            raise SettingRefused(
                f"{given[0]} and {given[1]} both say how long steps take; give one"
            )
        if not given and sources[0] != "--books":
            raise SettingRefused(
                "nothing says how long steps take; give --costs FILE, --decode and --prefill, or "
                "--measure"
            )

    @cached_property
    def _recorded(self) -> Recorded | None:
        options = self._options
        return self._known.books(options.books, options.limit) if options.books else None

    def _server_settings(self, settings: Settings) -> dict[str, object]:
        """Those of the server that was diagnosed or recorded, as far as none are given."""
        given = settings.model_fields_set
        found: dict[str, object] = {}
        setup = self._recorded.setup if self._recorded is not None else None
        if setup is not None:
            found = {
                "max_sequences": setup.sequences_max,
                "token_budget": setup.token_budget,
                "kv_blocks": setup.blocks,
                "step_stretch": setup.step_stretch,
                "prefill_step": setup.prefill_step,
                "tpot_target": setup.tpot_target,
                "prefix_reuse": "on" if setup.reuses_prefixes else "off",
            }
        if self._served is not None:
            found |= self._served.settings
        if "kv_bytes" in given:
            found.pop("kv_blocks", None)
        return {name: value for name, value in found.items() if name not in given}

    @cached_property
    def _model(self) -> PlannedModel:
        """The model's sizes, read where something depends on them."""
        return served_model(self._settings.model, self._settings.download)

    def _layout(self) -> _core.KvLayout:
        config = self._model.config
        return _core.KvLayout(
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            block_tokens=self._settings.block_tokens,
        )

    def _core_settings(self) -> CoreSettings:
        settings, options = self._settings, self._options
        context, growth = options.context or _CONTEXT, 0.0
        blocks = settings.kv_blocks
        if blocks is None:
            config = self._model.config
            context, growth = options.context or config.context_tokens, config.cost_growth
            # A machine that has the memory is what is asked about; without --kv-bytes it is this.
            available = settings.kv_bytes or memory_available()
            blocks = pool_blocks(settings, self._layout(), context, available)
        return CoreSettings(
            blocks=blocks,
            slots_per_block=self._slots(),
            context_tokens=context,
            token_budget=settings.token_budget,
            sequences_max=settings.sequences_max,
            priority_aging=settings.priority_aging,
            tpot_target=settings.tpot_target,
            step_stretch=settings.step_stretch,
            prefill_step=settings.prefill_step,
            prefix_reuse=settings.reuses_prefixes,
            cost_growth=growth,
            max_queued=settings.max_queued,
        )

    def _slots(self) -> int:
        """Tokens of a block: as the server had, or as the settings make them."""
        setup = self._recorded.setup if self._recorded is not None else None
        for known in (self._served and self._served.block_tokens, setup and setup.block_tokens):
            if known and self._keeps_blocks:
                return int(known)
        settings = self._settings
        layout = _core.KvLayout(
            layers=1, kv_heads=1, head_dim=64, block_tokens=settings.block_tokens
        )
        return layout.slots_per_block(settings.kv_format)

    def _costs(self, core: CoreSettings) -> Costs:
        options = self._options
        if self._served is not None:
            return self._served.costs
        if options.decode is not None:
            return Costs(options.decode, options.prefill)
        if options.measure:
            return self._known.measured(self._settings, core.context_tokens)
        assert self._recorded is not None
        return self._recorded.costs(options.books)

    def _tenants(self) -> Sequence[Tenant]:
        """Those of the file, if there is one."""
        settings = self._settings
        return settings.registry().now.tenants() if settings.tenants is not None else ()

    def _traffic(self, tenants: Sequence[Tenant]) -> Traffic:
        options = self._options
        traffic: Traffic
        if options.trace is not None:
            rows = self._known.trace(options.trace, options.limit)
            traffic = Replay(rows, self._seed, options.rate_scale or 1.0)
        elif self._recorded is not None:
            traffic = Replay(self._recorded.rows, self._seed, options.rate_scale or 1.0)
        else:
            traffic = MadeUp(self._shape(tenants), self._seed)
        unknown = set(traffic.tenants) - {tenant.name for tenant in tenants}
        if tenants and unknown:
            raise SettingRefused(
                f"--tenants has no {sorted(unknown)[0]}, who is in the traffic; add it, or leave "
                f"--tenants out"
            )
        return traffic

    def _shape(self, tenants: Sequence[Tenant]) -> Shape:
        options = self._options
        spread = _SPREAD if options.spread is None else options.spread
        everybody = {tenant.name: 1.0 for tenant in tenants} or {"all": 1.0}
        return Shape(
            LogNormal(options.prompt or _PROMPT, options.output or _OUTPUT, spread),
            rate=options.rate,
            callers=options.callers,
            requests=options.requests or _REQUESTS,
            turns=options.turns or 1,
            think=options.think or 0.0,
            tenants=options.senders or everybody,
        )

    def _shares(self, tenants: Sequence[Tenant], core: CoreSettings) -> Sequence[CoreShare]:
        if not tenants:
            return ()
        by_bytes = any(tenant.limits.kv_bytes_max is not None for tenant in tenants)
        block_bytes = self._layout().block_bytes if by_bytes else 1
        pool = PoolShape(core.blocks, block_bytes, core.slots_per_block)
        return core_shares(tenants, pool, more_may_come=False)


def _notes(tenants: Sequence[Tenant], settings: Settings) -> Sequence[str]:
    """What was asked for and is not simulated."""
    limits = sorted(
        {
            name
            for tenant in tenants
            for name in _AT_THE_DOOR
            if getattr(tenant.limits, name) is not None
        }
    )
    notes = []
    if limits:
        notes.append(f"Not simulated, because the door keeps it: {', '.join(limits)} of tenants.")
    if settings.max_queued_tokens is not None:
        notes.append("Not simulated: --max-queued-tokens.")
    return notes
