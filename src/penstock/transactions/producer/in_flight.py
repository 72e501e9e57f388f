"""What the transactions of one producer share: how many may be in flight, and how long anything is waited for.

One thread looks at the time and gives up what took too long; what is still waited for at a stop is given up, too. What
that means for a transaction, and whose callback comes, is the flight's own. An error for a publication says what it
waits for: the store is asked that on another thread, so that no other deadline waits for the answer.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from penstock.clients.bounded_calls import ask_again
from penstock.errors import BufferFullError
from penstock.transactions.model import ProducerStatistics, TransactionState
from penstock.transactions.producer.futures import in_callback
from penstock.transactions.store import Store

if TYPE_CHECKING:
    from penstock.telemetry.sending import SendSpans

# Members of enumerations are expensive to look up, and every message passes here.
_COMMIT, _UNKNOWN = TransactionState.COMMIT, TransactionState.UNKNOWN


class InFlightLimit:
    """Counts what is in flight, keeps it within bounds, and counts how it ended. Thread-safe.

    One transaction alone may have more than `most_bytes`. Who waits for room does so for `timeout_s` seconds; 0: it
    raises at once.
    """

    def __init__(self, most: int, most_bytes: int, timeout_s: float) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self.timeout_s = timeout_s
        # Guards all fields below. Entered by itself, for a condition's own way in is written in Python.
        self._lock = threading.Lock()
        # Waiters sleep on it.
        self._room = threading.Condition(self._lock)
        self._waiting = 0
        self.count = 0
        self.bytes = 0
        # How many ended as they should, by their decision.
        self._committed = self._rolled_back = self._unknown = 0
        # Halves and decisions that are not known to be stored; of these the decisions that nobody waited for.
        self._failed = self._lost = 0

    def reserve(self, size: int, *, may_wait: bool = True) -> None:
        """Take room for so many bytes, waiting for it where that was chosen, or raise `BufferFullError`."""
        with self._lock:
            if not self._fits(size):
                self._wait(size, may_wait=may_wait)
            self.count += 1
            self.bytes += size

    def release(self, size: int, ended: TransactionState | None = None) -> None:
        """Give room back; count a transaction that ended as it should by its decision."""
        with self._lock:
            self.count -= 1
            self.bytes -= size
            if ended is _COMMIT:
                self._committed += 1
            elif ended is _UNKNOWN:
                self._unknown += 1
            elif ended is not None:
                self._rolled_back += 1
            if self._waiting:
                self._room.notify()

    def count_failure(self, *, lost: bool = False) -> None:
        """Count a half or a decision that is not known to be stored."""
        with self._lock:
            self._failed += 1
            self._lost += lost

    def statistics(self) -> ProducerStatistics:
        """Return the counts; those of checks are 0."""
        with self._lock:
            return ProducerStatistics(
                in_flight=self.count,
                committed=self._committed,
                rolled_back=self._rolled_back,
                unknown=self._unknown,
                failed=self._failed,
                checks=0,
                failed_checks=0,
                skipped_checks=0,
                lost_decisions=self._lost,
            )

    def _fits(self, size: int) -> bool:
        return self.count < self._most and (self.bytes + size <= self._most_bytes or not self.count)

    def _wait(self, size: int, *, may_wait: bool) -> None:
        # A callback that waited would wait for what it holds up itself.
        may_wait = may_wait and not in_callback()
        deadline = time.monotonic() + self.timeout_s
        self._waiting += 1
        try:
            while not self._fits(size):
                left = deadline - time.monotonic()
                if not may_wait or left <= 0:
                    raise BufferFullError(
                        f"{self.count} transactions with {self.bytes} bytes are in flight, max_in_flight is "
                        f"{self._most} and max_in_flight_bytes {self._most_bytes}; nothing of this one was sent: send "
                        "it again later, or raise the limits"
                    )
                self._room.wait(left)
        finally:
            self._waiting -= 1
            # Who leaves without taking the room hands the word on.
            if self._waiting and self._fits(0):
                self._room.notify()


_POLL_S = 0.1
_STOP_POLL_S = 0.005
_JOIN_S = 5.0


class Awaited(Protocol):
    """A flight, as far as it is waited for. It may already be complete: giving it up is a no-op then."""

    def give_up(self, cause: str) -> None:
        """Wait no longer for the store's answer."""

    def give_up_publication(self, cause: str) -> None:
        """Wait no longer until the message is visible."""


