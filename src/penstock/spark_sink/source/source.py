"""The Data Source `penstock`: Kafka for Spark without jars, committed messages only unless asked otherwise.

The driver plans offsets (`planning`, over what `log_view` tells), tasks read them (`reading`). Columns and
options are those of Spark's own Kafka source, so a query moves between the two by changing one word.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
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

from penstock.clients.gc_pause import imports_set_aside
from penstock.errors import ConfigurationError, SourceError
from penstock.spark_sink.source import planning
from penstock.spark_sink.source.absences import Absences, place
from penstock.spark_sink.source.offset_reader import LogView, Topics
from penstock.spark_sink.source.open_transactions import OpenTransactions
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.partition_reader import read_range
from penstock.spark_sink.source.planning import OffsetRange, Offsets
from penstock.spark_sink.source.positions import refuse_backwards, resolve
from penstock.spark_sink.source.session import settle_environment, use_this_python

#: Of topics that were not asked for.
_NOTHING_SAID = Topics(counts={}, ids={}, refused={})

_log = logging.getLogger("penstock.spark_sink")


def register(spark: SparkSession) -> None:
    """Make `spark.read.format("penstock")` and `spark.readStream.format("penstock")` known to a session.

    Executors need penstock importable: on a local master Spark's workers run this process's Python from here on, unless
    `PYSPARK_PYTHON` says another; elsewhere set it. Registering twice does no harm.
    """
    use_this_python(spark)
    spark.dataSource.register(PenstockSource)
    settle_environment(spark, PenstockSource.name())


class PenstockSource(DataSource):
    """The entry Spark calls; see `register` and `penstock.spark_sink.source.options` for the options."""

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
        starting, ending = options.starting or "earliest", options.ending or "latest"
        start = resolve("startingOffsets", starting, first, last, log.at_times)
        end = resolve("endingOffsets", ending, first, last, log.at_times)
        refuse_backwards(starting, ending, start, end)
        written = _written_past(log, {part: max(start[part], end[part]) for part in last}, last)
        for part, until in written.items():
            if start[part] > until:
                _report_loss(options, f"{place(part)}: startingOffsets is {start[part]}, but the log ends at {until}")
        if options.read_committed:
            OpenTransactions(log).tell({part: offset for part, offset in last.items() if end[part] >= offset})
        for part, until in written.items():
            if end[part] > until:
                _report_loss(options, f"{place(part)}: endingOffsets is {end[part]}, but the log ends at {until}")
            elif end[part] > last[part]:
                waiting = _waiting(f"{place(part)}: endingOffsets is {end[part]}", last[part])
                _report_loss(options, waiting, "start the query again then")
            end[part] = min(end[part], last[part])
        return _tasks(options, start, end, first)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one task's range on an executor."""
        return _read(self._options, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads micro-batches.

    Spark makes one for the life of a query, which plans, and one for each batch, which travels to executors
    and only reads; the connection of the planning one is therefore made when first needed.
    """

    def __init__(self, options: SourceOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._log: LogView | None = None
        self._target: Offsets | None = None
        self._seen: Offsets = {}
        self._open: OpenTransactions | None = None
        self._triggered_at: float | None = None
        self._absences = Absences(options, partial(_report_loss, options))

    def initialOffset(self) -> dict[str, dict[str, int]]:  # noqa: N802 - Spark's name
        """Return where a query without checkpoint begins."""
        log = self._view()
        log.partitions()  # one that is named and not there is a mistake, here at the beginning
        # Where the end is fixed already, "latest" is that end: what came since must not lie past it.
        latest = self._latest()
        first = log.earliest(latest)
        if self._options.starting is None and any(first[part] < end for part, end in latest.items()):
            _log.warning(
                "the query over %s begins at the end of the logs, as it has no checkpoint yet and no startingOffsets: "
                "what was sent before is not read. penstock.spark_sink.start_sink begins where the sink's ledger says; "
                "or give startingOffsets (earliest, latest or JSON)",
                self._options.selection,
            )
        starting = self._options.starting or "latest"
        return planning.to_json(resolve("startingOffsets", starting, first, latest, log.at_times))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return what maxOffsetsPerTrigger says; Spark has no limit of both kinds, so the least is held here."""
        if self._options.max_offsets is not None:
            return ReadMaxRows(self._options.max_offsets)
        return ReadAllAvailable() if self._options.min_offsets is None else ReadMinRows(self._options.min_offsets)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the end of the query: what is committed now, and nothing later."""
        log = self._view()
        self._target = self._latest()
        if self._options.read_committed:
            OpenTransactions(log).tell(self._target)

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, dict[str, int]]:  # noqa: N802 - Spark's name
        """Return where the next batch ends, within the limit; partitions that are new are taken in."""
        begun = planning.from_json(start)
        self._refuse_another_query(begun)
        there, topics = self._there(begun)
        # Back to 0 in a batch of its own, which is empty: the next one begins there.
        anew = self._absences.made_anew(begun, topics)
        known = {part: offset for part, offset in begun.items() if part not in anew}
        unseen = self._absences.kept(known, there, topics)
        written = _written_past(self._view(), known, there)
        for part, until in written.items():
            if known[part] > until:
                _report_loss(
                    self._options,
                    f"{place(part)} was read up to offset {known[part]}, but its log ends at {until}: the topic was "
                    "made anew or its log was cut",
                )
        ahead = {part for part, until in written.items() if known[part] <= until}
        if self._open is not None and self._target is None:
            self._open.watch(there, at_once=ahead)
        # What may be read ends before the query's position: it stays where it is until the end has come to it.
        latest = self._seen = there | {part: known[part] for part in ahead} | unseen | anew
        if not isinstance(limit, ReadMaxRows | ReadMinRows):
            return planning.to_json(latest)
        # What a log holds no more is no work: counted in, a limit would be spent on it, batch after batch.
        first = self._view().earliest(latest.keys() - unseen.keys())
        from_here = {part: max(begun.get(part, 0), min(first.get(part, 0), end)) for part, end in latest.items()}
        if self._is_too_little(sum(max(0, latest[part] - offset) for part, offset in from_here.items())):
            # The same text as before tells Spark that there is nothing new; what is gone is told once.
            return planning.to_json({part: min(begun[part], end) for part, end in latest.items() if part in begun})
        if isinstance(limit, ReadMaxRows):
            return planning.to_json(planning.limited(from_here, latest, limit.max_rows))
        return planning.to_json(latest)

    def _is_too_little(self, behind: int) -> bool:
        """Tell whether a batch is put off, as minOffsetsPerTrigger and maxTriggerDelay say.

        As with Spark's own source, the first batch after a start is not. Where the end is fixed, none is: more would
        never come.
        """
        if self._options.min_offsets is None or self._target is not None or not behind:
            return False
        now = self._clock()
        waited = None if self._triggered_at is None else now - self._triggered_at
        if waited is not None and waited < self._options.max_trigger_delay_s and behind < self._options.min_offsets:
            return True
        self._triggered_at = now
        return False

    def _refuse_another_query(self, noted: Iterable[planning.TopicPartition]) -> None:
        """Raise where the checkpoint's offsets are of topics of which this query reads none."""
        topics = sorted({topic for topic, _ in noted})
        if topics and not any(map(self._options.selection.covers, topics)):
            raise ConfigurationError(
                f"the checkpoint was written by a query over {', '.join(topics)}, but this one has "
                f"{self._options.selection}; give it a checkpointLocation of its own"
            )

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:  # noqa: N802 - Spark's name
        """Return the ends of the logs as last seen, from which Spark's progress tells the lag."""
        return planning.to_json(self._seen) or None

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[InputPartition]:
        """Cut a batch into tasks."""
        begun, ends = planning.from_json(start), planning.from_json(end)
        self._refuse_another_query(ends)
        # A batch that is done again after a restart was planned over logs that may have been cut or deleted since.
        if any(offset > self._seen.get(part, -1) for part, offset in ends.items()):
            ends = self._still_there(begun, ends)
        ends = {part: offset for part, offset in ends.items() if offset > begun.get(part, 0)}
        return _tasks(self._options, begun, ends, self._view().earliest(ends))

    def _still_there(self, start: Offsets, ends: Offsets) -> Offsets:
        """Return the ends of those partitions that there are, none past its log, once what is gone is reported."""
        log, selection = self._view(), self._options.selection
        topics = log.topics(_covered(self._options, ends))
        last = log.latest(set(selection.pick_existing(topics.counts)) & ends.keys())
        written = _written_past(log, ends, last)
        for part, offset in sorted(ends.items()):
            if part not in last:
                if offset > start.get(part, 0):
                    self._report_unread(part, offset, topics)
            elif offset > written.get(part, offset):
                _report_loss(
                    self._options,
                    f"{place(part)} was to be read up to offset {offset}, but its log ends at {written[part]}: the "
                    "topic was made anew or its log was cut",
                )
            elif part in written and offset > start.get(part, 0):
                # Cut short, the batch would leave out for ever what is committed later.
                waiting = _waiting(f"{place(part)} was to be read up to offset {offset}", last[part])
                raise SourceError(f"{waiting}; start the query again then")
        return {part: min(ends[part], offset) for part, offset in last.items()}

    def _report_unread(self, part: planning.TopicPartition, offset: int, topics: Topics) -> None:
        """Report a partition of a batch that is done again and cannot be seen."""
        read = f"{place(part)} was to be read up to offset {offset}"
        if not self._options.selection.covers(part[0]):
            _report_loss(self._options, f"{read} and is read no more, as this query has {self._options.selection}")
        elif (error := self._absences.unseen(part, read, topics)) is not None:
            # Left out, its rows would be skipped for ever, whatever is said of losses.
            raise error
        else:
            _report_loss(self._options, f"{read} and exists no more")

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one task's range on an executor."""
        return _read(self._options, partition)

    def stop(self) -> None:
        """Let the planning connection go."""
        self._log = self._open = None

    def _view(self) -> LogView:
        if self._log is None:
            self._log = LogView(self._options)
            if self._options.read_committed:
                self._open = OpenTransactions(self._log, self._clock)
        return self._log

    def _latest(self) -> Offsets:
        """Return the ends of the logs that are there: one may have been deleted since the query began."""
        return self._there({})[0]

    def _there(self, begun: Offsets) -> tuple[Offsets, Topics]:
        """Return the ends of the logs that can be seen, and what the brokers say of the topics."""
        log = self._view()
        if self._target is not None and begun.keys() <= self._target.keys():
            return self._target, _NOTHING_SAID
        # Of those that are known to be missing it is not asked again and again: the others would wait for it.
        topics = log.topics(_covered(self._options, begun) - self._absences.told)
        if self._target is not None:
            return self._target, topics
        return log.latest(self._options.selection.pick_existing(topics.counts)), topics


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
                options, f"{place(part)}: offsets {begin} to {gone - 1} are gone, the log begins at {first[part]}"
            )
            begin = gone
        ranges.append(OffsetRange(topic, partition, begin, until))
    return [
        InputPartition(part)
        for part in planning.split(ranges, options.min_partitions, options.max_records_per_partition)
    ]


