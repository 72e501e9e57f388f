"""Reads the half and op logs and feeds their records to the state machines of half partitions.

Each log has a consumer of its own, because neither log may be read far ahead of the other: halves without their
decisions would fill the memory while nothing can be published, and so would decisions without their halves. A common
consumer returns the records that were fetched first: under load these were the halves.

Decisions take effect in the order of the op log. If a decision names an unread half, it waits, and all decisions after
it, until the half is read or cannot come.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain
from operator import attrgetter
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

_log = logging.getLogger("penstock.transactions")

#: The assumed size of op records until the first one is read: the first read takes one record.
_FIRST_OP_BYTES = 1 << 20
#: Op records of a partition that may wait for a half; then reading ops pauses. The leader of the half log may be away
#: for long, and they would fill the memory.
_WAITING = 20_000
#: Seconds that an op record waits for a half before the end of the half log is looked up. A producer decides only after
#: its half is stored, so the half nearly always comes with the next fetch.
_HALF_OVERDUE_AFTER_S = 0.1
#: Seconds for which a known end of the half log counts as its current end.
_LOG_END_VALID_S = 30.0
#: The size of the cache of target topics: forged halves may name any number of topics.
_TARGETS = 1_024

# Enum members are slow to look up, and this code runs for every decision.
_TICK = Verdict.TICK
_HALF_OFFSETS = attrgetter("half_offsets")


class LogReader:
    """Reads both logs. Used by the coordinator's thread.

    The consumers of `make` need `auto.offset.reset=error`: otherwise they would silently skip lost records of a
    replaced or truncated log.
    """

    def __init__(self, make: Callable[[], Consumer], topics: StoreTopics) -> None:
        self._half, self._op = topics.half, topics.op
        self._halves = make()
        self._ops = make()
        # The mean size of the op records read last: a record has one decision, or many of a fixed size.
        self._op_bytes = _FIRST_OP_BYTES
        # The next op offset by partition, and the partitions whose ops are paused.
        self._next_op: dict[int, int] = {}
        self._paused: set[int] = set()

    def add(self, number: int, half_position: int, op_position: int) -> None:
        """Start to read the logs of a partition at these offsets."""
        self._halves.incremental_assign([TopicPartition(self._half, number, half_position)])
        self._ops.incremental_assign([TopicPartition(self._op, number, op_position)])
        self._next_op[number] = op_position

    def remove(self, number: int) -> None:
        """Stop reading the logs of a partition."""
        self.limit_waiting(number, 0)
        self._halves.incremental_unassign([TopicPartition(self._half, number)])
        self._ops.incremental_unassign([TopicPartition(self._op, number)])
        del self._next_op[number]

    def limit_waiting(self, number: int, waiting: int) -> None:
        """Pause the op log of a partition while too many of its records wait for halves."""
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

    def read(
        self, timeout_s: float, limit: int, *, waits_for_halves: bool, has_enough_halves: bool
    ) -> Iterable[Message]:
        """Return fetched records, halves first: about as many halves as decisions, up to `limit` of each.

        It waits for decisions: a half without a decision needs no work. If decisions wait for their halves
        (`waits_for_halves`), it waits for halves. If it `has_enough_halves`, it reads none while there are decisions.
        """
        halves = take(self._halves, timeout_s, limit) if waits_for_halves else []
        ops = self._read_ops(0 if waits_for_halves else timeout_s, limit)
        if not waits_for_halves and not (has_enough_halves and (ops or self._has_more_ops())):
            halves = take(self._halves, 0, limit)
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
        """Return whether an op log has unread records, even if they are not fetched yet or its leader is away."""
        return any(
            self._ops.get_watermark_offsets(TopicPartition(self._op, number), cached=True)[1] > offset
            for number, offset in self._next_op.items()
        )


def read_half(message: Message, may_publish_to: Callable[[str], bool]) -> Half:
    """Read a record of the half log. Raises `MessageFormatError`, also if its target may not be published to."""
    half = decode_half(message.key(), message.value(), wire_headers(message))
    if not may_publish_to(half.topic):
        raise MessageFormatError("a half that is addressed to a topic of the store or of Kafka itself")
    return half


def read_ops(message: Message, number: int) -> list[Op]:
    """Read a record of the op log of a half partition. Raises `MessageFormatError`, also if it is another one's."""
    ops = decode_ops(message.value())
    if ops[0].half_partition != number:
        raise MessageFormatError(f"an op record for half partition {ops[0].half_partition} that is not its own")
    return ops


