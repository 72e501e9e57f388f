"""Dead letters of a task: on the broker before the task reports, by a producer of its own, or published as results."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from penstock.clients.cluster import ProducerClient
from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.rights import MissingRightError, Operation, Resource, Right, principal_of, topic_right
from penstock.consumer.failures.limits import DeadLetterLimit
from penstock.consumer.handlers.options.handler_options import OnFailure
from penstock.consumer.handlers.route import Route
from penstock.dead_letters.headers import DeadLetterOrigin, HeaderList, write
from penstock.errors import SinkError
from penstock.message import Record
from penstock.spark_sink.sinks.handlers.execution.report import Counts

_log = logging.getLogger("penstock.handler_sink")

#: Seconds that a dead letter may take to be acknowledged, by the client's own count, and beyond it.
_TIMEOUT_S = 60
_GRACE_S = 10.0
#: Seconds between two looks at a client whose queue is full.
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class DeadLetterSettings:
    """What a task needs to write dead letters. Picklable.

    The producer's settings may hold secrets. `limit` says when a task fails rather than give up one more message; None
    for never.
    """

    group: str
    producer: dict[str, Any] = field(repr=False)
    limit: DeadLetterLimit | None

    def producer_config(self) -> dict[str, Any]:
        """Return the producer's settings with a time after which it gives a dead letter up."""
        return {"message.timeout.ms": _TIMEOUT_S * 1000, **self.producer}


class TaskDeadLetters:
    """Writes the dead letters of one task. One thread uses it.

    `counts` tells the task's counts, for the limit; `connect` makes the producer, at the first dead letter. With
    `publish` none is made: it takes a message with its topic and headers, to be published with the task's results.
    """

    def __init__(
        self,
        settings: DeadLetterSettings,
        counts: Callable[[], Counts],
        connect: Callable[[dict[str, Any]], ProducerClient],
        publish: Callable[[Record, str, HeaderList], None] | None = None,
    ) -> None:
        self._settings = settings
        self._counts = counts
        self._connect = connect
        self._publish = publish
        self._producer: ProducerClient | None = None
        #: Why the first letter that was not written was not, and its topic.
        self._failure: tuple[str, KafkaError] | None = None
        self._in_a_row = 0
        self._handled_then = 0

    def put(self, record: Record, route: Route, error: BaseException, attempts: int) -> None:
        """Count a message that is given up; send it to its dead-letter topic where its handler wants that.

        `flush` tells whether it came there. Raises `SinkError` where it is one too many or cannot be sent, and
        `MissingRightError` where this client may not write it.
        """
        handler = route.handler
        place = f"{record.topic()}[{record.partition()}]@{record.offset()}"
        self._check(place)
        if handler.on_failure is not OnFailure.DEAD_LETTER:
            return
        topic = handler.dead_letter_topic.replace("{topic}", record.topic())
        origin = DeadLetterOrigin.of(record, error, group=self._settings.group, attempts=attempts)
        headers = write(handler.dead_letter_format, record, origin)
        try:
            if self._publish is not None:
                self._publish(record, topic, headers)
            else:
                if self._producer is None:
                    self._producer = self._connect(self._settings.producer_config())
                self._send(self._producer, topic, record, headers)
        except (KafkaException, BufferError) as refused:
            if isinstance(refused, KafkaException) and is_missing_right(refused):
                raise self._forbidden(topic, refused.args[0]) from None
            why = reason(refused) if isinstance(refused, KafkaException) else str(refused)
            raise SinkError(
                f"{place} cannot be written to {topic}: {why}; the batch comes again: see that the topic and the "
                "brokers are well"
            ) from refused
        _log.warning("%s goes to %s after %d tries (%s)", place, topic, attempts, type(error).__name__)

    def _send(self, producer: ProducerClient, topic: str, record: Record, headers: Any) -> None:
        def delivered(failure: KafkaError | None, _message: object) -> None:
            if failure is not None and self._failure is None:
                self._failure = topic, failure

        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                producer.produce(topic, record.value(), record.key(), headers=headers, on_delivery=delivered)
            except BufferError:
                if time.monotonic() >= deadline:
                    raise
                producer.poll(_LOOK_S)
            else:
                producer.poll(0)
                return

    def _forbidden(self, topic: str, failure: KafkaError) -> MissingRightError:
        """Return the error of a right that is missing; with an idempotent producer old brokers ask for one more."""
        right = topic_right(Operation.WRITE, topic)
        if failure.code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
            right = Right(Operation.IDEMPOTENT_WRITE, Resource.CLUSTER)
        what = f"dead letters could not be written to {topic}, and the batch comes again"
        return MissingRightError(what, [right], principal_of(self._settings.producer))

    def _check(self, place: str) -> None:
        """Count a message that is given up against the limit."""
        limit, counts = self._settings.limit, self._counts()
        if limit is None:
            return
        self._in_a_row = self._in_a_row + 1 if counts.handled == self._handled_then else 1
        self._handled_then = counts.handled
        why = limit.exceeded(self._in_a_row, counts.dead_letters + counts.dropped + 1, counts.handled)
        if why is not None:
            raise SinkError(
                f"{why}: {place} is not given up, the query ends and the batch comes again; find what fails every "
                "message, then start again"
            ) from None  # its text may hold the message

    def flush(self) -> None:
        """Wait until the broker has all; raise `SinkError` where one was not written, or `MissingRightError`."""
        if self._producer is None:
            return
        left = self._producer.flush(_TIMEOUT_S + _GRACE_S)
        if left or self._failure is not None:
            if self._failure is not None and is_missing_right(self._failure[1]):
                raise self._forbidden(*self._failure)
            why = f"{left} were not acknowledged in time"
            if self._failure is not None:
                why = f"{self._failure[0]}: {reason(self._failure[1])}"
            raise SinkError(
                f"dead letters could not be written: {why}; the batch comes again: see that the topic and the brokers "
                "are well"
            )
