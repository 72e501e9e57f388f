"""The checks of a file store: when each is due, and the producers of its process that take them."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import islice

from penstock.transactions.stores.file.log.ledger import Standing, StoredTransaction
from penstock.transactions.wire.check_request import CheckRequest
from penstock.transactions.wire.half import Half

#: Checks that a producer takes at once.
_TAKEN = 500
#: Entries of a queue before those of transactions that need no check any more are taken out.
_CROWD = 4_096


class DueQueue:
    """Undecided transactions by the time of their next check, in monotonic seconds. Guarded by the store's lock."""

    def __init__(self) -> None:
        # Due time, number that settles ties, and transaction. Entries of what was decided, settled or planned again
        # stay until they come up, or until there are many.
        self._entries: list[tuple[float, int, StoredTransaction]] = []
        self._crowd = _CROWD
        self._ticket = itertools.count()

    def plan(self, stored: StoredTransaction, due: float) -> None:
        """Plan the next check of a transaction; what was planned before does not count."""
        stored.due = due
        heapq.heappush(self._entries, (due, next(self._ticket), stored))
        if len(self._entries) > self._crowd:
            self._entries = [entry for entry in self._entries if _is_planned(entry)]
            heapq.heapify(self._entries)
            self._crowd = max(_CROWD, 2 * len(self._entries))

    def take_due(self, now: float, limit: int) -> list[StoredTransaction]:
        """Take those whose time has come, the longest due first, so many at most; each must be planned again."""
        due: list[StoredTransaction] = []
        while self._entries and self._entries[0][0] <= now and len(due) < limit:
            entry = heapq.heappop(self._entries)
            if _is_planned(entry):
                due.append(entry[2])
        return due

    @property
    def next_due(self) -> float:
        """The time of the first entry; infinite where there is none."""
        return self._entries[0][0] if self._entries else float("inf")


def _is_planned(entry: tuple[float, int, StoredTransaction]) -> bool:
    due, _, stored = entry
    return stored.due == due and stored.standing is Standing.UNDECIDED


class CheckSources:
    """The checks that wait for producers, by group. Thread-safe; `read` returns the first half of what is undecided."""

    def __init__(self, read: Callable[[StoredTransaction], Half | None]) -> None:
        self._read = read
        # Guards the fields below; sources wait on it.
        self._more = threading.Condition()
        self._asked: dict[str, dict[str, StoredTransaction]] = {}
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
                self._asked.setdefault(stored.group, {})[stored.transaction_id] = stored
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
            taken = [self._asked[group].pop(name) for name in names]
        halves = ((stored, self._read(stored)) for stored in taken)
        return [
            CheckRequest(half, 0, stored.number, stored.check_count + 1) for stored, half in halves if half is not None
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
