"""A half partition during one assignment: commit batches, snapshots, checkpoints.

State belongs to this object, never to the partition number: after a partition is lost and assigned again, a new object
starts from the logs.
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

#: Seconds without anything to settle after which moved positions are committed.
_IDLE_COMMIT_AFTER_S = 2.0
#: Seconds between two searches for transactions to snapshot.
_SNAPSHOT_INTERVAL_S = 0.5
#: Tries to read the pending transactions while another thread changes them.
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
        # The revision of the clock at the last comparison with births.
        self._clock_revision = 0
        #: Processes the records of the half and op logs.
        self.feed = LogFeed(context, number, self.state, self.plan)
        #: The last mark (TICK) of the coordinator in the op log, in monotonic seconds.
        self.ticked_at = float("-inf")
        # The last non-empty batch, in monotonic seconds.
        self._idle_since = time.monotonic()
        # The next search for transactions to snapshot, in monotonic seconds.
        self._snapshot_due = 0.0
        #: The offset from which the done log shows the result of a Kafka transaction in doubt.
        self.done_end = recovered.ends[DONE]
        #: The positions committed last, by log. The next owner begins there: records below are not needed.
        self.committed = dict(recovered.starts)
        # Whether the positions name this coordinator, so that the next owner can end its open transactions.
        self._is_claimed = False
        #: The lowest needed offset of the done log, which the next batch commits.
        self.done_checkpoint = recovered.starts[DONE]
        #: The known topic ids of the logs that the positions belong to.
        self.ids = dict(recovered.ids)
        #: Whether a log has changed: nothing more is published, and the partition is recovered again.
        self.is_given_up = False
        #: Whether all records up to the recovered ends are read. Before, the pending transactions are not known.
        self.is_recovered = False
        self._ends_found = recovered.ends
        self._marks = DoneMarks(recovered.known)
        self._counts.lost += recovered.lost
        self._counts.forged += recovered.forged

    def note_progress(self, now: float) -> None:
        """Update the state after reading: waiting decisions, the time, the recovery. Never called within a record."""
        self.feed.decide_waiting()
        if (revision := self.clock.revision) != self._clock_revision:
            self._clock_revision = revision
            self._bring_births_back(self.clock.now_ms(now))
        ends = self._ends_found
        self.is_recovered = self.state.half_position >= ends[HALF] and self.state.op_position >= ends[OP]
        if self.is_recovered:
            if self.state.unread:  # brokers have lost their op record
                self.state.queue_unread()
            # Due messages wait for this: a cancellation that was in time may be unread until then.
            self.state.now_ms = self.clock.sure_ms(now)

    def _bring_births_back(self, now_ms: int) -> None:
        """Set future births to now, so that their checks do not wait for a wrong time."""
        for pending in self.state.pending.values():
            if max(pending.birth_ms, pending.answered_ms) > now_ms:
                pending.birth_ms = min(pending.birth_ms, now_ms)
                pending.answered_ms = min(pending.answered_ms, now_ms)
                if pending.verdict is None:
                    self.plan.add(pending)

    def give_up(self, why: str) -> None:
        """Stop publishing the partition and have it recovered again, because a log of it has changed."""
        if not self.is_given_up:
            self.is_given_up = True
            _log.error(
                "half partition %d is given up, and taken over again from what its logs hold now: %s", self.number, why
            )

    def oldest_age_s(self, now: float) -> float:
        """Return the age of the oldest pending transaction at `now`, in monotonic seconds. Any thread."""
        return max([0.0, *((self.clock.now_ms(now) - pending.birth_ms) / 1000 for pending in self.oldest(1))])

    def oldest(self, most: int) -> list[Pending]:
        """Return up to `most` pending transactions, in the order of the half log. Any thread."""
        for _ in range(_TRIES):
            # If the coordinator's thread adds a transaction meanwhile, reading starts again.
            with suppress(RuntimeError):
                return list(islice(self.state.pending.values(), most))
        return []

    def began(self, batch: CommitBatch) -> None:
        """Mark all transactions of a batch as in flight."""
        self._mark(batch, in_flight=True)

    def failed(self, batch: CommitBatch) -> None:
        """Handle an aborted batch."""
        self._mark(batch, in_flight=False)
        for pending in batch.decided:
            if pending.held:
                self.state.payloads.drop_if_short(pending)
        self._judge_held(batch)

    def settled(self, batch: CommitBatch, done_end: int | None = None) -> Iterable[str]:  # noqa: ARG002 - see take_bounds
        """Handle a committed batch; return the ids of its settled transactions."""
        ids = self._take_effect(batch, lambda: (batch.decided, self.state.apply(batch, batch.done_from)))
        if batch.moves:
            self._is_claimed = True
            self.committed = {HALF: batch.half_checkpoint, OP: batch.op_checkpoint, DONE: batch.done_checkpoint}
        return ids

    def learned(self, batch: CommitBatch, found: DoneRead) -> list[str]:
        """Handle a batch whose end was in doubt, by the done log; return the ids of its settled transactions."""
        ids = {note.transaction_id for note in batch.notes()}
        snapshotted = {snapshot.note.transaction_id for snapshot in batch.snapshots}
        notes = [note for note in found.notes if note.transaction_id in ids]
        snapshots = [(at, snapshot) for at, snapshot in found.snapshots if snapshot.note.transaction_id in snapshotted]
        self.done_end = found.end
        return self._take_effect(batch, lambda: self.state.settle(notes, snapshots))

    def _take_effect(
        self, batch: CommitBatch, settle: Callable[[], tuple[Sequence[Pending], Sequence[Pending]]]
    ) -> list[str]:
        """Apply `settle`, which returns settled transactions and new ones; return the ids of the settled ones."""
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
        """Judge the decisions that waited for the end of a batch's Kafka transaction."""
        if not self.state.held:
            return
        for pending in batch.decided:
            self.feed.judge_held(pending.half.transaction_id)
        for snapshot in batch.snapshots:
            self.feed.judge_held(snapshot.note.transaction_id)

    def next_batch(self, limit: int, blocking: Blocking, room_bytes: int) -> CommitBatch | None:
        """Choose the transactions that the next Kafka transaction settles or snapshots; None if there are none.

        `limit` and `room_bytes` are those of `PartitionState.next_batch`. The first batch settles nothing: it names the
        owner of the partition, so that the next owner can end this coordinator's open transactions.
        """
        if self.is_given_up:
            return None
        if not self._is_claimed:
            return self.claim()
        # Before the recovery is complete, the pending transactions are not known.
        snapshot, now = [], time.monotonic()
        if self.is_recovered and now >= self._snapshot_due:
            # Stop at a transaction in flight: a snapshot would come after its end in the done log.
            chosen = to_snapshot(self.state, self.done_end)
            snapshot = list(takewhile(lambda pending: not pending.in_flight, chosen))
            # The search is expensive. While it finds transactions, it continues without a pause.
            self._snapshot_due = now + (0.0 if snapshot else _SNAPSHOT_INTERVAL_S)
        batch = self.state.next_batch(limit, blocking, snapshot, room_bytes)
        is_idle = batch is None and self.is_recovered and now >= self._idle_since + _IDLE_COMMIT_AFTER_S
        if batch is not None or is_idle:
            self._idle_since = now
        if is_idle:
            # Marks and refused records move the positions, too: without this commit, logs of an idle store would grow.
            half, op = self.state.checkpoints()
            is_as_written = self.committed == {HALF: half, OP: op, DONE: self.done_checkpoint}
            return None if is_as_written else self.claim()
        return None if batch is None else self._placed(batch)

    def trial(self, waiting: Sequence[Pending], fits: Callable[[Pending], bool]) -> CommitBatch | None:
        """Return a batch of the first waiting transactions that `fits` accepts; request payloads not in memory.

        It moves no positions.
        """
        for pending in waiting:
            if pending.dropped is not None and not self.state.payloads.want(pending):
                break
        chosen = list(takewhile(fits, takewhile(lambda pending: pending.dropped is None, waiting)))
        is_possible = bool(chosen) and not self.is_given_up
        return CommitBatch(chosen, -1, -1, discarded_to=self._topics.discarded) if is_possible else None

    def claim(self) -> CommitBatch:
        """Return a batch that settles nothing and commits the positions with the owner's name."""
        return self._placed(CommitBatch([], *self.state.checkpoints()))

    def _placed(self, batch: CommitBatch) -> CommitBatch:
        batch.done_from, batch.done_checkpoint = self.done_end, self.done_checkpoint
        batch.log_ids, batch.discarded_to = encode_ids(self.ids), self._topics.discarded
        return batch

    def take_bounds(self, bounds: Mapping[str, tuple[int, int]], ops_read_to: int) -> None:
        """Process the bounds of the logs, which were requested when the op log had been read to `ops_read_to`.

        Records of the done log are needed as long as their halves and ops exist: if the committed positions were lost,
        halves and ops would be read again. So the done log is truncated last.
        """
        (half_begin, half_end), (op_begin, _), (_, self.done_end) = (bounds[log] for log in LOGS)
        self._marks.add(Mark(self.done_end, self.state.half_position, self.state.op_position))
        # Snapshots are in the order of the done log: the first one is the lowest.
        snapshotted = [p.snapshot_at or 0 for p in islice(self.state.places.snapshotted.values(), 1)]
        self.done_checkpoint = max(self.done_checkpoint, self._marks.low(half_begin, op_begin, snapshotted))
        # Decisions whose half can no longer come.
        dropped = self.state.sweep_held(half_end, ops_read_to)
        if dropped:
            self._counts.refused += dropped
            self._log.warn(
                "ahead", "op partition %d: %d decisions refused: no such half was ever stored", self.number, dropped
            )

    def positions(self) -> dict[str, int]:
        """Return the read positions by log; for the done log, its known end."""
        return {HALF: self.state.half_position, OP: self.state.op_position, DONE: self.done_end}

    def needed_from(self, log: str) -> int:
        """Return the lowest needed offset of a log."""
        half, op = self.state.checkpoints()
        return {HALF: half, OP: op, DONE: self.committed[DONE]}[log]


def held_in(partitions: Sequence[HalfPartition], now: float) -> dict[str, Any]:
    """Return the sums over half partitions, by names of `CoordinatorStatistics`. Any thread."""
    return {
        "partitions": sum(p.is_recovered for p in partitions),
        "pending": sum(len(p.state.pending) for p in partitions),
        "held_by_key": sum(p.queue.keys.behind for p in partitions),
        "delayed": sum(len(p.queue.delays) for p in partitions),
        "oldest_pending_age": max([0.0, *(p.oldest_age_s(now) for p in partitions)]),
        "held": sum(len(p.queue.set_aside) for p in partitions),
    }
