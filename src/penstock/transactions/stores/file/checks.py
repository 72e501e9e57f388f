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
from collections import Counter
from collections.abc import Collection, Sequence
from heapq import nsmallest
from itertools import islice

from penstock.transactions.core.check_plan import CheckPolicy
from penstock.transactions.stores.file.log.journal import Journal
from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.stores.file.log.table import TICK_MS, UNDECIDED, State, StateTable, ms_of, tick_of
from penstock.transactions.wire.half import CheckRequest

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


#: Checks that a producer takes at once.
_TAKEN = 500


class CheckSources:
    """The checks that wait for producers, by group. Thread-safe."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        # Guards the fields below; sources wait on it. It may be taken with the journal's lock held, never before that.
        self._more = threading.Condition()
        # Ids, with the numbers of their records.
        self._asked: dict[str, dict[str, int]] = {}
        self._sources: Counter[str] = Counter()

    def source(self, group: str) -> FileCheckSource:
        """Return the checks of a group, for a producer that is here from now on."""
        with self._more:
            self._sources[group] += 1
        return FileCheckSource(self, group)

    def lacks(self, group: str) -> bool:
        """Tell whether checks of a group wait, and no producer is here."""
        with self._more:
            return bool(self._asked.get(group)) and not self._sources[group]

    def ask(self, due: Sequence[StoredTransaction]) -> set[str]:
        """Let producers take checks; return the groups that have none here."""
        with self._more:
            for stored in due:
                self._asked.setdefault(stored.group, {})[stored.transaction_id] = stored.offset
            self._more.notify_all()
            return {stored.group for stored in due if not self._sources[stored.group]}

    def forget(self, stored: StoredTransaction) -> None:
        """It is decided: nobody has to be asked."""
        with self._more:
            self._asked.get(stored.group, {}).pop(stored.transaction_id, None)

    def take(self, group: str, timeout_s: float, running: Collection[str]) -> list[CheckRequest]:
        """Return checks of a group, but those that are running, waiting at most so long for the first."""

        def others() -> list[str]:
            return list(islice((name for name in self._asked.get(group, ()) if name not in running), _TAKEN))

        with self._more:
            names = self._more.wait_for(others, timeout_s)
            taken = [(self._asked[group].pop(name), name) for name in names]
        found = (self._journal.undecided(number, name) for number, name in taken)
        return [
            CheckRequest(stored.half, 0, stored.number, stored.check_count + 1)
            for stored in found
            if stored is not None
        ]

    def leave(self, group: str) -> None:
        """A source of a group is gone."""
        with self._more:
            self._sources[group] -= 1


class FileCheckSource:
    """The checks of a group, as one producer takes them."""

    def __init__(self, sources: CheckSources, group: str) -> None:
        self._sources = sources
        self._group = group

    def take(self, timeout_s: float, running: Collection[str] = ()) -> Sequence[CheckRequest]:
        """Return the checks that are there, waiting at most `timeout_s` seconds for the first.

        None of those that are `running` here: one that hangs is asked again, and that is for another producer.
        """
        return self._sources.take(self._group, timeout_s, set(running))

    def close(self) -> None:
        """Give the source up; what it took and did not answer is asked again later, of others."""
        self._sources.leave(self._group)
