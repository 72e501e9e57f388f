"""The reader of a batch query: it reads between two positions, once."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from penstock.spark_sink.source.offsets.positions import refuse_backwards, resolve
from penstock.spark_sink.source.options.options import SourceOptions
from penstock.spark_sink.source.planning.missing_partitions import place
from penstock.spark_sink.source.planning.offset_reader import OffsetReader
from penstock.spark_sink.source.planning.open_transactions import OpenTransactions
from penstock.spark_sink.source.tasks import open_transaction_text, read_task, report_loss, tasks, written_past


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
        written = written_past(reader, {part: max(start[part], end[part]) for part in last}, last)
        for part, until in written.items():
            if start[part] > until:
                report_loss(options, f"{place(part)}: startingOffsets is {start[part]}, but the log ends at {until}")
        if options.read_committed:
            OpenTransactions(reader).warn({part: offset for part, offset in last.items() if end[part] >= offset})
        for part, until in written.items():
            if end[part] > until:
                report_loss(options, f"{place(part)}: endingOffsets is {end[part]}, but the log ends at {until}")
            elif end[part] > last[part]:
                waiting = open_transaction_text(f"{place(part)}: endingOffsets is {end[part]}", last[part])
                report_loss(options, waiting, "start the query again then")
            end[part] = min(end[part], last[part])
        return tasks(options, start, end, first)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one task's ranges on an executor."""
        return read_task(self._options, partition)
