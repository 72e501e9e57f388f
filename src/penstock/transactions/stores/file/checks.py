"""The checks of a file store: the scan that finds due transactions, and the queue from which producers take checks.

No due time is planned in memory. A scan of the state table finds due checks and near deliveries, at least as often as
one can become due. It reads a copy of the table, so it blocks no other thread, and takes at most a fifth of a
processor's time.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from heapq import nsmallest
from itertools import islice

from penstock.transactions.core.check_plan import CheckPolicy
from penstock.transactions.stores.file.log.entries import StoredTransaction
from penstock.transactions.stores.file.log.table import TICK_MS, UNDECIDED, State, StateTable, ms_of, tick_of
from penstock.transactions.wire.half import CheckRequest

#: Deliveries due within this many seconds after a scan are loaded into memory. The time between two scans is at most
#: half of it.
NEAR_S = 10.0
#: Most deliveries that one scan loads.
_NEAR = 20_000
#: The pause after a scan, in multiples of its duration; and ticks until the next scan if there were too many
#: deliveries.
_PAUSE_FACTOR = 4
_CROWDED_TICKS = 2
_NUMBER = 0xFFFFFFFF


class TableScan:
    """Finds due transactions in a table. The coordinator's thread calls `run` when `due_at` has come."""

    def __init__(self, table: StateTable, policy: CheckPolicy) -> None:
        self._table = table
        self._longest_s = min(policy.timeout_s, policy.interval_s, NEAR_S / 2)
        self._timeout = _ticks(policy.timeout_s)
        # Ticks after the check of that number.
        self._intervals = [_ticks(policy.interval(number)) for number in range(policy.maximum + 2)]
        #: Monotonic second of the next scan.
        self.due_at = 0.0
        #: Found and not taken yet: numbers of transactions to check, longest due last; and of near deliveries, soonest
        #: last.
        self.checks = array("I")
        self.near = array("I")

    def run(self) -> float:
        """Scan the table.

        Return the time up to which all deliveries were found, in milliseconds since the epoch.
        """
        begun, now_ms = time.monotonic(), time.time() * 1000
        now, soon_ms = tick_of(now_ms - TICK_MS), now_ms + NEAR_S * 1000
        soon, next_tick = tick_of(soon_ms), now + _ticks(self._longest_s)
        checks: list[int] = []
        near: list[int] = []
        for number, (_, _, tick, _, state, _, count) in self._table:
            if state == State.DELAYED:
                if tick <= soon:
                    near.append(tick << 32 | number)
            elif state in UNDECIDED:
                due = tick + self._wait_ticks(state, count)
                # A birth in the future means that the clock was set back. The true due time is unknown: check now.
                if due <= now or (tick > now + 1 and state != State.IMMUNE):
                    checks.append(due << 32 | number)
                else:
                    next_tick = min(next_tick, due)
        first = nsmallest(_NEAR, near)
        self.checks = array("I", [found & _NUMBER for found in sorted(checks, reverse=True)])
        self.near = array("I", [found & _NUMBER for found in reversed(first)])
        if len(near) > len(first):
            soon_ms, next_tick = ms_of(first[-1] >> 32), now + _CROWDED_TICKS
        ended = time.monotonic()
        self.due_at = max(ended + _PAUSE_FACTOR * (ended - begun), begun + (next_tick - now) * TICK_MS / 1000)
        return soon_ms

    def _wait_ticks(self, state: int, checks: int) -> int:
        """Return the ticks from the timestamp of an undecided transaction to its next check."""
        if state == State.IMMUNE:
            return 0
        if state == State.BORN:
            return self._timeout
        return self._intervals[min(checks + (state == State.ASKED), len(self._intervals) - 1)]


def _ticks(seconds: float) -> int:
    return math.ceil(seconds * 1000 / TICK_MS)


#: Most checks that a producer takes in one call.
_MAX_TAKEN = 500


class GroupChecks:
    """The waiting checks of one producer group, which the producers of this process take. Thread-safe.

    `find` returns the undecided transaction of that number and id with its halves, or None.
    """

    def __init__(self, find: Callable[[int, str], StoredTransaction | None]) -> None:
        self._find = find
        # Guards the fields below; producers wait on it. A thread that holds the store's lock may take it, never the
        # other way round.
        self._more = threading.Condition()
        # Record numbers by transaction id.
        self._waiting: dict[str, int] = {}
        self._producers = 0

    def join(self) -> None:
        """Count one more producer."""
        with self._more:
            self._producers += 1

    def close(self) -> None:
        """Count one producer less. Its unanswered checks are asked again later, of other producers."""
        with self._more:
            self._producers -= 1

    @property
    def lacks_producer(self) -> bool:
        """Whether checks wait and the group has no producer."""
        return bool(self._waiting) and not self._producers

    def offer(self, checks: Mapping[str, int]) -> bool:
        """Add checks for producers to take. Return whether the group has a producer."""
        with self._more:
            self._waiting.update(checks)
            self._more.notify_all()
            return self._producers > 0

    def forget(self, transaction_id: str) -> None:
        """Drop the check of a decided transaction."""
        with self._more:
            self._waiting.pop(transaction_id, None)

    def take(self, timeout_s: float, running: Collection[str] = ()) -> Sequence[CheckRequest]:
        """Return the waiting checks, waiting at most `timeout_s` seconds for the first.

        Leaves out the `running` transactions: a check that hangs is asked again, of another producer.
        """

        def not_running() -> list[str]:
            return list(islice((name for name in self._waiting if name not in running), _MAX_TAKEN))

        with self._more:
            taken = [(self._waiting.pop(name), name) for name in self._more.wait_for(not_running, timeout_s)]
        found = (self._find(number, name) for number, name in taken)
        return [
            CheckRequest(stored.half, 0, stored.number, stored.check_count + 1)
            for stored in found
            if stored is not None
        ]
