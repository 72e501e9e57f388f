"""The state machine of one half partition: pending halves, their first decisions, and the checkpoints.

Pure: it is fed the records of the half and op logs in their order, and hands out what is to be published. It knows
no Kafka and reads no clock, so that simulations can drive it.

No id of a settled transaction is kept. A decision names the offsets of its halves: if those were read already and
the id is not pending, the transaction was settled before, or never was; if they were not read yet, the decision runs
ahead of its half and is held until the half arrives.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile

from penstock.transactions.coordinator.state.cancelling import may_cancel
from penstock.transactions.coordinator.state.pending import NOWHERE, Pending
from penstock.transactions.coordinator.state.ready.payloads import Payloads
from penstock.transactions.coordinator.state.ready.ready_queue import CommitBatch, ReadyQueue
from penstock.transactions.coordinator.state.recovered_state import RecoveredNotes, restored
from penstock.transactions.wire.done_records import Note, Snapshot, UnloadedSnapshot
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Op, Verdict

#: The offset of an op record that is gone.
_NO_PLACE = -1
#: ReadyQueue that move all messages of a transaction, and so need all of its halves.
_NEED_ALL = frozenset({Verdict.COMMIT, Verdict.DISCARD})


class Refusal(Enum):
    """Why a record was refused."""

    DUPLICATE_ID = "its transaction id belongs to another half"
    SETTLED_OR_UNKNOWN = "no such transaction is pending: it is settled, or never was"
    ALREADY_DECIDED = "the transaction was decided before: the first decision stands"
    WRONG_GROUP = "it comes from another producer group than the half"
    WRONG_PLACE = "it names other offsets than those of the half"
    INCOMPLETE = (
        "not all halves of the transaction are there, or they contradict each other: it can only be rolled back"
    )


@dataclass(slots=True)
class _Ahead:
    """A decision that runs ahead of its half."""

    op: Op
    offset: int
    index: int
    appended_ms: int
    #: The half log must be read up to here before the decision can be called unknown; None where that is not known yet.
    limit: int | None


@dataclass(slots=True)
class PartitionState:
    """What one coordinator knows of one half partition it owns. Not thread-safe: its coordinator's thread drives it.

    Attributes:
        half_position: the next offset of the half log.
        op_position: the next offset of the op log.
        pending: transactions not settled, by id, in the order of the half log.
        queue: those of them that have a decision.
        answered: pending transactions with a count of answered checks that is not in the done log yet.
        answers: how many answers of checks counted, whatever they said.
        now_ms: the broker's time, for what is delayed; the caller moves it on.
    """

    half_position: int
    op_position: int
    pending: OrderedDict[str, Pending] = field(default_factory=OrderedDict)
    queue: ReadyQueue = field(default_factory=ReadyQueue)
    answered: dict[str, Pending] = field(default_factory=dict)
    answers: int = 0
    now_ms: int = 0
    _inherited: RecoveredNotes = field(default_factory=RecoveredNotes)
    _ahead: dict[str, list[_Ahead]] = field(default_factory=dict)
    # ReadyQueue not applied, or ahead of their halves, by the offset of their op record: rising, for ops come so.
    _open_ops: OrderedDict[int, int] = field(default_factory=OrderedDict)
    # Halves brought back from the discarded topic before it is known here that they went there: place, half, birth.
    _reborn: dict[str, tuple[int, Half, int]] = field(default_factory=dict)
    # Pending transactions that are in the half log alone, by rising offsets.
    _only_in_half_log: OrderedDict[str, Pending] = field(default_factory=OrderedDict)
    # Pending transactions that shall be written down as soon as can be, for a log that held something of them is gone.
    _at_risk: dict[str, Pending] = field(default_factory=dict)
    # Those with a snapshot in the done log, in the order of the snapshots; and those of them whose decision is newer
    # than the snapshot, in the order of the decisions.
    _snapshotted: OrderedDict[str, Pending] = field(default_factory=OrderedDict)
    _stale_snapshots: OrderedDict[str, Pending] = field(default_factory=OrderedDict)
    #: Which payloads are in memory.
    payloads: Payloads = field(init=False)

    def __post_init__(self) -> None:
        self.payloads = Payloads(self.queue, self._at_risk)

    def find(self, transaction_id: str) -> Pending | None:
        """Return a pending transaction, or None."""
        return self.pending.get(transaction_id)

    def remember(
        self, notes: Iterable[Note], snapshots: Iterable[tuple[int, Snapshot | UnloadedSnapshot]] = ()
    ) -> list[Pending]:
        """Take in what the done log says, before the half log is read from the half checkpoint.

        Args:
            notes: in the order of the done log.
            snapshots: the live ones, by `recovered_partition.live_snapshots`, each with its offset in the done log.

        Returns:
            What was snapshotted and is pending, in the order of the half log.
        """
        self._inherited.remember(notes, self.half_position, self.op_position)
        snapshotted = []
        for pending in sorted((restored(place, snapshot) for place, snapshot in snapshots), key=lambda one: one.offset):
            self._keep(pending)
            snapshotted.append(pending)
        by_place = sorted(snapshotted, key=lambda one: one.snapshot_at or 0)
        self._snapshotted.update((pending.half.transaction_id, pending) for pending in by_place)
        for pending in sorted(snapshotted, key=lambda one: (one.decided_at, one.decided_index)):
            if pending.verdict is not None:
                self.queue.add(pending)
        return snapshotted

    def add_half(self, offset: int, half: Half, birth_ms: int = 0) -> Pending | Refusal | None:
        """Take the next half in.

        Returns:
            The pending transaction; None when the half tells nothing new: the done log says that it is settled, or it
            was snapshotted; or why it is refused.
        """
        self.half_position = offset + 1
        transaction_id = half.transaction_id
        note = self._inherited.note_on(transaction_id, offset) if self._inherited.notes else None
        if note is not None and note.verdict is not Verdict.UNKNOWN:
            return None
        pending = self.pending.get(transaction_id)
        if pending is not None:
            if offset in pending.offsets:
                return None
            if half.resumed is not None and pending.verdict is Verdict.DISCARD:
                self._reborn[transaction_id] = offset, half, birth_ms
                return None
            bytes_before = pending.payload_bytes
            if not pending.add_part(offset, half):
                return Refusal.DUPLICATE_ID
            self.payloads.grown(pending, bytes_before)
            return pending
        return self._begin(offset, half, birth_ms, note)

    def _begin(self, offset: int, half: Half, birth_ms: int, note: Note | None = None) -> Pending:
        pending = Pending(half, offset)
        pending.birth_ms = birth_ms
        if note is not None:
            pending.remember_checks(note)
        self._only_in_half_log[half.transaction_id] = pending
        self._keep(pending)
        return pending

    def _keep(self, pending: Pending) -> None:
        self.pending[pending.half.transaction_id] = pending
        self.payloads.add(pending)
        if (line := pending.half.line) is not None:
            self.queue.keys.add(line, pending)

    def skip_half(self, offset: int) -> None:
        """Pass a record of the half log that is no half."""
        self.half_position = offset + 1
        self._inherited.pass_halves(offset)

    def skip_op(self, offset: int) -> None:
        """Pass a record of the op log that is no op."""
        self.op_position = offset + 1
        self._inherited.pass_ops(offset)

    def add_op(self, offset: int, op: Op, appended_ms: int, index: int = 0) -> Refusal | None:
        """Take the next decision in, and return why it is refused, or None.

        Args:
            offset: of its record.
            op: the decision.
            appended_ms: append time of its record.
            index: which decision of its record it is.
        """
        self.op_position = offset + 1
        places = self._inherited.places
        if places and places.get((offset, index)) == op.transaction_id:
            # Read again after a restart: what it decided is settled.
            return None
        pending = self.pending.get(op.transaction_id)
        # Nearly all have one half, and it is there.
        is_usual = pending is not None and pending.parts is None and not self._reborn
        if pending is not None and (is_usual or not self._waits_for_halves(pending, op)):
            return self._judge(pending, offset, index, op, appended_ms)
        last = max(op.half_offsets, default=-1)
        if pending is None and op.half_offsets and last < self.half_position:
            return Refusal.SETTLED_OR_UNKNOWN
        # A transaction that is there in part may become whole as long as the half log goes on.
        limit = last + 1 if op.half_offsets and pending is None else None
        self._ahead.setdefault(op.transaction_id, []).append(_Ahead(op, offset, index, appended_ms, limit))
        self._open(offset)
        return None

    def _waits_for_halves(self, pending: Pending, op: Op) -> bool:
        """Tell whether a decision is held until more halves of its transaction are there, or its next life begins.

        What moves its messages is, and all that comes after that, so that the first one in the op log wins.
        """
        reborn = self._reborn.get(op.transaction_id)
        if reborn is not None:
            return op.half_offsets == (reborn[0],)
        if pending.parts is None or not pending.parts.missing:
            return False
        last = max(op.half_offsets, default=-1)
        return op.verdict in _NEED_ALL or last >= self.half_position or op.transaction_id in self._ahead

    def join_ahead(self, transaction_id: str) -> list[tuple[int, Refusal]]:
        """Apply the decisions that ran ahead of a half that has just arrived; return the refused ones by op offset."""
        waiting = self._ahead.pop(transaction_id, None)
        if waiting is None:
            return []
        refused = []
        for at, ahead in enumerate(waiting):
            pending = self.pending.get(transaction_id)
            if pending is not None and self._waits_for_halves(pending, ahead.op):
                # How far the half log must be read for the rest is not known yet.
                ahead.limit = None
                self._ahead.setdefault(transaction_id, []).extend(waiting[at:])
                break
            if pending is None and ahead.limit is not None and ahead.limit > self.half_position:
                # This half was settled long ago; the decision is for a later one with the same id.
                self._ahead.setdefault(transaction_id, []).append(ahead)
                continue
            refusal = self._judge_ahead(pending, ahead)
            if refusal is not None:
                refused.append((ahead.offset, refusal))
        return refused

    def _judge_ahead(self, pending: Pending | None, ahead: _Ahead) -> Refusal | None:
        refusal: Refusal | None = Refusal.SETTLED_OR_UNKNOWN
        if pending is not None:
            refusal = self._judge(pending, ahead.offset, ahead.index, ahead.op, ahead.appended_ms)
        # After judging: what is open stays in its place among the others.
        self._close(ahead.offset)
        return refusal

    def sweep_ahead(self, half_end: int, read_to: int | None = None) -> int:
        """Refuse decisions whose half cannot come any more, and return how many there were.

        Args:
            half_end: the end of the half log, asked for after the decisions were read. A half is stored before its
                decision is written, so a decision that names an offset at or past the end is forged.
            read_to: the next offset of the op log when it was asked for: decisions at or above it are left; None: all
                had been read.
        """
        dropped = 0
        for transaction_id in list(self._ahead):
            kept: list[_Ahead] = []
            for ahead in self._ahead[transaction_id]:
                if read_to is not None and ahead.offset >= read_to:
                    kept.append(ahead)
                    continue
                if ahead.limit is None:
                    ahead.limit = half_end
                if (
                    kept
                    or transaction_id in self._reborn
                    or not (ahead.limit > half_end or ahead.limit <= self.half_position)
                ):
                    kept.append(ahead)
                else:
                    # The transaction may be there in part.
                    dropped += self._judge_ahead(self.pending.get(transaction_id), ahead) is not None
            if kept:
                self._ahead[transaction_id] = kept
            else:
                del self._ahead[transaction_id]
        return dropped

    @property
    def decided(self) -> Mapping[str, Pending]:
        """Pending transactions that have a decision, in the order in which the decisions took effect."""
        return self.queue.all

    @property
    def only_in_half_log(self) -> Iterable[Pending]:
        """Pending transactions that are in the half log alone, lowest first."""
        return self._only_in_half_log.values()

    @property
    def snapshotted(self) -> Iterable[Pending]:
        """Pending transactions that the done log holds whole, in the order in which it does."""
        return self._snapshotted.values()

    @property
    def stale_snapshots(self) -> Iterable[Pending]:
        """Those of them that were decided since, in the order of the decisions."""
        return self._stale_snapshots.values()

    @property
    def at_risk(self) -> Iterable[Pending]:
        """Pending transactions that a restart would lose, or would not know for pending: a log of theirs is gone."""
        return self._at_risk.values()

    def lose(self, some: Iterable[Pending]) -> list[Pending]:
        """Forget those whose payloads are not in memory, for they are not in the logs either; return them."""
        lost = [pending for pending in some if pending.dropped is not None]
        for pending in lost:
            self._forget(pending)
        return lost

    def lose_half_log(self, low: int) -> list[Pending]:
        """Take in that the half log was made again and begins at `low`: what is pending is here alone.

        Returns:
            What is lost: its payload was there alone.
        """
        lost = self.lose(self._only_in_half_log.values())
        self.half_position = low
        self._at_risk.update(self._only_in_half_log)
        self._only_in_half_log.clear()
        self._reborn.clear()
        self._inherited.forget_halves()
        return lost

    def cut_half_log(self, low: int) -> list[Pending]:
        """Take in that the half log was deleted below `low`: what is pending and lay there is here alone.

        Returns:
            What is lost: its payload was there alone.
        """
        self.half_position = max(self.half_position, low)
        lost = self.lose(takewhile(lambda one: one.offset < low, self._only_in_half_log.values()))
        gone = {name: pending for name, pending in self._only_in_half_log.items() if pending.offset < low}
        for name in gone:
            del self._only_in_half_log[name]
        self._at_risk.update(gone)
        return lost

    def lose_op_log(self, low: int) -> None:
        """Take in that the op log was made again and begins at `low`: places in the former one mean nothing."""
        self.op_position = low
        self._open_ops.clear()
        self._stale_snapshots.clear()
        self._inherited.places.clear()
        for pending in self.pending.values():
            pending.answered_at = NOWHERE
            pending.is_op_open = False
            if pending.verdict is not None:
                pending.decided_at, pending.decided_index = NOWHERE
                self._at_risk[pending.half.transaction_id] = pending
        for waiting in self._ahead.values():
            for ahead in waiting:
                ahead.offset = _NO_PLACE

    def cut_op_log(self, low: int) -> None:
        """Take in that the op log was deleted below `low`: decisions there that are not applied are here alone."""
        self.op_position = max(self.op_position, low)
        for name, pending in self.queue.all.items():
            if pending.is_op_open and pending.decided_at < low:
                self._at_risk[name] = pending

    def lose_done_log(self, low: int | None = None) -> list[Pending]:
        """Take in that what the done log said is gone.

        What is pending is to be written down, so that the checkpoints pass what is settled.

        Args:
            low: where it begins now: payloads that are not in memory may be read from above; None: it was made again.

        Returns:
            What is lost: its payload was there alone.
        """
        lost = self.lose(self._snapshotted.values()) if low is None else []
        for name, pending in self.pending.items():
            self._at_risk[name] = pending
            if pending.snapshot_at is not None and pending.dropped is not None:
                pending.snapshot_at = max(pending.snapshot_at, low or 0)
            elif pending.snapshot_at is not None:
                pending.snapshot_at = None
                self._snapshotted.pop(name, None)
                self._stale_snapshots.pop(name, None)
        return lost

    @property
    def has_ahead(self) -> bool:
        """Whether decisions wait for their halves."""
        return bool(self._ahead)

    def _judge(self, pending: Pending, offset: int, index: int, op: Op, appended_ms: int) -> Refusal | None:
        misfit = _misfit(pending, op)
        if misfit is not None:
            return misfit
        if op.verdict is Verdict.UNKNOWN:
            # A late, repeated or forged answer carries a number that is not the next: it counts for nothing.
            is_next = op.check_number == pending.check_count + 1 and (offset, index) > pending.answered_at
            if pending.verdict is None and is_next:
                pending.check_count += 1
                pending.answered_ms = appended_ms
                pending.answered_at = offset, index
                self.answers += 1
                self.answered[op.transaction_id] = pending
            return None
        if pending.verdict is not None:
            if (pending.decided_at, pending.decided_index) == (offset, index):
                return None
            if not (_overrules(op, pending) or self._is_cancellation(pending, op, appended_ms)):
                return Refusal.ALREADY_DECIDED
        if op.verdict in _NEED_ALL and not pending.is_complete:
            return Refusal.INCOMPLETE
        if pending.verdict is not None:
            self.queue.withdraw(pending)
            if pending.is_op_open:
                self._close(pending.decided_at)
        self._decide(pending, op, offset, index)
        return None

    def _decide(self, pending: Pending, op: Op, offset: int, index: int) -> None:
        """Let a decision take effect."""
        self.answers += op.author is Author.CHECK
        pending.verdict = op.verdict
        pending.author = op.author
        pending.decided_at = offset
        pending.decided_index = index
        pending.is_op_open = True
        self._open(offset)
        if pending.snapshot_at is not None:
            self._stale_snapshots[op.transaction_id] = pending
            self._stale_snapshots.move_to_end(op.transaction_id)
        self.queue.add(pending)

    def _is_cancellation(self, pending: Pending, op: Op, appended_ms: int) -> bool:
        """Tell whether a decision takes a COMMIT back, so that it counts though it is not the first.

        By the broker's clock it was stored before the message was due, and nobody has begun to publish it. Delays end
        only once all is read that was stored before a restart, so the restart changes nothing of it.
        """
        due_ms = pending.half.deliver_at_ms
        return (
            may_cancel(op.verdict, op.author)
            and pending.verdict is Verdict.COMMIT
            and op.transaction_id in self.queue.delays
            and due_ms is not None
            and appended_ms < due_ms
        )

    def _open(self, op_offset: int) -> None:
        """Note that a decision of an op record is not applied yet."""
        self._open_ops[op_offset] = self._open_ops.get(op_offset, 0) + 1

    def _close(self, op_offset: int) -> None:
        left = self._open_ops.get(op_offset, 0) - 1
        if left > 0:
            self._open_ops[op_offset] = left
        else:
            self._open_ops.pop(op_offset, None)

    @property
    def has_work(self) -> bool:
        """Whether there is something to publish or to write down, apart from what waits."""
        return bool(self.answered) or self.queue.ready > 0

    def next_batch(
        self,
        limit: int,
        out: Callable[[Pending], str | None],
        snapshot: Iterable[Pending] = (),
        room_bytes: int = 1 << 40,
    ) -> CommitBatch | None:
        """Choose what the next Kafka transaction settles, or return None when there is nothing.

        Nothing changes here, save what is set aside: the batch takes effect by `apply`, once it is committed.

        Args:
            limit: most decisions to take.
            out: names the topic for whose sake a transaction cannot be published with others now, or None.
            snapshot: pending transactions to write down whole.
            room_bytes: bytes of messages to take at most; one transaction alone may have more.
        """
        self.queue.release_due(self.now_ms)
        chosen = self.queue.choose(limit, out, room_bytes)
        snapshotted = {p.half.transaction_id: p for p in snapshot if p.half.transaction_id not in chosen}
        passed = {**chosen, **snapshotted} if snapshotted else chosen
        answered = [pending for name, pending in self.answered.items() if name not in passed]
        if not chosen and not answered and not snapshotted:
            return None
        return CommitBatch(
            list(chosen.values()),
            answered,
            self._half_checkpoint(passed),
            self._op_checkpoint(passed.values()),
            [pending.count() for pending in answered],
            [pending.snapshot() for pending in snapshotted.values()],
        )

    def checkpoints(self) -> tuple[int, int]:
        """Return where reading of the half and op logs would have to start if nothing more was settled."""
        return self._half_checkpoint({}), self._op_checkpoint(())

    def _half_checkpoint(self, passed: dict[str, Pending]) -> int:
        reborn = min((offset for offset, _, _ in self._reborn.values()), default=self.half_position)
        for transaction_id, pending in self._only_in_half_log.items():
            if transaction_id not in passed:
                return min(pending.offset, reborn)
        return reborn

    def _op_checkpoint(self, passed: Iterable[Pending]) -> int:
        """Return the lowest op not applied: a decision not done, or ahead of its half; answers are in the notes."""
        if not self._open_ops:
            return self.op_position
        applied = Counter(pending.decided_at for pending in passed if pending.is_op_open)
        return next((at for at, count in self._open_ops.items() if count > applied[at]), self.op_position)

    def apply(self, batch: CommitBatch, done_from: int = 0) -> list[Pending]:
        """Take in that a batch was committed.

        Args:
            batch: as `next_batch` returned it.
            done_from: an offset of the done log at or below that of its records.

        Returns:
            What is pending now and was not before: it came back from the discarded topic meanwhile.
        """
        for pending in batch.decided:
            self._forget(pending)
        for note in batch.counts:
            self._is_noted(note)
        for snapshot in batch.snapshots:
            self._take_snapshot(done_from, snapshot)
        return self._rebirths(batch.decided)

    def _rebirths(self, settled: Iterable[Pending]) -> list[Pending]:
        begun = []
        for pending in settled if self._reborn else ():
            if pending.half.transaction_id in self._reborn:
                begun.append(self._begin(*self._reborn.pop(pending.half.transaction_id)))
                self.join_ahead(pending.half.transaction_id)
        if begun:
            # Others were read meanwhile, which lie above them.
            self._only_in_half_log = _by_offset(self._only_in_half_log)
            self.pending = _by_offset(self.pending)
            for line in {line for pending in begun if (line := pending.half.line) is not None}:
                self.queue.sort(line)
        return begun

    def settle(
        self, notes: Iterable[Note], snapshots: Iterable[tuple[int, Snapshot | UnloadedSnapshot]] = ()
    ) -> tuple[list[Pending], list[Pending]]:
        """Take in what the done log says after a Kafka transaction ended in doubt.

        Returns:
            What is settled, and what is pending now and was not before.
        """
        for place, snapshot in snapshots:
            self._take_snapshot(place, snapshot)
        settled = []
        for note in notes:
            pending = self.pending.get(note.transaction_id)
            if note.verdict is Verdict.UNKNOWN:
                self._is_noted(note)
            elif pending is not None and pending.offset <= note.half_offset:
                pending.verdict = note.verdict
                settled.append(pending)
                self._forget(pending)
        return settled, self._rebirths(settled)

    def _is_noted(self, note: Note) -> None:
        """Take in that the done log has a count of answered checks; one that grew since has to be written anew."""
        pending = self.answered.get(note.transaction_id)
        if pending is not None and pending.check_count == note.check_count:
            del self.answered[note.transaction_id]

    def _take_snapshot(self, done_from: int, snapshot: Snapshot | UnloadedSnapshot) -> None:
        """Take in that the done log holds a pending transaction whole."""
        pending = self.pending.get(snapshot.note.transaction_id)
        if pending is None or pending.offset != min(half.offset for half in snapshot.halves):
            return
        transaction_id = snapshot.note.transaction_id
        pending.snapshot_at = done_from
        self._only_in_half_log.pop(transaction_id, None)
        self._at_risk.pop(transaction_id, None)
        self._snapshotted[transaction_id] = pending
        self._snapshotted.move_to_end(transaction_id)
        self._is_noted(snapshot.note)
        self.payloads.unwant(transaction_id)
        if not pending.is_op_open:
            return
        # A decision that came while the snapshot was under way is not in it, nor that another one was taken back.
        if (snapshot.note.op_offset, snapshot.note.op_index) != (pending.decided_at, pending.decided_index):
            self._stale_snapshots[transaction_id] = pending
        else:
            self._stale_snapshots.pop(transaction_id, None)
            pending.is_op_open = False
            self._close(pending.decided_at)

    def _forget(self, pending: Pending) -> None:
        transaction_id = pending.half.transaction_id
        del self.pending[transaction_id]
        self.payloads.forget(pending)
        if pending.snapshot_at is None:
            self._only_in_half_log.pop(transaction_id, None)
        else:
            self._snapshotted.pop(transaction_id, None)
            self._stale_snapshots.pop(transaction_id, None)
        if self._at_risk:
            self._at_risk.pop(transaction_id, None)
        if self.answered:
            self.answered.pop(transaction_id, None)
        if pending.is_op_open:
            pending.is_op_open = False
            self._close(pending.decided_at)
        self.queue.forget(pending)

    def load(self, transaction_id: str, halves: Sequence[tuple[int, Half]], place: int | None = None) -> Pending | None:
        """Take in the payload of a transaction, which was read again.

        Args:
            transaction_id: of the transaction.
            halves: its halves, with their offsets in the half log.
            place: offset of its snapshot in the done log, if they were read there.

        Returns:
            The transaction; None where it is settled, or was in memory, or the halves are not its own.
        """
        pending = self.pending.get(transaction_id)
        if pending is None or not pending.load(halves):
            return None
        if place is not None and pending.snapshot_at is not None:
            pending.snapshot_at = max(pending.snapshot_at, place)
        self.payloads.take_in(pending)
        return pending


def _misfit(pending: Pending, op: Op) -> Refusal | None:
    """Say why an op record cannot be of a transaction, or return None."""
    if op.group != pending.half.group:
        return Refusal.WRONG_GROUP
    is_usual = pending.parts is None and op.half_offsets == (pending.offset,)
    return Refusal.WRONG_PLACE if op.half_offsets and not is_usual and not pending.is_named_by(op) else None


def _overrules(op: Op, pending: Pending) -> bool:
    """Tell whether a decision takes effect though there is one: an operator discards what cannot be published.

    What is under way cannot be overruled: it may be visible by now.
    """
    is_discard = op.verdict is Verdict.DISCARD and op.author is Author.OPERATOR
    return is_discard and pending.verdict is Verdict.COMMIT and not pending.in_flight


def _by_offset(some: Mapping[str, Pending]) -> OrderedDict[str, Pending]:
    return OrderedDict(sorted(some.items(), key=lambda one: one[1].offset))


__all__ = ["CommitBatch", "PartitionState", "Pending", "Refusal"]
