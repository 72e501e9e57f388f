"""One half partition while this coordinator owns it: records in, counts, timers and the trimming of its logs.

State hangs on this object, never on the partition number: after a partition is lost and taken again, a new object
starts from what the logs say.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from confluent_kafka import Message

from penstock.errors import MessageFormatError
from penstock.transactions.checks import CheckPolicy, CheckSchedule
from penstock.transactions.delivery import wire_headers
from penstock.transactions.model import CoordinatorStatistics
from penstock.transactions.records import Half, Op, Verdict, decode_half, decode_ops
from penstock.transactions.settlement import Pending, Refusal, Settlement, Share
from penstock.transactions.takeover import Inheritance
from penstock.transactions.trimming import DoneMarks, Mark

_log = logging.getLogger("penstock.transactions")

#: Seconds between two log lines of one kind; the counts tell the rest.
_LOG_EVERY_S = 10.0


@dataclass(slots=True)
class Counts:
    """What a coordinator counted. Written by its thread; other threads read single numbers, which is safe."""

    committed: int = 0
    rolled_back: int = 0
    discarded: int = 0
    refused: int = 0
    forged: int = 0
    checks: int = 0
    answered_checks: int = 0
    no_producer: int = 0
    groups: int = 0
    recoveries: int = 0

    def statistics(self, partitions: list[OwnedPartition]) -> CoordinatorStatistics:
        """Return a snapshot together with what is pending now."""
        births = [birth for p in partitions if (birth := p.oldest_birth()) is not None]
        return CoordinatorStatistics(
            partitions=sum(p.taken_over for p in partitions),
            pending=sum(len(p.settlement.pending) for p in partitions),
            held_by_key=sum(p.behind for p in partitions),
            delayed=sum(len(p.settlement.decisions.delays) for p in partitions),
            oldest_pending_age=max(0.0, time.time() - min(births)) if births else 0.0,
            held=sum(p.held for p in partitions),
            committed=self.committed,
            rolled_back=self.rolled_back,
            discarded=self.discarded,
            refused=self.refused,
            forged=self.forged,
            checks=self.checks,
            answered_checks=self.answered_checks,
            no_producer=self.no_producer,
            groups=self.groups,
            recoveries=self.recoveries,
        )

    def settled(self, pending: Pending) -> None:
        """Count a transaction by how it ended."""
        if pending.verdict is Verdict.COMMIT:
            self.committed += 1
        elif pending.verdict is Verdict.DISCARD:
            self.discarded += 1
        else:
            self.rolled_back += 1


class RationedLog:
    """Warnings that bad input could repeat without end: one of each kind every few seconds."""

    def __init__(self) -> None:
        self._said: dict[str, float] = {}

    def warn(self, kind: str, text: str, *args: object) -> None:
        """Log a warning, unless one of its kind was logged a moment ago."""
        now = time.monotonic()
        if now - self._said.get(kind, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._said[kind] = now
            _log.warning(text, *args)


class OwnedPartition:
    """Drives the settlement and the checks of one half partition. Used by the coordinator's thread.

    Args:
        number: the half partition.
        inheritance: what it starts from.
        policy: when to check.
        counts: the coordinator's counts.
        log: where refusals are said.
        may_publish_to: whether a half may name a topic as its target.
    """

    def __init__(
        self,
        number: int,
        inheritance: Inheritance,
        *,
        policy: CheckPolicy,
        counts: Counts,
        log: RationedLog,
        may_publish_to: Callable[[str], bool],
    ) -> None:
        self.number = number
        self.settlement = Settlement(inheritance.half_position, inheritance.op_position)
        self.settlement.remember(inheritance.notes)
        self.schedule = CheckSchedule(policy)
        #: Committed transactions that cannot be published now.
        self.held = 0
        #: Transactions that stand behind an earlier one of their key.
        self.behind = 0
        #: From where the done log has to be read to learn what a transaction in doubt became.
        self.done_end = inheritance.done_end
        #: Positions as last committed.
        self.checkpoints = (inheritance.half_position, inheritance.op_position)
        #: Whether all that its predecessors left was read: before, what is pending is not known.
        self.taken_over = False
        self._counts = counts
        self._log = log
        self._may_publish_to = may_publish_to
        self._ends_found = (inheritance.half_end, inheritance.op_end)
        halves = max((note.half_offset for note in inheritance.notes), default=-1) + 1
        ops = max((note.op_offset for note in inheritance.notes), default=-1) + 1
        self._marks = DoneMarks(Mark(inheritance.done_end, halves, ops))
        # Birth of the oldest pending half, by its offset: births rise with offsets.
        self._births: deque[tuple[int, float]] = deque()

    def feed_half(self, message: Message, now: float, wall: float) -> None:
        """Take a record of the half log in."""
        offset = message.offset() or 0
        settlement = self.settlement
        if offset < settlement.half_position:
            return
        try:
            half = self._read_half(message)
        except MessageFormatError as bad:
            settlement.skip_half(offset)
            self._counts.forged += 1
            self._log.warn("half", "half partition %d, offset %d: %s", self.number, offset, bad)
            return
        birth_ms = message.timestamp()[1]
        pending = settlement.add_half(offset, half, birth_ms)
        if isinstance(pending, Pending):
            # Its first half: the others of its transaction change nothing of when it is checked.
            if pending.offset == offset:
                self._births.append((offset, birth_ms / 1000))
                self._plan(pending, now, wall)
        elif pending is not None:
            self._refuse(half.transaction_id, offset, pending, forged=True)
        if settlement.has_ahead:
            for op_offset, refusal in settlement.join_ahead(half.transaction_id):
                self._refuse(half.transaction_id, op_offset, refusal)

    def feed_op(self, message: Message) -> None:
        """Take a record of the op log in."""
        offset = message.offset() or 0
        settlement = self.settlement
        if offset < settlement.op_position:
            return
        try:
            ops = self._read_ops(message)
        except MessageFormatError as bad:
            settlement.skip_op(offset)
            self._counts.forged += 1
            self._log.warn("op", "op partition %d, offset %d: %s", self.number, offset, bad)
            return
        answers, appended_ms = settlement.answers, message.timestamp()[1]
        for index, op in enumerate(ops):
            if op.verdict is Verdict.TICK:
                continue
            refusal = settlement.add_op(offset, op, appended_ms, index)
            if refusal is not None:
                self._refuse(op.transaction_id, offset, refusal)
        settlement.skip_op(offset)
        self._counts.answered_checks += settlement.answers - answers

    def _read_half(self, message: Message) -> Half:
        half = decode_half(message.key(), message.value(), wire_headers(message))
        if not self._may_publish_to(half.topic):
            raise MessageFormatError("a half that is addressed to a topic of the store or of Kafka itself")
        if half.part is not None or half.deliver_at_ms is not None:
            raise MessageFormatError("a half of a kind that this coordinator cannot settle")
        return half

    def _read_ops(self, message: Message) -> list[Op]:
        ops = decode_ops(message.value())
        if ops[0].half_partition != self.number:
            raise MessageFormatError(f"an op record for half partition {ops[0].half_partition} that is not its own")
        return ops

    def note_progress(self) -> None:
        """Look whether all that was there at the beginning was read. Called between records, never within one."""
        self.behind = self.settlement.decisions.keys.behind
        half_end, op_end = self._ends_found
        self.taken_over = self.settlement.half_position >= half_end and self.settlement.op_position >= op_end

    def sweep(self, half_end: int) -> None:
        """Refuse decisions whose half cannot come any more."""
        dropped = self.settlement.sweep_ahead(half_end)
        if dropped:
            self._counts.refused += dropped
            self._log.warn(
                "ahead", "op partition %d: %d decisions refused: no such half was ever stored", self.number, dropped
            )

    def settled(self, share: Share) -> None:
        """Take in that a share was committed."""
        for pending in share.decided:
            self._counts.settled(pending)
        for pending in self.settlement.apply(share, self._marks.end):
            self._plan(pending, time.monotonic(), time.time())
        self.checkpoints = (share.half_checkpoint, share.op_checkpoint)
        self._forget_births()

    def settled_in_doubt(self, inheritance_end: int, outcome: tuple[list[Pending], list[Pending]]) -> None:
        """Take in what the done log told after a Kafka transaction ended in doubt.

        Args:
            inheritance_end: the end of the done log as it was read.
            outcome: what is settled, and what is pending since.
        """
        settled, begun = outcome
        for pending in settled:
            self._counts.settled(pending)
        for pending in begun:
            self._plan(pending, time.monotonic(), time.time())
        self.done_end = inheritance_end
        self._forget_births()

    def _plan(self, pending: Pending, now: float, wall: float) -> None:
        """Plan the first check of a transaction that became pending."""
        answered_age = wall - pending.answered_ms / 1000 if pending.answered_ms else None
        self.schedule.add(pending, now, wall - pending.birth_ms / 1000, answered_age)

    def mark(self, done_end: int) -> None:
        """Remember where the done log ends now: when the half checkpoint is here, records below it are not needed."""
        self.done_end = done_end
        self._marks.add(Mark(done_end, self.settlement.half_position, self.settlement.op_position))

    def trim_points(self) -> tuple[int, int, int]:
        """Return the offsets below which the half, op and done logs are not needed any more."""
        half, op = self.checkpoints
        carried = (p.carried_at for p in self.settlement.pending.values() if p.carried_at is not None)
        return half, op, self._marks.low(half, op, carried)

    def oldest_birth(self) -> float | None:
        """Return when the oldest pending half was stored, in seconds since the epoch, or None. Safe to ask anywhere."""
        try:
            return self._births[0][1] if self.settlement.pending else None
        except IndexError:
            # Another thread took the last one away meanwhile: there is none.
            return None

    def _forget_births(self) -> None:
        lowest = next((p.offset for p in self.settlement.pending.values()), self.settlement.half_position)
        births = self._births
        while births and births[0][0] < lowest:
            births.popleft()

    def _refuse(self, transaction_id: str, offset: int, refusal: Refusal, *, forged: bool = False) -> None:
        if forged:
            self._counts.forged += 1
        else:
            self._counts.refused += 1
        self._log.warn(
            refusal.name,
            "transaction %s: the record at %s[%d]@%d is refused: %s",
            transaction_id,
            "half" if forged else "op",
            self.number,
            offset,
            refusal.value,
        )


__all__ = ["Counts", "OwnedPartition", "RationedLog"]
