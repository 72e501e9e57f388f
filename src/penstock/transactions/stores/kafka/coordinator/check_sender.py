"""Sends check requests, and the coordinator's own decisions.

A request is sent only to a group that has a live producer, so that a group that is down for hours spends no checks, and
finds no heap of stale requests when it comes back.
"""

from __future__ import annotations

import logging
import time
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
from penstock.transactions.writing.acked_producer import AckedProducer, Report

_log = logging.getLogger("penstock.transactions")

#: Seconds for which it is believed that a group has live producers, or none.
_FRESH_S = 1.0
_ANSWER_S = 5.0
#: How the reports of what a stop has cut off end.
_CUT_OFF = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001 - public constants look so

_NOT_ASKED = "check requests to producers cannot be sent"


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
        request = CheckRequest(half, partition.number, pending.offset, number)
        # Each attempt goes to another partition, and so to another producer, where there are several: the last one may
        # hang in it.
        to = self._topics.check_partition(half.transaction_id, pending.attempts)
        headers, report = encode_check_request(request), partial(self._is_stored, half.transaction_id)
        try:
            if not self._sends.try_send(self._topics.check, to, half.key, half.value, headers=headers, report=report):
                return SendOutcome.LATER
        except KafkaException as error:
            return self._not_asked(pending, error)
        pending.requested = number
        pending.attempts += 1
        return SendOutcome.SENT

    def _not_asked(self, pending: Pending, error: KafkaException) -> SendOutcome:
        half = pending.half
        if self._is_lacking(self._topics.check, _NOT_ASKED, error.args[0]):
            return SendOutcome.LATER
        if not pending.is_uncheckable:
            pending.is_uncheckable = True
            _log.error(
                "transaction %s of group %s, of %d bytes, cannot be asked about: the client library refused the "
                "question: %s; raise or leave out the coordinator's message.max.bytes, or settle it by `penstock "
                "tx commit` or `rollback`",
                half.transaction_id,
                half.group,
                pending.size_bytes,
                reason(error),
            )
        return SendOutcome.REFUSED

    def _is_stored(self, transaction_id: str, error: KafkaError | None, _: Message) -> None:
        """Take the report on a request, in the delivery thread: one that is not stored is sent again, and logged."""
        if self._is_lacking(self._topics.check, _NOT_ASKED, error):
            return
        if error is not None and error.code() not in _CUT_OFF:
            text = "the question about transaction %s is not stored in %s: %s; it is asked again"
            self._ration.warn(f"not stored {error.code()}", text, transaction_id, self._topics.check, reason(error))

    def decide(self, half_partition: int, pending: Pending, verdict: Verdict) -> None:
        """Write the coordinator's own decision into the op log; it counts when it is read back, if it is the first.

        Thread-safe. Not waited for: if it is lost, the half is still pending at its next due time, and this is done
        again.
        """
        half = pending.half
        op = Op(half.transaction_id, verdict, Author.COORDINATOR, half.group, half_partition, pending.offsets, 0)
        self._send(half_partition, half.transaction_id.encode(), op, self._is_decided)

    def tick(self, half_partition: int) -> None:
        """Write a mark into the op log: once it is read back, all that was written before it was read.

        Its acknowledgement tells the broker's time.
        """
        op = Op(NO_ID, Verdict.TICK, Author.COORDINATOR, self._topics.coordinators, half_partition, (), 0)
        self._send(half_partition, None, op, partial(self._is_marked, time.monotonic()))

    def _is_decided(self, error: KafkaError | None, _: Message) -> None:
        """Take the report on a decision, in the delivery thread."""
        self._is_lacking(self._topics.op, "the coordinator's own decisions cannot be stored", error)

    def _is_lacking(self, topic: str, what: str, error: KafkaError | None) -> bool:
        """Tell whether a record was refused for want of a right, and note that."""
        right = topic_right(Operation.WRITE, topic)
        if error is None:
            self._rights.granted(right)
        elif is_missing_right(error):
            self._rights.refused(what, right)
            return True
        return False

    def _is_marked(self, sent: float, error: KafkaError | None, message: Message) -> None:
        """Take the report on a mark, in the delivery thread."""
        self._is_lacking(self._topics.op, "marks in the op log, without which nobody is asked, cannot be stored", error)
        kind, append_ms = message.timestamp()
        if error is None and kind == TIMESTAMP_LOG_APPEND_TIME:
            self._clock.marked(append_ms, sent, time.monotonic())

    def _send(self, half_partition: int, key: bytes | None, op: Op, report: Report) -> None:
        """Send an op without waiting: it is sent again anyhow where it was lost."""
        topic = self._topics.op
        try:
            self._sends.try_send(topic, half_partition, key, encode_op(op), report=report)
        except KafkaException as error:
            if self._is_lacking(topic, f"a record for {topic} cannot be stored", error.args[0]):
                return
            text = "a record for %s[%d] could not be sent: %s; it is tried again"
            self._ration.warn(f"not sent {topic}", text, topic, half_partition, reason(error))

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
