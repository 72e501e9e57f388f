"""What a file store holds: a transaction in memory, which changes hold, and the replay that makes a table of a log.

A batch is judged before it is written, by what the store has and by what earlier changes of the batch do: the first
decision wins. What is written holds, so a replay of the log judges nothing. There are two exceptions to "the first
wins": a ROLLBACK takes back the COMMIT of what is not due yet, and an operator's DISCARD that of what Kafka refuses, if
`Publication` lets it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

from penstock.errors import MessageFormatError, StoreDamagedError
from penstock.transactions.core.decisions import may_cancel
from penstock.transactions.stores.file.log.frames import (
    Checked,
    Decided,
    Entry,
    Prepared,
    Record,
    Settled,
    decode_entry,
)
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
from penstock.transactions.stores.relayed_store import NOT_HELD, UNKNOWN_ID, Decide, Outcome, Prepare, came_first
from penstock.transactions.wire.half import MAX_CHECK_NUMBER, Half, Line
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


class Settle(NamedTuple):
    """Transactions are over."""

    transaction_ids: tuple[str, ...]


Change = Prepare | Decide | Settle


@dataclass(slots=True)
class Applied(Outcome):
    """What became of a change: with the transactions in memory that it changed."""

    changed: Sequence[StoredTransaction] = ()


class Holdings(Protocol):
    """What the store has."""

    def number_of(self, transaction_id: str) -> int:
        """Return the number of a transaction that is pending, or 0."""

    def find(self, transaction_id: str) -> StoredTransaction | None:
        """Return a transaction that is pending."""

    def ended(self, transaction_id: str) -> Verdict | None:
        """Return how a transaction ended that was settled a while ago, if that is known still."""


class Publication(Protocol):
    """Where committed transactions wait to be published. Called with the journal's lock held."""

    def withdraw(self, stored: StoredTransaction, verdict: Verdict) -> bool:
        """Let nobody publish what is to be decided again; False where it may not be: it is under way, or about to be.

        A ROLLBACK may be where it waits for its time, a DISCARD where Kafka refuses it.
        """

    def restore(self, stored: StoredTransaction) -> None:
        """Let it wait as before."""

    def changed(self, changes: Sequence[Change], applied: Sequence[Applied]) -> None:
        """Take in what has become durable."""


class Judging:
    """Changes that are judged together: what earlier ones make of a transaction does not show in the journal yet."""

    def __init__(self, holdings: Holdings, publication: Publication | None, number: int, decided: int) -> None:
        self._holdings = holdings
        self._publication = publication
        # The highest that were given out.
        self._number, self._decided = number, decided
        # Ids of what is prepared or decided here; answered checks.
        self._taken: set[str] = set()
        self._counts: dict[str, int] = {}
        #: Ids of what was looked at, and may leave the memory again at the end.
        self.seen: set[str] = set()
        #: What is decided again, and not published before that.
        self.withdrawn: list[StoredTransaction] = []

    def judge(self, change: Change) -> Entry | str | None:
        """Return the entry of a change that holds, or why it does not; None: nothing is to be said of that."""
        if isinstance(change, Settle):
            return Settled(change.transaction_ids)
        if isinstance(change, Decide):
            return self._judge(change)
        transaction_id = change.halves[0].transaction_id
        if transaction_id in self._taken or self._holdings.number_of(transaction_id):
            return f"transaction {transaction_id} is stored already"
        self._taken.add(transaction_id)
        self._number += 1
        return Prepared(self._number, change.birth_ms, 0, 0, Verdict.UNKNOWN, 0, change.halves)

    def _judge(self, change: Decide) -> Entry | str | None:
        transaction_id = change.transaction_id
        stored = self._holdings.find(transaction_id)
        if stored is None:
            ended = self._holdings.ended(transaction_id)
            return UNKNOWN_ID if ended is None else f"{came_first(ended)}; it is settled"
        self.seen.add(transaction_id)
        if change.group not in {None, stored.group}:
            return f"it belongs to group {stored.group}"
        is_first = stored.verdict is None and not change.cancels
        if transaction_id in self._taken or not (is_first or self._is_withdrawn(change, stored)):
            # An answered check that comes late says nothing against what was decided.
            return None if change.verdict is Verdict.UNKNOWN else _too_late(change, stored)
        if change.verdict is not Verdict.UNKNOWN:
            self._taken.add(transaction_id)
            self._decided += 1
            return Decided(transaction_id, change.verdict, change.author, self._decided, change.actor)
        count = self._counts.get(transaction_id, stored.check_count) + 1
        if change.check_number != count or count > MAX_CHECK_NUMBER:
            return None
        self._counts[transaction_id] = count
        return Checked(transaction_id, count, change.now_ms)

    def _is_withdrawn(self, change: Decide, stored: StoredTransaction) -> bool:
        """Tell whether a decision counts against a COMMIT; nobody publishes that from then on.

        A ROLLBACK does before it is due, and an operator's DISCARD where Kafka refuses it.
        """
        is_early = stored.deliver_at_ms is not None and change.now_ms < stored.deliver_at_ms
        is_cancelled = is_early and may_cancel(change.verdict, change.author)
        is_discarded = (change.verdict, change.author) == (Verdict.DISCARD, Author.OPERATOR)
        publication = self._publication
        if stored.verdict is not Verdict.COMMIT or not (is_cancelled or is_discarded) or publication is None:
            return False
        may = publication.withdraw(stored, change.verdict)
        if may:
            self.withdrawn.append(stored)
        return may


def _too_late(change: Decide, stored: StoredTransaction) -> str:
    """Return why a decision does not count."""
    if stored.verdict is None:
        return "it is not decided yet" if change.cancels else "another decision came first"
    if (stored.verdict, change.verdict) == (Verdict.COMMIT, Verdict.DISCARD):
        return NOT_HELD
    return came_first(stored.verdict)
