"""Committed transactions that are to be published later, soonest first. Pure: the caller gives the time.

Those whose payloads are not in memory stand in a list of their own: the first of them are read next, and none is due
before its payload is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from sortedcontainers import SortedList

from penstock.transactions.core.pending import Pending

#: Due time in milliseconds, a number that keeps the order in which they were decided, and the transaction.
_Entry = tuple[int, int, Pending]


class Delays:
    """The delayed transactions of one half partition. Not thread-safe: its coordinator's thread drives it."""

    def __init__(self) -> None:
        self._ticket = count()
        self._entries: dict[str, _Entry] = {}
        self._in_memory: SortedList[_Entry] = SortedList()
        self._dropped: SortedList[_Entry] = SortedList()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, transaction_id: str) -> bool:
        return transaction_id in self._entries

    def add(self, pending: Pending, due_ms: int) -> None:
        """Keep a transaction until its time."""
        self._enter((due_ms, next(self._ticket), pending))

    def _enter(self, entry: _Entry) -> None:
        pending = entry[2]
        self._entries[pending.half.transaction_id] = entry
        self._list(is_dropped=pending.dropped is not None).add(entry)

    def remove(self, transaction_id: str) -> None:
        """Forget a transaction that was settled otherwise."""
        entry = self._entries.pop(transaction_id, None)
        if entry is not None:
            self._list(is_dropped=entry[2].dropped is not None).remove(entry)

    def _list(self, *, is_dropped: bool) -> SortedList[_Entry]:
        return self._dropped if is_dropped else self._in_memory

    def moved(self, pending: Pending) -> None:
        """Take in that the payload of a transaction was dropped, or is in memory again."""
        entry = self._entries.get(pending.half.transaction_id)
        if entry is not None:
            self._list(is_dropped=pending.dropped is None).remove(entry)
            self._enter(entry)

    def take_due(self, now_ms: int) -> Iterator[Pending]:
        """Yield and forget what is due by the broker's clock, in the order of the due times.

        It ends at one whose payload is not in memory: what is due later does not pass it.
        """
        while self._in_memory:
            entry = self._in_memory[0]
            if entry[0] > now_ms or (self._dropped and self._dropped[0] < entry):
                return
            self.remove(entry[2].half.transaction_id)
            yield entry[2]

    def dropped_until(self, until_ms: int) -> Iterator[Pending]:
        """Yield those that are not in memory and are due by then, soonest first."""
        for due_ms, _, pending in self._dropped:
            if due_ms > until_ms:
                return
            yield pending
