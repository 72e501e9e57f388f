"""What a file store holds: a transaction as it is in memory, and the replay that makes a state table of a redo log."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from xxhash import xxh3_64_intdigest

from penstock.errors import MessageFormatError, StoreDamagedError
from penstock.transactions.stores.file.log.entries import Checked, Decided, Entry, Prepared, decode_entry
from penstock.transactions.stores.file.log.frames import Record
from penstock.transactions.stores.file.log.table import (
    STAYS,
    UNDECIDED,
    RawRow,
    Row,
    State,
    StateTable,
    ms_of,
    tick_of,
)
from penstock.transactions.wire.half import Half, Line
from penstock.transactions.wire.ids import id_bytes
from penstock.transactions.wire.ops import Author, Verdict

_GROUP_MASK = 0xFFFFFFFF


class Standing(IntEnum):
    """How far a transaction in memory is on its way to Kafka; the queue of what is ready changes it."""

    #: It is undecided, or waits for its time in the table: it may leave the memory.
    PARKED = 0
    #: It waits for its time, which comes soon; for those before it in its line.
    DELAYED = 1
    BEHIND = 2
    READY = 3
    #: A relay has it; Kafka refuses it, or what it must stay behind; a trial has it.
    TAKEN = 4
    HELD = 5
    TRIED = 6
    #: Nobody publishes it: it is about to be decided again.
    WITHDRAWN = 7
    #: It is over, a little before that is durable here: what waits for it must not take it again.
    SETTLED = 8


@dataclass(slots=True, eq=False)
class StoredTransaction:
    """An unsettled transaction, as it was read from the table and the log. The store's lock guards it."""

    transaction_id: str
    #: Its number in the table.
    record: int
    group: str
    #: Rises from transaction to transaction: the order in which they were prepared.
    number: int
    birth_ms: int
    check_count: int
    #: When it was asked about, or that was answered; 0: never.
    asked_ms: int
    #: None while it is undecided.
    verdict: Verdict | None
    author: Author | None
    #: Rises from decision to decision; 0 while there is none.
    decided: int
    #: Bytes in the redo log.
    size: int
    immunity_ms: int | None
    deliver_at_ms: int | None
    #: With `order="half"`: the group and key within which it waits for those before it.
    line: Line | None
    topics: tuple[str, ...]
    #: Where an operator brought it back from; None: it was never discarded.
    resumed: str | None
    #: None: they are read from the log again.
    halves: tuple[Half, ...] | None
    #: Bytes of them that count for what the store keeps in memory.
    cached: int = 0
    standing: Standing = Standing.PARKED

    @property
    def settled(self) -> bool:
        """Whether it is over."""
        return self.standing is Standing.SETTLED

    @property
    def stays(self) -> bool:
        """Whether it stays in memory as long as it is pending."""
        return self.standing is not Standing.PARKED or self.line is not None or self.resumed is not None


_VERDICTS = {State.DELAYED: Verdict.COMMIT, State.COMMITTED: Verdict.COMMIT, State.DISCARDED: Verdict.DISCARD}


class Replay:
    """Makes a table of a log's records, in their order; all are entered. Raises `StoreDamagedError`."""

    def __init__(self, table: StateTable) -> None:
        self._table = table
        # Timestamps of delivery, by number: the table has room for them once they are decided.
        self._dues = array("I")

    def __call__(self, record: Record) -> None:
        """Let a record change the table. What it speaks of may be settled, and its halves gone with their segment."""
        table, entry = self._table, decoded(record)
        if isinstance(entry, Prepared):
            self._prepare(entry, record)
        elif isinstance(entry, Decided):
            table.decided = max(table.decided, entry.decided)
            number = table.find(id_bytes(entry.transaction_id))
            if number and entry.verdict is Verdict.ROLLBACK:
                # There is nothing left to do for it: it is settled by being decided.
                self._settle(number)
            elif number:
                # The first decision is the only one written, save for one that takes a COMMIT back before it is due,
                # and for an operator's DISCARD of what Kafka refused.
                table.decide(number, entry.verdict, entry.author, entry.decided, self._dues[number])
        elif isinstance(entry, Checked):
            if number := table.find(id_bytes(entry.transaction_id)):
                table.wait(number, State.ANSWERED, tick_of(entry.answered_ms), entry.check_count)
        else:
            for transaction_id in entry.transaction_ids:
                if number := table.find(id_bytes(transaction_id)):
                    self._settle(number)

    def _prepare(self, entry: Prepared, record: Record) -> None:
        table, raw_id = self._table, id_bytes(entry.halves[0].transaction_id)
        table.number = max(table.number, entry.number)
        table.decided = max(table.decided, entry.decided)
        number = table.find(raw_id)
        if number:
            # It was written again.
            table.move(number, record.place, record.size)
            return
        number = table.add(raw_id, entry.number, row_of(entry, record))
        table.enter(number)
        if number >= len(self._dues):
            self._dues.extend([0] * (number + 1))
        self._dues[number] = due_of(_longest([half.deliver_at_ms for half in entry.halves]))
        if entry.verdict is not Verdict.UNKNOWN:
            # As an earlier version of penstock wrote it again.
            table.decide(number, entry.verdict, Author.PRODUCER, entry.decided, self._dues[number])

    def _settle(self, number: int) -> None:
        self._table.leave(number)
        self._table.free(number)


