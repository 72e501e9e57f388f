"""Results of a task: rows of `PUBLISHED` for results and dead letters, and the counts of messages.

Results and dead letters have the position of their message. The task's report is in the last row, so that one Spark
job is enough.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa

from penstock.consumer.assignments import ConsumerLane, Item
from penstock.consumer.handlers.results import Result
from penstock.consumer.outbox.outbox import Submission, Then
from penstock.errors import SinkError
from penstock.spark_sink.sinks.frames import STEP_BYTES, STEP_ROWS
from penstock.spark_sink.sinks.kafka_sink import MARK, PUBLISHED

#: Outcomes of messages and of tries: fields of a report that the consumer's statistics have too.
OUTCOMES = ("handled", "filtered", "dead_letters", "dropped", "failed", "retried")


@dataclass(slots=True)
class BatchReport:
    """Counts of a micro-batch or a task. `rows` is the sum of `handled`, `dead_letters`, `dropped` and `filtered`.

    Attributes:
        rows: messages read.
        handled: messages that a handler completed.
        filtered: messages that a filter refused.
        dead_letters: messages given up and sent to a dead-letter topic.
        dropped: messages given up and logged.
        failed: failed tries.
        retried: tries after the first.
        results: messages that handlers returned, to be published.
        tasks: tasks that had messages.
    """

    rows: int = 0
    handled: int = 0
    filtered: int = 0
    dead_letters: int = 0
    dropped: int = 0
    failed: int = 0
    retried: int = 0
    results: int = 0
    tasks: int = 0

    @classmethod
    def of_tasks(cls, pickled: Sequence[bytes]) -> BatchReport:
        """Return the sum of the reports of tasks."""
        tasks = [pickle.loads(task) for task in pickled]  # noqa: S301 - written by this query's own tasks
        return cls(**{count.name: sum(getattr(task, count.name) for task in tasks) for count in fields(cls)})

    def __str__(self) -> str:
        """Return it as one line, without any key."""
        return (
            f"{self.rows} messages in {self.tasks} tasks, {self.handled} handled, {self.filtered} filtered, "
            f"{self.dead_letters} dead letters, {self.dropped} dropped, {self.failed} failures, {self.results} results"
        )


class ResultRows:
    """The outbox of a task: stores handlers' results and dead letters, and completes their messages. Thread-safe.

    `publishes` says whether the sink may publish messages.
    """

    def __init__(self, *, publishes: bool) -> None:
        self.publishes = publishes
        # Guards the fields below: lane holders add rows, the task's thread takes them.
        self._lock = threading.Lock()
        self._rows: list[tuple[Any, ...]] = []
        self._size = 0

    def submit(
        self, items: Sequence[Item], messages: Sequence[Result], then: Then, lane: ConsumerLane | None = None
    ) -> None:
        """Store the results for messages, or a dead letter, and complete the messages.

        Raises `SinkError` if the sink publishes nothing, and for common results of several messages: one of their
        source partitions may be published already and another not.
        """
        name = items[0][0].assignment.route.handler.name
        if not self.publishes:
            raise SinkError(
                f"{name} returned messages, but this HandlerSink has no name, by which the ledger knows published "
                "results; give it name=... (and bootstrap_servers), or return None"
            )
        if len(items) > 1:
            raise SinkError(
                f"{name} returned messages for its batch as a whole, which the ledger cannot publish exactly once: "
                "return a list with the results of each message, as [[...], None, ...]"
            )
        record = items[-1][2]
        position = (record.topic(), record.partition(), record.offset())
        rows = []
        for place, message in enumerate(messages):
            content = message.topic, message.partition, message.key, message.value
            headers = [(name, text.encode() if isinstance(text, str) else text) for name, text in message.headers]
            rows.append((*position, place, *content, headers))
        submission = Submission(items, messages, then, lane)
        with self._lock:
            self._rows += rows
            self._size += submission.size_bytes
            submission.complete()
            # Under the lock: only one thread at a time may call the counting callback.
            submission.is_written = True
            then(submission)

    def full(self) -> Iterator[pa.RecordBatch]:
        """Yield the stored rows, if there are enough for a batch."""
        if len(self._rows) >= STEP_ROWS or self._size >= STEP_BYTES:
            yield self._take()

    def end(self, report: BatchReport) -> Iterator[pa.RecordBatch]:
        """Yield the remaining rows and the task's report. Called once, at the end."""
        self._rows.append((None, None, None, MARK, None, None, None, pickle.dumps(report), None))
        yield self._take()

    def _take(self) -> pa.RecordBatch:
        with self._lock:
            rows, self._rows, self._size = self._rows, [], 0
        cells = zip(*rows, strict=True)
        return pa.record_batch(
            [pa.array(column, kind) for column, kind in zip(cells, PUBLISHED.types, strict=True)], schema=PUBLISHED
        )
