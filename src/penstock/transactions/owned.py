"""One half partition while this coordinator owns it: records in, counts, timers and the trimming of its logs.

State hangs on this object, never on the partition number: after a partition is lost and taken again, a new object
starts from what the logs say.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from confluent_kafka import Message

from penstock.errors import MessageFormatError
from penstock.transactions.broker_clock import BrokerClock
from penstock.transactions.carrying import GAP, to_carry
from penstock.transactions.checks import CheckPolicy, CheckSchedule
from penstock.transactions.delivery import wire_headers
from penstock.transactions.model import FINISH_BUCKETS_S, CoordinatorStatistics
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.records import Half, Op, Verdict, decode_half, decode_ops
from penstock.transactions.settlement import Pending, Refusal, Settlement, Share
from penstock.transactions.takeover import Inheritance
from penstock.transactions.trimming import DoneMarks, Mark

_log = logging.getLogger("penstock.transactions")

#: Seconds without anything to settle after which positions that moved are written down.
_IDLE_S = 2.0
#: Seconds between two looks for what is to be carried.
_CARRY_S = 0.5
#: Seconds that an op record waits for a half it names: whoever decided knew that it was stored, so it comes with the
#: next fetch. A forged one names what never comes.
_HALF_S = 1.0


class _OpRecord(NamedTuple):
    """A record of the op log, read.

    Attributes:
        offset: where it stands.
        appended_ms: its append time.
        ops: its decisions, or why it is refused.
        needs: the last half that its decisions name.
        since: when it was read, in monotonic seconds.
    """

    offset: int
    appended_ms: int
    ops: list[Op] | MessageFormatError
    needs: int
    since: float


@dataclass(slots=True)
class Counts:
    """What a coordinator counted. Written by its thread; other threads read single numbers, which is safe.

    Attributes:
        lock: held while settled transactions are counted and leave what is pending, and by `statistics`, so that none
            is in both or in neither. Whoever holds it waits for nobody.
    """

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
    lost: int = 0
    hung_checks: int = 0
    #: By `FINISH_BUCKETS_S`, with one more for what took longer.
    finish_times: list[int] = field(default_factory=lambda: [0] * (len(FINISH_BUCKETS_S) + 1))
    finish_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def statistics(self, partitions: list[OwnedPartition]) -> CoordinatorStatistics:
        """Return a snapshot together with what is pending now."""
        with self.lock:
            return self._statistics(partitions)

    def _statistics(self, partitions: list[OwnedPartition]) -> CoordinatorStatistics:
        now = time.monotonic()
        ages = [
            p.clock.now_ms(now) - birth
            for p in partitions
            if p.settlement.pending and (birth := p.oldest_birth_ms) is not None
        ]
        return CoordinatorStatistics(
            partitions=sum(p.taken_over for p in partitions),
            pending=sum(len(p.settlement.pending) for p in partitions),
            held_by_key=sum(p.behind for p in partitions),
            delayed=sum(len(p.settlement.decisions.delays) for p in partitions),
            oldest_pending_age=max(0.0, max(ages) / 1000) if ages else 0.0,
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
            lost=self.lost,
            hung_checks=self.hung_checks,
            finish_times=tuple(self.finish_times),
            finish_seconds=self.finish_seconds,
        )

    def settled(self, pending: Pending, now_ms: int) -> None:
        """Count a transaction by how it ended; `now_ms` is the broker's time."""
        if pending.verdict is Verdict.COMMIT:
            self.committed += 1
            took_s = max(0, now_ms - pending.birth_ms) / 1000
            self.finish_times[bisect_left(FINISH_BUCKETS_S, took_s)] += 1
            self.finish_seconds += took_s
        elif pending.verdict is Verdict.DISCARD:
            self.discarded += 1
        else:
            self.rolled_back += 1


