"""How many transactions a producer holds at once, what happens to one more, and how they end."""

from __future__ import annotations

import threading
import time

from penstock.errors import BufferFullError
from penstock.transactions.model import ProducerStatistics, TransactionState
from penstock.transactions.producer.flight.futures import in_callback

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

    def enter(self, size: int, *, may_wait: bool = True) -> None:
        """Take room for so many bytes, waiting for it where that was chosen, or raise `BufferFullError`."""
        with self._lock:
            if not self._fits(size):
                self._wait(size, may_wait=may_wait)
            self.count += 1
            self.bytes += size

    def leave(self, size: int, ended: TransactionState | None = None) -> None:
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
