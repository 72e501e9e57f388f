"""Which payloads of pending transactions are in memory. Pure.

What waits long need not have its payload in memory: a message that is not due, one whose target takes nothing, one that
its producers were asked about. Where there is not enough memory, its payload is dropped as it begins to wait, and read
again from the log that holds it: a little before it is due, or when it is asked for. What can be published is never
dropped; what is not in memory is not published with the others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, islice

from penstock.transactions.core.pending import OBJECT_BYTES, Pending
from penstock.transactions.core.queue import Delays

#: Bytes of payloads in the memory of one coordinator, about. What is read again comes on top of it, up to `_ON_TOP`.
PAYLOAD_BYTES = 64 << 20
_ON_TOP = 0.25
#: One read takes this part of the budget, and so many transactions; what was asked for, that part.
_READ_PART = 8
_MOST = 5_000
_WANTED_PART = 4
#: Milliseconds before its time at which a payload has to be there.
_SOON_MS = 30_000


class Payloads:
    """The payloads of one half partition. Not thread-safe: its coordinator's thread drives it."""

    def __init__(self, delays: Delays) -> None:
        self._delays = delays
        #: Bytes that may be in memory. The caller sets it.
        self.limit = sys.maxsize
        #: Bytes in memory.
        self.bytes = 0
        # Those that somebody asked for and that are not in memory yet, each with its bytes.
        self._wanted: dict[str, tuple[int, Pending]] = {}
        self._wanted_bytes = 0

    def add(self, pending: Pending) -> None:
        """Take in that a transaction is pending."""
        if pending.dropped is None:
            self.bytes += pending.payload_bytes + OBJECT_BYTES

    def grown(self, pending: Pending, bytes_before: int) -> None:
        """Take in that a transaction has got another half."""
        if pending.dropped is None:
            self.bytes += pending.payload_bytes - bytes_before

    def forget(self, pending: Pending) -> None:
        """Take in that a transaction is settled."""
        if pending.dropped is None:
            self.bytes -= pending.payload_bytes + OBJECT_BYTES
        elif self._wanted:
            self._unwant(pending)

    def let_go(self, pending: Pending) -> None:
        """Drop the payload of a transaction that waits, if memory is short and nothing is under way with it."""
        if self.bytes > self.limit and not pending.in_flight:
            self.drop(pending)

    def drop(self, pending: Pending) -> None:
        """Drop the payload of a transaction from memory."""
        if pending.dropped is None:
            self.bytes -= pending.held_bytes
            pending.drop()
            self._delays.moved(pending)

    def take_in(self, pending: Pending) -> None:
        """Take in that the payload of a transaction is in memory again."""
        self.add(pending)
        self._unwant(pending)
        self._delays.moved(pending)

    def want(self, pending: Pending) -> bool:
        """Ask for a payload that is not in memory, and tell whether it will be read: not too many are at a time."""
        transaction_id, size = pending.half.transaction_id, pending.held_bytes
        if transaction_id not in self._wanted:
            if self._wanted and self._wanted_bytes + size > self.limit // _WANTED_PART:
                return False
            self._wanted[transaction_id] = size, pending
            self._wanted_bytes += size
        return True

    def _unwant(self, pending: Pending) -> None:
        size, _ = self._wanted.pop(pending.half.transaction_id, (0, None))
        self._wanted_bytes -= size

    def next_read(self, now_ms: int) -> list[Pending]:
        """Return those whose payloads are to be read now: what was asked for, and what is due soon.

        `now_ms` is the broker's time.
        """
        room = self.limit // _READ_PART
        chosen: dict[str, Pending] = {}
        wanted = [pending for _, pending in self._wanted.values()]
        for pending in islice(chain(wanted, self._due(now_ms)), _MOST):
            room -= pending.held_bytes
            if room < 0 and chosen:
                break
            chosen[pending.half.transaction_id] = pending
        return list(chosen.values())

    def _due(self, now_ms: int) -> Iterator[Pending]:
        """Yield what is not in memory and due, soonest first; what is due soon, while there is room for it."""
        has_room = self.bytes <= self.limit * (1 + _ON_TOP)
        return self._delays.dropped_until(now_ms + _SOON_MS if has_room else now_ms)