def _report_loss(options: SourceOptions, what: str, remedy: str = "check the topic and its retention") -> None:
    if options.fail_on_data_loss:
        raise SourceError(f"{what}; {remedy}, or set failOnDataLoss to false to go on regardless")
    _log.warning("%s; going on, as failOnDataLoss=false says", what)


def _waiting(what: str, readable: int) -> str:
    return f"{what}, but a transaction is open at offset {readable}: what lies behind it can be read when it has ended"


def _covered(options: SourceOptions, offsets: Offsets) -> set[str]:
    """Return the topics of offsets that the query still reads."""
    return {topic for topic, _ in offsets if options.selection.covers(topic)}


def _written_past(log: LogView, offsets: Offsets, readable: Offsets) -> Offsets:
    """Return the real ends of those logs in which an offset lies past what may be read.

    Up to there a transaction may be open, as where a query begins behind it or has read uncommitted before; past it,
    messages are gone.
    """
    past = [part for part, offset in offsets.items() if offset > readable.get(part, offset)]
    return log.written(past) if past else {}


def _read(options: SourceOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    wanted = partition.value
    if wanted is not None:  # Spark plans one empty task where there is nothing to read
        schema = to_arrow_schema(source_schema(include_headers=options.include_headers), timezone="UTC")
        yield from read_range(options, schema, wanted)
    imports_set_aside("source")


__all__ = ["BatchReader", "PenstockSource", "StreamReader", "register", "source_schema"]
