"""Records that a coordinator sends outside its Kafka transactions: checks, its own decisions, marks and its status.

They are idempotent sends. The coordinator's Kafka transactions do not write to the op log, because an open one would
hold back its readers. No caller waits for a send: lost records are sent again.
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

#: Errors in the reports of records that a stop has purged.
_CUT_OFF = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001 - public constants look so
#: Seconds after which an unchanged status is written again.
_REPEAT_INTERVAL_S = 20.0


class CoordinatorSends:
    """Sends the coordinator's records. Used by its thread, `decide` by any thread; never waits for Kafka."""

    def __init__(self, context: CoordinatorContext, sends: AckedProducer) -> None:
        self._context, self._topics, self._sends = context, context.topics, sends
        # The consequence of a missing WRITE permission, by topic.
        self._lacking = {
            self._topics.check: "check requests to producers cannot be sent",
            self._topics.op: "the coordinator's decisions and marks are not stored; without marks no check is sent",
            self._topics.status: f"{self._topics.status} cannot be written, so that `penstock tx ls` shows less",
        }

    def ask(self, half_partition: int, pending: Pending) -> bool:
        """Send a check to the producer group of a half; return whether it is on its way.

        Each attempt goes to another partition, and so to another producer if there are several: the last producer may
        hang in its check, or the last partition be gone. Raises `KafkaException` if the client library refuses this
        record.
        """
        half, number = pending.half, pending.check_count + 1
        headers = encode_check_request(CheckRequest(half, half_partition, pending.offset, number))
        to = self._topics.check_partition(half.transaction_id, pending.attempts)
        what = f"the check of transaction {half.transaction_id}"
        pending.attempts += 1
        is_sent = self._send(self._topics.check, to, half.key, half.value, what, headers=headers)
        if is_sent:
            pending.requested = number
        return is_sent

    def decide(self, half_partition: int, pending: Pending, verdict: Verdict) -> None:
        """Write the coordinator's decision into the op log; when it is read back, it counts if it is the first.

        If the record is lost, the half is still pending at its next due time, and the decision is written again.
        """
        op = Op(pending.transaction_id, verdict, Author.COORDINATOR, pending.group, half_partition, pending.offsets, 0)
        what = f"the {verdict.name} of transaction {op.transaction_id}"
        self.write(self._topics.op, half_partition, pending.transaction_id.encode(), encode_op(op), what)

    def tick(self, half_partition: int) -> None:
        """Write a mark into the op log: once it is read back, all earlier records are read.

        Its acknowledgement carries the broker's time.
        """
        op = Op(NO_ID, Verdict.TICK, Author.COORDINATOR, self._topics.coordinators, half_partition, (), 0)
        marked = partial(self._marked, time.monotonic())
        what = "a mark, without which no check is sent,"
        self.write(self._topics.op, half_partition, None, encode_op(op), what, stored=marked)

    def _marked(self, sent: float, message: Message) -> None:
        """Update the clock from a stored mark, on the delivery thread."""
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
        """Send a record that the caller repeats if it is lost; return whether it is on its way.

        `what` names it in log lines; the delivery thread calls `stored` once it is stored.
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
        """Process a delivery report, on the delivery thread."""
        right = topic_right(Operation.WRITE, topic)
        if error is None:
            self._context.rights.granted(right)
            stored(message)
        elif not self._context.note_missing_right(error, self._lacking[topic], right) and error.code() not in _CUT_OFF:
            self._report_not_stored(topic, what, error)

    def _report_not_stored(self, topic: str, what: str, error: KafkaError) -> None:
        text = "%s is not stored in %s: %s; it is tried again"
        self._context.ration.warn(f"not stored {topic} {error.code()}", text, what, topic, reason(error))


class StatusLog:
    """Writes the status of one coordinator. Used by its thread; never waits and never raises."""

    def __init__(self, topic: str, sends: CoordinatorSends) -> None:
        self._topic = topic
        self._sends = sends
        # The last written status without its time; None if that had nothing to report, or none was written.
        self._last: Status | None = None
        self._last_at = float("-inf")

    def write(self, status: Status, now: float) -> None:
        """Write a status if it has changed or its last record is old; `now` is in monotonic seconds."""
        news = replace(status, at_ms=0) if status.is_notable else None
        is_due = news != self._last or (news is not None and now - self._last_at >= _REPEAT_INTERVAL_S)
        if not is_due:
            return
        key, what = status.coordinator.encode(), "the status, without which `penstock tx ls` shows less,"
        if self._sends.write(self._topic, 0, key, encode_status(status), what):
            self._last, self._last_at = news, now
