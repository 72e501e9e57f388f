"""The memory budget for payloads of pending transactions. Pure.

A transaction that waits long does not need its payload in memory: it is delayed, its target takes no messages, or its
producers were asked about it. If memory is short, its payload is dropped when it begins to wait. It is read again from
the log that holds it: shortly before the transaction is due, or on request. The payload of a publishable transaction is
never dropped. A transaction whose payload is not in memory is not published with the others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from penstock.transactions.core.pending import OBJECT_BYTES, Pending
from penstock.transactions.core.queue import Delays

#: Approximate bytes of payloads in the memory of one coordinator. Payloads that are read again may exceed it by the
#: part `_EXCESS_PART`.
PAYLOAD_BYTES = 64 << 20
_EXCESS_PART = 0.25
#: One read takes the budget divided by this, and at most so many transactions. Requested payloads take the budget
#: divided by the last number.
_READ_DIVISOR = 8
_MAX_READ = 5_000
_WANTED_DIVISOR = 4
#: Milliseconds before a transaction's due time at which its payload is read.
_READ_AHEAD_MS = 30_000


class Payloads:
    """The payloads of one half partition. Not thread-safe: its coordinator's thread drives it."""

    def __init__(self, delays: Delays) -> None:
        self._delays = delays
        #: Most bytes in memory. The caller sets it.
        self.limit = sys.maxsize
        #: Bytes in memory.
        self.bytes = 0
        # By id: bytes and transaction of each requested payload that is not in memory yet.
        self._wanted: dict[str, tuple[int, Pending]] = {}
        self._wanted_bytes = 0

    def add(self, pending: Pending) -> None:
        """Count a new pending transaction."""
        if pending.dropped is None:
            self.bytes += pending.payload_bytes + OBJECT_BYTES

    def grown(self, pending: Pending, bytes_before: int) -> None:
        """Count another half of a transaction."""
        if pending.dropped is None:
            self.bytes += pending.payload_bytes - bytes_before

    def forget(self, settled: Iterable[Pending]) -> None:
        """Forget settled transactions."""
        for pending in settled:
            if pending.dropped is None:
                self.bytes -= pending.payload_bytes + OBJECT_BYTES
            elif self._wanted:
                self._unwant(pending)

    def drop_if_short(self, pending: Pending) -> None:
        """Drop the payload of a waiting transaction if memory is short and no Kafka transaction has it."""
        if self.bytes > self.limit and not pending.in_flight:
            self.drop(pending)

    def drop(self, pending: Pending) -> None:
        """Drop the payload of a transaction from memory."""
        if pending.dropped is None:
            self.bytes -= pending.held_bytes
            pending.drop()
            self._delays.moved(pending)

    def take_in(self, pending: Pending) -> None:
        """Note that the payload of a transaction is in memory again."""
        self.add(pending)
        self._unwant(pending)
        self._delays.moved(pending)

    def want(self, pending: Pending) -> bool:
        """Request a payload that is not in memory. Return False if too many are requested already."""
        transaction_id, size = pending.transaction_id, pending.held_bytes
        if transaction_id not in self._wanted:
            if self._wanted and self._wanted_bytes + size > self.limit // _WANTED_DIVISOR:
                return False
            self._wanted[transaction_id] = size, pending
            self._wanted_bytes += size
        return True

    def _unwant(self, pending: Pending) -> None:
        size, _ = self._wanted.pop(pending.transaction_id, (0, None))
        self._wanted_bytes -= size

    def next_read(self, now_ms: int) -> list[Pending]:
        """Return the transactions whose payloads are to be read now: requested ones, and those that are due soon.

        `now_ms` is the broker's time.
        """
        room = self.limit // _READ_DIVISOR
        chosen: dict[str, Pending] = {}
        wanted = [pending for _, pending in self._wanted.values()]
        for pending in islice(chain(wanted, self._due(now_ms)), _MAX_READ):
            room -= pending.held_bytes
            if room < 0 and chosen:
                break
            chosen[pending.transaction_id] = pending
        return list(chosen.values())

    def _due(self, now_ms: int) -> Iterator[Pending]:
        """Yield dropped transactions that are due, the earliest first; if there is room, also those due soon."""
        has_room = self.bytes <= self.limit * (1 + _EXCESS_PART)
        return self._delays.dropped_until(now_ms + _READ_AHEAD_MS if has_room else now_ms)
