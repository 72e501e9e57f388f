"""How a batch is published to Kafka by Spark's tasks: rows in, a report of each transaction out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name under which everybody knows it

from penstock.clients.rights import MissingRightError
from penstock.errors import ConfigurationError, SinkError
from penstock.spark_sink.ledger.rules import Batch, OffsetStatistics, warn_left_out
from penstock.spark_sink.sinks.kafka_ledger import SLOTS, Target
from penstock.spark_sink.sinks.kafka_publisher import Row, SinkPublisher, publish, publishing
from penstock.spark_sink.sinks.position import POSITION
from penstock.spark_sink.source.pool import WorkerPool

#: A transaction takes rows of one source partition up to so many, or so many bytes of keys and values.
PIECE_ROWS = 10_000
PIECE_BYTES = 8 * 1024 * 1024

#: Column of a row that says only where a batch ends, and all that such a row has.
IS_END = "penstock_end"
_MARK = (*POSITION, IS_END)


class WriterCommitMessage(NamedTuple):
    """What a task reports to the driver of a transaction: rows of one source partition, or of a whole batch."""

    topic: str
    partition: int
    rows: int
    applied: int
    failure: str | None
    lacks_right: bool = False


#: Its columns.
COMMIT_MESSAGE = pa.schema(
    {
        "topic": pa.string(),
        "partition": pa.int32(),
        "rows": pa.int64(),
        "applied": pa.int64(),
        "failure": pa.string(),
        "lacks_right": pa.bool_(),
    }
)


def pieces(rows: Iterable[Row], *, whole: bool = False) -> Iterator[Sequence[Row]]:
    """Cut sorted rows into what one transaction takes: of one source partition, and never between rows of one offset.

    A `whole` batch is one piece.
    """
    piece: list[Row] = []
    size = 0
    for row in rows:
        is_full = len(piece) >= PIECE_ROWS or size >= PIECE_BYTES
        last = piece[-1] if piece and not whole else row
        if row.source != last.source or (is_full and row.offset != last.offset):
            yield piece
            piece, size = [], 0
        piece.append(row)
        size += len(row.key or b"") + len(row.value or b"")
    if piece:
        yield piece


#: What this process's tasks publish by.
_publishers = WorkerPool[SinkPublisher]()


def publish_rows(
    target: Target, rows: Iterable[Row], publishers: WorkerPool[SinkPublisher] = _publishers
) -> Iterator[WriterCommitMessage]:
    """Publish rows, sorted by source partition and offset, transaction by transaction up to the first that fails.

    By a publisher of `publishers`, or of what this process keeps. No two tasks at a time have rows of one slot.
    A failure is in the commit message: an exception would reach the driver as the text of a worker's stack.
    """
    sink = replace(target, batch=Batch("", -1))
    key = (sink.servers, frozenset(sink.config.items()), sink.name, sink.ledger, sink.whole)
    try:
        with publishers.lend(key, lambda: SinkPublisher(sink)) as publisher:
            for piece in pieces(rows, whole=target.whole):
                applied = publish(target, piece, publisher)
                yield WriterCommitMessage(*piece[0].source, publishing(piece), applied, None)
    except (SinkError, ConfigurationError, MissingRightError) as error:
        yield WriterCommitMessage("", -1, 0, 0, str(error), isinstance(error, MissingRightError))


def in_lanes(rows: DataFrame, target: Target, parallelism: int) -> DataFrame:
    """Return the rows of a batch in tasks that publish: those of a slot in one task, those of a `whole` batch in one.

    With a row for each partition where Spark has planned the batch to end: it publishes nothing, and the ledger moves
    there, whatever a filter has dropped.
    """
    ends = [
        F.struct(*(F.lit(value).alias(name) for name, value in zip(_MARK, (*part, end - 1, True), strict=True)))
        for part, (start, end) in sorted(target.batch.planned.items())
        if start != end
    ]
    if ends:
        marks = rows.sparkSession.range(0, 1, 1, 1).select(F.inline(F.array(*ends)))
        columns = [
            (F.col(column.name) if column.name in _MARK else F.lit(None)).cast(column.dataType).alias(column.name)
            for column in rows.schema.fields
        ]
        rows = rows.unionByName(marks.select(*columns))
    return rows.repartitionById(1 if target.whole else parallelism, slot_column())


def slot_column() -> Column:
    """Return the slot of a row's source partition, as `kafka_ledger.slot_of`; some slot where it has none."""
    place = F.concat_ws("/", F.col("topic"), F.col("partition").cast("string"))
    return F.pmod(F.crc32(place.cast("binary")), F.lit(SLOTS)).cast("int")


def conclude(batch_id: int, name: str, messages: Sequence[WriterCommitMessage]) -> None:
    """Warn of rows that were left out, and raise `SinkError` or `MissingRightError` where some were not published."""
    statistics = OffsetStatistics(rows=sum(message.rows for message in messages))
    for message in messages:
        if message.applied:
            part = message.topic, message.partition
            statistics.applied[part] = statistics.applied.get(part, 0) + message.applied
    warn_left_out(batch_id, f"sink {name}", statistics)
    failures = sorted((message for message in messages if message.failure), key=lambda failed: not failed.lacks_right)
    if failures:
        text = f"batch {batch_id}: {failures[0].failure} (tasks that failed: {len(failures)})"
        raise MissingRightError.from_text(text) if failures[0].lacks_right else SinkError(text)
