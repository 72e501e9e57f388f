"""What a task publishes, as rows of `PUBLISHED`: results and dead letters, each with the position of its message.

One more row for each source partition says how far the task has come there: the ledger moves over messages that
publish nothing too. The task's report is in a last row, so that one job is enough.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from penstock.consumer.assignments import ConsumerLane, Item
from penstock.consumer.handlers.results import Result
from penstock.consumer.outbox.outbox import Submission, Then
from penstock.errors import SinkError
from penstock.spark_sink.sinks.handlers.report import TaskReport, to_json
from penstock.spark_sink.sinks.kafka_publication import MARK, PUBLISHED
from penstock.spark_sink.sinks.position import STEP_BYTES, STEP_ROWS
from penstock.spark_sink.source.plan import Offsets


class ResultRows:
    """The outbox of a task: takes what handlers return, and dead letters; then their messages are done. Thread-safe.

    `publishes` says whether the sink may publish anything, `whole` whether the batch is one transaction.
    """

    def __init__(self, *, publishes: bool, whole: bool) -> None:
        self.publishes = publishes
        self._whole = whole
        # Guards the fields below: holders of lanes add, the task's thread takes.
        self._lock = threading.Lock()
        self._rows: list[tuple[Any, ...]] = []
        self._size = 0

    def submit(
        self, items: Sequence[Item], messages: Sequence[Result], then: Then, lane: ConsumerLane | None = None
    ) -> None:
        """Take what handlers returned for messages, or a dead letter; the messages are done then.

        Raises `SinkError` where the sink publishes nothing, and for results of several messages together where a batch
        is not one transaction: of their source partitions one may be published and another not.
        """
        name = items[0][0].assignment.route.handler.name
        if not self.publishes:
            raise SinkError(
                f"{name} returned messages, and this HandlerSink has no name under which it could remember what it "
                "has published; give it name=... (and bootstrap_servers), or return None"
            )
        if len(items) > 1 and not self._whole:
            raise SinkError(
                f"{name} returned messages for its batch as a whole, which the ledger cannot publish once: return a "
                "list with what is for each message, as [[...], None, ...], or make the sink with atomic_batches=True"
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

    def end(self, last: Offsets, report: TaskReport) -> Iterator[pa.RecordBatch]:
        """Return the rest, the last offset of each of the task's source partitions, and its report. Called once, last.

        Whatever the task's messages have published stands at or below these offsets.
        """
        self._rows += [(*part, offset, MARK, None, None, None, None, None) for part, offset in last.items()]
        self._rows.append((None, None, None, MARK, None, None, None, to_json(report), None))
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
