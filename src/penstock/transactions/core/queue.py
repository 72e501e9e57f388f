"""Which decided transactions the next Kafka transaction settles.

Pure. A decided transaction is ready, set aside (its target cannot take it now, or its payload is not in memory, or it
stands behind one that is set aside), delayed (`deliver_at`), or it stands behind an earlier one of its line
(`order="half"`). Only what is ready is looked at, so that a crowd of those that wait delays nobody.
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
        self._list(is_dropped=_is_away(pending)).add(entry)

    def remove(self, transaction_id: str) -> None:
        """Forget a transaction that was settled otherwise."""
        entry = self._entries.pop(transaction_id, None)
        if entry is not None:
            self._list(is_dropped=_is_away(entry[2])).remove(entry)

    def _list(self, *, is_dropped: bool) -> SortedList[_Entry]:
        return self._dropped if is_dropped else self._in_memory

    def next_ms(self) -> int | None:
        """Return when the next one is due, or None."""
        return min((entries[0][0] for entries in (self._in_memory, self._dropped) if entries), default=None)

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


def _is_away(pending: Pending) -> bool:
    """Tell whether the payload of a transaction has to be in memory before it may go on, and is not."""
    return pending.dropped is not None and not pending.is_at_hand


class KeyOrder:
    """The lines of one half partition. Not thread-safe: its coordinator's thread drives it.

    Halves are added in the order of their offsets, which is the order in which they were sent; `sort` is for those
    that are not.
    """

    def __init__(self) -> None:
        # By group and key, then by transaction id. There are no empty lines.
        self._lines: dict[Line, OrderedDict[str, Pending]] = {}
        self._count = 0

    def add(self, line: Line, pending: Pending) -> None:
        """Let a transaction stand in line, behind all that came before."""
        self._count += 1
        self._lines.setdefault(line, OrderedDict())[pending.half.transaction_id] = pending

    def head(self, line: Line) -> Pending | None:
        """Return who is in front, or None when nobody waits."""
        waiting = self._lines.get(line)
        return next(iter(waiting.values())) if waiting else None

    def line_of(self, line: Line) -> Iterable[Pending]:
        """Return all of a line, the head first."""
        return self._lines[line].values() if line in self._lines else ()

    def remove(self, line: Line, pending: Pending) -> Pending | None:
        """Take a transaction out; return the new head where it was the head itself."""
        waiting = self._lines[line]
        was_head = next(iter(waiting)) == pending.half.transaction_id
        del waiting[pending.half.transaction_id]
        self._count -= 1
        if not waiting:
            del self._lines[line]
            return None
        return next(iter(waiting.values())) if was_head else None

    def sort(self, line: Line) -> None:
        """Let all of a line stand in the order of their offsets: one was added whose half had been read before."""
        waiting = self._lines[line]
        self._lines[line] = OrderedDict(sorted(waiting.items(), key=lambda item: item[1].offset))

    @property
    def behind(self) -> int:
        """How many transactions stand behind another one."""
        return self._count - len(self._lines)


#: How many delayed transactions become ready in one round.
_DUE = 10_000

# A member of an enumeration is slow to look up, and this is the way of every transaction.
_ROLLBACK = Verdict.ROLLBACK


#: Names the topic for whose sake a transaction cannot be published with others now, or returns None.
Blocking = Callable[[Pending], str | None]


class ReadyQueue:
    """The decided transactions of one half partition. Not thread-safe: its coordinator's thread drives it.

    `let_go` is called with what begins to wait for long: it may drop the payload.
    """

    def __init__(self, delays: Delays, let_go: Callable[[Pending], None]) -> None:
        self._let_go = let_go
        #: All of them, by id, in the order in which the decisions took effect.
        self.all: dict[str, Pending] = {}
        self.keys = KeyOrder()
        self.delays = delays
        #: Those that cannot be published with the others now.
        self.set_aside = SetAside()
        self._ready: dict[str, Pending] = {}
        self._sequence = count(1)
        # One came back that had its turn before.
        self._is_unsorted = False

    @property
    def ready(self) -> int:
        """How many could be published now; those that are under way are among them."""
        return len(self._ready)

    def add(self, pending: Pending) -> None:
        """Take a transaction in that was just decided."""
        half = pending.half
        self.all[half.transaction_id] = pending
        if half.deliver_at_ms is not None and pending.verdict is Verdict.COMMIT:
            self.delays.add(pending, half.deliver_at_ms)
            self._let_go(pending)
        elif half.order_key is None:
            self._make_ready(pending)
        else:
            self._enter(pending)

    def _enter(self, pending: Pending) -> None:
        """Let it be published, unless it stands behind another one of its key."""
        if self._is_in_front(pending):
            self._make_ready(pending)

    def _is_in_front(self, pending: Pending) -> bool:
        line = pending.half.line
        return line is None or pending.verdict is not Verdict.COMMIT or self.keys.head(line) is pending

    def _make_ready(self, pending: Pending) -> None:
        """Let it be published, behind all that may be already."""
        pending.sequence = next(self._sequence)
        self._ready[pending.half.transaction_id] = pending

    def _make_ready_again(self, some: Iterable[Pending]) -> None:
        """Let those be published that had to wait, in their places among the others."""
        for pending in some:
            if self._is_in_front(pending):
                self._ready[pending.half.transaction_id] = pending
                self._is_unsorted = True

    def withdraw(self, pending: Pending) -> None:
        """Take a decided transaction out of all that waits to be published: it is decided otherwise."""
        transaction_id = pending.half.transaction_id
        self.all.pop(transaction_id, None)
        self._ready.pop(transaction_id, None)
        self.delays.remove(transaction_id)
        self._make_ready_again(self.set_aside.remove(pending))

    def forget(self, pending: Pending) -> None:
        """Forget a transaction that is settled; those that it held take its place."""
        transaction_id = pending.half.transaction_id
        # One that a snapshot says to be decided may go with its line before that op is read again: it is not among all.
        self.all.pop(transaction_id, None)
        self._ready.pop(transaction_id, None)
        if self.set_aside:
            self._make_ready_again(self.set_aside.remove(pending))
        if self.delays:
            self.delays.remove(transaction_id)
        if (line := pending.half.line) is not None:
            head = self.keys.remove(line, pending)
            if head is not None and head.verdict is Verdict.COMMIT:
                name = head.half.transaction_id
                if not (head.held or name in self._ready or name in self.delays):
                    self._make_ready(head)

    def is_put_off(self, pending: Pending) -> bool:
        """Tell whether a transaction is delayed, or set aside."""
        return pending.held or pending.half.transaction_id in self.delays

    def sort(self, line: Line) -> None:
        """Let all of a line stand in the order of their offsets; who does not stand in front any more is not ready."""
        self.keys.sort(line)
        head = self.keys.head(line)
        for pending in self.keys.line_of(line):
            if pending is not head and pending.verdict is Verdict.COMMIT:
                self._ready.pop(pending.half.transaction_id, None)

    def release_due(self, now_ms: int) -> None:
        """Let delayed transactions go whose time has come; a crowd of them in portions."""
        for pending in islice(self.delays.take_due(now_ms), _DUE):
            self._enter(pending)

    def release(self, topic: str, is_refused: Callable[[str], bool]) -> None:
        """Let what was set aside for a topic's sake go with the others, before those that came later.

        What is refused, by its name, stays where it is.
        """
        freed = self.set_aside.release(topic, lambda pending: is_refused(pending.transaction_id))
        self._make_ready_again(freed)

    def held_by(self, pending: Pending) -> Pending | None:
        """Return the transaction behind which one stands, or None."""
        line = pending.half.line
        head = None if line is None else self.keys.head(line)
        return None if head is pending else head

    def choose(self, limit: int, out: Blocking, room_bytes: int) -> dict[str, Pending]:
        """Return what can be settled now, by id, in the order of publication. What cannot be published is set aside.

        `limit`, `out` and `room_bytes` are those of `PartitionState.next_batch`.
        """
        chosen: dict[str, Pending] = {}
        waiting: list[str] = []
        looked: set[Line] = set()
        for transaction_id, pending in self._in_order().items():
            if len(chosen) >= limit:
                break
            if looked and transaction_id in chosen:
                # It went with others of its key.
                continue
            if self._goes_aside(pending, out):
                waiting.append(transaction_id)
                continue
            line = pending.half.line if pending.half.order_key is not None else None
            candidates: Iterable[Pending] = (pending,)
            if line is not None and line not in looked:
                looked.add(line)
                candidates = chain(self._passable(line, out, limit - len(chosen)), candidates)
            room_bytes = _fill(chosen, candidates, limit, room_bytes)
            if room_bytes < 0:
                break
        for transaction_id in waiting:
            del self._ready[transaction_id]
        return chosen

    def _in_order(self) -> dict[str, Pending]:
        """Return those that are ready, in the order in which they first came to be."""
        if self._is_unsorted:
            self._is_unsorted = False
            self._ready = dict(sorted(self._ready.items(), key=lambda item: item[1].sequence))
        return self._ready

    def _goes_aside(self, pending: Pending, out: Blocking) -> bool:
        """Set a transaction aside that cannot be published with others, and tell whether it is."""
        if pending.verdict is _ROLLBACK:
            return False
        topic = out(pending)
        if topic is None and not (self.set_aside and self.set_aside.is_behind(pending)):
            return False
        self.set_aside.add(pending, topic)
        self._let_go(pending)
        return True

    def _passable(self, line: Line, out: Blocking, limit: int) -> Iterator[Pending]:
        """Yield the beginning of a line that can go in one go: a hot key does not wait for a group per message."""
        for pending in self.keys.line_of(line):
            waits = pending.verdict is None or pending.held or _is_away(pending)
            if waits or limit <= 0 or pending.half.transaction_id in self.delays:
                return
            if pending.verdict is not _ROLLBACK and (out(pending) is not None or self.set_aside.is_behind(pending)):
                return
            limit -= 1
            yield pending


def _fill(chosen: dict[str, Pending], candidates: Iterable[Pending], limit: int, room_bytes: int) -> int:
    """Choose as many as there is room for, and return the bytes that are left: below 0 where one did not fit.

    Nothing smaller goes past one that does not fit: the order of decisions is kept. The first goes whatever its size.
    """
    for pending in candidates:
        transaction_id = pending.half.transaction_id
        if transaction_id in chosen or len(chosen) >= limit:
            continue
        if chosen and pending.payload_bytes > room_bytes:
            return -1
        chosen[transaction_id] = pending
        room_bytes = max(0, room_bytes - pending.payload_bytes)
    return room_bytes
