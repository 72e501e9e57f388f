"""A transaction of a file store as a record of the log, a record of the table, and an object in memory.

What is written in the log was judged before, so a replay, which makes a table of it, judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from penstock.errors import MessageFormatError, StoreDamagedError
from penstock.transactions.core.pending import Pending
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
    Row,
    State,
    StateTable,
    ms_of,
    tick_of,
)
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import id_bytes, id_text
from penstock.transactions.wire.ops import Author, Verdict

_GROUP_MASK = 0xFFFFFFFF
_VERDICTS = {State.DELAYED: Verdict.COMMIT, State.COMMITTED: Verdict.COMMIT, State.DISCARDED: Verdict.DISCARD}


class StoredTransaction(Pending):
    """An unsettled transaction in memory, as it was read from the table and the log. The store's lock guards it.

    Its `offset` is its number in the table. While it is held, or under way, the coordinator's thread has it.

    Attributes:
        number: rises from transaction to transaction: the order in which they were prepared.
        decided: rises from decision to decision; 0 while there is none.
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
        """Whether it stays in memory as long as it is pending: it stands in a line, or was brought back."""
        return self.half.order_key is not None or self.half.resumed is not None

    def decide(self, verdict: Verdict, author: Author, decided: int) -> None:
        """Take the decision in that stands."""
        self.verdict, self.author, self.decided = verdict, author, decided
        resumed = self.half.resumed
        if verdict is Verdict.DISCARD or resumed is not None:
            # It can be settled twice: one that was discarded, is resumed and commits is not taken for published because
            # the done log has it as discarded.
            self.done_name = id_text(xxh3_128_digest(f"{self.transaction_id} {verdict.name} {resumed or ''}".encode()))


def replay(records: Iterable[Record], table: StateTable) -> None:
    """Make a table of a log's records, in their order; all are entered. Raises `StoreDamagedError`.

    What a record speaks of may be settled, and its halves gone with their segment.
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
                # There is nothing left to do for it: it is settled by being decided.
                _settle(number, table)
            elif number:
                # The first decision is the only one written, save for one that takes a COMMIT back before it is due,
                # and for an operator's DISCARD of what Kafka refused.
                table.decide(number, entry.verdict, entry.author, entry.decided)


def _replay_prepared(entry: Prepared, record: Record, table: StateTable) -> None:
    raw_id, row = id_bytes(entry.halves[0].transaction_id), row_of(entry, record)
    due = due_tick_of(entry.halves[0].deliver_at_ms)
    table.number = max(table.number, entry.number)
    table.decided = max(table.decided, entry.decided)
    number = table.find(raw_id)
    if number:
        # It was written again, with all that was known of it; a decision stands behind it.
        table.put(number, raw_id, due, row)
    else:
        number = table.add(raw_id, due, row)
        table.add_to_index(number)
    if entry.verdict is not Verdict.UNKNOWN:
        # As an earlier version of penstock wrote it again.
        table.decide(number, entry.verdict, Author.PRODUCER, entry.decided)


def _settle(number: int, table: StateTable) -> None:
    if number:
        table.remove_from_index(number)
        table.free(number)


def row_of(entry: Prepared, record: Record) -> Row:
    """Return the record in the table of what was just prepared, or written again."""
    half = entry.halves[0]
    stays = STAYS if half.order_key is not None or half.resumed is not None else 0
    state, ms = (State.ANSWERED, entry.answered_ms) if entry.check_count else (State.BORN, entry.birth_ms)
    group = xxh3_64_intdigest(half.group.encode()) & _GROUP_MASK
    return Row(record.place, record.size, tick_of(ms), group, state, stays, entry.check_count)


def due_tick_of(deliver_at_ms: int | None) -> int:
    """Return the timestamp of a delivery, 0 where that is at once."""
    return 0 if deliver_at_ms is None else max(1, tick_of(deliver_at_ms))


def decode(record: Record) -> Entry:
    """Return the entry of a record. Raises `StoreDamagedError`."""
    try:
        return decode_entry(record.kind, record.payload)
    except MessageFormatError as error:
        raise StoreDamagedError(
            f"the file store is damaged, or was written by a later penstock: place {record.place} of its redo log "
            f"has {error}; use the penstock that wrote it, or restore its folder from a backup"
        ) from error


def entries_of(stored: StoredTransaction) -> list[Entry]:
    """Return entries that say all of a transaction that was just read, to be written again."""
    numbers = (stored.number, stored.birth_ms, stored.check_count, stored.answered_ms)
    entries: list[Entry] = [Prepared(*numbers, Verdict.UNKNOWN, 0, tuple(stored.halves))]
    if stored.verdict is not None:
        author = stored.author or Author.PRODUCER
        entries.append(Decided(stored.transaction_id, stored.verdict, author, stored.decided, ""))
    return entries


def restore(number: int, row: Row, order: int, entry: Entry) -> StoredTransaction:
    """Return a transaction as it stands, of its record and its halves in the log. Raises `StoreDamagedError`."""
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
