"""Committed transactions that are to be published later, soonest first. Pure: the caller gives the time.

Those whose payloads are in memory are kept apart from the others: the last of the former are dropped first where
memory is short, and the first of the latter are read next.
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
        #: Bytes that the payloads in memory take.
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, transaction_id: str) -> bool:
        return transaction_id in self._entries

    def add(self, pending: Pending, due_ms: int) -> None:
        """Keep a transaction until its time."""
        self._enter(due_ms, next(self._ticket), pending)

    def _enter(self, due_ms: int, ticket: int, pending: Pending) -> None:
        self._entries[pending.half.transaction_id] = entry = due_ms, ticket, pending
        if pending.dropped is None:
            self._in_memory.add(entry)
            self.bytes += pending.held_bytes
        else:
            self._dropped.add(entry)

    def remove(self, transaction_id: str) -> None:
        """Forget a transaction that was settled otherwise."""
        entry = self._entries.pop(transaction_id, None)
        if entry is not None:
            self._leave(entry, is_dropped=entry[2].dropped is not None)

    def _leave(self, entry: _Entry, *, is_dropped: bool) -> None:
        if is_dropped:
            self._dropped.remove(entry)
        else:
            self._in_memory.remove(entry)
            self.bytes -= entry[2].held_bytes

    def due_ms(self, pending: Pending) -> int:
        """Return when one of them is due."""
        return self._entries[pending.half.transaction_id][0]

    def moved(self, pending: Pending) -> None:
        """Take in that the payload of a transaction was dropped, or is in memory again."""
        entry = self._entries.get(pending.half.transaction_id)
        if entry is not None:
            self._leave(entry, is_dropped=pending.dropped is None)
            self._enter(*entry)

    def take_due(self, now_ms: int) -> Iterator[Pending]:
        """Yield and forget what is due by the broker's clock, in the order of the due times."""
        while True:
            first = [some[0] for some in (self._in_memory, self._dropped) if some]
            entry = min(first, default=None)
            if entry is None or entry[0] > now_ms:
                return
            self.remove(entry[2].half.transaction_id)
            yield entry[2]

    def last_in_memory(self) -> Iterator[Pending]:
        """Yield those that are in memory, the last that is due first."""
        return (pending for _, _, pending in reversed(self._in_memory))

    def dropped_until(self, until_ms: int) -> Iterator[Pending]:
        """Yield those that are not in memory and are due by then, soonest first."""
        for due_ms, _, pending in self._dropped:
            if due_ms > until_ms:
                return
            yield pending
