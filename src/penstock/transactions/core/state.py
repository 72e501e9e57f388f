"""The state of one half partition: pending transactions, their decisions, and the checkpoints.

Pure. The caller feeds it the records of the half and op logs in their order, and takes from it what to publish. It
knows no Kafka and reads no clock, so that simulations can drive it. The table in `decisions` says what a decision does.

The state keeps no ids of settled transactions. A decision names the offsets of its halves. If those were read and the
id is not pending, the transaction is settled or never existed. If they were not read yet, the decision is ahead of its
half, and is held until the half arrives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from math import inf

from penstock.transactions.core.checkpoints import HeldDecisions, HeldOp, LogPlaces, by_offset
from penstock.transactions.core.commit_batch import CommitBatch
from penstock.transactions.core.decisions import Refusal, Ruling, is_next_answer, judge, misfit
from penstock.transactions.core.payloads import Payloads
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.queue import Blocking, Delays, ReadyQueue
from penstock.transactions.core.recovered_state import RecoveredNotes, restored
from penstock.transactions.wire.done_records import Note, Snapshot, StoredHalf
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Op, Verdict

# Looking up a member of an enumeration is slow, and every decision comes through here.
_UNKNOWN, _CHECK = Verdict.UNKNOWN, Author.CHECK
_DECIDE, _COUNT = Ruling.DECIDE, Ruling.COUNT
_REFUSED = {Ruling.LATE: Refusal.ALREADY_DECIDED, Ruling.NOT_ALL: Refusal.INCOMPLETE}


class PartitionState:
    """What a coordinator knows of one half partition that it owns. One thread drives it.

    The positions are the next offsets of its half and op logs.
    """

    def __init__(self, half_position: int, op_position: int) -> None:
        self.half_position = half_position
        self.op_position = op_position
        #: How many answers to checks counted, with any verdict.
        self.answers = 0
        #: The broker's time in milliseconds, for delayed transactions. The caller moves it on.
        self.now_ms = 0
        #: All transactions that are not settled, by id, in the order of the half log.
        self.pending: OrderedDict[str, Pending] = OrderedDict()
        delays = Delays()
        #: Which payloads are in memory.
        self.payloads = Payloads(delays)
        #: The decided transactions.
        self.queue = ReadyQueue(delays, self.payloads.drop_if_short)
        #: Transactions that are decided by their snapshot. They are queued when the op is read again: its place in the
        #: log is their turn.
        self.unread: dict[str, Pending] = {}
        #: Transactions whose count of answered checks is not in the done log yet.
        self.answered: dict[str, Pending] = {}
        #: Which logs hold the pending transactions.
        self.places = LogPlaces()
        #: Decisions that are judged later.
        self.held = HeldDecisions(self.places)
        self._recovered = RecoveredNotes()
        # By id, halves that an operator brought back from the discarded topic. They were read before the end of the
        # discarded life, and begin the next one.
        self._next_lives: dict[str, list[StoredHalf]] = {}

    @property
    def has_work(self) -> bool:
        """Whether there is something to publish or to write down, besides waiting transactions."""
        return bool(self.answered) or self.queue.ready > 0

    def undecided(self, transaction_id: str) -> Pending | None:
        """Return a transaction if it is pending and undecided, else None. Safe from any thread."""
        pending = self.pending.get(transaction_id)
        return pending if pending is not None and pending.verdict is None else None

    # Reading: the done log first, then halves and decisions.

    def remember(self, notes: Iterable[Note], snapshots: Iterable[tuple[int, Snapshot]] = ()) -> list[Pending]:
        """Load what the done log says, before the half log is read from its checkpoint.

        Notes come in the order of the done log. Snapshots are those of `recovered_state.live_snapshots`, each with its
        offset there. Returns the restored transactions, in the order of the half log.
        """
        self._recovered.remember(notes, self.half_position, self.op_position)
        snapshotted = sorted(
            (restored(place, snapshot) for place, snapshot in snapshots), key=lambda pending: pending.offset
        )
        for pending in snapshotted:
            self._keep(pending)
        self.places.restore(snapshotted)
        for pending in snapshotted:
            if pending.verdict is not None:
                self.unread[pending.transaction_id] = pending
        self.queue_unread(self.op_position)
        return snapshotted

    def queue_unread(self, below: float = inf) -> None:
        """Queue the transactions that a snapshot decided by an op below an offset: that op is not read again."""
        for pending in sorted(self.unread.values(), key=lambda unread: (unread.decided_at, unread.decided_index)):
            if pending.decided_at < below:
                self.queue.add(self.unread.pop(pending.transaction_id))

    def add_half(self, offset: int, half: Half, birth_ms: int = 0) -> Pending | Refusal | None:
        """Add the next half. Return its pending transaction, or the reason for refusing it.

        None: the half is nothing new, because the done log says that it is settled, or a snapshot holds it.
        """
        self.half_position = offset + 1
        transaction_id = half.transaction_id
        note = self._recovered.note_on(transaction_id, offset) if self._recovered.notes else None
        if note is not None and note.verdict is not _UNKNOWN:
            return None
        pending = self.pending.get(transaction_id)
        if pending is None:
            return self._begin(offset, half, birth_ms, note)
        if offset in pending.offsets:
            return None
        if half.resumed is not None and pending.verdict is Verdict.DISCARD:
            self._next_lives.setdefault(transaction_id, []).append(StoredHalf(offset, birth_ms, half))
            return None
        return pending if self._add_part(pending, offset, half) else Refusal.DUPLICATE_ID

    def _begin(self, offset: int, half: Half, birth_ms: int, note: Note | None = None) -> Pending:
        pending = Pending(half, offset, birth_ms)
        if note is not None:
            pending.remember_checks(note)
        self.places.only_in_half_log[pending.transaction_id] = pending
        self._keep(pending)
        return pending

    def _add_part(self, pending: Pending, offset: int, half: Half) -> bool:
        bytes_before = pending.payload_bytes
        is_accepted = pending.add_part(offset, half)
        self.payloads.grown(pending, bytes_before)
        return is_accepted

    def _keep(self, pending: Pending) -> None:
        self.pending[pending.transaction_id] = pending
        self.payloads.add(pending)
        if pending.half.order_key is not None:
            self.queue.keys.add(pending)

    def _forget(self, settled: Sequence[Pending]) -> None:
        for pending in settled:
            del self.pending[pending.transaction_id]
            if self.answered:
                self.answered.pop(pending.transaction_id, None)
            if self.unread:
                self.unread.pop(pending.transaction_id, None)
        self.payloads.forget(settled)
        self.places.forget(settled)
        self.queue.forget(settled)

    def skip_half(self, offset: int) -> None:
        """Pass a record of the half log that is not a half."""
        self.half_position = offset + 1
        self._recovered.pass_halves(offset)

    def skip_op(self, offset: int) -> None:
        """Pass a record of the op log: its decisions were added, or it is not an op."""
        self.op_position = offset + 1
        self._recovered.pass_ops(offset)

    def load(self, transaction_id: str, halves: Sequence[tuple[int, Half]], place: int | None = None) -> Pending | None:
        """Put the payload of a transaction back in memory: its halves, by their offsets in the half log.

        `place` is the offset of its snapshot in the done log, if they were read there. Returns the transaction. Returns
        None if it is settled, if its payload is in memory already, or if the halves are not its own.
        """
        pending = self.pending.get(transaction_id)
        if pending is None or not pending.load(halves):
            return None
        if place is not None and pending.snapshot_at is not None:
            pending.snapshot_at = max(pending.snapshot_at, place)
        self.payloads.take_in(pending)
        return pending

    # Decisions.

    def add_op(self, offset: int, op: Op, appended_ms: int, index: int = 0) -> Refusal | None:
        """Add the next decision. Return the reason for refusing it, or None.

        `index` is the decision's position in its record. `appended_ms` is the append time of the record.
        """
        self.op_position = offset + 1
        places = self._recovered.places
        if places and places.get((offset, index)) == op.transaction_id:
            # Read again after a restart; its transaction is settled.
            return None
        pending = self.pending.get(op.transaction_id)
        if pending is not None:
            return self._judge(pending, op, (offset, index), appended_ms)
        last = max(op.half_offsets, default=-1)
        if op.half_offsets and last < self.half_position:
            return Refusal.SETTLED_OR_UNKNOWN
        self.held.hold(HeldOp(op, (offset, index), appended_ms, last + 1 if op.half_offsets else None))
        return None

    def _judge(
        self, pending: Pending, op: Op, place: tuple[int, int], appended_ms: int, *, may_grow: bool = True
    ) -> Refusal | None:
        """Apply a decision, or hold it until it can be judged. Return the reason for refusing it, or None."""
        # A transaction of one half, which was read, is behind nothing, unless a decision is held.
        may_be_behind = pending.parts is not None or self.held or self._next_lives
        if may_grow and may_be_behind and self._is_behind(pending, op):
            self.held.hold(HeldOp(op, place, appended_ms))
            return None
        wrong = misfit(pending, op)
        if wrong is not None:
            return wrong
        if pending.verdict is not None and (pending.decided_at, pending.decided_index) == place:
            if self.unread.pop(op.transaction_id, None) is not None:
                self.queue.add(pending)
            return None
        is_delayed = pending.verdict is not None and op.transaction_id in self.queue.delays
        ruling = judge(pending, op, appended_ms, is_delayed=is_delayed, may_grow=may_grow)
        if ruling is _DECIDE:
            self._decide(pending, op, place)
            return None
        if ruling is Ruling.REPLACE:
            self.unread.pop(op.transaction_id, None)
            self.queue.withdraw(pending)
            self.places.release_op(pending)
            self._decide(pending, op, place)
        elif ruling is Ruling.HOLD:
            self.held.hold(HeldOp(op, place, appended_ms))
        elif ruling is _COUNT and is_next_answer(pending, op, place):
            pending.check_count += 1
            pending.answered_ms = appended_ms
            pending.answered_at = place
            self.answers += 1
            self.answered[op.transaction_id] = pending
        return _REFUSED.get(ruling)

    def _is_behind(self, pending: Pending, op: Op) -> bool:
        """Tell whether a decision names unread halves, or follows a held decision: the first decision wins."""
        next_life = self._next_lives.get(op.transaction_id)
        last = max(op.half_offsets, default=-1)
        if next_life is not None:
            return last >= next_life[0].offset
        if pending.parts is None or not pending.parts.missing:
            return False
        return last >= self.half_position or op.transaction_id in self.held

    def _decide(self, pending: Pending, op: Op, place: tuple[int, int]) -> None:
        self.answers += op.author is _CHECK
        pending.verdict = op.verdict
        pending.author = op.author
        pending.decided_at, pending.decided_index = place
        self.places.decided(pending)
        self.queue.add(pending)

    def judge_held(self, transaction_id: str) -> list[tuple[int, Refusal]]:
        """Judge the held decisions of a transaction, after a half arrived or its Kafka transaction ended.

        Returns the refused ones by op offset.
        """
        refused = []
        for decision in self.held.take(transaction_id):
            pending = self.pending.get(transaction_id)
            refusal: Refusal | None = None
            if pending is not None:
                refusal = self._judge(pending, decision.op, decision.place, decision.appended_ms)
            elif decision.limit is not None and decision.limit > self.half_position:
                # This life was settled long ago. The decision is for a later life with the same id.
                self.held.hold(decision)
            else:
                refusal = Refusal.SETTLED_OR_UNKNOWN
            if refusal is not None:
                refused.append((decision.place[0], refusal))
        return refused

    def sweep_held(self, half_end: int, read_to: int | None = None) -> int:
        """Refuse held decisions whose half cannot arrive any more. Return their number.

        The caller asked for `half_end`, the end of the half log, after it had read the decisions. A half is stored
        before its decision is written. So a decision that names an offset at or past the end is forged. `read_to` was
        the next offset of the op log then: decisions at or above it are not judged. None: all had been read.
        """
        dropped = 0
        for decision in self.held.take_hopeless(lambda held: self._may_still_come(held, half_end, read_to)):
            op, pending = decision.op, self.pending.get(decision.op.transaction_id)
            # Some halves of the transaction may have arrived.
            if pending is None or self._judge(pending, op, decision.place, decision.appended_ms, may_grow=False):
                dropped += 1
        return dropped

    def _may_still_come(self, decision: HeldOp, half_end: int, read_to: int | None) -> bool:
        """Tell whether a held decision's half may still arrive, or its Kafka transaction may still end."""
        if read_to is not None and decision.place[0] >= read_to:
            return True
        transaction_id = decision.op.transaction_id
        pending = self.pending.get(transaction_id)
        if transaction_id in self._next_lives or (pending is not None and pending.in_flight):
            return True
        if decision.limit is None:
            decision.limit = half_end
        return self.half_position < decision.limit <= half_end

    # Publishing, and its outcome.

    def next_batch(
        self,
        limit: int,
        blocking: Blocking,
        snapshot: Iterable[Pending] = (),
        room_bytes: int = 1 << 40,
    ) -> CommitBatch | None:
        """Choose what the next Kafka transaction settles. Return None if there is nothing.

        Changes nothing, except that it sets transactions aside: `apply` makes the batch take effect once it is
        committed.

        Args:
            limit: most decisions.
            blocking: names the topic that keeps a transaction out of the common Kafka transactions, or returns None.
            snapshot: transactions to write into the done log with their halves.
            room_bytes: most bytes of messages. A single transaction may have more.
        """
        # Before anything else: a transaction that is set aside now may lose its payload.
        snapshots = [(pending, pending.snapshot()) for pending in snapshot]
        self.queue.release_due(self.now_ms)
        chosen = self.queue.choose(limit, blocking, room_bytes)
        snapshots = [(pending, written) for pending, written in snapshots if pending.transaction_id not in chosen]
        snapshotted = {pending.transaction_id: pending for pending, _ in snapshots}
        passed = {**chosen, **snapshotted} if snapshotted else chosen
        answered = [pending for name, pending in self.answered.items() if name not in passed]
        if not chosen and not answered and not snapshotted:
            return None
        return CommitBatch(
            list(chosen.values()),
            self._half_checkpoint(passed),
            self.places.op_checkpoint(passed.values(), self.op_position),
            [pending.count() for pending in answered],
            [written for _, written in snapshots],
        )

    def checkpoints(self) -> tuple[int, int]:
        """Return the offsets of the half and op logs from which a restart would read now."""
        return self._half_checkpoint({}), self.places.op_checkpoint((), self.op_position)

    def _half_checkpoint(self, passed: Mapping[str, Pending]) -> int:
        lowest_next = min((halves[0].offset for halves in self._next_lives.values()), default=self.half_position)
        return self.places.half_checkpoint(passed, lowest_next)

    def apply(self, batch: CommitBatch, done_from: int = 0) -> list[Pending]:
        """Settle a committed batch. `done_from` is an offset of the done log at or below the batch's records.

        Returns the transactions that are pending from now on: they were brought back from the discarded topic.
        """
        self._forget(batch.decided)
        for note in batch.counts:
            self._is_noted(note)
        for snapshot in batch.snapshots:
            self._take_snapshot(done_from, snapshot)
        return self._begin_next_lives(batch.decided)

    def settle(
        self, notes: Iterable[Note], snapshots: Iterable[tuple[int, Snapshot]] = ()
    ) -> tuple[list[Pending], list[Pending]]:
        """Apply what the done log says after a Kafka transaction ended in doubt.

        Returns the settled transactions, and those that are pending from now on.
        """
        for place, snapshot in snapshots:
            self._take_snapshot(place, snapshot)
        settled = []
        for note in notes:
            pending = self.pending.get(note.transaction_id)
            if note.verdict is _UNKNOWN:
                self._is_noted(note)
            elif pending is not None and pending.offset <= note.half_offset:
                pending.verdict = note.verdict
                settled.append(pending)
                self._forget([pending])
        return settled, self._begin_next_lives(settled)

    def _is_noted(self, note: Note) -> None:
        """Note that the done log has a count of answered checks. A count that grew since must be written again."""
        pending = self.answered.get(note.transaction_id)
        if pending is not None and pending.check_count == note.check_count:
            del self.answered[note.transaction_id]

    def _take_snapshot(self, done_from: int, snapshot: Snapshot) -> None:
        """Note that the done log holds a snapshot of a pending transaction."""
        pending = self.pending.get(snapshot.note.transaction_id)
        if pending is None or pending.offset != min(half.offset for half in snapshot.halves):
            return
        decision = snapshot.note.op_offset, snapshot.note.op_index
        self.places.take_snapshot(pending, done_from, decision)
        self._is_noted(snapshot.note)
        if self.queue.is_put_off(pending):
            self.payloads.drop_if_short(pending)

    def _begin_next_lives(self, settled: Iterable[Pending]) -> list[Pending]:
        """Begin the next lives of discarded transactions that were brought back meanwhile."""
        begun = []
        for pending in settled if self._next_lives else ():
            halves = self._next_lives.pop(pending.transaction_id, None)
            if halves is not None:
                first, *others = halves
                again = self._begin(first.offset, first.half, first.birth_ms)
                for part in others:
                    self._add_part(again, part.offset, part.half)
                begun.append(again)
                self.judge_held(again.transaction_id)
        if begun:
            # Halves with higher offsets were read meanwhile: restore the order of offsets.
            self.places.sort()
            for name in list(by_offset(self.pending)):
                self.pending.move_to_end(name)
            for line in {line for pending in begun if (line := pending.half.line) is not None}:
                self.queue.sort(line)
        return begun