class RequestDeadlines:
    """Who waits, and until when. Thread-safe.

    An answer is waited for `answer_timeout_s` seconds, infinite where the store keeps the time itself, and a
    publication `publish_timeout_s`, from its stored decision on.
    """

    def __init__(self, name: str, answer_timeout_s: float, publish_timeout_s: float) -> None:
        self._answer_timeout_s = answer_timeout_s
        #: Whether an answer may come too late.
        self.has_limit = answer_timeout_s < math.inf
        self._publish_timeout_s = publish_timeout_s
        # Both are changed by flights, in any thread: steps on a dict are single ones, and it keeps their order.
        #: Flights that the store owes an answer, and until when; not those whose block runs.
        self.awaiting_answer: dict[Awaited, float] = {}
        #: Flights whose decision is stored and whose publication is waited for, and until when. Who takes one out tells
        #: its owner.
        self.awaiting_publication: dict[Awaited, float] = {}
        # Set by drain(), before it looks at what is owed; read by flights, after they are among those.
        self.stopping = False
        self._ending = threading.Event()
        self._name = name
        self._thread = threading.Thread(target=self._run, name=f"penstock-deadlines-{name}", daemon=True)
        # Gives up publications. Made by the thread above, one at a time.
        self._diagnosis: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look at the time."""
        self._thread.start()

    def await_answer(self, flight: Awaited) -> None:
        """Wait for the store's answer from now on."""
        self.awaiting_answer[flight] = time.monotonic() + self._answer_timeout_s

    def await_publication(self, flight: Awaited) -> None:
        """Wait for the publication from now on."""
        self.awaiting_publication[flight] = time.monotonic() + self._publish_timeout_s

    def drain(self, timeout_s: float) -> None:
        """Have new flights refused, and wait until the store owes no answer, at most `timeout_s` seconds."""
        self.stopping = True
        ask_again(lambda: not self.awaiting_answer, timeout_s, _STOP_POLL_S)

    def stop(self) -> None:
        """Give up whatever is still waited for. The store is stopped: nobody else may tell of it."""
        self._ending.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        for flight in list(self.awaiting_answer):
            flight.give_up("the producer was stopped before the store had answered")
        for flight in list(self.awaiting_publication):
            flight.give_up_publication("the producer was stopped before it was seen to be visible")

    def _run(self) -> None:
        while not self._ending.wait(_POLL_S):
            now = time.monotonic()
            # Copies, made in one step each; a list of the items is not, for the collector may run at any tuple of it.
            for flight, until in self.awaiting_answer.copy().items():
                if until <= now:
                    flight.give_up(f"the store did not answer within {self._answer_timeout_s:g} s")
            late = [flight for flight, until in self.awaiting_publication.copy().items() if until <= now]
            if late and (self._diagnosis is None or not self._diagnosis.is_alive()):
                name = f"penstock-late-{self._name}"
                self._diagnosis = threading.Thread(target=self._give_up, args=(late,), name=name, daemon=True)
                self._diagnosis.start()

    def _give_up(self, late: Sequence[Awaited]) -> None:
        for flight in late:
            flight.give_up_publication(f"was not seen to be visible within {self._publish_timeout_s:g} s")


@dataclass(frozen=True, slots=True)
class Core:
    """What all transactions of one producer share. Thread-safe."""

    store: Store
    group: str
    in_flight: InFlightLimit
    deadlines: RequestDeadlines
    #: Connects at the first use.
    open: Callable[[], object]
    #: Whether this producer answers checks.
    has_check: bool
    #: Makes a span of each message, where telemetry is on.
    spans: SendSpans | None
    #: Targets that event loops asked for before. A set's steps are single ones.
    known: set[tuple[str, int | None]] = field(default_factory=set)

    def require(self, places: set[tuple[str, int | None]]) -> None:
        """Connect, and raise unless all targets exist."""
        self.open()
        for place in places:
            self.store.require_target(*place)

    def who_settles(self) -> str:
        """Say what becomes of a transaction whose decision is lost."""
        if self.has_check:
            return f"a check of group {self.group} will settle it"
        return (
            f"this producer has no check: it stays pending until a producer of group {self.group} that has one "
            "answers, or until `penstock tx commit` or `rollback` decides"
        )
