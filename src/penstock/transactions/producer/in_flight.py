"""The shared core of one producer: the store, start and stop, the room for transactions in flight, and deadlines.

A transaction holds room from its start until the last answer of the store. The deadline thread gives up transactions
that wait too long, and a stop gives up all others that still wait. The flight itself decides what that means for the
transaction and calls its owner back.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from penstock.clients.bounded_calls import ask_again
from penstock.errors import BufferFullError, StoppedError
from penstock.transactions.model import ProducerStatistics, TransactionState
from penstock.transactions.producer.check_responder import CheckResponder
from penstock.transactions.store import Store

if TYPE_CHECKING:
    from penstock.telemetry.sending import SendSpans

_log = logging.getLogger("penstock.transactions")

# Members of enumerations are slow to look up, and every message passes here.
_COMMIT, _UNKNOWN = TransactionState.COMMIT, TransactionState.UNKNOWN

#: Seconds between two looks at the deadlines.
_POLL_S = 0.1
#: Seconds between two looks at outstanding answers during a stop.
_STOP_POLL_S = 0.005
#: Seconds that a stop waits for the deadline thread.
_JOIN_S = 5.0


class _CurrentThread(threading.local):
    #: Whether the thread runs a callback of a submission. It serves all deliveries then, and must not wait for one.
    in_callback = False


current_thread = _CurrentThread()


class _Life(Enum):
    """The life of a producer; it only moves forward."""

    NEW = "new"
    STARTED = "started"
    STOPPED = "stopped"


_STARTED, _STOPPED = _Life.STARTED, _Life.STOPPED


class InFlight(Protocol):
    """The private half of a `Flight` that the core works with."""

    _size: int
    _deadline: float

    @property
    def _is_owed(self) -> bool: ...

    def _give_up(self, now: float) -> None: ...


class Core:
    """The state that all transactions of one producer share. Thread-safe.

    One transaction alone may have more than `max_bytes`. A start waits for room for `room_timeout_s` seconds; with 0 it
    raises at once. A flight waits `answer_timeout_s` seconds for an answer of the store; this is infinite if the store
    keeps the time itself. It waits `publish_timeout_s` seconds from the stored decision until the publication.
    """

    def __init__(
        self,
        store: Store,
        group: str,
        *,
        max_count: int,
        max_bytes: int,
        room_timeout_s: float,
        answer_timeout_s: float,
        publish_timeout_s: float,
        checks: CheckResponder | None,
        spans: SendSpans | None,
    ) -> None:
        self.store = store
        self.group = group
        self.spans = spans
        self.room_timeout_s = room_timeout_s
        self.answer_timeout_s = answer_timeout_s
        self.publish_timeout_s = publish_timeout_s
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._checks = checks
        #: Targets that were checked before, for event loops. Each step on a set is atomic.
        self.known_targets: set[tuple[str, int | None]] = set()
        # Guards start and stop.
        self._life_lock = threading.Lock()
        # Written under the life lock. Read without it, because it only moves forward.
        self._life = _Life.NEW
        # Clear only while the producer runs, until a stop is complete.
        self._is_down = threading.Event()
        self._is_down.set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"penstock-deadlines-{group}", daemon=True)
        #: Guards all fields below, and the phase of every flight: the owner, the store's threads and the deadline
        #: thread meet there. A plain lock, because entering a `Condition` runs Python code.
        self.lock = threading.Lock()
        # Threads that wait for room sleep on it.
        self._room = threading.Condition(self.lock)
        self._waiting = 0
        # Flights that hold room, and the bytes of their keys and values.
        self._flights: set[InFlight] = set()
        self.bytes = 0
        #: Flights whose decision is stored and whose owner waits for the publication.
        self.unseen: set[InFlight] = set()
        # Transactions that ended without an error, by their decision.
        self._committed = self._rolled_back = self._unknown = 0
        #: Halves and decisions that are not known to be stored; and those decisions of them that no owner waited for.
        self.failed = self.lost = 0

    def start(self) -> None:
        """Start all parts; when they run, do nothing. Raises as `TransactionalProducer.start`."""
        if self._life is _STARTED:
            return
        with self._life_lock:
            if self._life is _STOPPED:
                raise StoppedError(f"the producer of group {self.group} was stopped; make a new one")
            if self._life is _STARTED:
                return
            self.store.start()
            try:
                if self._checks is not None:
                    self._checks.start()
                self._thread.start()
            except BaseException:
                # Threads cannot start twice.
                self._life = _STOPPED
                self.store.stop(0)
                raise
            self._life = _STARTED
            self._is_down.clear()

    def stop(self, timeout_s: float) -> None:
        """Stop all parts, in an order that loses nothing under way; see `TransactionalProducer.stop`."""
        # A start under way may wait for brokers.
        if not self._life_lock.acquire(timeout=timeout_s):
            _log.warning("the producer of %s is not stopped: its start has not returned", self.group)
            return
        try:
            before, self._life = self._life, _STOPPED
        finally:
            self._life_lock.release()
        if before is _STARTED and current_thread.in_callback:
            threading.Thread(target=self._stop, args=(timeout_s,), name=f"penstock-stop-{self.group}").start()
        elif before is _STARTED:
            self._stop(timeout_s)
        elif not current_thread.in_callback:
            self._is_down.wait(timeout_s)

    def _stop(self, timeout_s: float) -> None:
        deadline = 0.0
        try:
            if self._checks is not None:
                self._checks.stop(timeout_s)
            deadline = time.monotonic() + timeout_s
            # While the store still takes decisions: stored halves lead to some.
            ask_again(lambda: not any(flight._is_owed for flight in self._waiters()), timeout_s, _STOP_POLL_S)
        finally:
            try:
                self.store.stop(max(0.0, deadline - time.monotonic()))
            finally:
                # The store is stopped and no longer calls back.
                self._ending.set()
                # The deadline thread logs lost decisions: the user's log handler may stop the producer there.
                if self._thread is not threading.current_thread():
                    self._thread.join(_JOIN_S)
                for flight in self._waiters():
                    flight._give_up(math.inf)
                self._is_down.set()

    def _run(self) -> None:
        while not self._ending.wait(_POLL_S):
            now = time.monotonic()
            for flight in self._waiters():
                if flight._deadline <= now:
                    flight._give_up(now)

    def _waiters(self) -> list[InFlight]:
        with self.lock:
            return [*self._flights, *self.unseen]

    def require(self, places: set[tuple[str, int | None]]) -> None:
        """Connect, and raise unless all targets exist."""
        self.start()
        for place in places:
            self.store.require_target(*place)
        self.known_targets.update(places)

    @property
    def count(self) -> int:
        """Transactions in flight."""
        return len(self._flights)

    def add(self, flight: InFlight, *, may_wait: bool) -> None:
        """Take room for a flight, and wait for room if the producer's settings say so; called under the lock.

        Raises `BufferFullError`, and `StoppedError` if the producer was stopped.
        """
        if len(self._flights) >= self._max_count or self.bytes + flight._size > self._max_bytes:
            self._wait(flight._size, may_wait=may_wait)
        if self._life is _STOPPED:
            raise StoppedError(f"the producer of group {self.group} was stopped, and nothing was sent; make a new one")
        self._flights.add(flight)
        self.bytes += flight._size

    def remove(self, flight: InFlight, ended: TransactionState | None = None) -> None:
        """Give a flight's room back, and count it by the decision that ended it; called under the lock."""
        try:
            self._flights.remove(flight)
        except KeyError:
            # It ended early: it had no room yet, or has given it back and the store answers all the same.
            return
        self.bytes -= flight._size
        if ended is _COMMIT:
            self._committed += 1
        elif ended is _UNKNOWN:
            self._unknown += 1
        elif ended is not None:
            self._rolled_back += 1
        if self._waiting:
            self._room.notify()

    def statistics(self) -> ProducerStatistics:
        """Return the counts."""
        checks = self._checks
        with self.lock:
            return ProducerStatistics(
                in_flight=self.count,
                committed=self._committed,
                rolled_back=self._rolled_back,
                unknown=self._unknown,
                failed=self.failed,
                checks=checks.answered if checks else 0,
                failed_checks=checks.failed if checks else 0,
                skipped_checks=checks.skipped if checks else 0,
                hung_checks=checks.hung if checks else 0,
                lost_decisions=self.lost,
            )

    def _fits(self, size: int) -> bool:
        count = len(self._flights)
        return count < self._max_count and (self.bytes + size <= self._max_bytes or not count)

    def _wait(self, size: int, *, may_wait: bool) -> None:
        # A callback must not wait: it would hold up the deliveries that make room.
        may_wait = may_wait and not current_thread.in_callback
        deadline = time.monotonic() + self.room_timeout_s
        self._waiting += 1
        try:
            while not self._fits(size):
                left = deadline - time.monotonic()
                if not may_wait or left <= 0:
                    raise BufferFullError(
                        f"{self.count} transactions with {self.bytes} bytes are in flight, max_in_flight is "
                        f"{self._max_count} and max_in_flight_bytes {self._max_bytes}; nothing of this one was sent: "
                        "send it again later, or raise the limits"
                    )
                self._room.wait(left)
        finally:
            self._waiting -= 1
            # A thread that leaves without taking the room wakes the next one.
            if self._waiting and self._fits(0):
                self._room.notify()

    def who_settles(self) -> str:
        """Return the end of an error text: how a transaction is settled whose decision is lost."""
        if self._checks is not None:
            return f"a check of group {self.group} will settle it"
        return (
            f"this producer has no check: it stays pending until a producer of group {self.group} that has one "
            "answers, or until `penstock tx commit` or `rollback` decides"
        )
