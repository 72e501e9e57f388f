"""Dead letters of a task: published with its results, or on the broker before it reports, by a producer of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from confluent_kafka import KafkaError

from penstock.clients.kafka_errors import is_missing_right
from penstock.clients.rights import MissingRightError
from penstock.consumer.assignments import Item
from penstock.consumer.failures.dead_letter_publisher import NEVER_TAKEN, DeadLetterPublisher, ExhaustedMessage
from penstock.consumer.handlers.results import Result
from penstock.consumer.publishing.outlet import Delivered, Outlet
from penstock.errors import SinkError
from penstock.spark_sink.sinks.handlers.results import ResultRows

#: What comes of a message that fails a task, in words.
ENDS = "the query ends and the batch comes again"


class TaskDeadLetters(DeadLetterPublisher):
    """Sends each message at once, by whichever thread gives it up, and fails the task where that is refused."""

    #: Held by who sends or serves: one task runs in a process at a time.
    _lock = threading.Lock()

    def publish(self, message: ExhaustedMessage) -> None:
        """Send a message; `PenstockError` where it is one too many. Any thread."""
        super().publish(message)
        self.serve()

    def serve(self) -> None:
        """Send what was published, serve delivery reports. Any thread."""
        with self._lock:
            super().serve()

    def flush(self, timeout: float) -> None:
        """Wait for deliveries of what was sent, at most `timeout` seconds. Any thread."""
        with self._lock:
            super().flush(timeout)

    def not_written(self, one: ExhaustedMessage, topic: str, error: KafkaError) -> None:
        """Fail the task: it holds nothing while brokers are away. What is too large is written with less."""
        if error.code() in NEVER_TAKEN:
            super().not_written(one, topic, error)
            return
        text = f"dead letters could not be written: {topic}: {self.why(topic, error)}; {ENDS}"
        self.fail(MissingRightError.from_text(text) if is_missing_right(error) else SinkError(text))


class ResultOutlet(Outlet):
    """Writes dead letters into the task's results. Used under the lock of `TaskDeadLetters`."""

    def __init__(self, rows: ResultRows) -> None:
        self._rows = rows
        self._written: list[Callable[[], None]] = []

    def forward(self, item: Item, to: Result, complete: Callable[[], None], delivered: Delivered) -> None:
        """Take a message."""
        self._rows.add(item[2], [to])
        complete()
        self._written.append(lambda: delivered(None))

    def poll(self) -> None:
        """Report what was taken."""
        written, self._written = self._written, []
        for report in written:
            report()

    def flush(self, timeout: float) -> None:  # noqa: ARG002 - as an outlet's
        """Report what was taken."""
        self.poll()
