"""The queue of decided transactions: which of them the next Kafka transaction settles.

Pure. A decided transaction is in one of four states:

- ready;
- set aside: its target takes no messages now, its payload is not in memory, or it must stay behind such a transaction;
- delayed until its `deliver_at`;
- behind an earlier transaction of its line (`order="half"`).

The queue walks only the ready ones, so that many waiting transactions delay no others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice

from sortedcontainers import SortedList

from penstock.transactions.core.pending import Pending
from penstock.transactions.core.set_aside import SetAside
from penstock.transactions.wire.half import Line
from penstock.transactions.wire.ops import Verdict

#: Due time in milliseconds, a number that keeps the order of the decisions, and the transaction.
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
        self._entries[pending.transaction_id] = entry
        self._list(is_dropped=_needs_payload(pending)).add(entry)

    def remove(self, transaction_id: str) -> None:
        """Forget a transaction, if it is delayed."""
        entry = self._entries.pop(transaction_id, None)
        if entry is not None:
            self._list(is_dropped=_needs_payload(entry[2])).remove(entry)

    def _list(self, *, is_dropped: bool) -> SortedList[_Entry]:
        return self._dropped if is_dropped else self._in_memory

    def next_ms(self) -> int | None:
        """Return the earliest due time, or None."""
        return min((entries[0][0] for entries in (self._in_memory, self._dropped) if entries), default=None)

    def moved(self, pending: Pending) -> None:
        """Note that the payload of a transaction was dropped, or is in memory again."""
        entry = self._entries.get(pending.transaction_id)
        if entry is not None:
            self._list(is_dropped=pending.dropped is None).remove(entry)
            self._enter(entry)

    def take_due(self, now_ms: int) -> Iterator[Pending]:
        """Remove and yield transactions that are due by the broker's clock, in the order of their due times.

        It stops at a transaction whose payload is not in memory, so that later ones do not pass it.
        """
        while self._in_memory:
            entry = self._in_memory[0]
            if entry[0] > now_ms or (self._dropped and self._dropped[0] < entry):
                return
            self.remove(entry[2].half.transaction_id)
            yield entry[2]

    def dropped_until(self, until_ms: int) -> Iterator[Pending]:
        """Yield transactions that are due by then and whose payload is not in memory, the earliest first."""
        for due_ms, _, pending in self._dropped:
            if due_ms > until_ms:
                return
            yield pending


def _needs_payload(pending: Pending) -> bool:
    """Tell whether a transaction's payload must be read again before it can be published."""
    return pending.dropped is not None and not pending.is_at_hand


class KeyOrder:
    """The lines of one half partition. Not thread-safe: its coordinator's thread drives it.

    Transactions are added in the order of their offsets, which is the order of sending. `sort` repairs that order for
    the others.
    """

    def __init__(self) -> None:
        # By group and key, then by transaction id. No line is empty.
        self._lines: dict[Line, OrderedDict[str, Pending]] = {}
        self._count = 0

    def add(self, pending: Pending) -> None:
        """Add a transaction at the end of its line, if it has one."""
        if (line := pending.half.line) is not None:
            self._count += 1
            self._lines.setdefault(line, OrderedDict())[pending.transaction_id] = pending

    def head(self, line: Line) -> Pending | None:
        """Return the first transaction of a line, or None."""
        waiting = self._lines.get(line)
        return next(iter(waiting.values())) if waiting else None

    def line_of(self, line: Line) -> Iterable[Pending]:
        """Return the transactions of a line, the head first."""
        return self._lines[line].values() if line in self._lines else ()

    def remove(self, line: Line, pending: Pending) -> Pending | None:
        """Remove a transaction. If it was the head, return the new head."""
        waiting = self._lines[line]
        was_head = next(iter(waiting)) == pending.transaction_id
        del waiting[pending.transaction_id]
        self._count -= 1
        if not waiting:
            del self._lines[line]
            return None
        return next(iter(waiting.values())) if was_head else None

    def sort(self, line: Line) -> None:
        """Restore the order of offsets in a line, after a transaction was added late."""
        waiting = self._lines[line]
        self._lines[line] = OrderedDict(sorted(waiting.items(), key=lambda item: item[1].offset))

    @property
    def behind(self) -> int:
        """How many transactions stand behind another one."""
        return self._count - len(self._lines)


