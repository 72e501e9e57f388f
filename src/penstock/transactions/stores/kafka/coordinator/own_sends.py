"""What a coordinator writes besides its Kafka transactions: questions to producers, decisions of its own, its status.

They are idempotent sends: the coordinator's transactions do not touch the op log, for an open one would hold back its
readers. None is waited for: what is lost is sent again in any case.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, KafkaError, KafkaException, Message

from penstock.clients.kafka_errors import reason
from penstock.clients.rights import Operation, topic_right
from penstock.errors import StoppedError
from penstock.transactions.acked_producer import AckedProducer
from penstock.transactions.core.pending import Pending
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.status import Status, encode_status
from penstock.transactions.wire.half import CheckRequest, encode_check_request
from penstock.transactions.wire.ids import NO_ID
from penstock.transactions.wire.ops import Author, Op, Verdict, encode_op

#: How the reports of what a stop has cut off end.
_CUT_OFF = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001 - public constants look so


class OwnSends:
    """Sends what the coordinator writes. Used by its thread, and `decide` by any; never waits for Kafka."""

    def __init__(self, context: CoordinatorContext, sends: AckedProducer) -> None:
        self._context, self._topics, self._sends = context, context.topics, sends
        # What a right is missing for, by the topic that may not be written.
        self._lacking = {
            self._topics.check: "check requests to producers cannot be sent",
            self._topics.op: "the coordinator's own decisions, and marks without which nobody is asked, are not stored",
            self._topics.status: f"{self._topics.status} takes nothing, so that `penstock tx ls` shows less",
        }

    def ask(self, half_partition: int, pending: Pending) -> bool:
        """Ask the producer group of a half about it, and tell whether the question is on its way.

        Each attempt goes to another partition, and so to another producer, where there are several: the last one may
        hang in it. Raises `KafkaException` where the client library refuses the question itself.
        """
        half, number = pending.half, pending.check_count + 1
        headers = encode_check_request(CheckRequest(half, half_partition, pending.offset, number))
        to = self._topics.check_partition(half.transaction_id, pending.attempts)
        what = f"the question about transaction {half.transaction_id}"
        is_sent = self._send(self._topics.check, to, half.key, half.value, what, headers=headers)
        if is_sent:
            pending.requested = number
            pending.attempts += 1
        return is_sent

    def decide(self, half_partition: int, pending: Pending, verdict: Verdict) -> None:
        """Write the coordinator's own decision into the op log; it counts when it is read back, if it is the first.

        If it is lost, the half is still pending at its next due time, and this is done again.
        """
        op = Op(pending.transaction_id, verdict, Author.COORDINATOR, pending.group, half_partition, pending.offsets, 0)
        what = f"the {verdict.name} of transaction {op.transaction_id}"
        self.write(self._topics.op, half_partition, pending.transaction_id.encode(), encode_op(op), what)

    def tick(self, half_partition: int) -> None:
        """Write a mark into the op log: once it is read back, all that was written before it was read.

        Its acknowledgement tells the broker's time.
        """
        op = Op(NO_ID, Verdict.TICK, Author.COORDINATOR, self._topics.coordinators, half_partition, (), 0)
        marked = partial(self._marked, time.monotonic())
        what = "a mark, without which nobody is asked,"
        self.write(self._topics.op, half_partition, None, encode_op(op), what, stored=marked)

    def _marked(self, sent: float, message: Message) -> None:
        """Take in that a mark is stored, in the delivery thread."""
        kind, append_ms = message.timestamp()
        if kind == TIMESTAMP_LOG_APPEND_TIME:
            self._context.clock.marked(append_ms, sent, time.monotonic())

    def write(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        what: str,
        *,
        stored: Callable[[Message], object] = id,
    ) -> bool:
        """Send a record that is written again if it is lost; tell whether it is on its way.

        `what` names it in the log; `stored` is called once it is stored, by the delivery thread.
        """
        try:
            return self._send(topic, partition, key, value, what, stored=stored)
        except KafkaException as error:
            self._report_not_stored(topic, what, error.args[0])
            return False

    def _send(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        what: str,
        *,
        headers: Any = None,
        stored: Callable[[Message], object] = id,
    ) -> bool:
        report = partial(self._report, topic, what, stored)
        try:
            return self._sends.try_post(topic, partition, key, value, headers=headers, report=report)
        except StoppedError:
            return False
        except KafkaException as error:
            if not self._context.note_missing_right(error, self._lacking[topic], topic_right(Operation.WRITE, topic)):
                raise
            return False

    def _report(
        self, topic: str, what: str, stored: Callable[[Message], object], error: KafkaError | None, message: Message
    ) -> None:
        """Take the report on a record, in the delivery thread."""
        right = topic_right(Operation.WRITE, topic)
        if error is None:
            self._context.rights.granted(right)
            stored(message)
        elif not self._context.note_missing_right(error, self._lacking[topic], right) and error.code() not in _CUT_OFF:
            self._report_not_stored(topic, what, error)

    def _report_not_stored(self, topic: str, what: str, error: KafkaError) -> None:
        text = "%s is not stored in %s: %s; it is tried again"
        self._context.ration.warn(f"not stored {topic} {error.code()}", text, what, topic, reason(error))


#: Seconds between two records at least, and until what has not changed is written again.
_MIN_INTERVAL_S = 1.0
_REPEAT_INTERVAL_S = 20.0


class StatusLog:
    """Writes the status of one coordinator. Used by its thread, which never waits here, and gets no exception."""

    def __init__(self, topic: str, sends: OwnSends) -> None:
        self._topic = topic
        self._sends = sends
        # What was written last, less its time; None: nothing, or that nothing is the matter.
        self._last: Status | None = None
        self._tried_at = self._last_at = float("-inf")

    def write(self, status: Status, now: float) -> None:
        """Write a status down if it is new, or if the last record grows old; `now` is in monotonic seconds."""
        news = replace(status, at_ms=0) if status.is_notable else None
        is_due = news != self._last or (news is not None and now - self._last_at >= _REPEAT_INTERVAL_S)
        if not is_due or now - self._tried_at < _MIN_INTERVAL_S:
            return
        self._tried_at = now
        key, what = status.coordinator.encode(), "the status, without which `penstock tx ls` shows less,"
        if self._sends.write(self._topic, 0, key, encode_status(status), what):
            self._last, self._last_at = news, now
