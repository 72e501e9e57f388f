"""Which logs hold what is pending: what a restart would read again, and so from where. Pure.

A pending transaction is in the half log alone until the done log holds a snapshot of it. The op record that decided it
is needed until it is settled, or until a snapshot has the decision. A note in the done log is needed as long as its
halves, or the op that decided, may be read again; a snapshot, as long as its transaction is pending.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from penstock.transactions.core.pending import Pending
from penstock.transactions.wire.ops import Op

_DECIDED_AT, _IS_OP_OPEN = attrgetter("decided_at"), attrgetter("is_op_open")


class LogPlaces:
    """The places of what is pending in one half partition. Not thread-safe: its coordinator's thread drives it."""

    def __init__(self) -> None:
        #: Those that are in the half log alone, by rising offsets.
        self.only_in_half_log: OrderedDict[str, Pending] = OrderedDict()
        #: Those with a snapshot in the done log, in the order of the snapshots.
        self.snapshotted: OrderedDict[str, Pending] = OrderedDict()
        #: Those of them whose decision is newer than the snapshot, in the order of the decisions.
        self.stale_snapshots: OrderedDict[str, Pending] = OrderedDict()
        # Decisions not applied, or ahead of their halves, by the offset of their op record: rising, for ops come so.
        self._open_ops: OrderedDict[int, int] = OrderedDict()

    def add(self, pending: Pending) -> None:
        """Take in a transaction that was read from the half log."""
        self.only_in_half_log[pending.half.transaction_id] = pending

    def restore(self, some: Iterable[Pending]) -> None:
        """Take in transactions that were read from snapshots."""
        by_place = sorted(some, key=lambda pending: pending.snapshot_at or 0)
        self.snapshotted.update((pending.half.transaction_id, pending) for pending in by_place)

    def sort(self) -> None:
        """Put those in the half log in the order of their offsets: one was added whose half had been read before."""
        self.only_in_half_log = by_offset(self.only_in_half_log)

    def open_op(self, op_offset: int) -> None:
        """Note that a decision of an op record is not applied yet."""
        self._open_ops[op_offset] = self._open_ops.get(op_offset, 0) + 1

    def close_op(self, op_offset: int) -> None:
        """Note that a decision of an op record is applied, or is in a snapshot."""
        left = self._open_ops.get(op_offset, 0) - 1
        if left > 0:
            self._open_ops[op_offset] = left
        else:
            self._open_ops.pop(op_offset, None)

    def release_op(self, pending: Pending) -> None:
        """Note that the op record that decided a transaction is not needed for it any more."""
        if pending.is_op_open:
            pending.is_op_open = False
            self.close_op(pending.decided_at)

    def decided(self, pending: Pending) -> None:
        """Take in the place of a decision."""
        pending.is_op_open = True
        self.open_op(pending.decided_at)
        if pending.snapshot_at is not None:
            self.stale_snapshots[pending.half.transaction_id] = pending
            self.stale_snapshots.move_to_end(pending.half.transaction_id)

    def take_snapshot(self, pending: Pending, done_from: int, decision: tuple[int, int]) -> None:
        """Take in that the done log holds a snapshot of a transaction.

        `done_from` is an offset there at or below it; `decision` is the place of the decision that it has.
        """
        transaction_id = pending.half.transaction_id
        pending.snapshot_at = done_from
        self.only_in_half_log.pop(transaction_id, None)
        self.snapshotted[transaction_id] = pending
        self.snapshotted.move_to_end(transaction_id)
        if not pending.is_op_open:
            return
        # A decision that came while the snapshot was under way is not in it, nor that another one was taken back.
        if decision != (pending.decided_at, pending.decided_index):
            self.stale_snapshots[transaction_id] = pending
        else:
            self.stale_snapshots.pop(transaction_id, None)
            self.release_op(pending)

    def forget(self, pending: Pending) -> None:
        """Forget a transaction that is settled, or lost."""
        transaction_id = pending.half.transaction_id
        if pending.snapshot_at is None:
            self.only_in_half_log.pop(transaction_id, None)
        else:
            self.snapshotted.pop(transaction_id, None)
            self.stale_snapshots.pop(transaction_id, None)
        self.release_op(pending)

    def half_checkpoint(self, passed: Mapping[str, Pending], highest: int) -> int:
        """Return the lowest half that a restart needs, once some are settled or have a snapshot; `highest` at most."""
        for transaction_id, pending in self.only_in_half_log.items():
            if transaction_id not in passed:
                return min(pending.offset, highest)
        return highest

    def op_checkpoint(self, passed: Iterable[Pending], op_position: int) -> int:
        """Return the lowest op not applied: a decision not done, or ahead of its half; answers are in the notes."""
        if not self._open_ops:
            return op_position
        applied = Counter(map(_DECIDED_AT, filter(_IS_OP_OPEN, passed)))
        return next((at for at, count in self._open_ops.items() if count > applied[at]), op_position)


