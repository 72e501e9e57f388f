"""The file store's truth: the redo log and the state table it makes, changed in batches that are durable or not at all.

A batch is judged (the first decision wins), written and synced in one frame, and only then applied: what the table
shows is on the disk. Segments that hold little that is still needed are left behind: what is live in the oldest is
written again at the end, so that the disk taken, and the time to open, follow what is pending.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from penstock.errors import StoreDamagedError
from penstock.transactions.stores.file.log.folder import Folder
from penstock.transactions.stores.file.log.frames import (
    FRAME_BYTES,
    RECORD_BYTES,
    Checked,
    Decided,
    Entry,
    Kind,
    Prepared,
    Record,
    Settled,
    encode_entry,
)
from penstock.transactions.stores.file.log.ledger import (
    Applied,
    Change,
    Judging,
    Publication,
    Replay,
    StoredTransaction,
    born,
    decoded,
    due_of,
    loaded,
    row_of,
)
from penstock.transactions.stores.file.log.redo import NoRoomError, RedoLog, damaged
from penstock.transactions.stores.file.log.table import KEYS, ROWS, STAYS, STOPPED, State, StateTable, tick_of
from penstock.transactions.stores.relayed_store import Decide
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import id_bytes, id_text, is_id
from penstock.transactions.wire.ops import Author, Verdict

#: Bytes of live halves that are written again in one frame, at most (and at least one half).
_CARRY_BYTES = 1 << 20
#: Ends that are remembered, in this process alone.
_ENDED = 10_000


class Journal:
    """The redo log and the state table of one store.

    One thread opens it, commits and closes; any thread may read. `lock` guards the table and what is in memory.
    """

    def __init__(self, folder: Folder, segment_bytes: int) -> None:
        self._folder = folder
        self.lock = threading.Lock()
        self.table = StateTable(folder.map)
        self.redo = RedoLog(folder, segment_bytes)
        #: The transactions in memory, by id: what is young, in flight, ready, or stands in a line.
        self.live: dict[str, StoredTransaction] = {}
        #: Whether opening made the table of the log.
        self.was_rebuilt = False
        #: Set once it is open, by whoever publishes; without it nothing can be taken back.
        self.publication: Publication | None = None
        # How the last transactions ended, for decisions that come after that.
        self._ended: OrderedDict[str, Verdict] = OrderedDict()

    def open(self) -> None:
        """Open the log and the table; the latter is made of the log unless a clean stop left it. As `RedoLog.open`.

        An older store has no table: it gets one.
        """
        table, folder = self.table, self._folder
        log = table.unseal(folder.read(STOPPED)) if STOPPED in folder.names() else None
        self.was_rebuilt = self.redo.open(Replay(table), log, self._clear)
        table.claim()
        folder.remove(STOPPED)
        for number, (_, _, _, _, state, flags, _) in table:
            if flags & STAYS or state in {State.COMMITTED, State.DISCARDED}:
                self.adopt(number, self.load(number))

    def _clear(self) -> None:
        for name in (ROWS, KEYS):
            self._folder.remove(name)
        self.table.clear()

    def close(self) -> None:
        """Leave the table as it is, so that opening it need not read the log. Raises `OSError`: then it does."""
        for name in (ROWS, KEYS):
            self._folder.sync(name)
        self._folder.write(STOPPED, 0, self.table.seal(self.redo.log_end))
        self._folder.sync(STOPPED)
        self._folder.sync_names()

    # What is in memory, and what is in the table alone. The lock is held, save for `load` and those below it.

    def number_of(self, transaction_id: str) -> int:
        """Return the number of a transaction that is pending, or 0."""
        stored = self.live.get(transaction_id)
        if stored is not None:
            return stored.record
        return self.table.find(id_bytes(transaction_id)) if is_id(transaction_id) else 0

    def find(self, transaction_id: str) -> StoredTransaction | None:
        """Return a transaction that is pending, which is in memory then."""
        stored = self.live.get(transaction_id)
        if stored is None and (number := self.number_of(transaction_id)):
            stored = self.adopt(number, self.load(number))
        return stored

    def adopt(self, number: int, stored: StoredTransaction | None) -> StoredTransaction | None:
        """Take what was read of a record into memory, unless it is there, or is another transaction's by now."""
        if stored is None or stored.transaction_id in self.live:
            return None
        if self.table.find(id_bytes(stored.transaction_id)) != number:
            return None
        self.table.leave(number)
        self.live[stored.transaction_id] = stored
        return stored

    def park(self, stored: StoredTransaction) -> None:
        """Let a transaction leave the memory, unless it is needed there."""
        if not stored.stays and self.live.get(stored.transaction_id) is stored:
            del self.live[stored.transaction_id]
            self.table.enter(stored.record)

    def _park(self, seen: Iterable[str]) -> None:
        """Let leave the memory what was looked at, but for what is young."""
        for transaction_id in seen:
            stored = self.live.get(transaction_id)
            if stored is not None and (stored.verdict is not None or stored.asked_ms):
                self.park(stored)

    def load(self, number: int) -> StoredTransaction | None:
        """Read a transaction from the table and the log; None: it is settled by now. Safe from any thread.

        Raises `StoreDamagedError` where its halves do not read any more.
        """
        row = self.table.row(number)
        while row.state:
            order = self.table.key(number)[1]
            try:
                record = self.redo.read(row.place, row.size)
            except StoreDamagedError:
                # It may have been settled a moment ago, or its halves were written again elsewhere.
                if self.table.row(number) == row:
                    raise
                record = None
            former, row = row, self.table.row(number)
            if record is not None and row == former:
                return loaded(number, row, order, decoded(record))
        return None

    def peek(self, number: int) -> StoredTransaction | None:
        """Return a transaction by its number, and leave the memory as it is. As `load`."""
        return self.in_memory(number) or self.load(number)

    def in_memory(self, number: int) -> StoredTransaction | None:
        """Return a transaction by its number if it is in memory."""
        return self.live.get(id_text(self.table.key(number)[0]))

    def undecided(self, number: int, transaction_id: str) -> StoredTransaction | None:
        """Return a transaction with its halves, unless it was decided or settled meanwhile. As `load`."""
        stored = self.load(number)
        if stored is None or stored.transaction_id != transaction_id or stored.verdict is not None:
            return None
        return stored

    def halves(self, stored: StoredTransaction) -> tuple[Half, ...]:
        """Return the halves of a transaction that is pending, from memory or from the log. As `load`."""
        if stored.halves is not None:
            return stored.halves
        again = self.load(stored.record)
        if again is None or again.halves is None or again.transaction_id != stored.transaction_id:
            raise damaged(f"the halves of transaction {stored.transaction_id} are gone")
        return again.halves

    # Changing.

    def commit(self, changes: Sequence[Change]) -> list[Applied]:
        """Judge changes in their order and make those that hold durable, all together.

        Raises `NoRoomError`, having changed nothing: it may be tried again. After an `OSError` it is not known what
        became of the changes before the store is opened again.
        """
        with self.lock:
            judging = Judging(self, self.publication, self.table.number, self.table.decided)
            entries = [judging.judge(change) for change in changes]
        try:
            records = self._write([encode_entry(entry) for entry in entries if isinstance(entry, tuple)], len(changes))
        except NoRoomError:
            with self.lock:
                for stored in judging.withdrawn:
                    self._restore(stored)
                self._park(judging.seen)
            raise
        with self.lock:
            written = iter(records)
            applied = [
                self._made(entry, next(written)) if isinstance(entry, tuple) else self._not_made(change, entry)
                for change, entry in zip(changes, entries, strict=True)
            ]
            if self.publication is not None:
                self.publication.changed(changes, applied)
            self._park(judging.seen)
        return applied

    def _restore(self, stored: StoredTransaction) -> None:
        if self.publication is not None:
            self.publication.restore(stored)

    def _made(self, entry: Entry, record: Record) -> Applied:
        live, table = self.live, self.table
        if isinstance(entry, Prepared):
            half = entry.halves[0]
            number = table.add(id_bytes(half.transaction_id), entry.number, row_of(entry, record))
            table.number = entry.number
            stored = live[half.transaction_id] = born(number, record.size, entry)
        elif isinstance(entry, Settled):
            changed = [found for name in entry.transaction_ids if (found := self.find(name)) is not None]
            for settled in changed:
                self._end(settled, settled.verdict or Verdict.COMMIT)
            return Applied(changed=changed)
        elif isinstance(entry, Checked):
            stored = self._judged(entry.transaction_id)
            stored.check_count, stored.asked_ms = entry.check_count, entry.answered_ms
            table.wait(stored.record, State.ANSWERED, tick_of(entry.answered_ms), entry.check_count)
        else:
            stored = self._judged(entry.transaction_id)
            stored.verdict, stored.author, stored.decided = entry.verdict, entry.author, entry.decided
            table.decided = entry.decided
            if entry.verdict is Verdict.ROLLBACK:
                self._end(stored, entry.verdict)
            else:
                table.decide(stored.record, entry.verdict, entry.author, entry.decided, due_of(stored.deliver_at_ms))
        return Applied(changed=[stored])

    def _judged(self, transaction_id: str) -> StoredTransaction:
        """Return what an entry that was just written is of; it may have left the memory since, to be asked about."""
        stored = self.find(transaction_id)
        assert stored is not None  # noqa: S101 - nobody else settles it
        return stored

    def _end(self, stored: StoredTransaction, verdict: Verdict) -> None:
        del self.live[stored.transaction_id]
        self.table.free(stored.record)
        self._ended[stored.transaction_id] = verdict
        if len(self._ended) > _ENDED:
            self._ended.popitem(last=False)

    def _not_made(self, change: Change, refused: str | None) -> Applied:
        if refused is None or not isinstance(change, Decide):
            return Applied(refused)
        stored = self.live.get(change.transaction_id)
        if stored is None:
            ended = self._ended.get(change.transaction_id)
            return Applied(refused, ended, is_known=ended is not None)
        return Applied(refused, stored.verdict, is_known=change.group in {None, stored.group})

    def ended(self, transaction_id: str) -> Verdict | None:
        """Return how a transaction ended that was settled a while ago, if that is known still."""
        return self._ended.get(transaction_id)

    # The log.

    def _write(self, records: Sequence[tuple[int, bytes]], most: int) -> list[Record]:
        """Write records; the table has room for so many more then."""
        if not records:
            return []
        try:
            with self.lock:
                self.table.reserve(most)
        except OSError as error:
            raise NoRoomError(f"the state table: {error.strerror}") from error
        size = FRAME_BYTES + sum(RECORD_BYTES + len(payload) for _, payload in records)
        if self.redo.needs_segment(size):
            live, floor = self._extent()
            self.redo.begin_segment(size, floor)
            self._carry(live)
        if self.redo.needs_segment(size):
            # What was carried has filled it.
            self.redo.begin_segment(size, self._extent()[1])
        return self.redo.append(records)

    def _extent(self) -> tuple[int, int]:
        """Return the bytes of all that is pending, and the lowest place that is still needed."""
        live, floor = 0, self.redo.end
        for _, (place, size, *_) in self.table:
            live += size
            floor = min(floor, place)
        return live, floor

    def _carry(self, live: int) -> None:
        """Write what is live in the oldest segments again, while the log takes more than twice what is live."""
        bases = self.redo.bases
        # The last two are always there: the one that was begun, and the one that was full.
        spare, limit = self.redo.end - bases[0] - 2 * live, 0
        for begin, end in itertools.pairwise(bases[:-1]):
            if spare > 0:
                spare, limit = spare - (end - begin), end
        frame: list[tuple[int, bytes]] = []
        moved: list[int] = []
        size = FRAME_BYTES
        for _, number in sorted((place, number) for number, (place, *_) in self.table if place < limit):
            stored = self.load(number)
            records = [] if stored is None else [encode_entry(entry) for entry in _entries_of(stored)]
            more = sum(RECORD_BYTES + len(payload) for _, payload in records)
            if frame and size + more > _CARRY_BYTES:
                self._append_carried(frame, size, moved)
                frame, moved, size = [], [], FRAME_BYTES
            frame += records
            moved.append(number)
            size += more
        if frame:
            self._append_carried(frame, size, moved)

    def _append_carried(self, frame: Sequence[tuple[int, bytes]], size: int, moved: Sequence[int]) -> None:
        if self.redo.needs_segment(size):
            self.redo.begin_segment(size, self._extent()[1])
        halves = (record for record in self.redo.append(frame) if record.kind == Kind.PREPARED)
        with self.lock:
            for number, record in zip(moved, halves, strict=True):
                self.table.move(number, record.place, record.size)


def _entries_of(stored: StoredTransaction) -> list[Entry]:
    """Return entries that tell all of a transaction that was just read, to be written again."""
    assert stored.halves is not None  # noqa: S101 - it was just read
    numbers = (stored.number, stored.birth_ms, stored.check_count, stored.asked_ms)
    entries: list[Entry] = [Prepared(*numbers, Verdict.UNKNOWN, 0, stored.halves)]
    if stored.verdict is not None:
        author = stored.author or Author.PRODUCER
        entries.append(Decided(stored.transaction_id, stored.verdict, author, stored.decided, ""))
    return entries
