"""The contents of a file store: the redo log, the state table built from it, and the transactions in memory.

Compaction rewrites the live transactions of the oldest segments at the end of the log. So disk usage and the time to
open follow the number of pending transactions.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence

from penstock.errors import StoreDamagedError
from penstock.transactions.core.pending import Pending
from penstock.transactions.stores.file.log.entries import (
    Kind,
    Prepared,
    StoredTransaction,
    decode,
    due_tick_of,
    encode_entry,
    entries_of,
    replay,
    restore,
    row_of,
)
from penstock.transactions.stores.file.log.folder import Folder
from penstock.transactions.stores.file.log.frames import Record
from penstock.transactions.stores.file.log.redo import NoRoomError, RedoLog, damaged
from penstock.transactions.stores.file.log.table import (
    KEYS,
    ROWS,
    STAYS,
    STOPPED,
    State,
    StateTable,
    in_memory,
    is_current,
)
from penstock.transactions.wire.ids import id_bytes, id_text, is_id
from penstock.transactions.wire.ops import Verdict

#: Number of ends that are remembered, in this process only.
_REMEMBERED_ENDS = 10_000
#: Bytes of payloads in memory. Payloads beyond that are read from the log again.
_PAYLOAD_BYTES = 256 << 20
#: Size of a compaction frame, in bytes of halves.
_REWRITE_FRAME_BYTES = 1 << 20


class Journal:
    """The transactions of one store. One thread opens, writes and closes it; others read.

    `lock` guards the table and the transactions in memory. The caller holds it, except for the methods that say
    otherwise.
    """

    def __init__(self, folder: Folder, segment_bytes: int) -> None:
        self.folder = folder
        self.lock = threading.Lock()
        self.table = StateTable(folder.map)
        self.redo = RedoLog(folder, segment_bytes, self._floor)
        #: Whether opening rebuilt the table from the log.
        self.was_rebuilt = False
        #: The transactions in memory, by id: young, in flight, ready, or in a line. The table's index has all others.
        self.live: dict[str, StoredTransaction] = {}
        self._payload_bytes = 0
        #: The verdicts of the last settled transactions, for decisions that come after that.
        self.recent_ends: OrderedDict[str, Verdict] = OrderedDict()

    # Opening and closing. No other thread uses the store then.

    def open(self) -> None:
        """Open the log and the table. Rebuild the table from the log, unless a clean stop left it.

        A store of an earlier penstock may have no table: it gets one. Raises as `RedoLog.open`.
        """
        table, folder = self.table, self.folder
        self.redo.open()
        seal = folder.read(STOPPED) if STOPPED in folder.names() else b""
        self.was_rebuilt = not table.unseal(seal, self.redo.log_end)
        if self.was_rebuilt:
            for name in (ROWS, KEYS):
                folder.remove(name)
            replay(self.redo.records(), table)
        self.redo.recover()
        table.write_header()
        folder.remove(STOPPED)
        for number, (_, _, _, _, state, flags, _) in table:
            if flags & STAYS or state in {State.COMMITTED, State.DISCARDED}:
                self.adopt(number, self.load(number))

    def close(self) -> None:
        """Seal the table for a fast opening. Raises `OSError`: then the next opening reads the log."""
        for name in (ROWS, KEYS):
            self.folder.sync(name)
        self.folder.write(STOPPED, 0, self.table.seal(self.redo.log_end))
        self.folder.sync(STOPPED)
        self.folder.sync_names()

    def open_read_only(self) -> None:
        """Read the pending transactions of a store that another process has open. Change nothing.

        After a crash of the machine the table may be wrong: then a table is built from the log in memory. Raises
        `StoreDamagedError`, also if the other process removed a segment during the read.
        """
        self.redo.open_read_only()
        rows = self.folder.view(ROWS) if ROWS in self.folder.names() else b""
        if is_current(rows):
            self.table.attach(rows, self.folder.view(KEYS))
        else:
            self.table = StateTable(in_memory())
            replay(self.redo.records(), self.table)

    # Finding.

    def number_of(self, transaction_id: str) -> int:
        """Return the table number of a pending transaction, or 0."""
        stored = self.live.get(transaction_id)
        if stored is not None:
            return stored.offset
        return self.table.find(id_bytes(transaction_id)) if is_id(transaction_id) else 0

    def find(self, transaction_id: str) -> StoredTransaction | None:
        """Return a pending transaction, or None. It is in memory then."""
        stored = self.live.get(transaction_id)
        if stored is None and (number := self.number_of(transaction_id)):
            stored = self.adopt(number, self.load(number))
        return stored

    def load(self, number: int) -> StoredTransaction | None:
        """Read a transaction from the table and the log, or None if it is settled. Needs no lock.

        Raises `StoreDamagedError` if its halves are unreadable.
        """
        row = self.table.row(number)
        while row.state:
            order = self.table.key(number)[1]
            try:
                record = self.redo.read(row.place, row.size)
            except StoreDamagedError:
                # It may have been settled or moved by compaction a moment ago.
                if self.table.row(number) == row:
                    raise
                record = None
            former, row = row, self.table.row(number)
            if record is not None and row == former:
                return restore(number, row, order, decode(record))
        return None

    def peek(self, number: int) -> StoredTransaction | None:
        """Return a transaction by its number without bringing it into memory. Otherwise as `load`."""
        return self.live.get(id_text(self.table.key(number)[0])) or self.load(number)

    def undecided(self, number: int, transaction_id: str) -> StoredTransaction | None:
        """Return a transaction with its halves, or None if it was decided or settled meanwhile. Otherwise as `load`."""
        stored = self.load(number)
        if stored is None or stored.transaction_id != transaction_id or stored.verdict is not None:
            return None
        return stored

    # What is in memory.

    def add(self, entry: Prepared, record: Record) -> StoredTransaction:
        """Add a transaction that was prepared."""
        first = entry.halves[0]
        number = self.table.add(id_bytes(first.transaction_id), due_tick_of(first.deliver_at_ms), row_of(entry, record))
        stored = StoredTransaction(entry.halves, number, entry.number, entry.birth_ms)
        self._remember(stored)
        return stored

    def adopt(self, number: int, stored: StoredTransaction | None) -> StoredTransaction | None:
        """Bring a transaction that was read from a record into memory.

        None if it is there already, or if the record is another transaction's by now.
        """
        if stored is None or stored.transaction_id in self.live:
            return None
        if self.table.find(id_bytes(stored.transaction_id)) != number:
            return None
        self.table.remove_from_index(number)
        self._remember(stored)
        return stored

    def unload(self, stored: StoredTransaction) -> None:
        """Remove a transaction from memory. The table keeps it."""
        self._forget(stored)
        self.table.add_to_index(stored.offset)

    def end(self, stored: StoredTransaction, verdict: Verdict) -> None:
        """Remove a settled transaction, and remember its verdict."""
        self._forget(stored)
        self.table.free(stored.offset)
        self.recent_ends[stored.half.transaction_id] = verdict
        if len(self.recent_ends) > _REMEMBERED_ENDS:
            self.recent_ends.popitem(last=False)

    def load_payload(self, stored: Pending) -> None:
        """Load the payload of a transaction into memory. Raises as `load`."""
        if stored.dropped is None:
            return
        reread = self.load(stored.offset)
        if reread is None or not stored.load(list(zip(reread.offsets, reread.halves, strict=True))):
            raise damaged(f"the halves of transaction {stored.transaction_id} are gone")
        self._payload_bytes += stored.held_bytes

    def drop_payload_if_full(self, stored: Pending) -> None:
        """Drop the payload of a transaction from memory if payloads exceed their limit."""
        if stored.dropped is None and self._payload_bytes > _PAYLOAD_BYTES:
            self._payload_bytes -= stored.held_bytes
            stored.drop()

    def _remember(self, stored: StoredTransaction) -> None:
        self.live[stored.half.transaction_id] = stored
        self._payload_bytes += stored.held_bytes
        self.drop_payload_if_full(stored)

    def _forget(self, stored: StoredTransaction) -> None:
        del self.live[stored.half.transaction_id]
        if stored.dropped is None:
            self._payload_bytes -= stored.held_bytes

    # The log. Called by the writing thread, without the lock.

    def _write(self, records: Sequence[tuple[int, bytes]]) -> list[Record]:
        """Write records, after making room in the table for the transactions that they add."""
        if not records:
            return []
        try:
            with self.lock:
                self.table.reserve(sum(kind == Kind.PREPARED for kind, _ in records))
        except OSError as error:
            raise NoRoomError(f"the state table: {error.strerror}") from error
        return self.redo.append(records)

    def _floor(self) -> int:
        """Return the lowest place of the log that is still needed."""
        return min((place for _, (place, *_) in self.table), default=self.redo.end)

    def _compact(self) -> None:
        """Rewrite what is live in the oldest segments, while the log takes more than twice the bytes of live halves."""
        bases = self.redo.bases
        # The last two segments always stay: the new one, and the one that has just become full.
        spare, limit = self.redo.end - bases[0] - 2 * sum(size for _, (_, size, *_) in self.table), 0
        for begin, end in itertools.pairwise(bases[:-1]):
            if spare > 0:
                spare, limit = spare - (end - begin), end
        frame: list[tuple[int, bytes]] = []
        moved: list[int] = []
        size = 0
        for _, number in sorted((place, number) for number, (place, *_) in self.table if place < limit):
            stored = self.load(number)
            if stored is None:
                continue
            if size > _REWRITE_FRAME_BYTES:
                self._rewrite(frame, moved)
                frame, moved, size = [], [], 0
            for kind, payload in map(encode_entry, entries_of(stored)):
                frame.append((kind, payload))
                size += len(payload)
            moved.append(number)
        if frame:
            self._rewrite(frame, moved)

    def _rewrite(self, frame: Sequence[tuple[int, bytes]], moved: Sequence[int]) -> None:
        """Write transactions again. `moved` has their numbers."""
        halves = [record for record in self.redo.append(frame) if record.kind == Kind.PREPARED]
        with self.lock:
            for number, record in zip(moved, halves, strict=True):
                self.table.move(number, record.place, record.size)
