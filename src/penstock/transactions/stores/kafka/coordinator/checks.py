"""Which undecided transactions are due for a check, for the discard policy, or for a rollback; and how they are sent.

A check is sent only once the op log was read up to an append time at or past the time at which it was due: what was
decided before then needs no check. Where nothing new comes, the coordinator writes a mark of its own (a TICK) into the
op log and waits until it has read it. That also tells it the broker's time. A request is sent only to a group that has
a live producer, so that a group that is down for hours spends no checks, and finds no heap of stale requests when it
comes back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, KafkaError, KafkaException, Message

from penstock.clients.groups import GroupAdmin, describe_groups
from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.rights import Operation, group_right, topic_right
from penstock.transactions.acked_producer import AckedProducer
from penstock.transactions.core.discard import Discarding, Exhausted
from penstock.transactions.core.pending import Pending
from penstock.transactions.operator.administration import NO_ANSWER, NO_PRODUCER
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.coordinator.half_partition import HalfPartition
from penstock.transactions.wire.half import CheckRequest, Half, encode_check_request
from penstock.transactions.wire.ids import NO_ID
from penstock.transactions.wire.ops import Author, Op, Verdict, encode_op

_log = logging.getLogger("penstock.transactions")

#: Seconds for which it is believed that a group has live producers, or none.
_LIVENESS_VALID_S = 1.0
_ANSWER_S = 5.0
#: How the reports of what a stop has cut off end.
_CUT_OFF = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001 - public constants look so

#: What a right is missing for: of the check topic, and of the op topic.
_LACKING = (
    "check requests to producers cannot be sent",
    "the coordinator's own decisions, and marks without which nobody is asked, cannot be stored",
)


class SendOutcome(Enum):
    """What became of a check request."""

    SENT = "sent"
    #: The group has no live producer.
    NOBODY = "nobody"
    #: Whether anybody is there is not known yet: try again in a moment.
    LATER = "later"
    #: No broker said in time whether anybody is there: it is asked again.
    UNKNOWN = "unknown"
    #: Its payload is not in memory.
    UNREAD = "unread"
    #: It cannot be sent; that was said, once for each half.
    REFUSED = "refused"


class CheckSender:
    """Sends checks and the coordinator's own decisions. Used by the coordinator's thread; never waits for Kafka.

    They are idempotent sends: the coordinator's transactions do not touch the op log, for an open one would hold back
    its readers.
    """

    def __init__(self, context: CoordinatorContext, admin: GroupAdmin, sends: AckedProducer) -> None:
        self._admin = admin
        self._sends = sends
        self._topics, self._clock = context.topics, context.clock
        self._ration, self._rights = context.ration, context.rights
        # By producer group: when it was learnt, and whether a producer is alive.
        self._alive: dict[str, tuple[float, bool]] = {}
        # What that client was asked, and since when there is no answer that tells.
        self._asked: dict[str, tuple[float, Future[Any]]] = {}

    def check(self, partition: HalfPartition, pending: Pending, now: float) -> SendOutcome:
        """Ask the producer group of a half about it."""
        half = pending.half
        hindrance = self._hindrance(half.group, now)
        if hindrance is not None:
            return hindrance
        if pending.dropped is not None:
            return SendOutcome.UNREAD
        number = pending.check_count + 1
        headers = encode_check_request(CheckRequest(half, partition.number, pending.offset, number))
        # Each attempt goes to another partition, and so to another producer, where there are several: the last one may
        # hang in it.
        to = self._topics.check_partition(half.transaction_id, pending.attempts)
        what = f"the question about transaction {half.transaction_id}"
        try:
            report = partial(self._report, self._topics.check, what, id)
            if not self._sends.try_send(self._topics.check, to, half.key, half.value, headers=headers, report=report):
                return SendOutcome.LATER
        except KafkaException as error:
            if self._is_lacking(self._topics.check, error.args[0]):
                return SendOutcome.LATER
            self._report_uncheckable(pending, error)
            return SendOutcome.REFUSED
        pending.requested = number
        pending.attempts += 1
        return SendOutcome.SENT

    def _report_uncheckable(self, pending: Pending, error: KafkaException) -> None:
        if not pending.is_uncheckable:
            pending.is_uncheckable = True
            _log.error(
                "transaction %s of group %s, of %d bytes, cannot be asked about: the client library refused the "
                "question: %s; raise or leave out the coordinator's message.max.bytes, or settle it by `penstock "
                "tx commit` or `rollback`",
                pending.transaction_id,
                pending.group,
                pending.size_bytes,
                reason(error),
            )

    def decide(self, half_partition: int, pending: Pending, verdict: Verdict) -> None:
        """Write the coordinator's own decision into the op log; it counts when it is read back, if it is the first.

        Thread-safe. Not waited for: if it is lost, the half is still pending at its next due time, and this is done
        again.
        """
        op = Op(pending.transaction_id, verdict, Author.COORDINATOR, pending.group, half_partition, pending.offsets, 0)
        self._send_op(op, pending.transaction_id.encode(), f"the {verdict.name} of transaction {op.transaction_id}")

    def tick(self, half_partition: int) -> None:
        """Write a mark into the op log: once it is read back, all that was written before it was read.

        Its acknowledgement tells the broker's time.
        """
        op = Op(NO_ID, Verdict.TICK, Author.COORDINATOR, self._topics.coordinators, half_partition, (), 0)
        self._send_op(op, None, "a mark, without which nobody is asked,", partial(self._marked, time.monotonic()))

    def _marked(self, sent: float, message: Message) -> None:
        """Take in that a mark is stored, in the delivery thread."""
        kind, append_ms = message.timestamp()
        if kind == TIMESTAMP_LOG_APPEND_TIME:
            self._clock.marked(append_ms, sent, time.monotonic())

    def _send_op(self, op: Op, key: bytes | None, what: str, stored: Callable[[Message], object] = id) -> None:
        """Hand an op to the client library without waiting: what was lost is sent again in any case."""
        topic = self._topics.op
        try:
            report = partial(self._report, topic, what, stored)
            self._sends.try_send(topic, op.half_partition, key, encode_op(op), report=report)
        except KafkaException as error:
            self._not_stored(topic, what, error.args[0])

    def _report(
        self, topic: str, what: str, stored: Callable[[Message], object], error: KafkaError | None, message: Message
    ) -> None:
        """Take the report on a record, in the delivery thread."""
        if error is None:
            self._rights.granted(topic_right(Operation.WRITE, topic))
            stored(message)
        else:
            self._not_stored(topic, what, error)

    def _not_stored(self, topic: str, what: str, error: KafkaError) -> None:
        if not self._is_lacking(topic, error) and error.code() not in _CUT_OFF:
            text = "%s is not stored in %s: %s; it is tried again"
            self._ration.warn(f"not stored {topic} {error.code()}", text, what, topic, reason(error))

    def _is_lacking(self, topic: str, error: KafkaError) -> bool:
        """Tell whether a record was refused for want of a right, and note that."""
        if is_missing_right(error):
            self._rights.refused(_LACKING[topic == self._topics.op], topic_right(Operation.WRITE, topic))
        return is_missing_right(error)

    def _hindrance(self, group: str, now: float) -> SendOutcome | None:
        """Return why a group cannot be asked now; None where it has a live producer."""
        hindrance, said = SendOutcome.LATER, ""
        since, future = self._asked.get(group, (now, None))
        if future is not None and future.done():
            del self._asked[group]
            alive = self._has_members(future, self._topics.checkers(group))
            if alive is not None:
                self._alive[group], since = (now, alive), now
            elif isinstance(error := future.exception(), KafkaException):
                said = f" ({reason(error)})"
        if now - since > _ANSWER_S:
            text = (
                "the producers of group %s are not checked: no broker said within %g s whether one runs%s; see whether "
                "the brokers run"
            )
            self._ration.warn(f"unknown {group}", text, group, _ANSWER_S, said)
            self._asked.clear()
            hindrance, since = SendOutcome.UNKNOWN, now
            with suppress(KafkaException):  # no token for another client now: the one that is there asks again
                self._admin.renew()
        learnt, alive = self._alive.get(group, (None, False))
        if learnt is not None and now - learnt < _LIVENESS_VALID_S:
            return None if alive else SendOutcome.NOBODY
        if group not in self._asked:
            name = self._topics.checkers(group)
            self._asked[group] = since, describe_groups(self._admin.client, [name])[name]
        return hindrance

    def _has_members(self, answer: Future[Any], group: str) -> bool | None:
        """Read the answer to "who is in this group"; None when it was no answer."""
        error, right = answer.exception(), group_right(group, Operation.DESCRIBE)
        if error is None:
            self._rights.granted(right)
            return bool(answer.result().members)
        if isinstance(error, KafkaException) and error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
            return False
        if isinstance(error, KafkaException) and is_missing_right(error):
            self._rights.refused("it is not known whether a producer can be asked, so that none is", right)
        return None


#: Checks sent in one round: a crowd of undecided halves delays nobody's commit.
_CHECKS = 200
#: Seconds until a check is tried again when it is not known whether anybody is there to be asked.
_RETRY_DELAY_S = 0.1
#: Seconds until it is looked whether some of them were answered.
_WINDOW_POLL_S = 0.02
#: Seconds between two marks in one op log.
_MARK_INTERVAL_S = 0.5
#: Seconds after which the broker's clock is read again while something is pending.
_CLOCK_INTERVAL_S = 30.0
#: Why a group could not be asked, for operators.
_WAITS_FOR = {SendOutcome.NOBODY: NO_PRODUCER, SendOutcome.UNKNOWN: NO_ANSWER}


class CheckScheduler:
    """Sends what is due. Used by the coordinator's thread."""

    def __init__(self, context: CoordinatorContext, sender: CheckSender, discarding: Discarding) -> None:
        self._policy, self._counts, self._ration = context.policy, context.counts, context.ration
        self._sender = sender
        self._discarding = discarding
        # By producer group that could not be asked: half partition and id of the transaction that it was to be asked
        # about, and what that waits for.
        self._unasked: dict[str, tuple[int, str, str]] = {}

    def unasked(self, owned: Mapping[int, HalfPartition]) -> dict[str, str]:
        """Return the producer groups that could not be asked, each with what its undecided transactions wait for."""
        self._unasked = {
            group: (number, name, why)
            for group, (number, name, why) in self._unasked.items()
            if number in owned and owned[number].state.undecided(name) is not None
        }
        return {group: why for group, (_, _, why) in self._unasked.items()}

    def run(self, partition: HalfPartition, now: float) -> None:
        """Send what is due in a partition that is owned; `now` is in monotonic seconds."""
        self._discarding.tend()
        if not partition.state.pending or not partition.is_recovered:
            return
        due = partition.plan.next_due()
        time_s = partition.clock.now_ms(now) / 1000
        is_due = due is not None and due <= time_s
        # At first, what was read may be of long ago: only what is written now tells what time it is.
        clock = partition.clock
        is_unsure = partition.ticked_at < 0 or now - clock.set_at > _CLOCK_INTERVAL_S or clock.is_disputed
        if is_unsure or (is_due and partition.feed.ops_read_to_ms / 1000 < time_s - _MARK_INTERVAL_S):
            self._tick(partition, now)
        if is_due:
            for pending in partition.plan.take_due(min(time_s, partition.feed.ops_read_to_ms / 1000), _CHECKS):
                self._check(partition, pending, now, time_s)

    def _tick(self, partition: HalfPartition, now: float) -> None:
        if now - partition.ticked_at >= _MARK_INTERVAL_S:
            partition.ticked_at = now
            self._sender.tick(partition.number)

    def _check(self, partition: HalfPartition, pending: Pending, now: float, time_s: float) -> None:
        plan, interval = partition.plan, self._policy.interval(pending.check_count + 1)
        if not pending.is_complete:
            self._end_incomplete(partition, pending, now)
            plan.postpone(pending, time_s + interval)
            return
        if pending.check_count >= self._policy.maximum:
            self._settle_exhausted(partition, pending, time_s)
            return
        group, unanswered = pending.half.group, pending.requested > pending.check_count
        if not plan.has_room(group, time_s):
            plan.postpone(pending, time_s)
            plan.park(group, time_s + _WINDOW_POLL_S)
            return
        asked = self._sender.check(partition, pending, now)
        if asked is SendOutcome.SENT:
            self._unasked.pop(group, None)
            plan.sent(pending, pending.requested, time_s)
            # Its question holds it now; the next one is not asked for some time.
            partition.state.payloads.let_go(pending)
            self._counts.checks += 1
            if unanswered:
                text = "the check of transaction %s was not answered within %g s by group %s: it is asked again"
                self._ration.warn(f"unanswered {group}", text, pending.half.transaction_id, interval, group)
            return
        if asked is SendOutcome.UNREAD:
            self._await_payload(partition, pending, time_s)
        elif asked is SendOutcome.REFUSED:
            # Its own fault: the others of its group are asked.
            self._counts.no_producer += 1
            plan.postpone(pending, time_s + interval)
        else:
            self._leave_alone(partition, pending, asked, time_s)

    def _leave_alone(self, partition: HalfPartition, pending: Pending, asked: SendOutcome, time_s: float) -> None:
        """Ask a group nothing for a while, for nobody is there, or it is not known yet whether somebody is."""
        plan, group = partition.plan, pending.half.group
        plan.postpone(pending, time_s)
        if asked in _WAITS_FOR:
            waits_for = _WAITS_FOR[asked].format(group)
            self._unasked[group] = partition.number, pending.half.transaction_id, waits_for
        if asked is not SendOutcome.NOBODY:
            self._counts.no_producer += asked is SendOutcome.UNKNOWN
            plan.park(group, time_s + _RETRY_DELAY_S)
            return
        # One question for all of a group: it is left alone, and costs nothing, until it is looked for again.
        self._counts.no_producer += 1 + plan.park(group, time_s + self._policy.interval_s)
        text = "no producer of group %s answers the check of transaction %s; start one with a check function"
        self._ration.warn(f"nobody {group}", text, group, pending.half.transaction_id)

    def _end_incomplete(self, partition: HalfPartition, pending: Pending, now: float) -> None:
        """Roll a transaction back whose halves cannot all come any more: its local transaction never began."""
        until_ms = pending.birth_ms + self._policy.incomplete_s * 1000
        if partition.feed.halves_read_to_ms < until_ms and not partition.feed.is_at_end(now):
            return
        _log.error(
            "transaction %s of group %s is rolled back: not all of its halves are there, or they contradict",
            pending.half.transaction_id,
            pending.half.group,
        )
        self._sender.decide(partition.number, pending, Verdict.ROLLBACK)

    def _settle_exhausted(self, partition: HalfPartition, pending: Pending, time_s: float) -> None:
        if self._discarding.reads_halves and pending.dropped is not None:
            self._await_payload(partition, pending, time_s)
            return
        half = pending.half
        # By id: what waits for a slow policy does not keep in memory what is settled meanwhile.
        first = partial(_undecided_half, partition, half.transaction_id)
        decide = partial(self._decide, partition, half.transaction_id)
        self._discarding.settle(Exhausted(half.transaction_id, half.group, pending.check_count, first, decide))
        partition.plan.postpone(pending, time_s + self._policy.interval(pending.check_count + 1))

    def _await_payload(self, partition: HalfPartition, pending: Pending, time_s: float) -> None:
        """Have a payload read that a question needs: it comes up again as soon as it is there."""
        plan = partition.plan
        if partition.state.payloads.want(pending):
            plan.await_payload(pending, time_s + self._policy.interval(pending.check_count + 1))
        else:
            # As many as may be are being read.
            plan.postpone(pending, time_s)
            plan.park(plan.turn_of(pending), time_s + _WINDOW_POLL_S)

    def _decide(self, partition: HalfPartition, transaction_id: str, verdict: Verdict) -> None:
        """Store what the discard policy said; also called by its threads."""
        pending = partition.state.undecided(transaction_id)
        if pending is not None:
            self._sender.decide(partition.number, pending, verdict)


def _undecided_half(partition: HalfPartition, transaction_id: str) -> Half | None:
    pending = partition.state.undecided(transaction_id)
    # One whose payload was dropped meanwhile comes up again.
    return None if pending is None or pending.dropped is not None else pending.half
