"""What a task publishes, as rows of Spark: results and dead letters, each with the position of its message.

One more row for each source partition says how far the task has come there: the ledger moves over messages that
publish nothing too. The task's report is in a last row, so that one job is enough.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from penstock.consumer.assignments import Assignment, ConsumerLane, Item
from penstock.consumer.handlers.results import Result
from penstock.consumer.publishing.result_publisher import ResultTaker, Tries
from penstock.errors import SinkError
from penstock.message import Record
from penstock.spark_sink.sinks.handlers.report import TaskReport
from penstock.spark_sink.sinks.handlers.rows import STEP_BYTES, STEP_ROWS, steps
from penstock.spark_sink.sinks.kafka_publisher import Row
from penstock.spark_sink.sinks.position import offset_spans
from penstock.spark_sink.source.plan import TopicPartition

#: Columns by which results are sorted: of one message, they stand as the handler returned them.
ORDER = ("topic", "partition", "offset", "place")

#: The columns. A target of NULL publishes nothing; `report` stands alone in its row.
RESULT_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("place", pa.int32()),
        ("target_topic", pa.string()),
        ("target_partition", pa.int32()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("report", pa.string()),
    ]
)

#: The empty cells behind a position, and before a report.
_NO_RESULT = (None,) * 6
_NO_ROW = (None,) * 9


class ResultRows(ResultTaker):
    """Takes what handlers return, and dead letters; then their messages are done. Thread-safe.

    `publishes` says whether the sink may publish anything, `whole` whether the batch is one transaction.
    """

    def __init__(self, *, publishes: bool, whole: bool) -> None:
        self.publishes = publishes
        self._whole = whole
        self._last: dict[TopicPartition, int] = {}
        # Guards the fields below: holders of lanes add, the task's thread takes.
        self._lock = threading.Lock()
        self._rows: list[tuple[Any, ...]] = []
        self._size = 0
        #: Messages that were submitted with their results, and those results.
        self.handled = 0
        self.published = 0

    def note(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Pass the task's rows on; keep how far they go in each source partition."""
        for batch in batches:
            if self.publishes:
                for part, span in offset_spans(pa.Table.from_batches([batch])).items():
                    self._last[part] = max(span.last, self._last.get(part, span.last))
            yield batch

    def submit(
        self,
        lane: ConsumerLane,  # noqa: ARG002 - as the consumer's
        items: Sequence[Item],
        results: Sequence[Result],
        tries: Sequence[Tries] | None = None,  # noqa: ARG002 - the same
    ) -> None:
        """Take what handlers returned for messages, which are done then.

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
        self.add(items[-1][2], results)
        with self._lock:
            self.handled += len(items)
            self.published += len(results)
        for fetch, index, _ in items:
            fetch.assignment.tracker.complete(fetch.block, (index,))

    def has_any_of(self, assignments: Sequence[Assignment]) -> bool:  # noqa: ARG002 - as the consumer's
        """Tell that nothing is on its way: what was submitted is done."""
        return False

    def add(self, record: Record, results: Sequence[Result]) -> None:
        """Take what is to be published for a message."""
        position = (record.topic(), record.partition(), record.offset())
        rows = [
            (
                *position,
                place,
                result.topic,
                result.partition,
                result.key,
                result.value,
                _as_bytes(result.headers),
                None,
            )
            for place, result in enumerate(results)
        ]
        with self._lock:
            self._rows += rows
            self._size += sum(len(result.key or b"") + len(result.value or b"") for result in results)

    def full(self) -> Iterator[pa.RecordBatch]:
        """Return what was taken as columns, where it is enough for that."""
        if len(self._rows) >= STEP_ROWS or self._size >= STEP_BYTES:
            yield self._take()

    def end(self, report: TaskReport) -> Iterator[pa.RecordBatch]:
        """Return the rest, how far the task has come, and its report. Called once, last."""
        # The highest of the task's messages: whatever they published stands at or below it.
        self._rows += [(*part, offset, -1, *_NO_RESULT) for part, offset in self._last.items()]
        self._rows.append((*_NO_ROW, json.dumps(asdict(report))))
        yield self._take()

    def _take(self) -> pa.RecordBatch:
        with self._lock:
            rows, self._rows, self._size = self._rows, [], 0
        columns = [
            pa.array(cells, kind) for cells, kind in zip(zip(*rows, strict=True), RESULT_SCHEMA.types, strict=True)
        ]
        return pa.record_batch(columns, schema=RESULT_SCHEMA)


def published_rows(batches: Iterable[pa.RecordBatch], reports: list[str]) -> Iterator[Row]:
    """Return rows as the ledger's publisher takes them; reports are put into `reports`, as they come."""
    for batch in batches:
        for part in steps(batch):
            cells = zip(*(column.to_pylist() for column in part.columns), strict=True)
            for topic, partition, offset, _, target, place, key, value, headers, report in cells:
                if report is not None:
                    reports.append(report)
                    continue
                pairs = [(header["key"], header["value"]) for header in headers] if headers else ()
                yield Row((topic, partition), offset, target, key, value, pairs, -1 if place is None else place)


def report_of(text: str) -> TaskReport:
    """Read a report that a task sent along."""
    return TaskReport(**json.loads(text))


def _as_bytes(headers: Sequence[tuple[str, str | bytes | None]]) -> list[tuple[str, bytes | None]]:
    return [(name, value.encode() if isinstance(value, str) else value) for name, value in headers]
