"""The file store's truth: the redo log and the ledger it makes, changed in batches that are durable or did not happen.

A batch is judged (the first decision wins), written and synced in one frame, and only then applied: what the ledger
shows is on the disk. Segments that hold little that is still needed are left behind: what is live in the oldest is
written again at the end, so that the disk taken, and the time to open, follow what is pending.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
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
from penstock.transactions.stores.relay.changes import NOT_HELD, UNKNOWN_ID, Decide, Outcome, Prepare, came_first
from penstock.transactions.wire.check_request import MAX_CHECK_NUMBER
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Verdict

#: Bytes of live halves that are written again in one frame, at most (and at least one half).
_CARRY_BYTES = 1 << 20
#: Ends that are remembered, in this process alone.
_ENDED = 10_000


class Settle(NamedTuple):
    """Transactions are over."""

    transaction_ids: tuple[str, ...]


Change = Prepare | Decide | Settle


@dataclass(slots=True)
class Applied(Outcome):
    """What became of a change: with the transactions that it changed."""

    changed: Sequence[StoredTransaction] = ()


class Publication(Protocol):
    """Where committed transactions wait to be published. Safe from any thread."""

    def withdraw(self, stored: StoredTransaction, verdict: Verdict) -> bool:
        """Let nobody publish what is to be decided again; False where it may not be: it is under way, or about to be.

        A ROLLBACK may be where it waits for its time, a DISCARD where Kafka refuses it.
        """

    def restore(self, stored: StoredTransaction) -> None:
        """Let it wait as before."""


class Journal:
    """The redo log and the ledger of one store. Used by one thread; `halves` by any."""

    def __init__(self, folder: Folder, segment_bytes: int) -> None:
        self.ledger = Ledger()
        self.redo = RedoLog(folder, segment_bytes)
        #: Set once it is open, by whoever publishes; without it nothing can be taken back.
        self.publication: Publication | None = None
        # How the last transactions ended, for decisions that come after that.
        self._ended: OrderedDict[str, Verdict] = OrderedDict()

    def open(self) -> None:
        """Read the redo log. Raises as `RedoLog.open`."""
        self.redo.open(self._apply)

    def commit(self, changes: Sequence[Change]) -> list[Applied]:
        """Judge changes in their order and make those that hold durable, all together.

        Raises `NoRoomError`, having changed nothing: it may be tried again. After an `OSError` it is not known what
        became of the changes before the store is opened again.
        """
        number, decided = self.ledger.number, self.ledger.decided
        # What earlier changes of the same batch make of a transaction, before it shows in the ledger.
        taken: set[str] = set()
        counts: dict[str, int] = {}
        entries: list[Entry | str | None] = []
        withdrawn: list[StoredTransaction] = []
        for change in changes:
            if isinstance(change, Prepare):
                number += 1
                entries.append(self._prepared(change, number, taken))
            elif isinstance(change, Settle):
                entries.append(Settled(change.transaction_ids))
            else:
                entry = self._decided(change, decided + 1, taken, counts, withdrawn)
                decided += isinstance(entry, Decided)
                entries.append(entry)
        try:
            records = self._write([encode_entry(entry) for entry in entries if isinstance(entry, tuple)])
        except NoRoomError:
            if self.publication is not None:
                for stored in withdrawn:
                    self.publication.restore(stored)
            raise
        written = iter(records)
        return [
            self._made(entry, next(written)) if isinstance(entry, tuple) else self._not_made(change, entry)
            for change, entry in zip(changes, entries, strict=True)
        ]

    def _made(self, entry: Entry, record: Record) -> Applied:
        changed = self.ledger.apply(entry, record.place, record.size)
        if isinstance(entry, Settled) or (isinstance(entry, Decided) and entry.verdict is Verdict.ROLLBACK):
            for stored in changed:
                self._ended[stored.transaction_id] = stored.verdict or Verdict.COMMIT
                if len(self._ended) > _ENDED:
                    self._ended.popitem(last=False)
        return Applied(changed=changed)

    def _not_made(self, change: Change, refused: str | None) -> Applied:
        if refused is None or not isinstance(change, Decide):
            return Applied(refused)
        stored = self.ledger.pending.get(change.transaction_id)
        if stored is None:
            ended = self._ended.get(change.transaction_id)
            return Applied(refused, ended, is_known=ended is not None)
        return Applied(refused, stored.verdict, is_known=change.group in {None, stored.group})

    def _prepared(self, change: Prepare, number: int, taken: set[str]) -> Entry | str:
        transaction_id = change.halves[0].transaction_id
        if transaction_id in self.ledger.pending or transaction_id in taken:
            return f"transaction {transaction_id} is stored already"
        taken.add(transaction_id)
        return Prepared(number, change.birth_ms, 0, 0, Verdict.UNKNOWN, 0, change.halves)

    def _decided(
        self, change: Decide, decided: int, taken: set[str], counts: dict[str, int], withdrawn: list[StoredTransaction]
    ) -> Entry | str | None:
        stored = self.ledger.pending.get(change.transaction_id)
        if stored is None or change.group not in {None, stored.group}:
            return self._stranger(change.transaction_id, stored)
        is_first = stored.verdict is None and not change.cancels
        if change.transaction_id in taken or not (is_first or self._is_withdrawn(change, stored)):
            # An answered check that comes late says nothing against what was decided.
            return None if change.verdict is Verdict.UNKNOWN else _too_late(change, stored)
        if not is_first:
            withdrawn.append(stored)
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
        ended = self._ended.get(transaction_id)
        return UNKNOWN_ID if ended is None else f"{came_first(ended)}; it is settled"

    def _is_withdrawn(self, change: Decide, stored: StoredTransaction) -> bool:
        """Tell whether a decision counts against a COMMIT; nobody publishes that from then on.

        A ROLLBACK does before it is due, and an operator's DISCARD where Kafka refuses it.
        """
        is_early = stored.deliver_at_ms is not None and change.now_ms < stored.deliver_at_ms
        is_cancelled = may_cancel(change.verdict, change.author) and stored.verdict is Verdict.COMMIT and is_early
        if not is_cancelled and not is_discard_of_refused(stored, change.verdict, change.author):
            return False
        return self.publication is not None and self.publication.withdraw(stored, change.verdict)

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


def _too_late(change: Decide, stored: StoredTransaction) -> str:
    """Return why a decision does not count."""
    if stored.verdict is None:
        return "it is not decided yet" if change.cancels else "another decision came first"
    if (stored.verdict, change.verdict) == (Verdict.COMMIT, Verdict.DISCARD):
        return NOT_HELD
    return came_first(stored.verdict)