#: Most delayed transactions that one batch releases.
_MAX_RELEASED = 10_000

# Looking up a member of an enumeration is slow, and every transaction comes through here.
_COMMIT, _ROLLBACK = Verdict.COMMIT, Verdict.ROLLBACK


#: Names the topic that keeps a transaction out of the common Kafka transactions now, or returns None.
Blocking = Callable[[Pending], str | None]


class ReadyQueue:
    """The decided transactions of one half partition. Not thread-safe: its coordinator's thread drives it.

    The queue calls `put_off` for a transaction that begins to wait long: the callee may drop its payload.
    """

    def __init__(self, delays: Delays, put_off: Callable[[Pending], None]) -> None:
        self._put_off = put_off
        #: All of them, by id, in the order in which the decisions took effect.
        self.all: dict[str, Pending] = {}
        self.keys = KeyOrder()
        self.delays = delays
        #: Transactions that cannot be published with the others now.
        self.set_aside = SetAside()
        self._ready: dict[str, Pending] = {}
        self._sequence = count(1)
        # Whether a transaction became ready again: its place is not at the end.
        self._is_unsorted = False

    @property
    def ready(self) -> int:
        """How many are ready or being published."""
        return len(self._ready)

    def add(self, pending: Pending) -> None:
        """Add a transaction that was just decided."""
        half = pending.half
        self.all[half.transaction_id] = pending
        if half.deliver_at_ms is not None and pending.verdict is _COMMIT:
            self.delays.add(pending, half.deliver_at_ms)
            self._put_off(pending)
        elif half.order_key is None:
            self._make_ready(pending)
        else:
            self._enter(pending)

    def _enter(self, pending: Pending) -> None:
        if self._is_in_front(pending):
            self._make_ready(pending)

    def _is_in_front(self, pending: Pending) -> bool:
        line = pending.half.line
        return line is None or pending.verdict is not Verdict.COMMIT or self.keys.head(line) is pending

    def _make_ready(self, pending: Pending) -> None:
        """Make a transaction ready, behind all others."""
        pending.sequence = next(self._sequence)
        self._ready[pending.transaction_id] = pending

    def _make_ready_again(self, freed: Iterable[Pending]) -> None:
        """Make transactions ready that were set aside. They keep their places among the others."""
        for pending in freed:
            if self._is_in_front(pending):
                self._ready[pending.transaction_id] = pending
                self._is_unsorted = True

    def withdraw(self, pending: Pending) -> None:
        """Remove a transaction from the queue, because another decision replaces its own."""
        transaction_id = pending.transaction_id
        self.all.pop(transaction_id, None)
        self._ready.pop(transaction_id, None)
        self.delays.remove(transaction_id)
        self._make_ready_again(self.set_aside.remove(pending))

    def forget(self, settled: Iterable[Pending]) -> None:
        """Remove settled transactions, and make ready those that waited behind them."""
        are_set_aside, are_delayed = bool(self.set_aside), bool(self.delays)
        for pending in settled:
            transaction_id = pending.transaction_id
            # A transaction that its snapshot decided may be settled with its line before its op is read again. Then it
            # is not in `all`.
            self.all.pop(transaction_id, None)
            self._ready.pop(transaction_id, None)
            if are_set_aside:
                self._make_ready_again(self.set_aside.remove(pending))
            if are_delayed:
                self.delays.remove(transaction_id)
            if pending.half.order_key is not None:
                self._leave_line(pending)

    def _leave_line(self, pending: Pending) -> None:
        line = pending.half.line
        head = None if line is None else self.keys.remove(line, pending)
        if head is not None and head.verdict is _COMMIT:
            name = head.transaction_id
            if not (head.held or name in self._ready or name in self.delays):
                self._make_ready(head)

    def is_put_off(self, pending: Pending) -> bool:
        """Tell whether a transaction is delayed or set aside."""
        return pending.held or pending.transaction_id in self.delays

    def sort(self, line: Line) -> None:
        """Restore the order of offsets in a line. A commit that is no longer the head is not ready."""
        self.keys.sort(line)
        head = self.keys.head(line)
        for pending in self.keys.line_of(line):
            if pending is not head and pending.verdict is Verdict.COMMIT:
                self._ready.pop(pending.transaction_id, None)

    def release_due(self, now_ms: int) -> None:
        """Release delayed transactions that are due, a limited number at a time."""
        for pending in islice(self.delays.take_due(now_ms), _MAX_RELEASED):
            self._enter(pending)

    def release(self, topic: str, is_refused: Callable[[str], bool]) -> None:
        """Make ready what was set aside because of a topic, before later transactions.

        Refused transactions stay set aside: `is_refused` takes an id.
        """
        freed = self.set_aside.release(topic, lambda pending: is_refused(pending.transaction_id))
        self._make_ready_again(freed)

    def held_by(self, pending: Pending) -> Pending | None:
        """Return the head of a transaction's line if it is another one, else None."""
        line = pending.half.line
        head = None if line is None else self.keys.head(line)
        return None if head is pending else head

    def choose(self, limit: int, blocking: Blocking, room_bytes: int) -> dict[str, Pending]:
        """Return the transactions to settle now, by id, in the order of publication. Set aside what is blocked.

        Arguments are those of `PartitionState.next_batch`.
        """
        chosen: dict[str, Pending] = {}
        waiting: list[str] = []
        lines_seen: set[Line] = set()
        is_full = False
        for transaction_id, pending in self._in_order().items():
            if is_full or len(chosen) >= limit:
                break
            if lines_seen and transaction_id in chosen:
                # It was chosen together with its line.
                continue
            topic = None if pending.verdict is _ROLLBACK else blocking(pending)
            if topic is not None or (self.set_aside.lines and self.set_aside.is_behind(pending)):
                self.set_aside.add(pending, topic)
                self._put_off(pending)
                waiting.append(transaction_id)
                continue
            candidates: Iterable[Pending] = (pending,)
            line = pending.half.line if pending.half.order_key is not None else None
            if line is not None and line not in lines_seen:
                lines_seen.add(line)
                candidates = chain(self._passable(line, blocking, limit - len(chosen)), candidates)
            for candidate in candidates:
                if candidate.transaction_id in chosen or len(chosen) >= limit:
                    continue
                # No smaller one passes a candidate that does not fit: the order of decisions is kept.
                is_full = bool(chosen) and candidate.payload_bytes > room_bytes
                if is_full:
                    break
                chosen[candidate.transaction_id] = candidate
                room_bytes -= candidate.payload_bytes
        for transaction_id in waiting:
            del self._ready[transaction_id]
        return chosen

    def _in_order(self) -> dict[str, Pending]:
        """Return the ready transactions, in the order in which they first became ready."""
        if self._is_unsorted:
            self._is_unsorted = False
            self._ready = dict(sorted(self._ready.items(), key=lambda item: item[1].sequence))
        return self._ready

    def _passable(self, line: Line, blocking: Blocking, limit: int) -> Iterator[Pending]:
        """Yield the beginning of a line that can be published together: a hot key needs few Kafka transactions."""
        for pending in self.keys.line_of(line):
            waits = pending.verdict is None or pending.held or _needs_payload(pending)
            if waits or limit <= 0 or pending.transaction_id in self.delays:
                return
            is_rollback = pending.verdict is _ROLLBACK
            if not is_rollback and (blocking(pending) is not None or self.set_aside.is_behind(pending)):
                return
            limit -= 1
            yield pending
