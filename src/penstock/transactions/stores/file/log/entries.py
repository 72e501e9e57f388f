"""The entries of the redo log, and conversions: to records of the table, to transactions in memory, and back.

Entries were judged before they were written. So a replay, which rebuilds the table, judges nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from penstock.errors import MessageFormatError, StoreDamagedError
from penstock.transactions.core.pending import Pending
from penstock.transactions.stores.file.log.frames import Record
from penstock.transactions.stores.file.log.table import (
    STAYS,
    UNDECIDED,
    Row,
    State,
    StateTable,
    ms_of,
    tick_of,
)
from penstock.transactions.wire.half import Half, pack_halves, unpack_halves
from penstock.transactions.wire.ids import ID_BYTES, id_bytes, id_text
from penstock.transactions.wire.ops import Author, Verdict

_GROUP_MASK = 0xFFFFFFFF
_VERDICTS = {State.DELAYED: Verdict.COMMIT, State.COMMITTED: Verdict.COMMIT, State.DISCARDED: Verdict.DISCARD}


class Kind(IntEnum):
    """The kinds of records."""

    PREPARED = 1
    DECIDED = 2
    CHECKED = 3
    SETTLED = 4


class Prepared(NamedTuple):
    """The halves of a transaction, with its checks so far. Written again before its segment is removed."""

    #: Rises with each transaction: the order in which they were prepared.
    number: int
    #: Time of the first write, in milliseconds since the epoch.
    birth_ms: int
    #: Number of answered checks, and the time of the last answer (milliseconds since the epoch, 0: never).
    check_count: int
    answered_ms: int
    #: The decision and `Decided.decided`, as an earlier penstock rewrote them; now always UNKNOWN and 0.
    verdict: Verdict
    decided: int
    halves: tuple[Half, ...]


class Decided(NamedTuple):
    """A decision that counts."""

    transaction_id: str
    verdict: Verdict
    author: Author
    decided: int
    #: The operator's name, if an operator decided.
    actor: str


class Checked(NamedTuple):
    """A check with the answer UNKNOWN."""

    transaction_id: str
    check_count: int
    answered_ms: int


class Settled(NamedTuple):
    """Transactions that are published, rolled back or discarded."""

    transaction_ids: tuple[str, ...]


Entry = Prepared | Decided | Checked | Settled

_PREPARED = struct.Struct(">QQHQBQH")
_DECIDED = struct.Struct(f">{ID_BYTES}sBBQ")
_CHECKED = struct.Struct(f">{ID_BYTES}sHQ")


def encode_entry(entry: Entry) -> tuple[int, bytes]:
    """Return the kind and the payload of a record."""
    if isinstance(entry, Prepared):
        head = _PREPARED.pack(*entry[:6], len(entry.halves))
        return Kind.PREPARED, head + pack_halves(entry.halves)
    if isinstance(entry, Decided):
        head = _DECIDED.pack(id_bytes(entry.transaction_id), entry.verdict, entry.author, entry.decided)
        return Kind.DECIDED, head + entry.actor.encode()
    if isinstance(entry, Checked):
        return Kind.CHECKED, _CHECKED.pack(id_bytes(entry.transaction_id), entry.check_count, entry.answered_ms)
    return Kind.SETTLED, b"".join(map(id_bytes, entry.transaction_ids))


def decode_entry(kind: int, payload: bytes) -> Entry:
    """Read a record. Raises `MessageFormatError`."""
    try:
        if kind == Kind.PREPARED:
            return _prepared(payload)
        if kind == Kind.DECIDED:
            raw_id, verdict, author, decided = _DECIDED.unpack_from(payload)
            actor = payload[_DECIDED.size :].decode()
            return Decided(id_text(raw_id), Verdict(verdict), Author(author), decided, actor)
        if kind == Kind.CHECKED:
            raw_id, count, answered_ms = _CHECKED.unpack(payload)
            return Checked(id_text(raw_id), count, answered_ms)
        if kind == Kind.SETTLED and len(payload) % ID_BYTES == 0:
            starts = range(0, len(payload), ID_BYTES)
            return Settled(tuple(id_text(payload[start : start + ID_BYTES]) for start in starts))
    except (struct.error, ValueError) as error:
        raise MessageFormatError(f"an unreadable record of kind {kind}: {error}") from error
    raise MessageFormatError(f"a record of kind {kind} with {len(payload)} bytes, which this penstock cannot read")


def decode(record: Record) -> Entry:
    """Return the entry of a record. Raises `StoreDamagedError`."""
    try:
        return decode_entry(record.kind, record.payload)
    except MessageFormatError as error:
        raise StoreDamagedError(
            f"the file store is damaged, or was written by a later penstock: place {record.place} of its redo log "
            f"has {error}; use the penstock that wrote it, or restore its folder from a backup"
        ) from error


def _prepared(payload: bytes) -> Prepared:
    number, birth_ms, checks, answered_ms, verdict, decided, count = _PREPARED.unpack_from(payload)
    halves = unpack_halves(payload, _PREPARED.size)
    if not halves or len(halves) != count:
        raise ValueError(f"{len(halves)} halves instead of {count}")
    return Prepared(number, birth_ms, checks, answered_ms, Verdict(verdict), decided, tuple(halves))


class StoredTransaction(Pending):
    """An unsettled transaction in memory, read from the table and the log. The store's lock guards it.

    Its `offset` is its number in the table. While it is held or in flight, it belongs to the coordinator's thread.

    Attributes:
        number: rises with each transaction: the order in which they were prepared.
        decided: rises with each decision; 0 if it is undecided.
    """

    __slots__ = ("decided", "number")

    is_at_hand = True

    def __init__(self, halves: Sequence[Half], record: int, number: int, birth_ms: int) -> None:
        super().__init__(halves[0], record, birth_ms)
        self.number = number
        self.decided = 0
        for place, half in enumerate(halves[1:], record + 1):
            self.add_part(place, half)

    @property
    def stays(self) -> bool:
        """Whether it stays in memory while it is pending: it has an order key, or was resumed."""
        return self.half.order_key is not None or self.half.resumed is not None

    def decide(self, verdict: Verdict, author: Author, decided: int) -> None:
        """Store the decision that counts."""
        self.verdict, self.author, self.decided = verdict, author, decided
        resumed = self.half.resumed
        if verdict is Verdict.DISCARD or resumed is not None:
            # A resumed transaction is settled twice: discarded, then committed. The two need different names in the
            # done log, or the commit would count as published already.
            self.done_name = id_text(xxh3_128_digest(f"{self.transaction_id} {verdict.name} {resumed or ''}".encode()))


def replay(records: Iterable[Record], table: StateTable) -> None:
    """Rebuild the table from a log's records in their order, with all transactions in its index.

    A record may name a transaction that is settled and whose halves are gone with their segment. Raises
    `StoreDamagedError`.
    """
    table.clear()
    for record in records:
        entry = decode(record)
        if isinstance(entry, Prepared):
            _replay_prepared(entry, record, table)
        elif isinstance(entry, Settled):
            for transaction_id in entry.transaction_ids:
                _settle(table.find(id_bytes(transaction_id)), table)
        elif isinstance(entry, Checked):
            if number := table.find(id_bytes(entry.transaction_id)):
                table.set_wait(number, State.ANSWERED, tick_of(entry.answered_ms), entry.check_count)
        else:
            table.decided = max(table.decided, entry.decided)
            number = table.find(id_bytes(entry.transaction_id))
            if entry.verdict is Verdict.ROLLBACK:
                # A rolled-back transaction needs nothing more: the decision settles it.
                _settle(number, table)
            elif number:
                # Only two kinds of second decisions are written: a ROLLBACK of a COMMIT before its delivery time, and
                # an operator's DISCARD of a COMMIT that Kafka refuses.
                table.decide(number, entry.verdict, entry.author, entry.decided)


def _replay_prepared(entry: Prepared, record: Record, table: StateTable) -> None:
    raw_id, row = id_bytes(entry.halves[0].transaction_id), row_of(entry, record)
    due = due_tick_of(entry.halves[0].deliver_at_ms)
    table.number = max(table.number, entry.number)
    table.decided = max(table.decided, entry.decided)
    number = table.find(raw_id)
    if number:
        # The halves were rewritten with the checks so far. Its decision follows in the log.
        table.put(number, raw_id, due, row)
    else:
        number = table.add(raw_id, due, row)
        table.add_to_index(number)
    if entry.verdict is not Verdict.UNKNOWN:
        # An earlier penstock rewrote the decision with the halves.
        table.decide(number, entry.verdict, Author.PRODUCER, entry.decided)


def _settle(number: int, table: StateTable) -> None:
    if number:
        table.remove_from_index(number)
        table.free(number)


def row_of(entry: Prepared, record: Record) -> Row:
    """Return the table record of a transaction that was just prepared or rewritten."""
    half = entry.halves[0]
    stays = STAYS if half.order_key is not None or half.resumed is not None else 0
    state, ms = (State.ANSWERED, entry.answered_ms) if entry.check_count else (State.BORN, entry.birth_ms)
    group = xxh3_64_intdigest(half.group.encode()) & _GROUP_MASK
    return Row(record.place, record.size, tick_of(ms), group, state, stays, entry.check_count)


def due_tick_of(deliver_at_ms: int | None) -> int:
    """Return the timestamp of a delivery, 0 if it has no delivery time."""
    return 0 if deliver_at_ms is None else max(1, tick_of(deliver_at_ms))


def entries_of(stored: StoredTransaction) -> list[Entry]:
    """Return the log entries that describe all of a transaction, to be rewritten."""
    numbers = (stored.number, stored.birth_ms, stored.check_count, stored.answered_ms)
    entries: list[Entry] = [Prepared(*numbers, Verdict.UNKNOWN, 0, tuple(stored.halves))]
    if stored.verdict is not None:
        author = stored.author or Author.PRODUCER
        entries.append(Decided(stored.transaction_id, stored.verdict, author, stored.decided, ""))
    return entries


def restore(number: int, row: Row, order: int, entry: Entry) -> StoredTransaction:
    """Return a transaction built from its table record and its halves in the log. Raises `StoreDamagedError`."""
    if not isinstance(entry, Prepared):
        raise StoreDamagedError(
            f"the file store is damaged: place {row.place} of its redo log holds no halves; restore a backup"
        )
    stored = StoredTransaction(entry.halves, number, entry.number, entry.birth_ms)
    if row.checks:
        stored.check_count = row.checks
    if row.state in {State.ASKED, State.ANSWERED}:
        stored.answered_ms = ms_of(row.tick)
    if row.state not in UNDECIDED:
        stored.decide(_VERDICTS[State(row.state)], Author(row.flags & ~STAYS), order)
    return stored
