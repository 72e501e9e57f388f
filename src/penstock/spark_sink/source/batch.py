"""The reader of a batch query, which reads between two positions, and what it shares with that of a stream."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from penstock.clients.gc_pause import imports_set_aside
from penstock.spark_sink.source.brokers import OffsetReader
from penstock.spark_sink.source.open_transactions import OpenTransactions
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import OffsetRange, Offsets, cut, place
from penstock.spark_sink.source.pool import WorkerPool
from penstock.spark_sink.source.positions import refuse_backwards, resolve
from penstock.spark_sink.source.reading import KeptConsumer, read_ranges

#: Those of this process's tasks.
_consumers = WorkerPool[KeptConsumer]()


class SourceTask(InputPartition):
    """The ranges that a task reads, and what all tasks of its batch have in common.

    Attributes:
        partitions: how many partitions of topics the batch reads.
        is_divided: whether one of them is read by several tasks.
    """

    def __init__(self, ranges: tuple[OffsetRange, ...], partitions: int, *, is_divided: bool) -> None:
        super().__init__(ranges)
        self.partitions = partitions
        self.is_divided = is_divided


def tasks(options: SourceOptions, start: Offsets, end: Offsets, first: Offsets) -> list[InputPartition]:
    """Return the tasks between two positions, after what the logs have lost since is reported."""
    ranges = []
    for part, until in sorted(end.items()):
        # A partition the query has not met yet is read from its very beginning.
        begin, there = start.get(part, 0), min(first[part], until)
        if begin < there:
            options.report_loss(
                f"{place(part)}: offsets {begin} to {there - 1} are gone, the log begins at {first[part]}"
            )
        ranges.append(OffsetRange(*part, max(begin, there), until))
    pieces = cut(ranges, options.min_partitions, options.max_records_per_partition)
    read = [piece.part for task in pieces for piece in task]
    partitions = len(set(read))
    return [SourceTask(task, partitions, is_divided=len(read) > partitions) for task in pieces]


def written_past(
    options: SourceOptions, reader: OffsetReader, offsets: Offsets, readable: Offsets, said: str
) -> Offsets:
    """Return the real ends of those logs in which an offset lies past what may be read.

    Up to there a transaction may be open, as where a query begins behind it or has read uncommitted before; past it,
    messages are gone, and that is reported. `said` goes on after the partition, and has a place for the offset.
    """
    past = [part for part, offset in offsets.items() if offset > readable.get(part, offset)]
    written = reader.written(past) if past else {}
    for part, until in sorted(written.items()):
        if offsets[part] > until:
            options.report_loss(
                f"{place(part)}{said.format(offsets[part])}, but its log ends at {until}: the topic was created again "
                "or its log was cut"
            )
    return written


def open_transaction_text(what: str, readable: int) -> str:
    """Return the sentence for an offset that lies behind an open transaction."""
    return f"{what}, but a transaction is open at offset {readable}: what lies behind it can be read when it has ended"


def read_task(options: SourceOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Read one task's ranges, on an executor."""
    if partition.value is not None:  # Spark plans one empty task where there is nothing to read
        yield from read_ranges(options, partition.value, _consumers)
    imports_set_aside("source")


class BatchReader(DataSourceReader):
    """Reads between two positions, once."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """Plan the tasks on the driver."""
        options, reader = self._options, OffsetReader(self._options)
        parts = reader.partitions()
        first, last = reader.earliest(parts), reader.latest(parts)
        starting, ending = options.starting or "earliest", options.ending or "latest"
        start = resolve("startingOffsets", starting, first, last, reader.at_times)
        end = resolve("endingOffsets", ending, first, last, reader.at_times)
        refuse_backwards(starting, ending, start, end)
        written_past(options, reader, start, last, ": startingOffsets is {}")
        if options.read_committed:
            OpenTransactions(reader).warn({part: offset for part, offset in last.items() if end[part] >= offset})
        for part, until in written_past(options, reader, end, last, ": endingOffsets is {}").items():
            if last[part] < end[part] <= until:
                said = f"{place(part)}: endingOffsets is {end[part]}"
                options.report_loss(open_transaction_text(said, last[part]), "start the query again then")
        return tasks(options, start, {part: min(offset, last[part]) for part, offset in end.items()}, first)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one task's ranges on an executor."""
        return read_task(self._options, partition)
