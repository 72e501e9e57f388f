"""The checks of a file store that wait for the producers of its process, which take them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import islice

from penstock.transactions.stores.file.log.journal import Journal
from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.wire.check_request import CheckRequest

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
                self._asked.setdefault(stored.group, {})[stored.transaction_id] = stored.record
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
            CheckRequest(stored.halves[0], 0, stored.number, stored.check_count + 1)
            for stored in found
            if stored is not None and stored.halves is not None
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
