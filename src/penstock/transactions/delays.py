"""Committed transactions that are to be published later, soonest first. Pure: the caller gives the time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from penstock.transactions.pending import Pending


class Delays:
    """The delayed transactions of one half partition. Not thread-safe: its coordinator's thread drives it."""

    def __init__(self) -> None:
        # Due time in milliseconds and id. Entries of transactions that are gone stay until they come up.
        self._due: list[tuple[int, str]] = []
        self._waiting: dict[str, Pending] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, transaction_id: str) -> bool:
        return transaction_id in self._waiting

    def add(self, pending: Pending, due_ms: int) -> None:
        """Keep a transaction until its time."""
        transaction_id = pending.half.transaction_id
        self._waiting[transaction_id] = pending
        heapq.heappush(self._due, (due_ms, transaction_id))

    def remove(self, transaction_id: str) -> None:
        """Forget a transaction that was settled otherwise."""
        self._waiting.pop(transaction_id, None)

    def take_due(self, now_ms: int) -> Iterator[Pending]:
        """Yield and forget what is due by the broker's clock, in the order of the due times."""
        while self._due and self._due[0][0] <= now_ms:
            pending = self._waiting.pop(heapq.heappop(self._due)[1], None)
            if pending is not None:
                yield pending


__all__ = ["Delays"]
