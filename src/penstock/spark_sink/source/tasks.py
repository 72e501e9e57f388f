"""What the readers of batches and of streams share: how a range becomes tasks, and how lost messages are reported."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, BinaryType, IntegerType, LongType, StringType, StructType, TimestampType

from penstock.clients.gc_pause import imports_set_aside
from penstock.spark_sink.errors import DataLossError
from penstock.spark_sink.source.consumer_pool import ConsumerPool
from penstock.spark_sink.source.offsets import planning
from penstock.spark_sink.source.offsets.planning import OffsetRange, Offsets
from penstock.spark_sink.source.options.options import SourceOptions
from penstock.spark_sink.source.partition_reader import read_ranges
from penstock.spark_sink.source.planning.missing_partitions import place
from penstock.spark_sink.source.planning.offset_reader import OffsetReader

#: Those of this process's tasks.
_consumers = ConsumerPool()

_log = logging.getLogger("penstock.spark_sink")


class SourceTask(InputPartition):
    """The ranges that a task reads, and what is so of all tasks of its batch.

    Attributes:
        partitions: how many partitions of topics the batch reads.
        is_divided: whether one of them is read by several tasks.
    """

    def __init__(self, ranges: tuple[OffsetRange, ...], partitions: int, *, is_divided: bool) -> None:
        super().__init__(ranges)
        self.partitions = partitions
        self.is_divided = is_divided


def source_schema(*, include_headers: bool) -> StructType:
    """Return the columns of Spark's own Kafka source."""
    schema = (
        StructType()
        .add("key", BinaryType())
        .add("value", BinaryType())
        .add("topic", StringType())
        .add("partition", IntegerType())
        .add("offset", LongType())
        .add("timestamp", TimestampType())
        .add("timestampType", IntegerType())
    )
    if include_headers:
        schema.add("headers", ArrayType(StructType().add("key", StringType()).add("value", BinaryType())))
    return schema


def tasks(options: SourceOptions, start: Offsets, end: Offsets, first: Offsets) -> list[InputPartition]:
    """Return the tasks between two positions, after what the logs have lost since is reported."""
    ranges = []
    for (topic, partition), until in sorted(end.items()):
        part = (topic, partition)
        # A partition the query has not met yet is read from its very beginning.
        begin = start.get(part, 0)
        if begin < min(first[part], until):
            gone = min(first[part], until)
            report_loss(
                options, f"{place(part)}: offsets {begin} to {gone - 1} are gone, the log begins at {first[part]}"
            )
            begin = gone
        ranges.append(OffsetRange(topic, partition, begin, until))
    least, most = options.min_partitions, options.max_records_per_partition
    if least is None and most is None:
        cut = planning.packed(ranges)
    else:
        cut = [(part,) for part in planning.split(ranges, least, most)]
    read = [(one.topic, one.partition) for task in cut for one in task]
    partitions = len(set(read))
    return [SourceTask(task, partitions, is_divided=len(read) > partitions) for task in cut]


def report_loss(options: SourceOptions, what: str, remedy: str = "check the topic and its retention") -> None:
    """Raise `DataLossError` for messages that are gone, or log them where the options allow to go on without."""
    if options.fail_on_data_loss:
        raise DataLossError(f"{what}; {remedy}, or set failOnDataLoss to false to go on regardless")
    _log.warning("%s; going on, as failOnDataLoss=false says", what)


def open_transaction_text(what: str, readable: int) -> str:
    """Return the sentence for an offset that lies behind an open transaction."""
    return f"{what}, but a transaction is open at offset {readable}: what lies behind it can be read when it has ended"


def written_past(reader: OffsetReader, offsets: Offsets, readable: Offsets) -> Offsets:
    """Return the real ends of those logs in which an offset lies past what may be read.

    Up to there a transaction may be open, as where a query begins behind it or has read uncommitted before; past it,
    messages are gone.
    """
    past = [part for part, offset in offsets.items() if offset > readable.get(part, offset)]
    return reader.written(past) if past else {}


def read_task(options: SourceOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Read one task's ranges, on an executor."""
    wanted: tuple[OffsetRange, ...] | None = partition.value
    if wanted is not None:  # Spark plans one empty task where there is nothing to read
        schema = to_arrow_schema(source_schema(include_headers=options.include_headers), timezone="UTC")
        yield from read_ranges(options, schema, wanted, _consumers)
    imports_set_aside("source")
