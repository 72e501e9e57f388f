"""The checks of a file store: the scan that finds what is due, and the producers of the process, which take them.

Nothing that is due is planned in memory: a scan of the state table finds what is to be checked, and what is published
soon, at least as often as anything can become due. It reads a copy of the table, so that it holds nobody up, and takes
at most a fifth of a processor's time.
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
from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.stores.file.log.table import TICK_MS, UNDECIDED, State, StateTable, ms_of, tick_of
from penstock.transactions.wire.half import CheckRequest

#: What is due within so many seconds after a scan comes into memory; two scans are closer than half of it.
NEAR_S = 10.0
#: As much comes into memory, at most.
_NEAR = 20_000
#: Times the time that a scan took, that pass until the next; ticks after which more may come into memory.
_PAUSE_FACTOR = 4
_CROWDED_TICKS = 2
_NUMBER = 0xFFFFFFFF


class TableScan:
    """Finds what is due in a table, at the times that `due_at` says. Used by the coordinator's thread."""

    def __init__(self, table: StateTable, policy: CheckPolicy) -> None:
        self._table = table
        self._longest_s = min(policy.timeout_s, policy.interval_s, NEAR_S / 2)
        self._timeout = _ticks(policy.timeout_s)
        # By the number of the check before.
        self._intervals = [_ticks(policy.interval(number)) for number in range(policy.maximum + 2)]
        #: Monotonic second of the next scan.
        self.due_at = 0.0
        #: What was found and not taken yet: numbers of transactions to check, the longest due last; and of those that
        #: are published soon, the first of them last.
        self.checks = array("I")
        self.near = array("I")

    def run(self) -> float:
        """Look for what is due.

        Return the time up to which all that is to be published was found, in milliseconds since the epoch.
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
                # What was prepared in the future was so before the clock was set back: nobody knows when.
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


#: Checks that a producer takes at once.
_MAX_TAKEN = 500


class GroupChecks:
    """The checks of one producer group, as the producers of this process take them. Thread-safe.

    `find` returns an undecided transaction of that number and id with its halves, or None.
    """

    def __init__(self, find: Callable[[int, str], StoredTransaction | None]) -> None:
        self._find = find
        # Guards the fields below; producers wait on it. It may be taken with the store's lock held, never before that.
        self._more = threading.Condition()
        # Ids, with the numbers of their records.
        self._waiting: dict[str, int] = {}
        self._producers = 0

    def join(self) -> None:
        """Take in that a producer is here from now on."""
        with self._more:
            self._producers += 1

    def close(self) -> None:
        """Take in that a producer is gone; what it took and did not answer is asked again later, of others."""
        with self._more:
            self._producers -= 1

    @property
    def lacks_producer(self) -> bool:
        """Whether checks wait, and no producer is here."""
        return bool(self._waiting) and not self._producers

    def offer(self, some: Mapping[str, int]) -> bool:
        """Let a producer take checks; tell whether there is one."""
        with self._more:
            self._waiting.update(some)
            self._more.notify_all()
            return self._producers > 0

    def forget(self, transaction_id: str) -> None:
        """It is decided: nobody has to be asked."""
        with self._more:
            self._waiting.pop(transaction_id, None)

    def take(self, timeout_s: float, running: Collection[str] = ()) -> Sequence[CheckRequest]:
        """Return the checks that are there, waiting at most `timeout_s` seconds for the first.

        None of those that are `running` here: one that hangs is asked again, and that is for another producer.
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
