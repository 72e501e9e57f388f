"""The state machine of one half partition: pending halves, their first decisions, and the checkpoints.

Pure: it is fed the records of the half and op logs in their order, and hands out what is to be published. It knows
no Kafka and reads no clock, so that simulations can drive it.

No id of a settled transaction is kept. A decision names the offsets of its halves: if those were read already and
the id is not pending, the transaction was settled before, or never was; if they were not read yet, the decision runs
ahead of its half and is held until the half arrives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from penstock.transactions.records import Half, Note, Op, Verdict


class Refusal(Enum):
    """Why a record was refused."""

    DUPLICATE_ID = "its transaction id belongs to another half"
    SETTLED_OR_UNKNOWN = "no such transaction is pending: it is settled, or never was"
    ALREADY_DECIDED = "the transaction was decided before: the first decision stands"
    WRONG_GROUP = "it comes from another producer group than the half"
    WRONG_PLACE = "it names other offsets than those of the half"


class Pending:
    """A half that is not settled."""

    __slots__ = (
        "answered_ms",
        "check_count",
        "check_due",
        "decided_at",
        "half",
        "held",
        "offset",
        "requested",
        "suspect",
        "verdict",
    )

    def __init__(self, half: Half, offset: int) -> None:
        self.half = half
        #: Offset of the half record.
        self.offset = offset
        #: The first decision, or None.
        self.verdict: Verdict | None = None
        #: Offset of the op record that decided.
        self.decided_at = -1
        #: Answered checks, and the append time of the last answer in milliseconds.
        self.check_count = 0
        self.answered_ms = 0
        #: Number of the check that was asked last; 0 when none was.
        self.requested = 0
        #: When the next check is due, in the caller's monotonic seconds.
        self.check_due = 0.0
        #: Its target cannot take it now: it waits aside.
        self.held = False
        #: A group with it failed: it is published alone next, so that it takes nobody with it.
        self.suspect = False


@dataclass(slots=True)
class Share:
    """One partition's share of a Kafka transaction.

    Attributes:
        decided: what is settled by it, in the order of the decisions.
        answered: pending halves whose count of answered checks is written down by it.
        half_checkpoint: where reading of the half log would start once it is committed.
        op_checkpoint: the same for the op log.
    """

    decided: list[Pending]
    answered: list[Pending]
    half_checkpoint: int
    op_checkpoint: int

    def notes(self) -> list[Note]:
        """Return what the done log shall say."""
        ends = [
            Note(p.half.transaction_id, p.offset, p.verdict or Verdict.UNKNOWN, p.check_count, p.answered_ms)
            for p in self.decided
        ]
        return ends + [
            Note(p.half.transaction_id, p.offset, Verdict.UNKNOWN, p.check_count, p.answered_ms) for p in self.answered
        ]


@dataclass(slots=True)
class _Ahead:
    """A decision that runs ahead of its half."""

    op: Op
    offset: int
    appended_ms: int
    #: The half log must be read up to here before the decision can be called unknown; None where that is not known yet.
    limit: int | None


@dataclass(slots=True)
class Settlement:
    """What one coordinator knows of one half partition it owns. Not thread-safe: its coordinator's thread drives it.

    Attributes:
        half_position: the next offset of the half log.
        op_position: the next offset of the op log.
        pending: halves not settled, by transaction id, in the order of the half log.
        decided: those of them that have a decision, in the order in which the decisions took effect.
        answered: pending halves with a count of answered checks that is not in the done log yet, with the offset of
            the answer's op record.
        answers: how many answered checks were counted.
    """

    half_position: int
    op_position: int
    pending: OrderedDict[str, Pending] = field(default_factory=OrderedDict)
    decided: dict[str, Pending] = field(default_factory=dict)
    answered: dict[str, int] = field(default_factory=dict)
    answers: int = 0
    _ahead: dict[str, list[_Ahead]] = field(default_factory=dict)
    _notes: dict[str, Note] = field(default_factory=dict)
    _notes_end: int = 0

    def remember(self, notes: Iterable[Note]) -> None:
        """Take in what the done log says above the half checkpoint, before the half log is read from there."""
        for note in notes:
            if note.half_offset < self.half_position:
                continue
            before = self._notes.get(note.transaction_id)
            # An end is final; of two counts the later one, which is the greater, stands.
            if before is None or before.verdict is Verdict.UNKNOWN:
                self._notes[note.transaction_id] = note
                self._notes_end = max(self._notes_end, note.half_offset + 1)

    def add_half(self, offset: int, half: Half) -> Pending | Refusal | None:
        """Take the next half in.

        Returns:
            The pending half; None when the done log says that it is settled; or why it is refused.
        """
        self.half_position = offset + 1
        note = self._notes.pop(half.transaction_id, None) if self._notes else None
        if self._notes and self.half_position >= self._notes_end:
            self._notes.clear()
        if note is not None and note.half_offset == offset and note.verdict is not Verdict.UNKNOWN:
            return None
        if half.transaction_id in self.pending:
            return Refusal.DUPLICATE_ID
        pending = Pending(half, offset)
        if note is not None:
            pending.check_count = pending.requested = note.check_count
            pending.answered_ms = note.answered_ms
        self.pending[half.transaction_id] = pending
        return pending

    def skip_half(self, offset: int) -> None:
        """Pass a record of the half log that is no half."""
        self.half_position = offset + 1

    def skip_op(self, offset: int) -> None:
        """Pass a record of the op log that is no op."""
        self.op_position = offset + 1

    def add_op(self, offset: int, op: Op, appended_ms: int) -> Refusal | None:
        """Take the next op in, and return why it is refused, or None."""
        self.op_position = offset + 1
        pending = self.pending.get(op.transaction_id)
        if pending is not None:
            return self._judge(pending, offset, op, appended_ms)
        if not op.half_offsets or op.half_offsets[-1] >= self.half_position:
            limit = op.half_offsets[-1] + 1 if op.half_offsets else None
            self._ahead.setdefault(op.transaction_id, []).append(_Ahead(op, offset, appended_ms, limit))
            return None
        return Refusal.SETTLED_OR_UNKNOWN

    def join_ahead(self, transaction_id: str) -> list[tuple[int, Refusal]]:
        """Apply the decisions that ran ahead of a half that has just arrived; return the refused ones by op offset."""
        refused = []
        for ahead in self._ahead.pop(transaction_id, ()):
            pending = self.pending.get(transaction_id)
            refusal = (
                Refusal.SETTLED_OR_UNKNOWN
                if pending is None
                else self._judge(pending, ahead.offset, ahead.op, ahead.appended_ms)
            )
            if refusal is not None:
                refused.append((ahead.offset, refusal))
        return refused

    def sweep_ahead(self, half_end: int) -> int:
        """Drop decisions whose half cannot come any more, and return how many there were.

        Args:
            half_end: the end of the half log, asked for after the decisions were read. A half is stored before its
                decision is written, so a decision that names an offset at or past the end is forged.
        """
        dropped = 0
        for transaction_id in list(self._ahead):
            kept = []
            for ahead in self._ahead[transaction_id]:
                if ahead.limit is None:
                    ahead.limit = half_end
                if ahead.limit > half_end or ahead.limit <= self.half_position:
                    dropped += 1
                else:
                    kept.append(ahead)
            if kept:
                self._ahead[transaction_id] = kept
            else:
                del self._ahead[transaction_id]
        return dropped

    @property
    def has_ahead(self) -> bool:
        """Whether decisions wait for their halves."""
        return bool(self._ahead)

    def _judge(self, pending: Pending, offset: int, op: Op, appended_ms: int) -> Refusal | None:
        if op.group != pending.half.group:
            return Refusal.WRONG_GROUP
        if op.half_offsets and op.half_offsets != (pending.offset,):
            return Refusal.WRONG_PLACE
        if op.verdict is Verdict.UNKNOWN:
            # A late, repeated or forged answer carries a number that is not the next: it counts for nothing.
            if pending.verdict is None and op.check_number == pending.check_count + 1:
                pending.check_count += 1
                pending.answered_ms = appended_ms
                self.answers += 1
                self.answered[op.transaction_id] = offset
            return None
        if pending.verdict is not None:
            return Refusal.ALREADY_DECIDED
        pending.verdict = op.verdict
        pending.decided_at = offset
        self.decided[op.transaction_id] = pending
        return None

    @property
    def has_work(self) -> bool:
        """Whether there is something to publish or to write down, apart from what is held."""
        return bool(self.answered) or any(not p.held for p in self.decided.values())

    def share(self, limit: int, publishable: Callable[[Pending], bool]) -> Share | None:
        """Choose what the next Kafka transaction settles, or return None when there is nothing.

        Nothing changes here: the share takes effect by `apply`, once it is committed.

        Args:
            limit: most decisions to take.
            publishable: whether a committed half can be published now. Where not, it is held.
        """
        chosen: list[Pending] = []
        for pending in self.decided.values():
            if pending.held or len(chosen) == limit:
                continue
            if pending.verdict is Verdict.COMMIT and not publishable(pending):
                pending.held = True
            elif pending.suspect:
                # It goes alone, after those before it: the order of decisions is kept.
                if not chosen:
                    chosen.append(pending)
                break
            else:
                chosen.append(pending)
        settled = {p.half.transaction_id for p in chosen}
        answered = [self.pending[name] for name in self.answered if name not in settled]
        if not chosen and not answered:
            return None
        return Share(chosen, answered, self._half_checkpoint(settled), self._op_checkpoint(settled))

    def _half_checkpoint(self, settled: set[str]) -> int:
        for transaction_id, pending in self.pending.items():
            if transaction_id not in settled:
                return pending.offset
        return self.half_position

    def _op_checkpoint(self, settled: set[str]) -> int:
        """Return the lowest op not applied: a decision not done, or ahead of its half; answers are in the notes."""
        return min(self._open_ops(settled), default=self.op_position)

    def _open_ops(self, settled: set[str]) -> Iterator[int]:
        for transaction_id, pending in self.decided.items():
            if transaction_id not in settled:
                yield pending.decided_at
        for waiting in self._ahead.values():
            for ahead in waiting:
                yield ahead.offset

    def apply(self, share: Share) -> None:
        """Forget what a committed Kafka transaction settled."""
        for pending in share.decided:
            self._forget(pending.half.transaction_id)
        for pending in share.answered:
            self.answered.pop(pending.half.transaction_id, None)

    def settle(self, notes: Iterable[Note]) -> list[Pending]:
        """Forget what the done log says is settled, and return it: used after a Kafka transaction ended in doubt."""
        settled = []
        for note in notes:
            pending = self.pending.get(note.transaction_id)
            if pending is not None and pending.offset == note.half_offset and note.verdict is not Verdict.UNKNOWN:
                pending.verdict = note.verdict
                settled.append(pending)
                self._forget(note.transaction_id)
        return settled

    def _forget(self, transaction_id: str) -> None:
        del self.pending[transaction_id]
        self.decided.pop(transaction_id, None)
        self.answered.pop(transaction_id, None)

    def release_held(self) -> None:
        """Let held transactions try again."""
        for pending in self.decided.values():
            pending.held = False


__all__ = ["Pending", "Refusal", "Settlement", "Share"]
