"""What a task publishes, as rows of Spark: results and dead letters, each with the position of its message.

Besides, one row for each source partition that says how far the task has come there: the ledger moves over messages
that publish nothing too. The task's report comes along in a last row, so that one job is enough.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import IO, Any, NamedTuple

import pyarrow as pa

from penstock.consumer.handlers.results import Result, Results
from penstock.errors import SinkError
from penstock.message import Record
from penstock.spark_sink.ledger.kafka_target import Row
from penstock.spark_sink.sinks.handlers.execution.key_queues import HandlerCall
from penstock.spark_sink.sinks.handlers.execution.report import TaskReport
from penstock.spark_sink.sinks.handlers.execution.rows import steps
from penstock.spark_sink.sinks.position import offset_spans
from penstock.spark_sink.source.plan import TopicPartition

#: Columns by which results are sorted: of one message, they stand as the handler returned them.
ORDER = ("topic", "partition", "offset", "place")

#: The columns, as Spark's DDL and as Arrow's. A target of NULL publishes nothing; `report` stands alone in its row.
RESULT_DDL = (
    "topic string, partition int, offset bigint, place int, target_topic string, target_partition int, key binary, "
    "value binary, headers array<struct<key:string,value:binary>>, report string"
)
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

#: Rows, and bytes of keys and values, that are Python objects before they become columns.
_STEP_ROWS = 4_096
_STEP_BYTES = 8 * 1024 * 1024
#: Bytes of columns that a task keeps in memory; more are in a file.
_IN_MEMORY_BYTES = 32 * 1024 * 1024


class _Cells(NamedTuple):
    """A row, in the order of the columns."""

    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    place: int | None = None
    target_topic: str | None = None
    target_partition: int | None = None
    key: bytes | None = None
    value: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] | None = None
    report: str | None = None


class ResultRows:
    """Gathers what a task publishes until its report is made. One thread calls it at a time, and closes it.

    `whole` says whether the batch is one transaction. More than some megabytes are in a file without a name, in a
    folder of Spark's: a task that dies leaves nothing.
    """

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._rows: list[_Cells] = []
        self._size = 0
        self._last: dict[TopicPartition, int] = {}
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - `close` closes it
            _IN_MEMORY_BYTES, dir=_local_folder()
        )
        self._stream: Any = pa.ipc.new_stream(self._file, RESULT_SCHEMA)

    def note(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Pass the task's rows on; keep how far they go in each source partition."""
        for batch in batches:
            for part, span in offset_spans(pa.Table.from_batches([batch])).items():
                self._last[part] = max(span.last, self._last.get(part, span.last))
            yield batch

    def take(self, call: HandlerCall, results: Results) -> int:
        """Take what came of a call that is done; return how many messages that is.

        Raises `SinkError` for results of several messages together where a batch is not one transaction: those
        messages may be of several source partitions, of which one may be published and another not.
        """
        if results.each is not None:
            pairs = zip(call.items, results.each, strict=True)
            return sum(self._add(record, found) for (_, record), found in pairs)
        if call.route.batch > 1 and not self._whole:
            raise SinkError(
                f"{call.route.handler.name} returned messages for its batch as a whole, which the ledger cannot "
                "publish once: return a list with what is for each message, as [[...], None, ...], or make the sink "
                "with atomic_batches=True"
            )
        return self._add(call.items[-1][1], results.messages)

    def add_dead_letter(self, record: Record, topic: str, headers: Sequence[tuple[str, str | bytes | None]]) -> None:
        """Take a message that is given up, for its dead-letter topic."""
        self._add(record, [Result(topic, record.value(), record.key(), list(headers), -1)])

    def _add(self, record: Record, results: Sequence[Result]) -> int:
        for place, one in enumerate(results):
            headers = [(name, value.encode() if isinstance(value, str) else value) for name, value in one.headers]
            self._rows.append(
                _Cells(
                    record.topic(), record.partition(), record.offset(), place,
                    one.topic, one.partition, one.key, one.value, headers,
                )
            )  # fmt: skip
            self._size += len(one.key or b"") + len(one.value or b"")
            if len(self._rows) >= _STEP_ROWS or self._size >= _STEP_BYTES:
                self._store()
        return len(results)

    def _store(self) -> None:
        """Make columns of the rows at hand."""
        columns = [
            pa.array(cells, kind)
            for cells, kind in zip(zip(*self._rows, strict=True), RESULT_SCHEMA.types, strict=True)
        ]
        self._stream.write_batch(pa.record_batch(columns, schema=RESULT_SCHEMA))
        self._rows.clear()
        self._size = 0

    def batches(self, report: TaskReport) -> Iterator[pa.RecordBatch]:
        """Return all that was taken, how far the task has come, and its report. Called once."""
        for (topic, partition), offset in self._last.items():
            # The highest of the task's messages: whatever they published stands at or below it.
            self._rows.append(_Cells(topic, partition, offset, -1))
        self._rows.append(_Cells(report=json.dumps(asdict(report))))
        self._store()
        self._stream.close()
        self._file.seek(0)
        yield from pa.ipc.open_stream(self._file)

    def close(self) -> None:
        """Let the memory or the file go."""
        self._file.close()


def published_rows(batches: Iterator[pa.RecordBatch], reports: list[str]) -> Iterator[Row]:
    """Return rows as the ledger's publisher takes them; reports are put into `reports`, as they come."""
    for batch in batches:
        for part in steps(batch):
            cells = zip(*(column.to_pylist() for column in part.columns), strict=True)
            for topic, partition, offset, _, target, place, key, value, headers, report in cells:
                if report is not None:
                    reports.append(report)
                    continue
                pairs = [(one["key"], one["value"]) for one in headers] if headers else ()
                yield Row((topic, partition), offset, target, key, value, pairs, -1 if place is None else place)


def report_of(text: str) -> TaskReport:
    """Read a report that a task sent along."""
    return TaskReport(**json.loads(text))


def _local_folder() -> str | None:
    """Return a folder in which Spark keeps what does not fit into memory; None for the system's."""
    folders = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
    return next((one for one in folders if one and os.access(one, os.W_OK)), None)
