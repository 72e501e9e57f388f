"""The file store's truth: the redo log and the state table it makes, changed in batches that are durable or not at all.

A batch is judged (the first decision wins), written and synced in one frame, and only then applied: what the table
shows is on the disk. Segments that hold little that is still needed are left behind: what is live in the oldest is
written again at the end, so that the disk taken, and the time to open, follow what is pending.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

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
from penstock.transactions.stores.file.log.holdings import Holdings
from penstock.transactions.stores.file.log.judging import Applied, Change, Judging
from penstock.transactions.stores.file.log.ledger import Replay, StoredTransaction, due_of, row_of
from penstock.transactions.stores.file.log.redo import NoRoomError
from penstock.transactions.stores.file.log.table import KEYS, ROWS, STAYS, STOPPED, State, tick_of
from penstock.transactions.stores.relayed_store import Decide
from penstock.transactions.wire.ids import id_bytes
from penstock.transactions.wire.ops import Author, Verdict

#: Bytes of live halves that are written again in one frame, at most (and at least one half).
_CARRY_BYTES = 1 << 20


class Journal(Holdings):
    """The redo log and the state table of one store. One thread opens it, commits and closes."""

    def __init__(self, folder: Folder, segment_bytes: int) -> None:
        super().__init__(folder, segment_bytes)
        #: Whether opening made the table of the log.
        self.was_rebuilt = False

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

    def commit(self, changes: Sequence[Change]) -> list[Applied]:
        """Judge changes in their order and make those that hold durable, all together.

        Raises `NoRoomError`, having changed nothing: it may be tried again. After an `OSError` it is not known what
        became of the changes before the store is opened again.
        """
        with self.lock:
            judging = Judging(self)
            entries = [judging.judge(change) for change in changes]
        try:
            records = self._write([encode_entry(entry) for entry in entries if isinstance(entry, tuple)], len(changes))
        except NoRoomError:
            with self.lock:
                for stored in judging.withdrawn:
                    self.restore(stored)
                self._park(judging.seen)
            raise
        with self.lock:
            written = iter(records)
            applied = [
                self._made(entry, next(written)) if isinstance(entry, tuple) else self._not_made(change, entry)
                for change, entry in zip(changes, entries, strict=True)
            ]
            self.changed(changes, applied)
            self._park(judging.seen)
        return applied

    def _park(self, seen: Iterable[str]) -> None:
        """Let leave the memory what was looked at, but for what is young."""
        for transaction_id in seen:
            stored = self.live.get(transaction_id)
            if stored is not None and (stored.verdict is not None or stored.answered_ms):
                self.park(stored)

    def restore(self, stored: StoredTransaction) -> None:
        """Let what was withdrawn wait as before."""

    def changed(self, changes: Sequence[Change], applied: Sequence[Applied]) -> None:
        """Take in what has become durable."""

    def _made(self, entry: Entry, record: Record) -> Applied:
        table = self.table
        if isinstance(entry, Prepared):
            raw_id = id_bytes(entry.halves[0].transaction_id)
            number = table.add(raw_id, entry.number, row_of(entry, record))
            table.number = entry.number
            stored = StoredTransaction(entry.halves, number, entry.number, entry.birth_ms)
            self._remember(stored)
        elif isinstance(entry, Settled):
            changed = [found for name in entry.transaction_ids if (found := self.find(name)) is not None]
            for settled in changed:
                self._end(settled, settled.verdict or Verdict.COMMIT)
            return Applied(changed=changed)
        elif isinstance(entry, Checked):
            stored = self._judged(entry.transaction_id)
            stored.check_count, stored.answered_ms = entry.check_count, entry.answered_ms
            table.wait(stored.offset, State.ANSWERED, tick_of(entry.answered_ms), entry.check_count)
        else:
            stored = self._stand(entry)
        return Applied(changed=[stored])

    def _stand(self, entry: Decided) -> StoredTransaction:
        """Take a decision in."""
        table, stored = self.table, self._judged(entry.transaction_id)
        table.decided = entry.decided
        if entry.verdict is Verdict.ROLLBACK:
            self._end(stored, entry.verdict)
            return stored
        table.decide(stored.offset, entry.verdict, entry.author, entry.decided, due_of(stored.half.deliver_at_ms))
        if stored.verdict is None:
            stored.decide(entry.verdict, entry.author, entry.decided)
            return stored
        # It is decided again, and the coordinator's thread has it: another object takes its place.
        again = self.load(stored.offset)
        assert again is not None  # noqa: S101 - it is pending
        self._forget(stored)
        self._remember(again)
        return again

    def _judged(self, transaction_id: str) -> StoredTransaction:
        """Return what an entry that was just written is of; it may have left the memory since, to be asked about."""
        stored = self.find(transaction_id)
        assert stored is not None  # noqa: S101 - nobody else settles it
        return stored

    def _not_made(self, change: Change, refused: str | None) -> Applied:
        if refused is None or not isinstance(change, Decide):
            return Applied(refused)
        stored = self.live.get(change.transaction_id)
        if stored is None:
            ended = self._ended.get(change.transaction_id)
            return Applied(refused, ended, is_known=ended is not None)
        return Applied(refused, stored.verdict, is_known=change.group in {None, stored.half.group})

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
    numbers = (stored.number, stored.birth_ms, stored.check_count, stored.answered_ms)
    entries: list[Entry] = [Prepared(*numbers, Verdict.UNKNOWN, 0, tuple(stored.halves))]
    if stored.verdict is not None:
        author = stored.author or Author.PRODUCER
        entries.append(Decided(stored.transaction_id, stored.verdict, author, stored.decided, ""))
    return entries
