"""Which payloads of pending transactions are in memory: no more than a budget of bytes. Pure.

What waits long (its time of delivery is far, nobody decided it, its target takes nothing) is dropped from memory where
there is not enough, and read again from the log that holds it: when it can be published, or is asked about, or is to be
snapshotted, and a little before it is due. First those are dropped that are due last, then those that came first.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, takewhile

from penstock.transactions.core.pending import OBJECT_BYTES, Pending
from penstock.transactions.core.queue import ReadyQueue
from penstock.transactions.wire.ops import Verdict

#: Bytes of payloads in the memory of one coordinator, about. What is being published may come on top of it.
PAYLOAD_BYTES = 64 << 20
#: One read takes this part of the budget, and so many transactions; what was asked for, that part; and what is delayed
#: keeps that part, even if others need memory.
_READ_PART = 8
_MOST = 5_000
_WANTED_PART = 4
_DELAYED_PART = 4
#: Of those that wait for their payloads, so many are looked at in one search.
_LOOKED_AT = 20_000
#: Milliseconds before its time at which a payload has to be there, and for which others are read with it.
_SOON_MS = 30_000
_AHEAD_MS = 600_000
#: How many that cannot be dropped are passed over in one search.
_TRIES = 16
#: Seconds for which what was read because somebody asked for it stays, if it is not used before.
_STAYS_S = 60.0


def _sum(some: Iterable[Pending]) -> int:
    return sum(pending.held_bytes for pending in some)


class Payloads:
    """The payloads of one half partition. Not thread-safe: its coordinator's thread drives it.

    Those `at_risk` stay: they are in memory alone, for a log that held them is gone. Times are monotonic seconds, save
    `now_ms`, the broker's.
    """

    def __init__(self, pending: Mapping[str, Pending], queue: ReadyQueue, at_risk: Mapping[str, Pending]) -> None:
        self._pending = pending
        self._queue = queue
        self._at_risk = at_risk
        #: Bytes that may be in memory. The caller sets it.
        self.limit = sys.maxsize
        #: Bytes in memory, and the most there were while nothing more could be dropped.
        self.bytes = self.peak = 0
        #: How many were dropped, and read again.
        self.dropped = self.loaded = 0
        # Those in memory, in the order in which they came: kept once there is not enough for all, and made then.
        self._in_memory: OrderedDict[str, Pending] | None = None
        # Those that somebody asked for: until when they stay in memory, in monotonic seconds.
        self._wanted: OrderedDict[str, tuple[float, Pending]] = OrderedDict()
        self._wanted_bytes = 0
        # Those that could not be read: when it is tried again.
        self._failed: dict[str, float] = {}

    def add(self, pending: Pending) -> None:
        """Take in that a transaction is pending."""
        if pending.dropped is None:
            self.bytes += pending.payload_bytes + OBJECT_BYTES
            if self._in_memory is not None:
                self._in_memory[pending.half.transaction_id] = pending

    def grown(self, pending: Pending, bytes_before: int) -> None:
        """Take in that a transaction has got another half."""
        if pending.dropped is None:
            self.bytes += pending.payload_bytes - bytes_before

    def forget(self, pending: Pending) -> None:
        """Take in that a transaction is settled."""
        transaction_id = pending.half.transaction_id
        if pending.dropped is None:
            self.bytes -= pending.payload_bytes + OBJECT_BYTES
            if self._in_memory is not None:
                del self._in_memory[transaction_id]
                if self.bytes < self.limit // 2:
                    self._in_memory = None
        if self._wanted:
            self.unwant(transaction_id)
        if self._failed:
            self._failed.pop(transaction_id, None)

    def drop(self, pending: Pending) -> None:
        """Drop the payload of a transaction from memory."""
        if pending.dropped is None:
            if self._in_memory is not None:
                del self._in_memory[pending.half.transaction_id]
            self.bytes -= pending.held_bytes
            pending.drop()
            self.dropped += 1
            self._queue.delays.moved(pending)

    def take_in(self, pending: Pending) -> None:
        """Take in that the payload of a transaction is in memory again."""
        self.add(pending)
        self.loaded += 1
        self._failed.pop(pending.half.transaction_id, None)
        self._queue.delays.moved(pending)
        self._queue.loaded(pending)

    def make_room(self, extra: int = 0) -> bool:
        """Drop payloads until so many bytes more would be within the budget, and tell whether they are."""
        delays = self._queue.delays
        while self.bytes + extra > self.limit:
            if delays.bytes > self.limit // _DELAYED_PART:
                pending = self._last_due() or self._oldest()
            else:
                pending = self._oldest() or self._last_due()
            if pending is None:
                break
            self.drop(pending)
        self.peak = max(self.peak, self.bytes)
        return self.bytes + extra <= self.limit

    def _last_due(self) -> Pending | None:
        some = islice(self._queue.delays.last_in_memory(), _TRIES)
        return next((one for one in some if not self._is_needed(one)), None)

    def _oldest(self) -> Pending | None:
        if self._in_memory is None:
            self._in_memory = OrderedDict((name, one) for name, one in self._pending.items() if one.dropped is None)
        for _ in range(min(_TRIES, len(self._in_memory))):
            transaction_id, pending = next(iter(self._in_memory.items()))
            if transaction_id not in self._queue.delays and not self._is_needed(pending):
                return pending
            self._in_memory.move_to_end(transaction_id)
        return None

    def _is_needed(self, pending: Pending) -> bool:
        name = pending.half.transaction_id
        is_used = pending.in_flight or name in self._wanted or name in self._at_risk
        return is_used or self._queue.is_ready(name)

    def want(self, pending: Pending, now: float) -> bool:
        """Ask for a payload, and tell whether it will be read: not too many are at a time.

        It stays in memory for a minute, or until `unwant`.
        """
        transaction_id, size = pending.half.transaction_id, pending.held_bytes
        if transaction_id not in self._wanted:
            if self._wanted and self._wanted_bytes + size > self.limit // _WANTED_PART:
                return False
            self._wanted[transaction_id] = now + _STAYS_S, pending
            self._wanted_bytes += size
        return True

    def is_wanted(self, transaction_id: str) -> bool:
        """Tell whether a payload was asked for."""
        return transaction_id in self._wanted

    def unwant(self, transaction_id: str) -> None:
        """Take in that what was asked for is not needed any more."""
        _, pending = self._wanted.pop(transaction_id, (0.0, None))
        if pending is not None:
            self._wanted_bytes -= pending.held_bytes

    def failed(self, transaction_id: str, until: float) -> None:
        """Do not try to read a payload before a time, in monotonic seconds."""
        self._failed[transaction_id] = until

    def next_read(self, now: float, now_ms: int) -> list[Pending]:
        """Return those whose payloads are to be read now, and make room for them."""
        while self._wanted and (first := next(iter(self._wanted.items())))[1][0] <= now:
            self.unwant(first[0])
        part = self.limit // _READ_PART
        urgent = self._portion(self._urgent(), part, now)
        if urgent:
            if self.make_room(_sum(urgent)):
                return urgent
            # Room comes when what is ready is published. One may always be there.
            return [] if self._queue.ready else urgent[:1]
        return self._ahead(part, now, now_ms)

    def _ahead(self, room: int, now: float, now_ms: int) -> list[Pending]:
        """Return the next that are due, once the first of them is soon; those in memory that are due later give way."""
        delays = self._queue.delays
        until_ms = now_ms + _AHEAD_MS
        left = self.limit // _DELAYED_PART - delays.bytes
        if left < room and (last := next(delays.last_in_memory(), None)) is not None:
            until_ms = min(until_ms, delays.due_ms(last) - 1)
        if next(delays.dropped_until(min(until_ms, now_ms + _SOON_MS)), None) is None:
            return []
        ahead = self._portion(delays.dropped_until(until_ms), room, now)
        return ahead if self.make_room(_sum(ahead)) else []

    def _portion(self, some: Iterable[Pending], room: int, now: float) -> list[Pending]:
        """Return the first of those that are not in memory, as many as fit in, and one at least."""
        chosen: dict[str, Pending] = {}
        for pending in islice(some, _LOOKED_AT):
            transaction_id = pending.half.transaction_id
            if pending.dropped is None or transaction_id in chosen or self._failed.get(transaction_id, 0.0) > now:
                continue
            room -= pending.held_bytes
            if len(chosen) == _MOST or (room < 0 and chosen):
                break
            chosen[transaction_id] = pending
        return list(chosen.values())

    def _urgent(self) -> Iterator[Pending]:
        """Yield those that could be published, or used otherwise, if their payloads were there."""
        keys = self._queue.keys
        for pending in self._queue.loading:
            yield pending
            if (line := pending.half.line) is not None:
                # Those behind it in its line can go with it.
                behind = takewhile(lambda one: one.verdict is Verdict.COMMIT, keys.line_of(line))
                yield from islice(behind, _MOST)
        for _, wanted in self._wanted.values():
            yield wanted
