"""Checkpoints: from where a restart reads each log, given which logs hold the pending transactions. Pure.

- A pending transaction is in the half log alone until the done log holds a snapshot of it.
- The op record of its decision is needed until the transaction is settled, or a snapshot has the decision.
- A note in the done log is needed while its halves, or the op that decided, may be read again.
- A snapshot is needed while its transaction is pending.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from penstock.transactions.core.pending import Pending
from penstock.transactions.wire.ops import Op

_DECIDED_AT, _IS_OP_OPEN = attrgetter("decided_at"), attrgetter("is_op_open")


class LogPlaces:
    """Which logs hold the pending transactions of a half partition. Not thread-safe: one thread drives it."""

    def __init__(self) -> None:
        #: Transactions in the half log alone, by rising offsets.
        self.only_in_half_log: OrderedDict[str, Pending] = OrderedDict()
        #: Transactions with a snapshot in the done log, in the order of the snapshots.
        self.snapshotted: OrderedDict[str, Pending] = OrderedDict()
        #: Those of them whose decision is newer than the snapshot, in the order of the decisions.
        self.stale_snapshots: OrderedDict[str, Pending] = OrderedDict()
        # How many decisions of an op record are held or not applied, by its offset. Offsets rise, as ops are read so.
        self._open_ops: OrderedDict[int, int] = OrderedDict()

    def restore(self, snapshotted: Iterable[Pending]) -> None:
        """Add transactions that were read from snapshots."""
        by_place = sorted(snapshotted, key=lambda pending: pending.snapshot_at or 0)
        self.snapshotted.update((pending.transaction_id, pending) for pending in by_place)

    def sort(self) -> None:
        """Restore the order of offsets in the half log, after a transaction was added late."""
        self.only_in_half_log = by_offset(self.only_in_half_log)

    def open_op(self, op_offset: int) -> None:
        """Note that a decision of an op record is not applied yet."""
        self._open_ops[op_offset] = self._open_ops.get(op_offset, 0) + 1

    def close_op(self, op_offset: int, decisions: int = 1) -> None:
        """Note that decisions of an op record are applied, or are in snapshots."""
        left = self._open_ops.get(op_offset, 0) - decisions
        if left > 0:
            self._open_ops[op_offset] = left
        else:
            self._open_ops.pop(op_offset, None)

    def release_op(self, pending: Pending) -> None:
        """Note that a transaction no longer needs the op record that decided it."""
        if pending.is_op_open:
            pending.is_op_open = False
            self.close_op(pending.decided_at)

    def decided(self, pending: Pending) -> None:
        """Note the place of a decision."""
        pending.is_op_open = True
        self._open_ops[pending.decided_at] = self._open_ops.get(pending.decided_at, 0) + 1
        if pending.snapshot_at is not None:
            self.stale_snapshots[pending.transaction_id] = pending
            self.stale_snapshots.move_to_end(pending.transaction_id)

    def take_snapshot(self, pending: Pending, done_from: int, decision: tuple[int, int]) -> None:
        """Note that the done log holds a snapshot of a transaction.

        `done_from` is an offset there at or below it. `decision` is the place of the decision in the snapshot.
        """
        transaction_id = pending.transaction_id
        pending.snapshot_at = done_from
        self.only_in_half_log.pop(transaction_id, None)
        self.snapshotted[transaction_id] = pending
        self.snapshotted.move_to_end(transaction_id)
        if not pending.is_op_open:
            return
        # The snapshot lacks a decision that came, or replaced another, while it was being written.
        if decision != (pending.decided_at, pending.decided_index):
            self.stale_snapshots[transaction_id] = pending
        else:
            self.stale_snapshots.pop(transaction_id, None)
            self.release_op(pending)

    def forget(self, settled: Sequence[Pending]) -> None:
        """Forget settled transactions."""
        for op_offset, decisions in Counter(map(_DECIDED_AT, filter(_IS_OP_OPEN, settled))).items():
            self.close_op(op_offset, decisions)
        for pending in settled:
            pending.is_op_open = False
            if pending.snapshot_at is None:
                self.only_in_half_log.pop(pending.transaction_id, None)
            else:
                self.snapshotted.pop(pending.transaction_id, None)
                self.stale_snapshots.pop(pending.transaction_id, None)

    def half_checkpoint(self, passed: Mapping[str, Pending], highest: int) -> int:
        """Return the lowest half that a restart needs, at most `highest`.

        `passed` are transactions that will be settled or have a snapshot by then.
        """
        for transaction_id, pending in self.only_in_half_log.items():
            if transaction_id not in passed:
                return min(pending.offset, highest)
        return highest

    def op_checkpoint(self, passed: Iterable[Pending], op_position: int) -> int:
        """Return the lowest op that a restart needs: its decision is not applied or is held. Notes hold the answers."""
        if not self._open_ops:
            return op_position
        applied = Counter(map(_DECIDED_AT, filter(_IS_OP_OPEN, passed)))
        return next((at for at, count in self._open_ops.items() if count > applied[at]), op_position)


def by_offset(transactions: Mapping[str, Pending]) -> OrderedDict[str, Pending]:
    """Return transactions in the order of their offsets."""
    return OrderedDict(sorted(transactions.items(), key=lambda item: item[1].offset))


class Mark(NamedTuple):
    """An end of the done log, with positions above everything that the records below it refer to."""

    done_end: int
    half_position: int
    op_position: int


class DoneMarks:
    """From where the done log of a half partition is needed. Not thread-safe: its coordinator's thread drives it.

    Notes do not say their own offsets. So the caller marks the log now and then: its end, and how far the other two
    logs were read. Records below a mark refer to nothing at or above those positions. The first mark is the end that
    recovery found, with positions above everything that the log refers to.
    """

    def __init__(self, first: Mark) -> None:
        self._marks = deque([first])
        self._low = 0

    @property
    def end(self) -> int:
        """The last marked end. New records lie at or above it."""
        return self._marks[-1].done_end

    def add(self, mark: Mark) -> None:
        """Mark where the done log ends now."""
        if mark.done_end > self.end:
            self._marks.append(mark)

    def low(self, half_checkpoint: int, op_checkpoint: int, snapshotted: Iterable[int]) -> int:
        """Return the offset below which nothing is needed.

        A restart reads the half and op logs from the checkpoints. `snapshotted` are offsets at or below the snapshots
        that are needed.
        """
        marks = self._marks
        while marks[0].half_position <= half_checkpoint and marks[0].op_position <= op_checkpoint:
            self._low = marks[0].done_end
            if len(marks) == 1:
                break
            marks.popleft()
        return min(self._low, min(snapshotted, default=self._low))


@dataclass(slots=True)
class HeldOp:
    """A decision that is judged later. Its place is the offset of its op record, and its index there.

    Its half is unknown only once the half log was read up to the limit. None: the limit is not known yet.
    """

    op: Op
    place: tuple[int, int]
    appended_ms: int
    limit: int | None = None


class HeldDecisions(dict[str, list[HeldOp]]):
    """The held decisions of one half partition, by id. Not thread-safe: its coordinator's thread drives it.

    The caller judges each yielded decision at once, and may hold it again.
    """

    def __init__(self, places: LogPlaces) -> None:
        super().__init__()
        self._places = places

    def hold(self, decision: HeldOp) -> None:
        """Hold a decision, behind others of its transaction."""
        self.setdefault(decision.op.transaction_id, []).append(decision)
        self._places.open_op(decision.place[0])

    def take(self, transaction_id: str) -> Iterator[HeldOp]:
        """Yield the decisions of a transaction."""
        for decision in self.pop(transaction_id, ()):
            yield decision
            self._close(decision)

    def take_hopeless(self, may_come: Callable[[HeldOp], bool]) -> Iterator[HeldOp]:
        """Yield decisions for which `may_come` is false. Decisions behind one that still waits are left."""
        for transaction_id in list(self):
            waiting = self.pop(transaction_id)
            for at, decision in enumerate(waiting):
                if may_come(decision):
                    self[transaction_id] = waiting[at:]
                    break
                yield decision
                self._close(decision)

    def _close(self, decision: HeldOp) -> None:
        # After judging: an op that stays open keeps its place among the others.
        self._places.close_op(decision.place[0])
