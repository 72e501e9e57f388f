"""The Data Source `penstock`: Kafka for Spark without jars, committed messages only unless asked otherwise.

The driver plans offsets (`planning`, over what `log_view` tells), tasks read them (`reading`). Columns and
options are those of Spark's own Kafka source, so a query moves between the two by changing one word.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from penstock.errors import ConfigurationError, SourceError
from penstock.spark_sink import planning
from penstock.spark_sink.log_view import LogView
from penstock.spark_sink.options import Position, SourceOptions
from penstock.spark_sink.planning import EARLIEST, LATEST, OffsetRange, Offsets
from penstock.spark_sink.reading import read_range

_log = logging.getLogger("penstock.spark_sink")


def register(spark: SparkSession) -> None:
    """Make `spark.read.format("penstock")` and `spark.readStream.format("penstock")` known to a session.

    Executors need penstock importable. Registering twice does no harm.
    """
    spark.dataSource.register(PenstockSource)


class PenstockSource(DataSource):
    """The entry Spark calls; see `register` and `penstock.spark_sink.options` for the options."""

    @classmethod
    def name(cls) -> str:
        """Return the word for `format(...)`."""
        return "penstock"

    def schema(self) -> StructType:
        """Return the columns of Spark's Kafka source; wrong options end here, before anything starts."""
        return source_schema(include_headers=SourceOptions.parse(self.options).include_headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch query."""
        options = SourceOptions.parse(self.options).for_batch()
        _refuse_other_schema(schema, options)
        return BatchReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader of a streaming query."""
        options = SourceOptions.parse(self.options).for_stream()
        _refuse_other_schema(schema, options)
        return StreamReader(options)


class BatchReader(DataSourceReader):
    """Reads between two positions, once."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """Plan the tasks on the driver."""
        options, log = self._options, LogView(self._options)
        parts = log.partitions()
        first, last = log.earliest(parts), log.latest(parts)
        start = _resolve("startingOffsets", options.starting or "earliest", first, last)
        end = _resolve("endingOffsets", options.ending or "latest", first, last)
        for part, offset in end.items():
            if offset > last[part]:
                _report_loss(options, f"{_place(part)}: endingOffsets is {offset}, but the log ends at {last[part]}")
                end[part] = last[part]
        return _tasks(options, start, end, first)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one task's range on an executor."""
        return _read(self._options, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads micro-batches.

    Spark makes one for the life of a query, which plans, and one for each batch, which travels to executors
    and only reads; the connection of the planning one is therefore made when first needed.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._log: LogView | None = None
        self._target: Offsets | None = None
        self._seen: Offsets = {}

    def initialOffset(self) -> dict[str, dict[str, int]]:  # noqa: N802 - Spark's name
        """Return where a query without checkpoint begins."""
        self._view().partitions()  # one that is named and not there is a mistake, here at the beginning
        # Where the end is fixed already, "latest" is that end: what came since must not lie past it.
        latest = self._latest()
        starting = self._options.starting or "latest"
        return planning.to_json(_resolve("startingOffsets", starting, self._view().earliest(latest), latest))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return what maxOffsetsPerTrigger says."""
        limit = self._options.max_offsets
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the end of the query: what is committed now, and nothing later."""
        log = self._view()
        self._target = log.latest(log.existing())

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, dict[str, int]]:  # noqa: N802 - Spark's name
        """Return where the next batch ends, within the limit; partitions that are new are taken in."""
        begun = planning.from_json(start)
        latest = self._latest()
        for part in sorted(begun.keys() - latest.keys()):
            _report_loss(self._options, f"{_place(part)} was read up to offset {begun[part]} and exists no more")
        for part, offset in begun.items():
            if offset > latest.get(part, offset):
                _report_loss(
                    self._options,
                    f"{_place(part)} was read up to offset {offset}, but its log ends at {latest[part]}: the topic "
                    "was made anew or its log was cut",
                )
        self._seen = latest
        if not isinstance(limit, ReadMaxRows):
            return planning.to_json(latest)
        # What a log holds no more is no work: counted in, a limit would be spent on it, batch after batch.
        first = self._view().earliest(latest)
        from_here = {part: max(begun.get(part, 0), min(first[part], end)) for part, end in latest.items()}
        return planning.to_json(planning.limited(from_here, latest, limit.max_rows))

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:  # noqa: N802 - Spark's name
        """Return the ends of the logs as last seen, from which Spark's progress tells the lag."""
        return planning.to_json(self._seen) or None

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[InputPartition]:
        """Cut a batch into tasks."""
        ends = planning.from_json(end)
        # A batch that is done again after a restart was planned over logs that may have been cut or deleted since.
        if any(offset > self._seen.get(part, -1) for part, offset in ends.items()):
            ends = self._still_there(ends)
        return _tasks(self._options, planning.from_json(start), ends, self._view().earliest(ends))

    def _still_there(self, ends: Offsets) -> Offsets:
        """Return the ends of those partitions that there are, none past its log, once what is gone is reported."""
        log = self._view()
        last = log.latest(set(log.existing()) & ends.keys())
        for part, offset in sorted(ends.items()):
            if part not in last:
                _report_loss(self._options, f"{_place(part)} was to be read up to offset {offset} and exists no more")
            elif offset > last[part]:
                _report_loss(
                    self._options,
                    f"{_place(part)} was to be read up to offset {offset}, but its log ends at {last[part]}: the topic "
                    "was made anew or its log was cut",
                )
        return {part: min(ends[part], offset) for part, offset in last.items()}

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one task's range on an executor."""
        return _read(self._options, partition)

    def stop(self) -> None:
        """Let the planning connection go."""
        self._log = None

    def _view(self) -> LogView:
        if self._log is None:
            self._log = LogView(self._options)
        return self._log

    def _latest(self) -> Offsets:
        """Return the ends of the logs that are there: one may have been deleted since the query began."""
        if self._target is not None:
            return self._target
        log = self._view()
        return log.latest(log.existing())


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


def _refuse_other_schema(schema: StructType, options: SourceOptions) -> None:
    fixed = source_schema(include_headers=options.include_headers)
    if schema.fieldNames() != fixed.fieldNames():
        raise ConfigurationError(
            f"the source penstock has the columns {', '.join(fixed.fieldNames())} and takes no other schema; "
            "leave .schema(...) out and parse the value in the query"
        )


def _resolve(option: str, position: Position, first: Offsets, last: Offsets) -> Offsets:
    """Turn a position into offsets of exactly the partitions that are read."""
    if isinstance(position, str):
        return dict(first if position == "earliest" else last)
    missing, foreign = sorted(first.keys() - position.keys()), sorted(position.keys() - first.keys())
    if missing or foreign:
        names = ", ".join(_place(part) for part in missing or foreign)
        raise ConfigurationError(
            f"the option {option} lacks {names}; give an offset for every partition, -2 for earliest, -1 for latest"
            if missing
            else f"the option {option} names {names}, which the query does not read; leave it out"
        )
    words = {EARLIEST: first, LATEST: last}
    return {part: words[offset][part] if offset in words else offset for part, offset in position.items()}


def _tasks(options: SourceOptions, start: Offsets, end: Offsets, first: Offsets) -> list[InputPartition]:
    """Return the tasks between two positions, after what the logs have lost since is reported."""
    ranges = []
    for (topic, partition), until in sorted(end.items()):
        part = (topic, partition)
        # A partition the query has not met yet is read from its very beginning.
        begin = start.get(part, 0)
        if begin < min(first[part], until):
            gone = min(first[part], until)
            _report_loss(
                options, f"{_place(part)}: offsets {begin} to {gone - 1} are gone, the log begins at {first[part]}"
            )
            begin = gone
        ranges.append(OffsetRange(topic, partition, begin, until))
    return [InputPartition(part) for part in planning.split(ranges, options.min_partitions)]


def _report_loss(options: SourceOptions, what: str) -> None:
    if options.fail_on_data_loss:
        raise SourceError(
            f"{what}; check the topic and its retention, and set failOnDataLoss to false to go on regardless"
        )
    _log.warning("%s; going on, as failOnDataLoss=false says", what)


def _read(options: SourceOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    wanted = partition.value
    if wanted is None:  # Spark plans one empty task where there is nothing to read
        return iter(())
    schema = to_arrow_schema(source_schema(include_headers=options.include_headers), timezone="UTC")
    return read_range(options, schema, wanted)


def _place(part: planning.TopicPartition) -> str:
    return f"{part[0]}[{part[1]}]"


__all__ = ["BatchReader", "PenstockSource", "StreamReader", "register", "source_schema"]
