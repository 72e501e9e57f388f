"""The Data Source `penstock`: Kafka for Spark without jars; committed messages only, by default.

The driver plans offsets (`brokers`, `plan`), and tasks read them (`reading`). Columns and options are those of Spark's
own Kafka source, so a query can switch between the two by one word.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from penstock.clients.gc_pause import imports_set_aside
from penstock.errors import ConfigurationError, SourceError
from penstock.spark_sink.source.brokers import (
    GoneTopics,
    OffsetReader,
    StalledLogs,
    View,
    report_gone,
    warn_of_open_transactions,
)
from penstock.spark_sink.source.columns import source_schema
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import (
    EARLIEST,
    LATEST,
    Log,
    OffsetRange,
    Offsets,
    TopicPartition,
    cut,
    from_json,
    limited,
    place,
    to_json,
)
from penstock.spark_sink.source.pool import WorkerPool
from penstock.spark_sink.source.positions import Position
from penstock.spark_sink.source.reading import KeptConsumer, read_ranges
from penstock.spark_sink.source.session import use_this_python

#: The kept consumers of this process's tasks.
_consumers = WorkerPool[KeptConsumer]()

_log = logging.getLogger("penstock.spark_sink")


def register(spark: SparkSession) -> None:
    """Register the format "penstock" with a session, for `spark.read` and `spark.readStream`.

    Executors must be able to import penstock. On a local master, Spark's workers run this process's Python from now on,
    unless `PYSPARK_PYTHON` is set; on clusters, set it. Registering twice does no harm.
    """
    use_this_python(spark)
    spark.dataSource.register(PenstockSource)


class PenstockSource(DataSource):
    """The entry point for Spark; see `register`, and `penstock.spark_sink.source.options` for the options."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(...)`."""
        return "penstock"

    def schema(self) -> StructType:
        """Return the columns of Spark's Kafka source. Wrong options raise here, before anything starts."""
        return source_schema(include_headers=SourceOptions.parse(self.options).include_headers)

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - Spark compares it with what is read
        """Return the reader of a batch query."""
        return BatchReader(SourceOptions.parse(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802, ARG002 - Spark's name; as above
        """Return the reader of a streaming query."""
        return StreamReader(SourceOptions.parse(self.options).for_stream())


class BatchReader(DataSourceReader):
    """Reads once, between two positions."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """Plan the tasks on the driver."""
        options, reader = self._options, OffsetReader(self._options)
        logs = reader.first_view().logs
        starting = options.starting or Position("startingOffsets", EARLIEST)
        ending = options.ending or Position("endingOffsets", LATEST)
        start, end = (position.resolve(logs, reader.at_time) for position in (starting, ending))
        for part, log in sorted(logs.items()):
            # A log that begins past the end, or ends before the start, has nothing to read, which is no mistake.
            if start[part] > end[part] and start[part] > log.first and end[part] < log.end:
                raise ConfigurationError(
                    f"{place(part)} would be read from offset {start[part]} to {end[part]}: its start lies past its "
                    "end; give an earlier start or a later end"
                )
        warn_of_open_transactions({part: log for part, log in logs.items() if end[part] >= log.end})
        return tasks(options, start, end, logs)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one task's ranges on an executor."""
        return read_task(self._options, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads micro-batches.

    Spark makes one for the life of a query, which plans, and one for each batch, which is pickled for executors and
    only reads. So the planning connection is made at its first use.
    """

    def __init__(self, options: SourceOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._kafka: OffsetReader | None = None
        #: The fixed end of the query, if any.
        self._target: Offsets | None = None
        #: The logs as last seen.
        self._logs: Mapping[TopicPartition, Log] = {}
        self._stalled = StalledLogs(clock)
        self._gone = GoneTopics(options)

    def initialOffset(self) -> dict[str, dict[str, int]]:  # noqa: N802 - Spark's name
        """Return the start of a query without checkpoint."""
        self._see(self._reader().first_view())
        if self._options.starting is None and any(log.first < log.end for log in self._logs.values()):
            _log.warning(
                "the query over subscribe=%s begins at the end of the logs, as it has no checkpoint yet and no "
                "startingOffsets: what was sent before is not read. penstock.spark_sink.start_sink begins where the "
                "sink's ledger says; or give startingOffsets (earliest, latest or JSON)",
                ",".join(self._options.topics),
            )
        starting = self._options.starting or Position("startingOffsets", LATEST)
        return to_json(starting.resolve(self._logs, self._reader().at_time))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the limit of `maxOffsetsPerTrigger`."""
        most = self._options.max_offsets
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the end of the query at the messages that are committed now."""
        self._look({})
        self._target = {part: log.end for part, log in self._logs.items()}
        warn_of_open_transactions(self._logs)

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, dict[str, int]]:  # noqa: N802 - Spark's name
        """Return the end of the next batch, within the limit, including new partitions."""
        begun = {part: max(0, offset) for part, offset in from_json(start).items()}
        view = self._look(begun)
        if self._target is None:
            self._stalled.watch(self._logs)
        # A deleted topic keeps its position. A recreated one goes back in an empty batch, also from 0, for the ledgers.
        latest = self._gone.fixed(begun, view)
        for part, log in self._logs.items():
            if part in latest:
                continue
            offset = begun.get(part, 0)
            latest[part] = log.end
            if offset > log.end:
                report_past_log(self._options, part, "from", offset, log)
                if offset <= log.written:
                    # A transaction is open below the query's position: it stays until the end has reached it.
                    latest[part] = offset
        if isinstance(limit, ReadMaxRows):
            # Deleted offsets are no work: otherwise batch after batch would spend its limit on them.
            first = {part: min(log.first, latest[part]) for part, log in self._logs.items()}
            from_here = {part: max(begun.get(part, 0), first.get(part, 0)) for part in latest}
            latest = limited(from_here, latest, limit.max_rows)
        return to_json(latest)

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:  # noqa: N802 - Spark's name
        """Return the ends of the logs as last seen. Spark's progress computes the lag from them."""
        return to_json({part: log.end for part, log in self._logs.items()}) or None

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[InputPartition]:
        """Cut a batch into tasks."""
        begun = {part: max(0, offset) for part, offset in from_json(start).items()}
        ends = {part: offset for part, offset in from_json(end).items() if offset > begun.get(part, 0)}
        # A batch that is repeated after a restart was planned earlier. Its logs may have been cut or deleted since.
        if any(part not in self._logs or offset > self._logs[part].end for part, offset in ends.items()):
            view = self._look(ends)
            for part in sorted(ends.keys() - self._logs.keys()):
                # If it were left out, the rows of a hidden partition would be skipped for ever.
                said = f"{place(part)} was to be read up to offset {ends.pop(part)}"
                report_gone(self._options, part, said, view)
        return tasks(self._options, begun, ends, self._logs)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one task's ranges on an executor."""
        return read_task(self._options, partition)

    def stop(self) -> None:
        """Close the planning connection."""
        self._kafka = None

    def _reader(self) -> OffsetReader:
        if self._kafka is None:
            self._kafka = OffsetReader(self._options)
        return self._kafka

    def _look(self, begun: Iterable[TopicPartition]) -> View:
        """Return the view of all topics; questions about topics that the query reads already are repeated."""
        # Missing topics that were reported are not asked for repeatedly: the other topics would wait for them.
        expected = {topic for topic, _ in begun if topic in self._options.topics} - self._gone.reported
        return self._see(self._reader().view(expected))

    def _see(self, view: View) -> View:
        """Note the ends of logs. With a fixed end, that is the end of each log."""
        if self._target is not None:
            target = self._target
            ends = {
                part: replace(log, end=min(log.end, target[part])) for part, log in view.logs.items() if part in target
            }
            view = replace(view, logs=ends)
        self._logs = view.logs
        return view


def tasks(
    options: SourceOptions, start: Offsets, end: Offsets, logs: Mapping[TopicPartition, Log]
) -> list[InputPartition]:
    """Return the tasks between two positions, with offsets clipped to the logs. Missing offsets are reported first."""
    ranges = []
    for part, until in sorted(end.items()):
        # A partition the query has not met yet is read from its very beginning.
        log, begin = logs[part], start.get(part, 0)
        report_past_log(options, part, "from", begin, log)
        report_past_log(options, part, "up to", until, log)
        if log.end < until <= log.written:
            # Clipped at this end, a batch of a stream would skip messages that are committed later.
            raise SourceError(
                f"{place(part)} is to be read up to offset {until}, but a transaction is open at offset {log.end}: "
                "what lies behind it can be read when it has ended; start the query again then"
            )
        first = min(log.first, until)
        if begin < first:
            options.report_loss(
                f"{place(part)}: offsets {begin} to {first - 1} are gone, the log begins at {log.first}"
            )
        ranges.append(OffsetRange(*part, max(begin, first), min(until, log.end)))
    return [InputPartition(task) for task in cut(ranges, options.min_partitions)]


def report_past_log(options: SourceOptions, part: TopicPartition, way: str, offset: int, log: Log) -> None:
    """Report a start or end offset past the last written record."""
    if offset > log.written:
        options.report_loss(
            f"{place(part)} is to be read {way} offset {offset}, but its log ends at {log.written}: the topic was "
            "created again or its log was cut"
        )


def read_task(options: SourceOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Read one task's ranges, on an executor."""
    if partition.value is not None:  # Spark plans one empty task where there is nothing to read
        yield from read_ranges(options, partition.value, _consumers)
    imports_set_aside("source")