class OwnedPartition:
    """Drives the settlement and the checks of one half partition. Used by the coordinator's thread.

    Args:
        number: the half partition.
        inheritance: what it starts from.
        policy: when to check.
        counts: the coordinator's counts.
        log: where refusals are said.
        may_publish_to: whether a half may name a topic as its target.
        clock: the broker's time.
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
        clock: BrokerClock,
    ) -> None:
        self.number = number
        self.settlement = Settlement(inheritance.half_position, inheritance.op_position)
        self.schedule = CheckSchedule(policy)
        for pending in self.settlement.remember(inheritance.notes, inheritance.carries):
            self.schedule.add(pending)
        self.clock = clock
        #: Append times of the newest op and half that were read, in the broker's milliseconds.
        self.ops_read_to_ms = self.halves_read_to_ms = 0
        # Op records fetched before a half they name, and all after them: decisions take effect in their order.
        self._waiting: deque[_OpRecord] = deque()
        #: When the coordinator last marked the op log, in monotonic seconds.
        self.ticked_at = float("-inf")
        # When something was last chosen to be settled, in monotonic seconds.
        self._idle_since = time.monotonic()
        # When to look next for what is to be carried, in monotonic seconds.
        self._carry_at = 0.0
        #: Birth of the oldest pending half in milliseconds, or None. Other threads read it.
        self.oldest_birth_ms: int | None = None
        #: Committed transactions that cannot be published now.
        self.held = 0
        #: Transactions that stand behind an earlier one of their key.
        self.behind = 0
        #: From where the done log has to be read to learn what a transaction in doubt became.
        self.done_end = inheritance.done_end
        #: Positions as last committed.
        self.checkpoints = (inheritance.half_position, inheritance.op_position)
        #: Checks that were sent and may be on their way to an answer, by group: until when, their number, the half.
        self.asked: dict[str, list[tuple[float, int, Pending]]] = {}
        #: Whether all that its predecessors left was read: before, what is pending is not known.
        self.taken_over = False
        self._counts = counts
        self._log = log
        self._may_publish_to = may_publish_to
        self._ends_found = (inheritance.half_end, inheritance.op_end)
        halves = max((note.half_offset for note in inheritance.notes), default=-1) + 1
        ops = max((note.op_offset for note in inheritance.notes), default=-1) + 1
        self._marks = DoneMarks(Mark(inheritance.done_end, halves, ops))

    def feed_half(self, message: Message, now: float) -> None:
        """Take a record of the half log in; it was read at `now`, in monotonic seconds."""
        offset, birth_ms = message.offset() or 0, message.timestamp()[1]
        self.clock.saw(birth_ms, now)
        self.halves_read_to_ms = birth_ms
        settlement = self.settlement
        if offset < settlement.half_position:
            return
        self._count_lost("half", settlement.half_position, offset)
        try:
            half = self._read_half(message)
        except MessageFormatError as bad:
            settlement.skip_half(offset)
            self._counts.forged += 1
            self._log.warn("half", "half partition %d, offset %d: %s", self.number, offset, bad)
            return
        pending = settlement.add_half(offset, half, birth_ms)
        if isinstance(pending, Pending):
            # Of the halves of one transaction the first and the last say when it is checked.
            if pending.offset == offset or pending.is_complete:
                self.schedule.add(pending)
        elif pending is not None:
            self._refuse(half.transaction_id, offset, pending, forged=True)
        if settlement.has_ahead:
            for op_offset, refusal in settlement.join_ahead(half.transaction_id):
                self._refuse(half.transaction_id, op_offset, refusal)

    def feed_op(self, message: Message, now: float) -> None:
        """Take a record of the op log in; it was read at `now`, in monotonic seconds."""
        offset, appended_ms = message.offset() or 0, message.timestamp()[1]
        self.clock.saw(appended_ms, now)
        ops: list[Op] | MessageFormatError
        try:
            ops = self._read_ops(message)
            needs = max(max(op.half_offsets, default=-1) for op in ops)
        except MessageFormatError as bad:
            ops, needs = bad, -1
        record = _OpRecord(offset, appended_ms, ops, needs, now)
        if self._waiting or needs >= self.settlement.half_position:
            self._waiting.append(record)
        else:
            self._decide(record)

    @property
    def waits_for_halves(self) -> bool:
        """Whether decisions were read before their halves."""
        return bool(self._waiting)

    def _decide(self, record: _OpRecord) -> None:
        """Let the decisions of an op record take effect."""
        offset, appended_ms, ops, _, _ = record
        self.ops_read_to_ms = appended_ms
        settlement = self.settlement
        if offset < settlement.op_position:
            return
        self._count_lost("op", settlement.op_position, offset)
        if isinstance(ops, MessageFormatError):
            settlement.skip_op(offset)
            self._counts.forged += 1
            self._log.warn("op", "op partition %d, offset %d: %s", self.number, offset, ops)
            return
        answers = settlement.answers
        for index, op in enumerate(ops):
            if op.verdict is Verdict.TICK:
                continue
            refusal = settlement.add_op(offset, op, appended_ms, index)
            if refusal is not None:
                self._refuse(op.transaction_id, offset, refusal)
        settlement.skip_op(offset)
        self._counts.answered_checks += settlement.answers - answers

    def _count_lost(self, log: str, expected: int, offset: int) -> None:
        """Tell of a gap: nothing but a deletion leaves one, for no Kafka transaction writes to these logs."""
        if offset > expected:
            self._counts.lost += offset - expected
            _log.error(
                "%s partition %d: records %d to %d were deleted before they were read: what they said is lost; check "
                "the retention of the store's topics, and who deletes from them",
                log,
                self.number,
                expected,
                offset - 1,
            )

    def _read_half(self, message: Message) -> Half:
        half = decode_half(message.key(), message.value(), wire_headers(message))
        if not self._may_publish_to(half.topic):
            raise MessageFormatError("a half that is addressed to a topic of the store or of Kafka itself")
        return half

    def _read_ops(self, message: Message) -> list[Op]:
        ops = decode_ops(message.value())
        if ops[0].half_partition != self.number:
            raise MessageFormatError(f"an op record for half partition {ops[0].half_partition} that is not its own")
        return ops

    def note_progress(self, now: float) -> None:
        """Look how far reading came, and what time it is. Called between records, never within one."""
        waiting = self._waiting
        while waiting and (waiting[0].needs < self.settlement.half_position or now - waiting[0].since >= _HALF_S):
            self._decide(waiting.popleft())
        first = next(iter(self.settlement.pending.values()), None)
        self.oldest_birth_ms = None if first is None else first.birth_ms
        self.behind = self.settlement.decisions.keys.behind
        half_end, op_end = self._ends_found
        self.taken_over = self.settlement.half_position >= half_end and self.settlement.op_position >= op_end
        if self.taken_over:
            # What is due waits until then: that it was cancelled in time may not be read yet.
            self.settlement.now_ms = self.clock.now_ms(now)

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
        now_ms = self.clock.now_ms(time.monotonic())
        with self._counts.lock:
            for pending in share.decided:
                self._counts.settled(pending, now_ms)
            begun = self.settlement.apply(share, self._marks.end)
        for pending in begun:
            self.schedule.add(pending)
        self.checkpoints = (share.half_checkpoint, share.op_checkpoint)

    def settled_in_doubt(self, inheritance_end: int, outcome: tuple[list[Pending], list[Pending]]) -> None:
        """Take in what the done log told after a Kafka transaction ended in doubt.

        Args:
            inheritance_end: the end of the done log as it was read.
            outcome: what is settled, and what is pending since.
        """
        settled, begun = outcome
        now_ms = self.clock.now_ms(time.monotonic())
        for pending in settled:
            self._counts.settled(pending, now_ms)
        for pending in begun:
            self.schedule.add(pending)
        self.done_end = inheritance_end

    def share(self, limit: int, publishable: Callable[[Pending], bool]) -> Share | None:
        """Choose what the next Kafka transaction settles here, and what it carries, or return None.

        Args:
            limit: most decisions to take.
            publishable: whether a committed transaction can be published now.
        """
        # Before all is read that its predecessors left, what is pending is not known.
        carry, now = [], time.monotonic()
        if self.taken_over and now >= self._carry_at:
            carry = to_carry(self.settlement, self._marks.end, GAP)
            # Looking for what is old costs something; while there is more of it, it goes on without a pause.
            self._carry_at = now + (0.0 if carry else _CARRY_S)
        share = self.settlement.share(limit, publishable, carry)
        if share is None and self.taken_over and now >= self._idle_since + _IDLE_S:
            # Marks, and what was refused, move the positions too; or the logs of an idle store would grow.
            self._idle_since = now
            checkpoints = self.settlement.checkpoints()
            return Share([], [], *checkpoints) if checkpoints != self.checkpoints else None
        if share is not None:
            self._idle_since = now
        return share

    def mark(self, done_end: int) -> None:
        """Remember where the done log ends now: when the half checkpoint is here, records below it are not needed."""
        self.done_end = done_end
        self._marks.add(Mark(done_end, self.settlement.half_position, self.settlement.op_position))

    def trim_points(self) -> tuple[int, int, int]:
        """Return the offsets below which the half, op and done logs are not needed any more."""
        half, op = self.checkpoints
        carried = (p.carried_at for p in self.settlement.pending.values() if p.carried_at is not None)
        return half, op, self._marks.low(half, op, carried)

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


__all__ = ["Counts", "OwnedPartition"]
