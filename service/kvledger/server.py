"""One server process: the engine thread, the gRPC server, and how they start and stop.

Start: load, start the engine, serve. Stop: SIGTERM makes health NOT_SERVING, refuses new requests
and gives running streams `drain_timeout` to end; a second signal stops at once. If the engine's
loop ever dies, open requests fail and the process exits with a reason. Requests that are still
open when it stops get their receipts and end with UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Callable

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvledger.admission import Admission
from kvledger.constraints.compiler import ConstraintCompiler
from kvledger.engine import Engine, StepOutcome
from kvledger.errors import SettingRefused
from kvledger.rpc import connections
from kvledger.rpc.doors import check_every_method_has_a_row
from kvledger.rpc.generation import GenerationServicer
from kvledger.rpc.listener import Listener
from kvledger.rpc.models import ModelServicer
from kvledger.rpc.prompts import PromptEncoder
from kvledger.rpc.undecodable import UndecodableRefused
from kvledger.sampling import Sampler
from kvledger.served_model import ServedModel
from kvledger.settings import Settings
from kvledger.streams import MailboxLimits
from kvledger.v1 import generation_pb2, generation_pb2_grpc, models_pb2, models_pb2_grpc

_log = structlog.get_logger(__name__)

# Exit status of a server whose engine died or hangs, or who lost its port (EX_SOFTWARE).
BROKE = 70

# How often health looks at the engine's heartbeat, in seconds.
_HEALTH_INTERVAL = 0.25
# What handlers get to send their last message once their requests have ended, in seconds.
_LAST_WORDS = 2.0
# How long a server that is done still answers callers, so that who is on the way hears UNAVAILABLE
# with the reason; gRPC itself would only cancel them. In seconds.
_LAME_DUCK = 0.25

_SERVICES = {
    descriptor.full_name: descriptor
    for descriptor in (
        generation_pb2.DESCRIPTOR.services_by_name["GenerationService"],
        models_pb2.DESCRIPTOR.services_by_name["ModelService"],
        health_pb2.DESCRIPTOR.services_by_name["Health"],
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    )
}
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name


class Server:
    """Serves one model until it is told to stop."""

    def __init__(self, settings: Settings, model: ServedModel) -> None:
        check_every_method_has_a_row(_SERVICES.values())
        self._settings = settings
        self._model = model
        self._loop: asyncio.AbstractEventLoop | None = None
        sampler = Sampler(settings.sequences_max)
        self._engine = Engine(model.core, model.llama, sampler, self._publish, self._engine_died)
        self._admission = Admission(
            self._engine,
            model.config.context_tokens,
            settings.max_queued,
            MailboxLimits(settings.mailbox_tokens, settings.stall_timeout),
        )
        self._prompts = PromptEncoder(model.tokenizer, settings.max_queued)
        self._constraints = ConstraintCompiler(model.tokenizer)
        self._health = health.aio.HealthServicer()
        self._stop_requested = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._broke = False
        self._listener: Listener | None = None

    @property
    def port(self) -> int:
        """The port that it serves on, once it is ready; 0 for a unix socket."""
        assert self._listener is not None
        return self._listener.port

    @property
    def address(self) -> str:
        """host:port or unix:/path that it serves on, once it is ready."""
        assert self._listener is not None
        return self._listener.address

    async def run(self, ready: Callable[[], None] = lambda: None) -> int:
        """Serves until stopped; returns the process's exit status. `ready` is called once."""
        self._loop = asyncio.get_running_loop()
        self._listener = Listener(
            self._settings.listen, self._make_grpc_server, self._settings.certificates()
        )
        self._engine.start()
        await self._set_health(serving=True)
        await self._listener.start()
        # What is loaded stays: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        # A kernel's thread that wants the GIL back should not wait 5 ms for it.
        sys.setswitchinterval(0.0005)
        self._handle_signals()
        watches = (
            asyncio.create_task(self._watch_heartbeat()),
            asyncio.create_task(self._watch_listener(self._listener)),
        )
        _log.info(
            "serving",
            listen=self.address,
            tls=self._settings.tls_cert is not None,
            client_certificates=self._settings.tls_client_ca is not None,
            model=self._model.id,
        )
        if self._settings.dev:
            _log.warning("dev_mode", meaning="callers without identity are served as one tenant")
        ready()
        await self._stop_requested.wait()
        await self._drain()
        for watch in watches:
            watch.cancel()
        await self._end_open_requests()
        await self._listener.stop(_LAST_WORDS)
        if not self._engine.stop(_LAST_WORDS):
            _log.error("engine_hangs", silence_seconds=round(self._engine.silence_seconds, 1))
            self._broke = True
        self._prompts.close()
        await self._constraints.stop()
        _log.info("stopped", open_requests=len(self._admission.open_requests))
        return BROKE if self._broke else 0

    @property
    def _service_names(self) -> tuple[str, ...]:
        """The services that it has: a probe must not hear that one is well which is not there."""
        return tuple(name for name in _SERVICES if self._settings.reflects or name != _REFLECTION)

    def request_stop(self) -> None:
        """Drains; asked again, stops at once."""
        if self._stop_requested.is_set():
            self._stop_now.set()
        self._stop_requested.set()

    def _make_grpc_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(
            options=connections.options(self._settings.max_connections),
            interceptors=(UndecodableRefused(),),
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(  # type: ignore[no-untyped-call]
            GenerationServicer(
                self._model, self._engine, self._admission, self._prompts, self._constraints
            ),
            server,
        )
        models_pb2_grpc.add_ModelServiceServicer_to_server(  # type: ignore[no-untyped-call]
            ModelServicer(self._model, self._prompts), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._settings.reflects:
            reflection.enable_server_reflection(self._service_names, server)
        return server

    def _publish(self, outcome: StepOutcome) -> None:
        assert self._loop is not None
        # The loop may be gone when the last step ends during a hard stop.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._admission.streams.deliver, outcome)

    def _engine_died(self) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._give_up)

    def _give_up(self) -> None:
        self._broke = True
        self._admission.drain()  # who enters now would wait for an engine that is gone
        self._admission.streams.fail_all()
        self.request_stop()

    def _handle_signals(self) -> None:
        assert self._loop is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, NotImplementedError):  # not the main thread
                self._loop.add_signal_handler(number, self.request_stop)

    async def _watch_heartbeat(self) -> None:
        """Health says what the engine's loop does, not what somebody hopes."""
        previous = True
        while True:
            silent = self._engine.silence_seconds > self._settings.heartbeat_timeout
            serving = self._engine.alive and not silent
            if serving != previous:
                await self._set_health(serving)
                _log.warning("health_changed", serving=serving)
                previous = serving
            await asyncio.sleep(_HEALTH_INTERVAL)

    async def _watch_listener(self, listener: Listener) -> None:
        try:
            await listener.watch()
        except SettingRefused:
            _log.exception("listener_lost")
            self._broke = True
            self.request_stop()

    async def _set_health(self, serving: bool) -> None:
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *self._service_names):
            await self._health.set(name, status)

    async def _drain(self) -> None:
        await self._health.enter_graceful_shutdown()
        self._admission.drain()
        streams = self._admission.streams
        _log.info("draining", open_requests=streams.open_count)
        empty = asyncio.create_task(streams.wait_until_empty())
        now = asyncio.create_task(self._stop_now.wait())
        await asyncio.wait(
            (empty, now),
            timeout=self._settings.drain_timeout,
            return_when=asyncio.FIRST_COMPLETED,
        )
        empty.cancel()
        await asyncio.wait((now,), timeout=_LAME_DUCK)
        now.cancel()

    async def _end_open_requests(self) -> None:
        """What still runs gets its receipt, and its caller UNAVAILABLE."""
        self._admission.end_all()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._admission.streams.wait_until_empty(), _LAST_WORDS)