class _OpRecord(NamedTuple):
    """A decoded record of the op log.

    Attributes:
        ops: its decisions, or the error of an invalid record.
        needs: the highest half offset in its decisions.
        since: the time of reading, in monotonic seconds.
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
        # Cached: most halves have the same few targets.
        self._may_publish_to = lru_cache(maxsize=_TARGETS)(context.topics.may_publish_to)
        # Logs for which the warning about producers' time stamps was logged.
        self._stamped: set[str] = set()
        # Cache of the last append time: the append time, the time of reading, and the result. Records of a batch share
        # them.
        self._appended = -1, 0.0, 0
        #: Append times of the newest op and half that were read, in the broker's milliseconds.
        self.ops_read_to_ms = self.halves_read_to_ms = 0
        # Op records that wait for a half, and all op records after them.
        self._waiting: deque[_OpRecord] = deque()
        # The end of the half log, and the monotonic second of its request.
        self._half_end, self._half_end_asked = 0, float("-inf")

    def take_half(self, message: Message, now: float) -> None:
        """Process a record of the half log, read at `now` in monotonic seconds."""
        offset, birth_ms = message.offset() or 0, self._append_ms("half", message, now)
        self.halves_read_to_ms = birth_ms
        state = self._state
        if offset != state.half_position:
            if offset < state.half_position:
                return
            self._count_lost("half", state.half_position, offset)
        try:
            half = read_half(message, self._may_publish_to)
        except MessageFormatError as bad:
            state.skip_half(offset)
            self._counts.forged += 1
            self._log.warn("half", "half partition %d, offset %d: %s", self._number, offset, bad)
            return
        pending = state.add_half(offset, half, birth_ms)
        if isinstance(pending, Pending):
            # The check time of a transaction follows from its first half, and from the last one that completes it.
            if pending.parts is None or pending.offset == offset or pending.is_complete:
                self._plan.add(pending)
        elif pending is not None:
            self._refuse(half.transaction_id, offset, pending, forged=True)
        if state.held:
            self.judge_held(half.transaction_id)

    def take_op(self, message: Message, now: float) -> None:
        """Process a record of the op log, read at `now` in monotonic seconds."""
        offset, appended_ms = message.offset() or 0, self._append_ms("op", message, now)
        ops: list[Op] | MessageFormatError
        try:
            ops = read_ops(message, self._number)
            needs = max(chain.from_iterable(map(_HALF_OFFSETS, ops)), default=-1)
        except MessageFormatError as bad:
            ops, needs = bad, -1
        record = _OpRecord(offset, appended_ms, ops, needs, now)
        if self._waiting or needs >= self._state.half_position:
            self._waiting.append(record)
        else:
            self._decide(record)

    def _append_ms(self, log: str, message: Message, now: float) -> int:
        """Return the append time by the broker's clock; for a producer's time stamp, the time of reading."""
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
                "the %s log of partition %d has records with their producers' time, from offset %d on: the time of "
                "reading is used instead; set message.timestamp.type=LogAppendTime on the topic",
                log,
                self._number,
                message.offset() or 0,
            )
        return self._clock.now_ms(now)

    @property
    def waiting(self) -> int:
        """The number of op records that wait for halves."""
        return len(self._waiting)

    def _decide(self, record: _OpRecord) -> None:
        """Apply the decisions of an op record."""
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
        """Count and log a gap. Only a deletion leaves one: no Kafka transaction writes markers into these logs."""
        if offset > expected:
            self._counts.lost += offset - expected
            _log.error(
                "%s partition %d: records %d to %d were deleted before they were read: their content is lost; check "
                "the retention of the store's topics, and who deletes from them",
                log,
                self._number,
                expected,
                offset - 1,
            )

    def decide_waiting(self) -> None:
        """Apply waiting decisions whose halves are read now, or cannot come."""
        waiting = self._waiting
        while waiting and self._has_halves(waiting[0]):
            self._decide(waiting.popleft())

    def _has_halves(self, record: _OpRecord) -> bool:
        """Return whether the halves of an op record are read, or cannot come.

        A half is stored before its decision is written. So if the end of the half log was requested after the decision
        was read, a half at or past this end was never stored. Until that is known (the leader of the half log may not
        answer) the record waits, and all records after it: otherwise later decisions of its key would overtake it.
        """
        if record.needs < self._state.half_position:
            return True
        return self._half_end_asked >= record.since and self._half_end <= record.needs

    def wants_half_end(self, now: float) -> bool:
        """Return whether a decision needs the end of the half log: can its unread half still come?"""
        waiting = self._waiting
        return bool(waiting) and self._half_end_asked < waiting[0].since <= now - _HALF_OVERDUE_AFTER_S

    def learn_half_end(self, end: int, asked: float) -> None:
        """Set the end of the half log, as requested at `asked`, in monotonic seconds."""
        self._half_end, self._half_end_asked = end, asked

    def is_at_end(self, now: float) -> bool:
        """Return whether all halves are read that were stored until a moment ago."""
        return now - self._half_end_asked < _LOG_END_VALID_S and self._half_end <= self._state.half_position

    def judge_held(self, transaction_id: str) -> None:
        """Judge the held decisions of a transaction, after one of its halves came or its Kafka transaction ended."""
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
