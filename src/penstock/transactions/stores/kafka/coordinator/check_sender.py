"""Sends check requests, and the coordinator's own decisions.

A request is sent only to a group that has a live producer, so that a group that is down for hours spends no checks, and
finds no heap of stale requests when it comes back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, KafkaError, KafkaException, Message

from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.requests.group_requests import GroupAdmin, describe_groups
from penstock.clients.rights import Operation, group_right, topic_right
from penstock.transactions.core.pending import Pending
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.coordinator.half_partition import HalfPartition
from penstock.transactions.wire.check_request import CheckRequest, encode_check_request
from penstock.transactions.wire.ids import NO_ID
from penstock.transactions.wire.ops import Author, Op, Verdict, encode_op
from penstock.transactions.writing.acked_producer import AckedProducer

_log = logging.getLogger("penstock.transactions")

#: Seconds for which it is believed that a group has live producers, or none.
_FRESH_S = 1.0
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
        if learnt is not None and now - learnt < _FRESH_S:
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
