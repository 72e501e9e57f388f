"""The half and op logs of half partitions, as they are read: records in, to the state machines and their checks.

Each kind of log has a consumer of its own, for neither may run far ahead of the other. Halves far ahead of the
decisions on them would fill the memory while nothing of them can be published; so would decisions ahead of them.
One consumer of both hands out whatever was fetched first, which under load was the halves.

Decisions take effect in the order of the op log. One that names a half which was not read yet waits, and all after it,
until the half is there or cannot come.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Consumer, Message, TopicPartition

from penstock.clients.reading import take
from penstock.errors import MessageFormatError
from penstock.transactions.acked_producer import wire_headers
from penstock.transactions.core.check_plan import CheckPlan
from penstock.transactions.core.decisions import Refusal
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.state import PartitionState
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.wire.half import Half, decode_half
from penstock.transactions.wire.ops import DECISION_BYTES, Op, Verdict, decode_ops
from penstock.transactions.wire.topics import StoreTopics

#: How large op records are taken for before one was seen: the first comes alone.
_FIRST_OP_BYTES = 1 << 20
#: Op records of a partition that may wait for a half before no more are read: the leader of its log may be away for
#: long, and they would fill the memory.
_WAITING = 20_000


class LogReader:
    """Reads both logs. Used by the coordinator's thread.

    The consumers that `make` returns must not choose a new offset by themselves (`auto.offset.reset=error`): a log that
    is not as it was would be read past in silence.
    """

    def __init__(self, make: Callable[[], Consumer], topics: StoreTopics) -> None:
        self._half, self._op = topics.half, topics.op
        self._halves = make()
        self._ops = make()
        # Mean size of op records, as it was last seen: nearly all are one decision, or many of a fixed size.
        self._op_bytes = _FIRST_OP_BYTES
        # Offset of the next op, by partition; and partitions whose ops are not read on.
        self._next_op: dict[int, int] = {}
        self._paused: set[int] = set()

    def add(self, number: int, half_position: int, op_position: int) -> None:
        """Read the logs of a partition, too, from these offsets."""
        self._halves.incremental_assign([TopicPartition(self._half, number, half_position)])
        self._ops.incremental_assign([TopicPartition(self._op, number, op_position)])
        self._next_op[number] = op_position

    def remove(self, number: int) -> None:
        """Read the logs of a partition no more."""
        self.bound(number, 0)
        self._halves.incremental_unassign([TopicPartition(self._half, number)])
        self._ops.incremental_unassign([TopicPartition(self._op, number)])
        del self._next_op[number]

    def bound(self, number: int, waiting: int) -> None:
        """Read no more ops of a partition while so many of them wait for halves that it is enough."""
        if waiting >= _WAITING and number not in self._paused:
            self._paused.add(number)
            self._ops.pause([TopicPartition(self._op, number)])
        elif waiting <= _WAITING // 2 and number in self._paused:
            self._paused.remove(number)
            self._ops.resume([TopicPartition(self._op, number)])

    def close(self) -> None:
        """Close the consumers."""
        self._halves.close()
        self._ops.close()

    def read(self, timeout_s: float, most: int, *, for_halves: bool, full: bool) -> Iterable[Message]:
        """Return records that are there, halves first: about as many halves as decisions, `most` of each.

        What is waited for is a decision, for a half without one is nothing to do; `for_halves`: or a half, for there
        are decisions that were fetched before theirs. `full`: no halves are wanted as long as there are decisions.
        """
        halves = take(self._halves, timeout_s, most) if for_halves else []
        ops = self._read_ops(0 if for_halves else timeout_s, most)
        if not for_halves and not (full and (ops or self._has_more_ops())):
            halves = take(self._halves, 0, most)
        return chain(halves, ops)

    def _read_ops(self, timeout_s: float, decisions: int) -> list[Message]:
        ops = take(self._ops, timeout_s, max(1, decisions * DECISION_BYTES // self._op_bytes))
        if ops:
            self._op_bytes = max(DECISION_BYTES, sum(map(len, ops)) // len(ops))
            for op in ops:
                if op.error() is None:
                    self._next_op[op.partition() or 0] = (op.offset() or 0) + 1
        return ops

    def _has_more_ops(self) -> bool:
        """Tell whether an op log goes on behind what was read, even if it has not come yet, or its leader is away."""
        return any(self._known_end(self._ops, self._op, number) > at for number, at in self._next_op.items())

    @staticmethod
    def _known_end(reader: Consumer, topic: str, number: int) -> int:
        return reader.get_watermark_offsets(TopicPartition(topic, number), cached=True)[1]


_log = logging.getLogger("penstock.transactions")

#: Seconds after which it is asked whether a half can come that an op record waits for: whoever decided knew that it was
#: stored, so nearly always it comes with the next fetch.
_HALF_OVERDUE_AFTER_S = 0.1
#: Seconds for which an end of the half log says that all of it was read.
_LOG_END_VALID_S = 30.0
#: Topics that are remembered as targets; forged halves may name any.
_TARGETS = 1_024

# Members of enumerations are slow to look up, and this is the way of every decision.
_TICK = Verdict.TICK


class _OpRecord(NamedTuple):
    """A record of the op log, read.

    Attributes:
        ops: its decisions, or why it is refused.
        needs: the last half that its decisions name.
        since: when it was read, in monotonic seconds.
    """

    offset: int
    appended_ms: int
    ops: list[Op] | MessageFormatError
    needs: int
    since: float


class LogFeed:
    """Feeds the records of one half partition to its state machine. Used by the coordinator's thread."""

    def __init__(
        self,
        context: CoordinatorContext,
        number: int,
        state: PartitionState,
        plan: CheckPlan,
    ) -> None:
        self._number = number
        self._state = state
        self._plan = plan
        self._counts, self._log, self._clock = context.counts, context.ration, context.clock
        # Nearly all halves are for few topics.
        self._may_publish_to = lru_cache(maxsize=_TARGETS)(context.topics.may_publish_to)
        # Logs of which it was said that producers stamp their records.
        self._stamped: set[str] = set()
        # Append time, when it was read, and what that came to, of the last record: those of one batch share it.
        self._appended = -1, 0.0, 0
        #: Append times of the newest op and half that were read, in the broker's milliseconds.
        self.ops_read_to_ms = self.halves_read_to_ms = 0
        # Op records fetched before a half they name, and all after them: decisions take effect in their order.
        self._waiting: deque[_OpRecord] = deque()
        # The end of the half log, and when it was asked for, in monotonic seconds.
        self._half_end, self._half_end_asked = 0, float("-inf")

    def half(self, message: Message, now: float) -> None:
        """Take a record of the half log in; it was read at `now`, in monotonic seconds."""
        offset, birth_ms = message.offset() or 0, self._append_ms("half", message, now)
        self.halves_read_to_ms = birth_ms
        state = self._state
        if offset != state.half_position:
            if offset < state.half_position:
                return
            self._count_lost("half", state.half_position, offset)
        try:
            half = self._read_half(message)
        except MessageFormatError as bad:
            state.skip_half(offset)
            self._counts.forged += 1
            self._log.warn("half", "half partition %d, offset %d: %s", self._number, offset, bad)
            return
        pending = state.add_half(offset, half, birth_ms)
        if isinstance(pending, Pending):
            # Of the halves of one transaction the first and the last say when it is checked.
            if pending.parts is None or pending.offset == offset or pending.is_complete:
                self._plan.add(pending)
        elif pending is not None:
            self._refuse(half.transaction_id, offset, pending, forged=True)
        if state.held:
            self.judge_held(half.transaction_id)

    def op(self, message: Message, now: float) -> None:
        """Take a record of the op log in; it was read at `now`, in monotonic seconds."""
        offset, appended_ms = message.offset() or 0, self._append_ms("op", message, now)
        ops: list[Op] | MessageFormatError
        try:
            ops = self._read_ops(message)
            needs = max([max(op.half_offsets, default=-1) for op in ops])
        except MessageFormatError as bad:
            ops, needs = bad, -1
        record = _OpRecord(offset, appended_ms, ops, needs, now)
        if self._waiting or needs >= self._state.half_position:
            self._waiting.append(record)
        else:
            self._decide(record)

    def _append_ms(self, log: str, message: Message, now: float) -> int:
        """Return when a record was appended, by the broker's clock; where a producer stamped it, when it was read."""
        kind, time_ms = message.timestamp()
        if kind == TIMESTAMP_LOG_APPEND_TIME:
            last_ms, at, broker_ms = self._appended
            if time_ms != last_ms or now != at:
                broker_ms = self._clock.saw(time_ms, now)
                self._appended = time_ms, now, broker_ms
            return broker_ms
        self._clock.assume(int(time.time() * 1000), now)
        if log not in self._stamped:
            self._stamped.add(log)
            _log.warning(
                "the %s log of partition %d has records with their producers' time, from offset %d on: they count as "
                "of when they are read; set message.timestamp.type=LogAppendTime on the topic",
                log,
                self._number,
                message.offset() or 0,
            )
        return self._clock.now_ms(now)

    @property
    def waiting(self) -> int:
        """How many op records wait for halves."""
        return len(self._waiting)

    def _decide(self, record: _OpRecord) -> None:
        """Let the decisions of an op record take effect."""
        offset, appended_ms, ops, _, _ = record
        self.ops_read_to_ms = appended_ms
        state = self._state
        if offset < state.op_position:
            return
        self._count_lost("op", state.op_position, offset)
        if isinstance(ops, MessageFormatError):
            state.skip_op(offset)
            self._counts.forged += 1
            self._log.warn("op", "op partition %d, offset %d: %s", self._number, offset, ops)
            return
        answers = state.answers
        for index, op in enumerate(ops):
            if op.verdict is _TICK:
                continue
            refusal = state.add_op(offset, op, appended_ms, index)
            if refusal is not None:
                self._refuse(op.transaction_id, offset, refusal)
        state.skip_op(offset)
        self._counts.answered_checks += state.answers - answers

    def _count_lost(self, log: str, expected: int, offset: int) -> None:
        """Tell of a gap: nothing but a deletion leaves one, for no Kafka transaction writes to these logs."""
        if offset > expected:
            self._counts.lost += offset - expected
            _log.error(
                "%s partition %d: records %d to %d were deleted before they were read: what they said is lost; check "
                "the retention of the store's topics, and who deletes from them",
                log,
                self._number,
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
        if ops[0].half_partition != self._number:
            raise MessageFormatError(f"an op record for half partition {ops[0].half_partition} that is not its own")
        return ops

    def go_on(self) -> None:
        """Let decisions take effect whose halves are there by now, or cannot come."""
        waiting = self._waiting
        while waiting and self._has_halves(waiting[0]):
            self._decide(waiting.popleft())

    def _has_halves(self, record: _OpRecord) -> bool:
        """Tell whether the halves that an op record names were read, or cannot come.

        A half is stored before its decision is written: what lies at or past an end that was asked for after the
        decision was read was never stored. As long as that is not known, as when the leader of the half log does not
        answer, the record waits, and all behind it: else later decisions of its key would pass it.
        """
        if record.needs < self._state.half_position:
            return True
        return self._half_end_asked >= record.since and self._half_end <= record.needs

    def wants_look(self, now: float) -> bool:
        """Tell whether something waits for a look at the half log: can a half come that was not read."""
        waiting = self._waiting
        return bool(waiting) and self._half_end_asked < waiting[0].since <= now - _HALF_OVERDUE_AFTER_S

    def learn_half_end(self, end: int, asked: float) -> None:
        """Take in the end of the half log, as it was asked for at `asked`, in monotonic seconds."""
        self._half_end, self._half_end_asked = end, asked

    def is_at_end(self, now: float) -> bool:
        """Tell whether all halves were read that were stored until a moment ago."""
        return now - self._half_end_asked < _LOG_END_VALID_S and self._half_end <= self._state.half_position

    def judge_held(self, transaction_id: str) -> None:
        """Have the decisions judged that were held: a half of their transaction came, or what was under way ended."""
        for op_offset, refusal in self._state.judge_held(transaction_id):
            self._refuse(transaction_id, op_offset, refusal)

    def _refuse(self, transaction_id: str, offset: int, refusal: Refusal, *, forged: bool = False) -> None:
        if forged:
            self._counts.forged += 1
        else:
            self._counts.refused += 1
        self._log.warn(
            refusal.name,
            "transaction %s: the record at %s:%d@%d is refused: %s",
            transaction_id,
            "half" if forged else "op",
            self._number,
            offset,
            refusal.value,
        )
