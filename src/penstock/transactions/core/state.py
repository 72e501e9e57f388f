"""The state machine of one half partition: pending halves, their first decisions, and the checkpoints.

Pure: it is fed the records of the half and op logs in their order, and hands out what is to be published. It knows
no Kafka and reads no clock, so that simulations can drive it.

No id of a settled transaction is kept. A decision names the offsets of its halves: if those were read already and
the id is not pending, the transaction was settled before, or never was; if they were not read yet, the decision runs
ahead of its half and is held until the half arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from math import inf

from penstock.transactions.core.ahead import Ahead, AheadOps
from penstock.transactions.core.checkpoints import by_offset
from penstock.transactions.core.commit_batch import CommitBatch
from penstock.transactions.core.decisions import (
    NEED_ALL,
    Refusal,
    is_cancellation,
    is_next_answer,
    misfit,
    overrules,
)
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.pending_transactions import PendingTransactions
from penstock.transactions.core.recovered_state import RecoveredNotes, restored
from penstock.transactions.wire.done_records import Note, Snapshot, UnloadedSnapshot
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Op, Verdict

# Members of enumerations are dear to look up, and this is the way of every decision.
_UNKNOWN, _CHECK = Verdict.UNKNOWN, Author.CHECK


class PartitionState(PendingTransactions):
    """What one coordinator knows of one half partition it owns. One thread drives it.

    The positions are the next offsets of its half and op logs.
    """

    def __init__(self, half_position: int, op_position: int) -> None:
        super().__init__()
        self.half_position = half_position
        self.op_position = op_position
        #: How many answers of checks counted, whatever they said.
        self.answers = 0
        #: The broker's time in milliseconds, for what is delayed; the caller moves it on.
        self.now_ms = 0
        self._recovered = RecoveredNotes()
        self._ahead = AheadOps(self.pending.__contains__, self._waits, self._judge_ahead)
        #: Decisions that are held, by transaction id: an object to look at before `join_ahead`, once for each record.
        self.ahead: Mapping[str, Sized] = self._ahead.waiting
        # Halves brought back from the discarded topic before it is known here that they went there: place, half, birth.
        self._reborn: dict[str, tuple[int, Half, int]] = {}

    def remember(
        self, notes: Iterable[Note], snapshots: Iterable[tuple[int, Snapshot | UnloadedSnapshot]] = ()
    ) -> list[Pending]:
        """Take in what the done log says, before the half log is read from the half checkpoint.

        Notes come in the order of the done log, snapshots are the live ones, by `recovered_state.live_snapshots`, each
        with its offset there. Returns what was snapshotted and is pending, in the order of the half log.
        """
        self._recovered.remember(notes, self.half_position, self.op_position)
        snapshotted = []
        for pending in sorted((restored(place, snapshot) for place, snapshot in snapshots), key=lambda one: one.offset):
            self._keep(pending)
            snapshotted.append(pending)
        self.places.restore(snapshotted)
        for pending in snapshotted:
            if pending.verdict is not None:
                self.unread[pending.half.transaction_id] = pending
        self.queue_unread(self.op_position)
        return snapshotted

    def queue_unread(self, below: float = inf) -> None:
        """Queue what a snapshot says to be decided by an op below an offset: such an op is not read again."""
        for pending in sorted(self.unread.values(), key=lambda one: (one.decided_at, one.decided_index)):
            if pending.decided_at < below:
                self.queue.add(self.unread.pop(pending.half.transaction_id))

    def add_half(self, offset: int, half: Half, birth_ms: int = 0) -> Pending | Refusal | None:
        """Take the next half in; return its pending transaction, or why it is refused.

        None: the half tells nothing new, as the done log says that it is settled, or it was snapshotted.
        """
        self.half_position = offset + 1
        transaction_id = half.transaction_id
        note = self._recovered.note_on(transaction_id, offset) if self._recovered.notes else None
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
        pending = Pending(half, offset, birth_ms)
        if note is not None:
            pending.remember_checks(note)
        self.places.add(pending)
        self._keep(pending)
        return pending

    def skip_half(self, offset: int) -> None:
        """Pass a record of the half log that is no half."""
        self.half_position = offset + 1
        self._recovered.pass_halves(offset)

    def skip_op(self, offset: int) -> None:
        """Pass a record of the op log that is no op."""
        self.op_position = offset + 1
        self._recovered.pass_ops(offset)

    def add_op(self, offset: int, op: Op, appended_ms: int, index: int = 0) -> Refusal | None:
        """Take the next decision in, and return why it is refused, or None.

        `index` says which decision of its record it is, `appended_ms` is the append time of that.
        """
        self.op_position = offset + 1
        places = self._recovered.places
        if places and places.get((offset, index)) == op.transaction_id:
            # Read again after a restart: what it decided is settled.
            return None
        pending = self.pending.get(op.transaction_id)
        # Nearly all have one half, and it is there.
        is_usual = pending is not None and pending.parts is None and not self._reborn and not pending.in_flight
        if pending is not None and (is_usual or not self._waits(op)):
            return self._judge(pending, offset, index, op, appended_ms)
        last = max(op.half_offsets, default=-1)
        if pending is None and op.half_offsets and last < self.half_position:
            return Refusal.SETTLED_OR_UNKNOWN
        # A transaction that is there in part may become whole as long as the half log goes on.
        limit = last + 1 if op.half_offsets and pending is None else None
        self._ahead.add(Ahead(op, offset, index, appended_ms, limit))
        self.places.open_op(offset)
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
        return op.verdict in NEED_ALL or last >= self.half_position or op.transaction_id in self._ahead

    def _waits(self, op: Op) -> bool:
        """Tell whether a decision is held: for more halves, or for the end of what is under way and may be visible."""
        pending = self.pending[op.transaction_id]
        return (pending.in_flight and overrules(op, pending)) or self._waits_for_halves(pending, op)

    def join_ahead(self, transaction_id: str) -> list[tuple[int, Refusal]]:
        """Apply the decisions that were held, now that a half has arrived, or what was under way has ended.

        Returns the refused ones by op offset.
        """
        return self._ahead.join(transaction_id, self.half_position)

    def _judge_ahead(self, ahead: Ahead) -> Refusal | None:
        refusal: Refusal | None = Refusal.SETTLED_OR_UNKNOWN
        pending = self.pending.get(ahead.op.transaction_id)
        if pending is not None:
            refusal = self._judge(pending, ahead.offset, ahead.index, ahead.op, ahead.appended_ms)
        # After judging: what is open stays in its place among the others.
        self.places.close_op(ahead.offset)
        return refusal

    def sweep_ahead(self, half_end: int, read_to: int | None = None) -> int:
        """Refuse decisions whose half cannot come any more, and return how many there were.

        The end of the half log was asked for after the decisions were read. A half is stored before its decision is
        written, so a decision that names an offset at or past the end is forged. `read_to` was the next offset of the
        op log then: decisions at or above it are left; None: all had been read.
        """
        return self._ahead.sweep(half_end, self.half_position, read_to, self._stays)

    def _stays(self, transaction_id: str) -> bool:
        """Tell whether what is held waits for something else than halves."""
        pending = self.pending.get(transaction_id)
        return transaction_id in self._reborn or (pending is not None and pending.in_flight)

    def lose_half_log(self, low: int) -> list[Pending]:
        """Take in that the half log was made again and begins at `low`: what is pending is here alone.

        Returns what is lost: its payload was there alone.
        """
        lost = self.lose(self.only_in_half_log)
        self.half_position = low
        self.places.lose_halves(list(self.only_in_half_log))
        self._reborn.clear()
        self._recovered.notes.clear()
        return lost

    def cut_half_log(self, low: int) -> list[Pending]:
        """Take in that the half log was deleted below `low`: what is pending and lay there is here alone.

        Returns what is lost: its payload was there alone.
        """
        self.half_position = max(self.half_position, low)
        lost = self.lose(self.places.below(low))
        self.places.lose_halves(self.places.below(low))
        return lost

    def lose_op_log(self, low: int) -> None:
        """Take in that the op log was made again and begins at `low`: places in the former one mean nothing."""
        self.op_position = low
        self._recovered.places.clear()
        self.places.lose_op_log(self.pending.values())
        self.queue_unread(self.op_position)
        self._ahead.lose_places()

    def cut_op_log(self, low: int) -> None:
        """Take in that the op log was deleted below `low`: decisions there that are not applied are here alone."""
        self.op_position = max(self.op_position, low)
        self.queue_unread(self.op_position)
        self.places.cut_op_log(low, self.decided.values())

    def lose_done_log(self, low: int | None = None) -> list[Pending]:
        """Take in that what the done log said is gone; return what is lost: its payload was there alone.

        What is pending is to be written down, so that the checkpoints pass what is settled. Payloads that are not in
        memory may be read from `low` on, where it begins now; None: it was made again.
        """
        lost = self.lose(self.snapshotted) if low is None else []
        self.places.lose_done_log(low or 0, self.pending.values())
        return lost

    def _judge(self, pending: Pending, offset: int, index: int, op: Op, appended_ms: int) -> Refusal | None:
        wrong = misfit(pending, op)
        if wrong is not None:
            return wrong
        if op.verdict is _UNKNOWN:
            if is_next_answer(pending, op, (offset, index)):
                pending.check_count += 1
                pending.answered_ms = appended_ms
                pending.answered_at = offset, index
                self.answers += 1
                self.answered[op.transaction_id] = pending
            return None
        if pending.verdict is not None:
            if (pending.decided_at, pending.decided_index) == (offset, index):
                if self.unread.pop(op.transaction_id, None) is not None:
                    self.queue.add(pending)
                return None
            if not (overrules(op, pending) or self._is_cancellation(pending, op, appended_ms)):
                return Refusal.ALREADY_DECIDED
        if pending.parts is not None and op.verdict in NEED_ALL and not pending.is_complete:
            return Refusal.INCOMPLETE
        if pending.verdict is not None:
            self.unread.pop(op.transaction_id, None)
            self.queue.withdraw(pending)
            self.places.release_op(pending)
        self._decide(pending, op, offset, index)
        return None

    def _is_cancellation(self, pending: Pending, op: Op, appended_ms: int) -> bool:
        return op.transaction_id in self.queue.delays and is_cancellation(pending, op, appended_ms)

    def _decide(self, pending: Pending, op: Op, offset: int, index: int) -> None:
        """Let a decision take effect."""
        self.answers += op.author is _CHECK
        pending.verdict = op.verdict
        pending.author = op.author
        pending.decided_at = offset
        pending.decided_index = index
        self.places.decided(pending)
        self.queue.add(pending)

    def next_batch(
        self,
        limit: int,
        out: Callable[[Pending], str | None],
        snapshot: Iterable[Pending] = (),
        room_bytes: int = 1 << 40,
    ) -> CommitBatch | None:
        """Choose what the next Kafka transaction settles, or return None when there is nothing.

        Nothing changes here, save what is set aside: the batch takes effect by `apply`, once it is committed. It takes
        `limit` decisions at most, and `room_bytes` of messages; one transaction alone may have more. `out` names the
        topic for whose sake a transaction cannot be published with others now, or None. Those in `snapshot` are written
        down whole.
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
            self.places.op_checkpoint(passed.values(), self.op_position),
            [pending.count() for pending in answered],
            [pending.snapshot() for pending in snapshotted.values()],
        )

    def checkpoints(self) -> tuple[int, int]:
        """Return where reading of the half and op logs would have to start if nothing more was settled."""
        return self._half_checkpoint({}), self.places.op_checkpoint((), self.op_position)

    def _half_checkpoint(self, passed: Mapping[str, Pending]) -> int:
        reborn = min((offset for offset, _, _ in self._reborn.values()), default=self.half_position)
        return self.places.half_checkpoint(passed, reborn)

    def apply(self, batch: CommitBatch, done_from: int = 0) -> list[Pending]:
        """Take in that a batch was committed; `done_from` is an offset of the done log at or below that of its records.

        Returns what is pending now and was not before: it came back from the discarded topic meanwhile.
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
            self.places.sort()
            for name in list(by_offset(self.pending)):
                self.pending.move_to_end(name)
            for line in {line for pending in begun if (line := pending.half.line) is not None}:
                self.queue.sort(line)
        return begun

    def settle(
        self, notes: Iterable[Note], snapshots: Iterable[tuple[int, Snapshot | UnloadedSnapshot]] = ()
    ) -> tuple[list[Pending], list[Pending]]:
        """Take in what the done log says after a Kafka transaction ended in doubt.

        Returns what is settled, and what is pending now and was not before.
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

    def _take_snapshot(self, done_from: int, snapshot: Snapshot | UnloadedSnapshot) -> None:
        """Take in that the done log holds a pending transaction whole."""
        pending = self.pending.get(snapshot.note.transaction_id)
        if pending is None or pending.offset != min(half.offset for half in snapshot.halves):
            return
        decision = snapshot.note.op_offset, snapshot.note.op_index
        self.places.take_snapshot(pending, done_from, decision)
        self._is_noted(snapshot.note)
        self.payloads.unwant(snapshot.note.transaction_id)