def row_of(entry: Prepared, record: Record) -> RawRow:
    """Return the record in the table of what was just prepared, or written again."""
    half = entry.halves[0]
    stays = STAYS if half.order_key is not None or half.resumed is not None else 0
    state, ms = (State.ANSWERED, entry.answered_ms) if entry.check_count else (State.BORN, entry.birth_ms)
    return record.place, record.size, tick_of(ms), hash_of(half.group), state, stays, entry.check_count


def due_of(deliver_at_ms: int | None) -> int:
    """Return the timestamp of a delivery, 0 where that is at once."""
    return 0 if deliver_at_ms is None else max(1, tick_of(deliver_at_ms))


def decoded(record: Record) -> Entry:
    """Return the entry of a record. Raises `StoreDamagedError`."""
    try:
        return decode_entry(record.kind, record.payload)
    except MessageFormatError as error:
        raise StoreDamagedError(
            f"the file store is damaged, or was written by a later penstock: place {record.place} of its redo log "
            f"has {error}; use the penstock that wrote it, or restore its folder from a backup"
        ) from error


def loaded(number: int, row: Row, order: int, entry: Entry) -> StoredTransaction:
    """Return a transaction as it stands, of its record and its halves in the log. Raises `StoreDamagedError`."""
    if not isinstance(entry, Prepared):
        raise StoreDamagedError(
            f"the file store is damaged: place {row.place} of its redo log holds no halves; restore a backup"
        )
    stored = born(number, row.size, entry)
    stored.check_count = row.checks
    if row.state in {State.ASKED, State.ANSWERED}:
        stored.asked_ms = ms_of(row.tick)
    if row.state not in UNDECIDED:
        stored.verdict = _VERDICTS[State(row.state)]
        stored.author, stored.decided = Author(row.flags & ~STAYS), order
    return stored


def born(number: int, size: int, entry: Prepared) -> StoredTransaction:
    """Return a transaction that was just prepared."""
    halves = entry.halves
    first = halves[0]
    immunity_ms, deliver_at_ms = first.immunity_ms, first.deliver_at_ms
    topics: tuple[str, ...] = (first.topic,)
    if len(halves) > 1:
        immunity_ms = _longest([half.immunity_ms for half in halves])
        deliver_at_ms = _longest([half.deliver_at_ms for half in halves])
        topics = tuple(dict.fromkeys(half.topic for half in halves))
    return StoredTransaction(
        transaction_id=first.transaction_id,
        record=number,
        group=first.group,
        number=entry.number,
        birth_ms=entry.birth_ms,
        check_count=0,
        asked_ms=0,
        verdict=None,
        author=None,
        decided=0,
        size=size,
        immunity_ms=immunity_ms,
        deliver_at_ms=deliver_at_ms,
        line=first.line,
        topics=topics,
        resumed=first.resumed,
        halves=halves,
    )


@lru_cache(maxsize=1_024)
def hash_of(group: str) -> int:
    """Return the hash of a producer group."""
    return xxh3_64_intdigest(group.encode()) & _GROUP_MASK


def _longest(times: Sequence[int | None]) -> int | None:
    return max((time for time in times if time is not None), default=None)
