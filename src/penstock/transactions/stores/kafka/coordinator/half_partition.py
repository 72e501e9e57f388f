"""One half partition while this coordinator owns it: commit batches, snapshots, checkpoints, truncation.

State hangs on this object, never on the partition number: after a partition is lost and taken again, a new object
starts from what the logs say.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice, takewhile
from typing import Any

from penstock.transactions.core.check_plan import CheckPlan
from penstock.transactions.core.checkpoints import DoneMarks, Mark
from penstock.transactions.core.commit_batch import CommitBatch
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.queue import Blocking
from penstock.transactions.core.snapshot import to_snapshot
from penstock.transactions.publishing.group_commit import Backlog
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.coordinator.log_feed import LogFeed
from penstock.transactions.stores.kafka.logs.recovered_partition import (
    DONE,
    HALF,
    LOGS,
    OP,
    DoneRead,
    RecoveredPartition,
    encode_ids,
)

_log = logging.getLogger("penstock.transactions")

#: Seconds without anything to settle after which positions that moved are written down.
_IDLE_COMMIT_AFTER_S = 2.0
#: Seconds between two looks for what is to be snapshotted.
_SNAPSHOT_INTERVAL_S = 0.5
#: Tries to read what is pending while it changes.
_TRIES = 5


class HalfPartition(Backlog):
    """Drives the state and the checks of one half partition. Used by the coordinator's thread."""

    def __init__(self, context: CoordinatorContext, number: int, recovered: RecoveredPartition) -> None:
        self.number = number
        self._topics, self._counts, self._log = context.topics, context.counts, context.ration
        self.state = recovered.state
        self.queue = self.state.queue
        self.plan = CheckPlan(context.policy, self.state.undecided)
        for pending in self.state.pending.values():
            self.plan.add(pending)
        self.clock = context.clock
        # Of the clock, when births were last compared with it.
        self._clock_revision = 0
        #: Takes the records of the half and op logs in.
        self.feed = LogFeed(context, number, self.state, self.plan)
        #: When the coordinator last marked the op log, in monotonic seconds.
        self.ticked_at = float("-inf")
        # When something was last chosen to be settled, in monotonic seconds.
        self._idle_since = time.monotonic()
        # When to look next for what is to be snapshotted, in monotonic seconds.
        self._snapshot_due = 0.0
        #: From where the done log has to be read to learn what a transaction in doubt became.
        self.done_end = recovered.ends[DONE]
        #: Positions as last committed, by log. Below them a log is not needed: the next owner begins there.
        self.committed = dict(recovered.starts)
        # Whether the name of this coordinator stands with the positions, for those who may have to recover it.
        self._is_claimed = False
        #: Below which the done log is not needed, as it is to be committed next.
        self.done_checkpoint = recovered.starts[DONE]
        #: Topic ids of the logs that the positions belong to, as far as they are known.
        self.ids = dict(recovered.ids)
        #: Whether a log of it is not as it was read: nothing more is published, and it is taken over again.
        self.is_given_up = False
        #: Whether all that its predecessors left was read: before, what is pending is not known.
        self.is_recovered = False
        self._ends_found = recovered.ends
        self._marks = DoneMarks(recovered.known)
        self._counts.lost += recovered.lost
        self._counts.forged += recovered.forged

    def note_progress(self, now: float) -> None:
        """Look how far reading came, and what time it is. Called between records, never within one."""
        self.feed.decide_waiting()
        if (revision := self.clock.revision) != self._clock_revision:
            self._clock_revision = revision
            self._bring_births_back(self.clock.now_ms(now))
        ends = self._ends_found
        self.is_recovered = self.state.half_position >= ends[HALF] and self.state.op_position >= ends[OP]
        if self.is_recovered:
            if self.state.unread:  # by an op that brokers have lost
                self.state.queue_unread()
            # What is due waits until then: that it was cancelled in time may not be read yet.
            self.state.now_ms = self.clock.sure_ms(now)

    def _bring_births_back(self, now_ms: int) -> None:
        """No half was born after now, and its check does not wait until then."""
        for pending in self.state.pending.values():
            if max(pending.birth_ms, pending.answered_ms) > now_ms:
                pending.birth_ms = min(pending.birth_ms, now_ms)
                pending.answered_ms = min(pending.answered_ms, now_ms)
                if pending.verdict is None:
                    self.plan.add(pending)

    def give_up(self, why: str) -> None:
        """Have it taken over again: a log of it is not as it was read."""
        if not self.is_given_up:
            self.is_given_up = True
            _log.error(
                "half partition %d is given up, and taken over again from what its logs hold now: %s", self.number, why
            )

    def oldest_age_s(self, now: float) -> float:
        """Return the age of the oldest that is pending; safe from any thread. `now` is in monotonic seconds."""
        return max([0.0, *((self.clock.now_ms(now) - pending.birth_ms) / 1000 for pending in self.oldest(1))])

    def oldest(self, most: int) -> list[Pending]:
        """Return the first that are pending, in the order of the half log, at most so many; safe from any thread."""
        for _ in range(_TRIES):
            # The coordinator's thread may add one meanwhile: then the reading begins again.
            with suppress(RuntimeError):
                return list(islice(self.state.pending.values(), most))
        return []

    def began(self, batch: CommitBatch) -> None:
        """Note on all that a batch settles or takes snapshots of that a Kafka transaction with it is under way."""
        self._mark(batch, in_flight=True)

    def failed(self, batch: CommitBatch) -> None:
        """Take in that a batch was aborted."""
        self._mark(batch, in_flight=False)
        for pending in batch.decided:
            if pending.held:
                self.state.payloads.drop_if_short(pending)
        self._judge_held(batch)

    def settled(self, batch: CommitBatch, done_end: int | None = None) -> Iterable[str]:  # noqa: ARG002 - upkeep looks
        """Take in that a batch was committed; return the ids of what it settled."""
        ids = self._take_effect(batch, lambda: (batch.decided, self.state.apply(batch, batch.done_from)))
        if batch.moves:
            self._is_claimed = True
            self.committed = {HALF: batch.half_checkpoint, OP: batch.op_checkpoint, DONE: batch.done_checkpoint}
        return ids

    def learned(self, batch: CommitBatch, found: DoneRead) -> list[str]:
        """Take in what the done log says of a batch whose end was in doubt; return the ids of what is settled."""
        ids = {note.transaction_id for note in batch.notes()}
        snapshotted = {snapshot.note.transaction_id for snapshot in batch.snapshots}
        notes = [note for note in found.notes if note.transaction_id in ids]
        snapshots = [(place, it) for place, it in found.snapshots if it.note.transaction_id in snapshotted]
        self.done_end = found.end
        return self._take_effect(batch, lambda: self.state.settle(notes, snapshots))

    def _take_effect(
        self, batch: CommitBatch, settle: Callable[[], tuple[Sequence[Pending], Sequence[Pending]]]
    ) -> list[str]:
        """Have the state changed, which gives what is settled and what began since; return the ids of the former."""
        self._mark(batch, in_flight=False)
        now_ms = self.clock.now_ms(time.monotonic())
        with self._counts.lock:
            settled, begun = settle()
            for pending in settled:
                self._counts.settled(pending.verdict, (now_ms - pending.birth_ms) / 1000)
        for pending in begun:
            self.plan.add(pending)
        self._judge_held(batch)
        return [pending.half.transaction_id for pending in settled]

    def _mark(self, batch: CommitBatch, *, in_flight: bool) -> None:
        for pending in batch.decided:
            pending.in_flight = in_flight
        for snapshot in batch.snapshots:
            pending_then = self.state.pending.get(snapshot.note.transaction_id)
            if pending_then is not None:
                pending_then.in_flight = in_flight

    def _judge_held(self, batch: CommitBatch) -> None:
        """Have the decisions judged that waited for the end of the Kafka transaction that had a batch."""
        if not self.state.held:
            return
        for pending in batch.decided:
            self.feed.judge_held(pending.half.transaction_id)
        for snapshot in batch.snapshots:
            self.feed.judge_held(snapshot.note.transaction_id)

    def next_batch(self, limit: int, blocking: Blocking, room_bytes: int) -> CommitBatch | None:
        """Choose what the next Kafka transaction settles here, and what it snapshots, or return None.

        `limit` and `room_bytes` are those of `PartitionState.next_batch`. The first one settles nothing: it says whose
        the partition is, so that what this coordinator leaves open can be ended under its name.
        """
        if self.is_given_up:
            return None
        if not self._is_claimed:
            return self.claim()
        # Before all is read that its predecessors left, what is pending is not known.
        snapshot, now = [], time.monotonic()
        if self.is_recovered and now >= self._snapshot_due:
            # Not past one that is being settled: what is snapshotted would come behind its end in the done log.
            chosen = to_snapshot(self.state, self.done_end)
            snapshot = list(takewhile(lambda pending: not pending.in_flight, chosen))
            # Looking for what is old costs something; while there is more of it, it goes on without a pause.
            self._snapshot_due = now + (0.0 if snapshot else _SNAPSHOT_INTERVAL_S)
        batch = self.state.next_batch(limit, blocking, snapshot, room_bytes)
        is_idle = batch is None and self.is_recovered and now >= self._idle_since + _IDLE_COMMIT_AFTER_S
        if batch is not None or is_idle:
            self._idle_since = now
        if is_idle:
            # Marks, and what was refused, move the positions too; or the logs of an idle store would grow.
            half, op = self.state.checkpoints()
            is_as_written = self.committed == {HALF: half, OP: op, DONE: self.done_checkpoint}
            return None if is_as_written else self.claim()
        return None if batch is None else self._placed(batch)

    def trial(self, waiting: Sequence[Pending], fits: Callable[[Pending], bool]) -> CommitBatch | None:
        """Return the first of what is set aside whose payloads are in memory and that `fits`; the others are asked for.

        It moves no positions.
        """
        for pending in waiting:
            if pending.dropped is not None and not self.state.payloads.want(pending):
                break
        chosen = list(takewhile(fits, takewhile(lambda pending: pending.dropped is None, waiting)))
        is_possible = bool(chosen) and not self.is_given_up
        return CommitBatch(chosen, -1, -1, discarded_to=self._topics.discarded) if is_possible else None

    def claim(self) -> CommitBatch:
        """Return a batch that settles nothing: what is written are the positions, and who owns the partition."""
        return self._placed(CommitBatch([], *self.state.checkpoints()))

    def _placed(self, batch: CommitBatch) -> CommitBatch:
        batch.done_from, batch.done_checkpoint = self.done_end, self.done_checkpoint
        batch.log_ids, batch.discarded_to = encode_ids(self.ids), self._topics.discarded
        return batch

    def take_bounds(self, bounds: Mapping[str, tuple[int, int]], ops_read_to: int) -> None:
        """Take in where the logs begin and end, asked for when the op log had been read to an offset.

        What the done log says of halves and ops is needed as long as those are there: without committed positions they
        would be read again. So it is truncated last.
        """
        (half_begin, half_end), (op_begin, _), (_, self.done_end) = (bounds[log] for log in LOGS)
        self._marks.add(Mark(self.done_end, self.state.half_position, self.state.op_position))
        # They stand in the order of the done log.
        snapshotted = [p.snapshot_at or 0 for p in islice(self.state.places.snapshotted.values(), 1)]
        self.done_checkpoint = max(self.done_checkpoint, self._marks.low(half_begin, op_begin, snapshotted))
        # Decisions whose half cannot come any more.
        dropped = self.state.sweep_held(half_end, ops_read_to)
        if dropped:
            self._counts.refused += dropped
            self._log.warn(
                "ahead", "op partition %d: %d decisions refused: no such half was ever stored", self.number, dropped
            )

    def positions(self) -> dict[str, int]:
        """Return how far the logs were read, by log; of the done log, to where it was known to go."""
        return {HALF: self.state.half_position, OP: self.state.op_position, DONE: self.done_end}

    def needed_from(self, log: str) -> int:
        """Return the lowest offset of a log that is not done with."""
        half, op = self.state.checkpoints()
        return {HALF: half, OP: op, DONE: self.committed[DONE]}[log]


def held_in(partitions: Sequence[HalfPartition], now: float) -> dict[str, Any]:
    """Return what half partitions hold together, by names of `CoordinatorStatistics`; safe from any thread."""
    return {
        "partitions": sum(it.is_recovered for it in partitions),
        "pending": sum(len(it.state.pending) for it in partitions),
        "held_by_key": sum(it.queue.keys.behind for it in partitions),
        "delayed": sum(len(it.queue.delays) for it in partitions),
        "oldest_pending_age": max([0.0, *(it.oldest_age_s(now) for it in partitions)]),
        "held": sum(len(it.queue.set_aside) for it in partitions),
    }
