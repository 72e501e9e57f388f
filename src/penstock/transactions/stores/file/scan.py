"""The scan of a file store's state table: what is to be checked, and what is published soon.

Nothing of that is planned in memory: a scan finds it, at least as often as anything can become due. It reads a copy of
the table, so that it holds nobody up, and takes at most a fifth of a processor's time.
"""

from __future__ import annotations

import math
import time
from array import array
from heapq import nsmallest

from penstock.transactions.core.check_plan import CheckPolicy
from penstock.transactions.stores.file.log.table import TICK_MS, UNDECIDED, State, StateTable, ms_of, tick_of

#: What is due within so many seconds after a scan comes into memory; two scans are closer than half of it.
NEAR_S = 10.0
#: As much comes into memory, at most.
_NEAR = 20_000
#: Times the time that a scan took, that pass until the next; ticks after which more may come into memory.
_PAUSE = 4
_CROWDED = 2
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
                due = tick + self._wait(state, count)
                # What was prepared in the future was so before the clock was set back: nobody knows when.
                if due <= now or (tick > now + 1 and state != State.IMMUNE):
                    checks.append(due << 32 | number)
                else:
                    next_tick = min(next_tick, due)
        first = nsmallest(_NEAR, near)
        self.checks = array("I", [found & _NUMBER for found in sorted(checks, reverse=True)])
        self.near = array("I", [found & _NUMBER for found in reversed(first)])
        if len(near) > len(first):
            soon_ms, next_tick = ms_of(first[-1] >> 32), now + _CROWDED
        ended = time.monotonic()
        self.due_at = max(ended + _PAUSE * (ended - begun), begun + (next_tick - now) * TICK_MS / 1000)
        return soon_ms

    def _wait(self, state: int, checks: int) -> int:
        """Return the ticks from the timestamp of an undecided transaction to its next check."""
        if state == State.IMMUNE:
            return 0
        if state == State.BORN:
            return self._timeout
        return self._intervals[min(checks + (state == State.ASKED), len(self._intervals) - 1)]


def _ticks(seconds: float) -> int:
    return math.ceil(seconds * 1000 / TICK_MS)