def by_offset(some: Mapping[str, Pending]) -> OrderedDict[str, Pending]:
    """Return transactions in the order of their offsets."""
    return OrderedDict(sorted(some.items(), key=lambda item: item[1].offset))


class Mark(NamedTuple):
    """An end of the done log, with positions above all that the records below it speak of."""

    done_end: int
    half_position: int
    op_position: int


class DoneMarks:
    """From where the done log of a half partition is needed. Not thread-safe: its coordinator's thread drives it.

    Notes do not tell their own offsets, so the log is marked now and then: where it ended, and how far both other logs
    were read then. What lies below a mark speaks of nothing above those positions. The first is the end of the done log
    as it was found, with positions above all that it speaks of.
    """

    def __init__(self, first: Mark) -> None:
        self._marks = deque([first])
        self._low = 0

    @property
    def end(self) -> int:
        """The last end that was marked: what is written from now on lies at or above it."""
        return self._marks[-1].done_end

    def add(self, mark: Mark) -> None:
        """Remember where the done log ends now."""
        if mark.done_end > self.end:
            self._marks.append(mark)

    def low(self, half_checkpoint: int, op_checkpoint: int, snapshotted: Iterable[int]) -> int:
        """Return the offset below which nothing is needed.

        The checkpoints are where a restart reads the half and op logs from; `snapshotted` are offsets at or below the
        snapshots that are needed.
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
    """A decision that is judged later; its place is the offset of its op record, and its index there.

    The half log must be read up to the limit before its half can be called unknown; None: that is not known yet.
    """

    op: Op
    place: tuple[int, int]
    appended_ms: int
    limit: int | None = None


class HeldDecisions:
    """Those of one half partition. Not thread-safe: its coordinator's thread drives it.

    What is yielded is to be judged at once, and may be held again.
    """

    def __init__(self, places: LogPlaces) -> None:
        self._places = places
        self._waiting: dict[str, list[HeldOp]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, transaction_id: str) -> bool:
        return transaction_id in self._waiting

    def hold(self, decision: HeldOp) -> None:
        """Hold a decision, behind those of its transaction."""
        self._waiting.setdefault(decision.op.transaction_id, []).append(decision)
        self._places.open_op(decision.place[0])

    def take(self, transaction_id: str) -> Iterator[HeldOp]:
        """Yield the decisions of a transaction."""
        for decision in self._waiting.pop(transaction_id, ()):
            yield decision
            self._close(decision)

    def take_hopeless(self, may_come: Callable[[HeldOp], bool]) -> Iterator[HeldOp]:
        """Yield those that need not wait any more, for what they wait for cannot come; what is behind others waits."""
        for transaction_id in list(self._waiting):
            waiting = self._waiting.pop(transaction_id)
            for at, decision in enumerate(waiting):
                if may_come(decision):
                    self._waiting[transaction_id] = waiting[at:]
                    break
                yield decision
                self._close(decision)

    def _close(self, decision: HeldOp) -> None:
        # After judging: what is open stays in its place among the others.
        self._places.close_op(decision.place[0])
