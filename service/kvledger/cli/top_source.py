"""Asks a server for its books and its diagnosis again and again, also once it comes back."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from google.protobuf import duration_pb2

from kvledger.cli.client import channel
from kvledger.cli.ledger import explained
from kvledger.cli.top_messages import books_of, load_of
from kvledger.errors import SettingRefused
from kvledger.top.picture import Books, Load
from kvledger.v1 import diagnosis_pb2, diagnosis_pb2_grpc, ledger_pb2, ledger_pb2_grpc

# The diagnosis is asked for this often, in seconds: it looks at all that is kept of an interval.
_DIAGNOSIS_EVERY = 3.0
_DIAGNOSIS_TIMEOUT = 10.0
# Until the first answer, and beyond an interval until the next one. Nobody hears of a machine that
# went without a word.
_PATIENCE = 10.0
# What the thread gets to end, in seconds; it goes with the process if it does not.
_LAST_WORDS = 0.5
# Before it is asked again, in seconds: twice as long each time.
_FIRST_PAUSE, _LAST_PAUSE = 0.5, 10.0
# What the diagnosis is held against, in seconds before now, and how long the server must have
# served for that, the first.
_AGO = ((400.0, 300.0), (150.0, 60.0))

# Asking again would be answered the same.
_FINAL = {
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
}


@dataclass(frozen=True)
class Asked:
    """What is asked for, in seconds."""

    interval: float  # from one picture to the next
    over: float  # what the diagnosis is of


class Source:
    """One server. A thread of its own tells what comes, or what keeps it away."""

    def __init__(
        self,
        options: argparse.Namespace,
        metadata: tuple[tuple[str, str], ...],
        asked: Asked,
        on_books: Callable[[Books], None],
        on_load: Callable[[Load | str], None],
        on_trouble: Callable[[str, bool], None],
    ) -> None:
        """`on_load` is told why, where there is no diagnosis. `on_trouble` is told why nothing
        comes, and whether that is for good."""
        self._options = options
        self._metadata = metadata
        self._asked = asked
        self._on_books = on_books
        self._on_load = on_load
        self._on_trouble = on_trouble
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._ask_again_and_again, daemon=True)
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None
        self._patience = threading.Timer(0.0, lambda: None)
        self._is_silent = False
        self._served = 0.0

    def start(self) -> None:
        """Begins to ask."""
        self._thread.start()

    def close(self) -> None:
        """Asks no more."""
        self._closed.set()
        with self._lock:
            self._patience.cancel()
            if self._call is not None:
                self._call.cancel()
        if self._thread.is_alive():
            self._thread.join(_LAST_WORDS)

    def once(self) -> tuple[Books, Load]:
        """Both, once. Raises grpc.RpcError."""
        with channel(self._options) as connection:
            stub = ledger_pb2_grpc.LedgerServiceStub(connection)  # type: ignore[no-untyped-call]
            books = stub.GetLedger(
                ledger_pb2.GetLedgerRequest(), metadata=self._metadata, timeout=_PATIENCE
            )
            load = self._diagnosis(connection)
            if (ago := self._ago()) > 0:  # now it is known how long the server has served
                load = self._diagnosis(connection, ago)
            return books_of(books.ledger), load

    def _ask_again_and_again(self) -> None:
        pause = _FIRST_PAUSE
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                with channel(self._options) as connection:
                    self._watch(connection)
                why, is_final = "the server ended the answer", False
            except grpc.RpcError as error:
                why, is_final = self._why(error)
            except SettingRefused as error:
                why, is_final = str(error), True
            finally:
                with self._lock:
                    self._patience.cancel()
            if self._closed.is_set():
                return
            if is_final:
                self._on_trouble(why, True)
                return
            # Whoever answered for a while is asked again soon.
            pause = _FIRST_PAUSE if time.monotonic() - began > _LAST_PAUSE else pause
            self._on_trouble(f"NO ANSWER, asked again every {pause:g} s: {why}", False)
            self._closed.wait(pause)
            pause = min(_LAST_PAUSE, 2 * pause)

    def _why(self, error: grpc.RpcError) -> tuple[str, bool]:
        if self._is_silent:
            return f"nothing came from {self._options.server} for {_PATIENCE:g} s", False
        return explained(error, self._options), error.code() in _FINAL

    def _watch(self, connection: grpc.Channel) -> None:
        """Tells what comes until it ends. Raises grpc.RpcError."""
        stub = ledger_pb2_grpc.LedgerServiceStub(connection)  # type: ignore[no-untyped-call]
        request = ledger_pb2.WatchLedgerRequest(interval=_duration(self._asked.interval))
        call = stub.WatchLedger(request, metadata=self._metadata)
        with self._lock:
            self._call, self._is_silent = call, False
        self._be_patient(_PATIENCE)
        asked_at = float("-inf")
        for response in call:
            self._on_books(books_of(response.ledger))
            if time.monotonic() - asked_at >= _DIAGNOSIS_EVERY:
                asked_at = time.monotonic()
                self._tell_diagnosis(connection)
            self._be_patient(self._asked.interval + _PATIENCE)

    def _be_patient(self, seconds: float) -> None:
        """Ends the call unless this is called again in time."""
        with self._lock:
            self._patience.cancel()
            if self._closed.is_set():
                return
            self._patience = threading.Timer(seconds, self._lose_patience)
            self._patience.daemon = True
            self._patience.start()

    def _lose_patience(self) -> None:
        with self._lock:
            self._is_silent = True
            if self._call is not None:
                self._call.cancel()

    def _tell_diagnosis(self, connection: grpc.Channel) -> None:
        try:
            self._on_load(self._diagnosis(connection, self._ago()))
        except grpc.RpcError as error:
            self._on_load(f"none: {explained(error, self._options)}")

    def _diagnosis(self, connection: grpc.Channel, ago: float = 0.0) -> Load:
        stub = diagnosis_pb2_grpc.DiagnosisServiceStub(connection)  # type: ignore[no-untyped-call]
        request = diagnosis_pb2.DiagnoseRequest(interval=_duration(self._asked.over))
        if ago > 0:
            request.against.CopyFrom(_duration(ago))
        response = stub.Diagnose(request, metadata=self._metadata, timeout=_DIAGNOSIS_TIMEOUT)
        load = load_of(response, ago)
        self._served = load.served
        return load

    def _ago(self) -> float:
        """What the server can be held against; 0 if it is too young."""
        for served, ago in _AGO:
            if self._served >= served + self._asked.over:
                return ago
        return 0.0


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromMilliseconds(round(seconds * 1000))
    return duration
