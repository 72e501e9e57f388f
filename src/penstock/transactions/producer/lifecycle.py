"""The life of a producer: connected at the first use, drained and disconnected once."""

from __future__ import annotations

import logging
import threading
import time
from enum import Enum

from penstock.errors import StoppedError
from penstock.transactions.producer.check_responder import CheckResponder
from penstock.transactions.producer.flight.deadlines import RequestDeadlines
from penstock.transactions.producer.flight.futures import in_callback
from penstock.transactions.store import Store

_log = logging.getLogger("penstock.transactions")


class _State(Enum):
    """How far it is; it only ever goes on."""

    NEW = "new"
    STARTED = "started"
    STOPPED = "stopped"


# A member of an enumeration is expensive to look up, and every message passes here.
_STARTED = _State.STARTED


class ProducerLifecycle:
    """Starts and stops the parts of a producer, once each. Thread-safe."""

    def __init__(self, group: str, store: Store, checks: CheckResponder | None, deadlines: RequestDeadlines) -> None:
        self._group = group
        self._store = store
        self._checks = checks
        self._deadlines = deadlines
        self._lock = threading.Lock()
        # Written under the lock; read without it, for it only ever goes on.
        self._state = _State.NEW
        # Cleared under the lock, set by who stops it.
        self._is_down = threading.Event()
        self._is_down.set()

    def ensure_started(self) -> None:
        """Start all parts at the first use."""
        if self._state is not _STARTED:
            self.start()

    def start(self) -> None:
        """Start all parts; a start more does nothing. Raises as `TransactionalProducer.start`."""
        with self._lock:
            if self._state is _State.STOPPED:
                raise StoppedError(f"the producer of group {self._group} was stopped; make a new one")
            if self._state is _STARTED:
                return
            self._store.start()
            try:
                if self._checks is not None:
                    self._checks.start()
                self._deadlines.start()
            except BaseException:
                # What was started cannot be started again.
                self._state = _State.STOPPED
                self._store.stop(0)
                raise
            self._state = _State.STARTED
            self._is_down.clear()

    def stop(self, timeout_s: float) -> None:
        """Stop all parts, in the order in which nothing that is under way is lost.

        A second call waits for the first. From a callback of a future, which holds up what is waited for, it returns at
        once, and the rest is done by a thread of its own.
        """
        # A start under way may wait for brokers.
        if not self._lock.acquire(timeout=timeout_s):
            _log.warning("the producer of %s is not stopped: its start has not returned", self._group)
            return
        try:
            before, self._state = self._state, _State.STOPPED
        finally:
            self._lock.release()
        if before is _State.STARTED and in_callback():
            threading.Thread(target=self._stop, args=(timeout_s,), name=f"penstock-stop-{self._group}").start()
        elif before is _State.STARTED:
            self._stop(timeout_s)
        elif not in_callback():
            self._is_down.wait(timeout_s)

    def _stop(self, timeout_s: float) -> None:
        deadline = 0.0
        try:
            if self._checks is not None:
                self._checks.stop(timeout_s)
            deadline = time.monotonic() + timeout_s
            # Before the store refuses decisions: halves that are stored by now lead to some.
            self._deadlines.drain(timeout_s)
        finally:
            try:
                self._store.stop(max(0.0, deadline - time.monotonic()))
            finally:
                self._deadlines.stop()
                self._is_down.set()
