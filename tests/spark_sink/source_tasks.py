"""The source without Spark around it: options of a query, the ranges of its tasks, and what reading them gives."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from penstock.devbroker import DevBroker
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import OffsetRange, TopicPartition
from penstock.spark_sink.source.pool import WorkerPool
from penstock.spark_sink.source.reading import KeptConsumer, read_ranges


class Clock:
    """Seconds moved by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def options_for(broker: DevBroker, topic: str | None = None, **options: str) -> SourceOptions:
    """Return the options of a query, over one topic or as the options say."""
    chosen = {} if topic is None else {"subscribe": topic}
    return SourceOptions.parse({"kafka.bootstrap.servers": broker.bootstrap_servers, **chosen, **options})


def ranges(tasks: Iterable[InputPartition]) -> list[OffsetRange]:
    """Return what tasks read."""
    return [one for task in tasks for one in task.value]


def batches_read(options: SourceOptions, *wanted: OffsetRange) -> list[pa.RecordBatch]:
    """Read a task."""
    pool = WorkerPool[KeptConsumer]()
    try:
        return list(read_ranges(options, wanted, pool))
    finally:
        pool.close()


def rows_of(batches: Iterable[pa.RecordBatch]) -> dict[TopicPartition, dict[int, bytes | None]]:
    """Return the values of each partition by their offsets, in their order."""
    found: dict[TopicPartition, dict[int, bytes | None]] = {}
    for batch in batches:
        for row in batch.to_pylist():
            found.setdefault((row["topic"], row["partition"]), {})[row["offset"]] = row["value"]
    return found


def offsets_read(options: SourceOptions, wanted: OffsetRange) -> list[int]:
    """Read a range; return the offsets of its rows."""
    return [offset for batch in batches_read(options, wanted) for offset in batch["offset"].to_pylist()]
