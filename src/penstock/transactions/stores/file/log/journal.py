"""The file store's truth: the redo log and the ledger it makes, changed in batches that are durable or did not happen.

A batch is judged (the first decision wins), written and synced in one frame, and only then applied: what the ledger
shows is on the disk. Segments that hold little that is still needed are left behind: what is live in the oldest is
written again at the end, so that the disk taken, and the time to open, follow what is pending.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.errors import MessageFormatError, StoreDamagedError
from penstock.transactions.core.decisions import may_cancel
from penstock.transactions.stores.file.log.entries import (
    Checked,
    Decided,
    Entry,
    Prepared,
    Settled,
    decode_entry,
    encode_entry,
)
from penstock.transactions.stores.file.log.folder import Folder
from penstock.transactions.stores.file.log.frames import FRAME_BYTES, RECORD_BYTES, Record
from penstock.transactions.stores.file.log.ledger import Ledger, StoredTransaction, is_discard_of_refused
from penstock.transactions.stores.file.log.redo import NoRoomError, RedoLog
from penstock.transactions.wire.check_request import MAX_CHECK_NUMBER
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Verdict

#: Bytes of live halves that are written again in one frame, at most (and at least one half).
_CARRY_BYTES = 1 << 20
#: Ends that are remembered, in this process alone.
_ENDED = 10_000


class Prepare(NamedTuple):
    """Store the halves of a transaction."""

    halves: tuple[Half, ...]
    birth_ms: int


class Decide(NamedTuple):
    """Decide a transaction, or (UNKNOWN) count an answered check."""

    transaction_id: str
    group: str
    verdict: Verdict
    author: Author
    #: Of the check that is answered; 0: it is no answer.
    check_number: int
    now_ms: int
    actor: str = ""
    #: It takes back what is committed and not due yet, and decides nothing else.
    cancels: bool = False
    #: Whether an operator discards what is committed, and Kafka refuses. The caller made sure that nothing of it is
    #: under way.
    over_commit: bool = False


class Settle(NamedTuple):
    """Transactions are over."""

    transaction_ids: tuple[str, ...]


Change = Prepare | Decide | Settle


class Outcome(NamedTuple):
    """What became of a change."""

    #: The transactions it changed.
    changed: Sequence[StoredTransaction]
    #: Why it was refused, or None.
    refused: str | None
    #: The decision that stands against it, where that is known.
    stands: Verdict | None = None


class Delays(Protocol):
    """Where committed transactions wait for their time. Safe from any thread."""

    def hold_back(self, stored: StoredTransaction) -> bool:
        """Let nobody publish a transaction that waits still; False where it is due, or waits for nothing."""

    def put_back(self, stored: StoredTransaction) -> None:
        """Let it wait as before."""


class Journal:
    """The redo log and the ledger of one store. Used by one thread; `halves` by any."""

    def __init__(self, folder: Folder, segment_bytes: int) -> None:
        self.ledger = Ledger()
        self.redo = RedoLog(folder, segment_bytes)
        #: Set once it is open, by whoever publishes; without it nothing can be taken back.
        self.delays: Delays | None = None
        # How the last transactions ended, for decisions that come after that.
        self._ended: OrderedDict[str, Verdict] = OrderedDict()

    def open(self) -> None:
        """Read the redo log. Raises as `RedoLog.open`."""
        self.redo.open(self._apply)

    def commit(self, changes: Sequence[Change]) -> list[Outcome]:
        """Judge changes in their order and make those that hold durable, all together.

        Raises `NoRoomError`, having changed nothing: it may be tried again. After an `OSError` it is not known what
        became of the changes before the store is opened anew.
        """
        number, decided = self.ledger.number, self.ledger.decided
        # What earlier changes of the same batch make of a transaction, before it shows in the ledger.
        taken: set[str] = set()
        counts: dict[str, int] = {}
        entries: list[Entry | str | None] = []
        held_back: list[StoredTransaction] = []
        for change in changes:
            if isinstance(change, Prepare):
                number += 1
                entries.append(self._prepared(change, number, taken))
            elif isinstance(change, Settle):
                entries.append(Settled(change.transaction_ids))
            else:
                entry = self._decided(change, decided + 1, taken, counts, held_back)
                decided += isinstance(entry, Decided)
                entries.append(entry)
        try:
            records = self._write([encode_entry(entry) for entry in entries if isinstance(entry, tuple)])
        except NoRoomError:
            if self.delays is not None:
                for stored in held_back:
                    self.delays.put_back(stored)
            raise
        written = iter(records)
        return [
            self._made(entry, next(written)) if isinstance(entry, tuple) else self._not_made(change, entry)
            for change, entry in zip(changes, entries, strict=True)
        ]

    def _made(self, entry: Entry, record: Record) -> Outcome:
        changed = self.ledger.apply(entry, record.place, record.size)
        if isinstance(entry, Settled) or (isinstance(entry, Decided) and entry.verdict is Verdict.ROLLBACK):
            for stored in changed:
                self._ended[stored.transaction_id] = stored.verdict or Verdict.COMMIT
                if len(self._ended) > _ENDED:
                    self._ended.popitem(last=False)
        return Outcome(changed, None)

    def _not_made(self, change: Change, refused: str | None) -> Outcome:
        if refused is None or not isinstance(change, Decide):
            return Outcome((), refused)
        stored = self.ledger.pending.get(change.transaction_id)
        return Outcome((), refused, self.end_of(change.transaction_id) if stored is None else stored.verdict)

    def _prepared(self, change: Prepare, number: int, taken: set[str]) -> Entry | str:
        transaction_id = change.halves[0].transaction_id
        if transaction_id in self.ledger.pending or transaction_id in taken:
            return f"transaction {transaction_id} is stored already"
        taken.add(transaction_id)
        return Prepared(number, change.birth_ms, 0, 0, Verdict.UNKNOWN, 0, change.halves)

    def _decided(
        self, change: Decide, decided: int, taken: set[str], counts: dict[str, int], held_back: list[StoredTransaction]
    ) -> Entry | str | None:
        stored = self.ledger.pending.get(change.transaction_id)
        if stored is None or stored.group != change.group:
            return self._stranger(change.transaction_id, stored)
        over_commit = change.over_commit and is_discard_of_refused(stored, change.verdict, change.author)
        if change.transaction_id not in taken and self._is_cancelled(change, stored):
            held_back.append(stored)
        elif change.cancels:
            return "it is not decided yet" if stored.verdict is None else "it is due"
        elif (stored.verdict is not None and not over_commit) or change.transaction_id in taken:
            first = stored.verdict.name if stored.verdict is not None else "another decision"
            # An answered check that comes late says nothing against what was decided.
            return None if change.verdict is Verdict.UNKNOWN else f"{first} came first"
        if change.verdict is not Verdict.UNKNOWN:
            taken.add(change.transaction_id)
            return Decided(change.transaction_id, change.verdict, change.author, decided, change.actor)
        count = counts.get(change.transaction_id, stored.check_count)
        if change.check_number != count + 1 or change.check_number > MAX_CHECK_NUMBER:
            return None
        counts[change.transaction_id] = count + 1
        return Checked(change.transaction_id, count + 1, change.now_ms)

    def _stranger(self, transaction_id: str, stored: StoredTransaction | None) -> str:
        if stored is not None:
            return f"it belongs to group {stored.group}"
        ended = self.end_of(transaction_id)
        return "it is unknown, or settled long ago" if ended is None else f"{ended.name} came first, and is settled"

    def end_of(self, transaction_id: str) -> Verdict | None:
        """Return how a transaction was settled, or None where that is not known any more. Safe from any thread."""
        return self._ended.get(transaction_id)

    def _is_cancelled(self, change: Decide, stored: StoredTransaction) -> bool:
        """Tell whether a decision takes a COMMIT back; nobody publishes it from then on."""
        due_ms = stored.deliver_at_ms
        return (
            may_cancel(change.verdict, change.author)
            and stored.verdict is Verdict.COMMIT
            and due_ms is not None
            and change.now_ms < due_ms
            and self.delays is not None
            and self.delays.hold_back(stored)
        )

    def _write(self, records: Sequence[tuple[int, bytes]]) -> list[Record]:
        if not records:
            return []
        size = FRAME_BYTES + sum(RECORD_BYTES + len(payload) for _, payload in records)
        if self.redo.needs_segment(size):
            self.redo.begin_segment(size, self._floor())
            self._carry()
        if self.redo.needs_segment(size):
            # What was carried has filled it.
            self.redo.begin_segment(size, self._floor())
        return self.redo.append(records)

    def _floor(self) -> int:
        """Return the lowest place that is still needed."""
        return min((stored.place for stored in self.ledger.pending.values()), default=self.redo.end)

    def _carry(self) -> None:
        """Write what is live in the oldest segments again, while the log takes more than twice what is live."""
        live = sum(stored.size for stored in self.ledger.pending.values())
        bases = self.redo.bases
        # The last two are always there: the one that was begun, and the one that was full.
        spare = self.redo.end - bases[0] - 2 * live
        kept_by_place = iter(sorted(self.ledger.pending.values(), key=lambda stored: stored.place))
        following = next(kept_by_place, None)
        for begin, end in itertools.pairwise(bases[:-1]):
            if spare <= 0:
                return
            spare -= end - begin
            batch: list[StoredTransaction] = []
            while following is not None and following.place < end:
                batch.append(following)
                following = next(kept_by_place, None)
            self._carry_batch(batch)

    def _carry_batch(self, batch: Sequence[StoredTransaction]) -> None:
        frame: list[tuple[int, bytes]] = []
        size = FRAME_BYTES
        for stored in batch:
            records = [encode_entry(entry) for entry in self.ledger.entries_of(stored, self.halves(stored))]
            more = sum(RECORD_BYTES + len(payload) for _, payload in records)
            if frame and size + more > _CARRY_BYTES:
                self._append_carried(frame, size)
                frame, size = [], FRAME_BYTES
            frame += records
            size += more
        if frame:
            self._append_carried(frame, size)

    def _append_carried(self, frame: Sequence[tuple[int, bytes]], size: int) -> None:
        if self.redo.needs_segment(size):
            self.redo.begin_segment(size, self._floor())
        for record in self.redo.append(frame):
            self._apply(record)

    def undecided_halves(self, stored: StoredTransaction) -> tuple[Half, ...] | None:
        """Read the halves of a transaction, unless it is decided or settled. The ledger is guarded meanwhile."""
        if stored.verdict is not None or self.ledger.pending.get(stored.transaction_id) is not stored:
            return None
        return self.halves(stored)

    def halves(self, stored: StoredTransaction) -> tuple[Half, ...]:
        """Read the halves of a transaction from the log. Safe from any thread, if it guards the ledger meanwhile.

        Raises `StoreDamagedError` where they do not read any more.
        """
        entry = self._decode(self.redo.read(stored.place, stored.size))
        if not isinstance(entry, Prepared):
            raise StoreDamagedError(
                f"the file store is damaged: place {stored.place} holds no halves; restore a backup"
            )
        return entry.halves

    def _apply(self, record: Record) -> None:
        self.ledger.apply(self._decode(record), record.place, record.size)

    def _decode(self, record: Record) -> Entry:
        try:
            return decode_entry(record.kind, record.payload)
        except MessageFormatError as error:
            raise StoreDamagedError(
                f"the file store is damaged, or was written by a later penstock: place {record.place} of its redo log "
                f"has {error}; use the penstock that wrote it, or restore its folder from a backup"
            ) from error
