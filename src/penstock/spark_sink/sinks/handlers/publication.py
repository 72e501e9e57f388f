"""The publication of what the handlers of a batch returned: rows of its tasks in, reports out.

Handlers and publication are two stages of one Spark job. Between them stands a shuffle, in which results are written
down: a task that publishes and is tried again publishes what was returned before, and no handler is called for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame, Row
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.clients.gc_pause import imports_set_aside
from penstock.spark_sink.sinks.handlers.report import TaskReport
from penstock.spark_sink.sinks.handlers.results import ORDER, published_rows, report_of
from penstock.spark_sink.sinks.kafka_ledger import Target
from penstock.spark_sink.sinks.kafka_publication import (
    COMMIT_MESSAGE,
    WriterCommitMessage,
    conclude,
    in_lanes,
    publish_rows,
)

#: What a task that publishes tells: of a source partition, or the report of a task that has called handlers.
_PUBLISHED = COMMIT_MESSAGE.append(pa.field("report", pa.string()))


@dataclass(frozen=True, slots=True)
class _PublishTask:
    """Publishes the rows of one Spark task, sorted by `ORDER`. Can be pickled."""

    target: Target

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reports: list[str] = []
        for message in publish_rows(self.target, published_rows(batches, reports)):
            yield pa.RecordBatch.from_pylist([message._asdict()], schema=_PUBLISHED)
        yield pa.RecordBatch.from_pylist([{"report": report} for report in reports], schema=_PUBLISHED)
        imports_set_aside("publishing")


def published(handled: DataFrame, target: Target, parallelism: int) -> DataFrame:
    """Return the frame whose job handles a batch and publishes its results; its rows are for `reports_of`."""
    lanes = in_lanes(handled, target, parallelism).sortWithinPartitions(*ORDER)
    return lanes.mapInArrow(_PublishTask(target), from_arrow_schema(_PUBLISHED))


def reports_of(batch_id: int, name: str, rows: Sequence[Row]) -> list[TaskReport]:
    """Return the reports of a batch's tasks, all results being published by the sink of that name.

    Raises:
        SinkError: some were not; others may be, and are left out when the batch comes again.
        MissingRightError: the same, for want of a right.
    """
    fields = WriterCommitMessage._fields
    messages = [WriterCommitMessage(*(row[field] for field in fields)) for row in rows if row["report"] is None]
    conclude(batch_id, name, messages)
    return [report_of(row["report"]) for row in rows if row["report"] is not None]
