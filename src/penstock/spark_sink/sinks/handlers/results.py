"""What comes of messages: rows of `PUBLISHED` that a task makes, and counts, of a task as of a batch.

Results and dead letters have the position of their message. The task's report is in a last row, so that one job is
enough.
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

#: What becomes of messages, and of tries: the fields of a report that the consumer's statistics have, too.
OUTCOMES = ("handled", "filtered", "dead_letters", "dropped", "failed", "retried")


@dataclass(slots=True)
class BatchReport:
    """What a micro-batch came to, or a task of it; `rows` is `handled`, `dead_letters`, `dropped` and `filtered`.

    Attributes:
        rows: messages taken in.
        handled: messages that their handler has done.
        filtered: messages that a filter refused.
        dead_letters: messages given up to a dead-letter topic.
        dropped: messages given up and logged.
        failed: failures, each try counted.
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
        """Return the sum of what tasks sent along."""
        tasks = [pickle.loads(task) for task in pickled]  # noqa: S301 - of this query's own tasks
        return cls(**{count.name: sum(getattr(task, count.name) for task in tasks) for count in fields(cls)})

    def __str__(self) -> str:
        """Say it in a line, without any key."""
        return (
            f"{self.rows} messages in {self.tasks} tasks, {self.handled} handled, {self.filtered} filtered, "
            f"{self.dead_letters} dead letters, {self.dropped} dropped, {self.failed} failures, {self.results} results"
        )


class ResultRows:
    """The outbox of a task: takes what handlers return, and dead letters; then their messages are done. Thread-safe.

    `publishes` says whether the sink may publish anything.
    """

    def __init__(self, *, publishes: bool) -> None:
        self.publishes = publishes
        # Guards the fields below: holders of lanes add, the task's thread takes.
        self._lock = threading.Lock()
        self._rows: list[tuple[Any, ...]] = []
        self._size = 0

    def submit(
        self, items: Sequence[Item], messages: Sequence[Result], then: Then, lane: ConsumerLane | None = None
    ) -> None:
        """Take what handlers returned for messages, or a dead letter; the messages are done then.

        Raises `SinkError` where the sink publishes nothing, and for results of several messages together: of their
        source partitions one may be published and another not.
        """
        name = items[0][0].assignment.route.handler.name
        if not self.publishes:
            raise SinkError(
                f"{name} returned messages, and this HandlerSink has no name under which it could remember what it "
                "has published; give it name=... (and bootstrap_servers), or return None"
            )
        if len(items) > 1:
            raise SinkError(
                f"{name} returned messages for its batch as a whole, which the ledger cannot publish once: return a "
                "list with what is for each message, as [[...], None, ...]"
            )
        record = items[-1][2]
        position = (record.topic(), record.partition(), record.offset())
        rows = [
            (*position, place, message.topic, message.partition, message.key, message.value, _as_bytes(message.headers))
            for place, message in enumerate(messages)
        ]
        submission = Submission(items, messages, then, lane)
        with self._lock:
            self._rows += rows
            self._size += submission.size_bytes
            submission.complete()
            # Under the lock: who counts is called by one thread at a time.
            submission.is_written = True
            then(submission)

    def full(self) -> Iterator[pa.RecordBatch]:
        """Return what was taken as columns, where it is enough for that."""
        if len(self._rows) >= STEP_ROWS or self._size >= STEP_BYTES:
            yield self._take()

    def end(self, report: BatchReport) -> Iterator[pa.RecordBatch]:
        """Return the rest, and the task's report. Called once, last."""
        self._rows.append((None, None, None, MARK, None, None, None, pickle.dumps(report), None))
        yield self._take()

    def _take(self) -> pa.RecordBatch:
        with self._lock:
            rows, self._rows, self._size = self._rows, [], 0
        cells = zip(*rows, strict=True)
        return pa.record_batch(
            [pa.array(column, kind) for column, kind in zip(cells, PUBLISHED.types, strict=True)], schema=PUBLISHED
        )


def _as_bytes(headers: Sequence[tuple[str, str | bytes | None]]) -> list[tuple[str, bytes | None]]:
    return [(name, value.encode() if isinstance(value, str) else value) for name, value in headers]
