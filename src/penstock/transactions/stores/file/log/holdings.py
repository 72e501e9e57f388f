"""What a file store holds: which transactions are in memory, and which in the state table and the log alone."""

from __future__ import annotations

import threading
from collections import OrderedDict

from penstock.errors import StoreDamagedError
from penstock.transactions.core.pending import OBJECT_BYTES
from penstock.transactions.stores.file.log.folder import Folder
from penstock.transactions.stores.file.log.ledger import Replay, StoredTransaction, decoded, loaded
from penstock.transactions.stores.file.log.redo import RedoLog, damaged, read_segments
from penstock.transactions.stores.file.log.table import KEYS, ROWS, StateTable, in_memory, is_current
from penstock.transactions.wire.ids import id_bytes, id_text, is_id
from penstock.transactions.wire.ops import Verdict

#: Ends that are remembered, in this process alone.
_ENDED = 10_000
#: Bytes of payloads in memory; what is beyond is read from the log again.
_PAYLOAD_BYTES = 256 << 20


class Holdings:
    """The transactions of one store. `lock` guards the table and what is in memory.

    It is held by whoever calls this, save for `load`, `peek` and `undecided`. What waits to be published is a
    subclass's.
    """

    def __init__(self, folder: Folder, segment_bytes: int) -> None:
        self._folder = folder
        self.lock = threading.Lock()
        self.table = StateTable(folder.map)
        self.redo = RedoLog(folder, segment_bytes)
        #: The transactions in memory, by id: what is young, in flight, ready, or stands in a line.
        self.live: dict[str, StoredTransaction] = {}
        self._payload_bytes = 0
        # How the last transactions ended, for decisions that come after that.
        self._ended: OrderedDict[str, Verdict] = OrderedDict()

    def look(self) -> None:
        """Read what is pending in a store that another process has, and change nothing.

        After a crash of the machine the table cannot be trusted: then one is made of the log, in memory. Raises
        `StoreDamagedError`, also where what is read together does not fit together, since segments come and go.
        """
        names, folder = self.redo.look(), self._folder
        rows = folder.view(ROWS) if ROWS in folder.names() else b""
        if is_current(rows):
            self.table.look(rows, folder.view(KEYS))
        else:
            self.table = StateTable(in_memory())
            self.table.clear()
            read_segments(folder, names, Replay(self.table))

    def number_of(self, transaction_id: str) -> int:
        """Return the number of a transaction that is pending, or 0."""
        stored = self.live.get(transaction_id)
        if stored is not None:
            return stored.offset
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
        self._remember(stored)
        return stored

    def _remember(self, stored: StoredTransaction) -> None:
        self.live[stored.half.transaction_id] = stored
        taken = self._payload_bytes + stored.payload_bytes + OBJECT_BYTES
        if taken > _PAYLOAD_BYTES:
            stored.drop()
        else:
            self._payload_bytes = taken

    def _forget(self, stored: StoredTransaction) -> None:
        del self.live[stored.half.transaction_id]
        if stored.dropped is None:
            self._payload_bytes -= stored.payload_bytes + OBJECT_BYTES

    def park(self, stored: StoredTransaction) -> None:
        """Let a transaction leave the memory, unless it is needed there."""
        if not stored.stays and not self.waits(stored) and self.live.get(stored.transaction_id) is stored:
            self._forget(stored)
            self.table.enter(stored.offset)

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

    def load_payload(self, stored: StoredTransaction) -> None:
        """Have the payload of a transaction in memory. As `load`."""
        if stored.dropped is None:
            return
        again = self.load(stored.offset)
        if again is None or not stored.load(list(zip(again.offsets, again.halves, strict=True))):
            raise damaged(f"the halves of transaction {stored.transaction_id} are gone")
        self._payload_bytes += stored.payload_bytes + OBJECT_BYTES

    def let_go(self, stored: StoredTransaction) -> None:
        """Let the payload of a transaction leave the memory, if there is too much."""
        if stored.dropped is None and self._payload_bytes > _PAYLOAD_BYTES:
            self._payload_bytes -= stored.held_bytes
            stored.drop()

    def _end(self, stored: StoredTransaction, verdict: Verdict) -> None:
        self._forget(stored)
        self.table.free(stored.offset)
        self._ended[stored.half.transaction_id] = verdict
        if len(self._ended) > _ENDED:
            self._ended.popitem(last=False)

    def ended(self, transaction_id: str) -> Verdict | None:
        """Return how a transaction ended that was settled a while ago, if that is known still."""
        return self._ended.get(transaction_id)

    def waits(self, stored: StoredTransaction) -> bool:  # noqa: ARG002 - the subclass knows
        """Tell whether a transaction waits in memory to be published, or is published and not durably settled."""
        return False

    def withdraw(self, stored: StoredTransaction, verdict: Verdict) -> bool:  # noqa: ARG002 - as above
        """Let nobody publish what is to be decided again; False where it may not be: it is under way, or about to be.

        A ROLLBACK may be where it waits for its time, a DISCARD where Kafka refuses it.
        """
        return False
