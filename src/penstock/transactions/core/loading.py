"""Decided transactions whose payloads are being read, and those that stand behind them. Pure.

Messages of one key are published in the order of their decisions. So one whose payload is in memory waits here, too,
while an earlier one of its key and target does. Those of a line (`order="half"`) have an order of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from penstock.transactions.core.pending import Pending
from penstock.transactions.wire.ops import Verdict


class Loading:
    """Who waits for payloads. Not thread-safe: its coordinator's thread drives it."""

    def __init__(self) -> None:
        # By id, each with its keys: it may be decided otherwise meanwhile.
        self._waiting: dict[str, tuple[Pending, frozenset[int]]] = {}
        # Sequence number of the one that was added last, and whether they stand in another order than that.
        self._last = 0
        self._is_unsorted = False
        # Those that wait, by hash of target and key, by their sequence: two keys that share a hash by chance
        # wait a moment longer.
        self._queues: dict[int, OrderedDict[str, Pending]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, transaction_id: str) -> bool:
        return transaction_id in self._waiting

    def __iter__(self) -> Iterator[Pending]:
        """Iterate by sequence: with little room in memory, the first to go must be the first to be read."""
        if self._is_unsorted:
            self._is_unsorted = False
            self._waiting = dict(sorted(self._waiting.items(), key=lambda one: one[1][0].sequence))
        return (pending for pending, _ in self._waiting.values())

    def is_behind(self, pending: Pending) -> bool:
        """Tell whether an earlier one of its key and target waits."""
        queues = [self._queues[key] for key in _keys_of(pending) if key in self._queues]
        return any(next(iter(queue.values())).sequence < pending.sequence for queue in queues)

    def add(self, pending: Pending) -> None:
        """Let a transaction wait for its payload, or for those before it."""
        transaction_id, keys = pending.half.transaction_id, _keys_of(pending)
        self._waiting[transaction_id] = pending, keys
        self._is_unsorted = self._is_unsorted or pending.sequence < self._last
        self._last = max(self._last, pending.sequence)
        for key in keys:
            queue = self._queues.setdefault(key, OrderedDict())
            is_last = not queue or next(reversed(queue.values())).sequence <= pending.sequence
            queue[transaction_id] = pending
            if not is_last:
                # It was set aside, and its payload dropped, while others behind it waited here.
                self._queues[key] = OrderedDict(sorted(queue.items(), key=lambda one: one[1].sequence))

    def remove(self, pending: Pending) -> Iterator[Pending]:
        """Take a transaction out that waits no more; yield those behind it that can go now, in their order."""
        if pending.half.transaction_id in self._waiting:
            for first in self._leave(pending.half.transaction_id):
                yield from self.loaded(first)

    def loaded(self, pending: Pending) -> Iterator[Pending]:
        """Take in that a payload is there; yield what can go now, in the order of the decisions."""
        free = [pending]
        for one in free:
            transaction_id = one.half.transaction_id
            if one.dropped is None and transaction_id in self._waiting and self._is_first(transaction_id):
                yield one
                free += self._leave(transaction_id)

    def _is_first(self, transaction_id: str) -> bool:
        return all(next(iter(self._queues[key])) == transaction_id for key in self._waiting[transaction_id][1])

    def _leave(self, transaction_id: str) -> list[Pending]:
        """Take one out, and return those that are first in the queues of its keys now."""
        first = []
        for key in self._waiting.pop(transaction_id)[1]:
            queue = self._queues[key]
            del queue[transaction_id]
            if queue:
                first.append(next(iter(queue.values())))
            else:
                del self._queues[key]
        return first


def _keys_of(pending: Pending) -> frozenset[int]:
    """Return what a transaction shares with those that must not pass it."""
    is_free = pending.half.line is not None or pending.verdict is not Verdict.COMMIT
    return frozenset() if is_free else frozenset(pending.keys)
