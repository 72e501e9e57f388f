"""The reader of a streaming query: the driver plans micro-batches, tasks read them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from penstock.errors import ConfigurationError, SourceError
from penstock.spark_sink.source.batch import open_transaction_text, read_task, tasks, written_past
from penstock.spark_sink.source.brokers import OffsetReader, Topics
from penstock.spark_sink.source.missing import MissingPartitions
from penstock.spark_sink.source.open_transactions import OpenTransactions
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import Offsets, TopicPartition, from_json, limited, place, to_json
from penstock.spark_sink.source.positions import resolve

_log = logging.getLogger("penstock.spark_sink")


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads micro-batches.

    Spark makes one for the life of a query, which plans, and one for each batch, which is pickled for
    executors and only reads; the connection of the planning one is therefore made when first needed.
    """

    def __init__(self, options: SourceOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._kafka: OffsetReader | None = None
        self._target: Offsets | None = None
        self._seen: Offsets = {}
        self._open: OpenTransactions | None = None
        self._triggered_at: float | None = None
        self._missing = MissingPartitions(options)

    def initialOffset(self) -> dict[str, dict[str, int]]:  # noqa: N802 - Spark's name
        """Return where a query without checkpoint begins."""
        reader = self._reader()
        reader.partitions()  # one that is named and not there is a mistake, here at the beginning
        # Where the end is fixed already, "latest" is that end: what came since must not lie past it.
        latest = self._there({})[0]
        first = reader.earliest(latest)
        if self._options.starting is None and any(first[part] < end for part, end in latest.items()):
            _log.warning(
                "the query over %s begins at the end of the logs, as it has no checkpoint yet and no startingOffsets: "
                "what was sent before is not read. penstock.spark_sink.start_sink begins where the sink's ledger says; "
                "or give startingOffsets (earliest, latest or JSON)",
                self._options.selection,
            )
        starting = self._options.starting or "latest"
        return to_json(resolve("startingOffsets", starting, first, latest, reader.at_times))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return what maxOffsetsPerTrigger says; Spark has no limit of both kinds, so the least is held here."""
        if self._options.max_offsets is not None:
            return ReadMaxRows(self._options.max_offsets)
        return ReadAllAvailable() if self._options.min_offsets is None else ReadMinRows(self._options.min_offsets)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the end of the query: what is committed now, and nothing later."""
        reader = self._reader()
        self._target = self._there({})[0]
        if self._options.read_committed:
            OpenTransactions(reader).warn(self._target)

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, dict[str, int]]:  # noqa: N802 - Spark's name
        """Return where the next batch ends, within the limit; partitions that are new are taken in."""
        begun = from_json(start)
        self._refuse_another_query(begun)
        there, topics = self._there(begun)
        # Back to 0 in a batch of its own, which is empty: the next one begins there.
        recreated = self._missing.recreated(begun, topics)
        known = {part: offset for part, offset in begun.items() if part not in recreated}
        unseen = self._missing.retained(known, there, topics)
        written = written_past(self._options, self._reader(), known, there, " was read up to offset {}")
        ahead = {part for part, until in written.items() if known[part] <= until}
        if self._open is not None and self._target is None:
            self._open.watch(there)
        # What may be read ends before the query's position: it stays where it is until the end has come to it.
        latest = self._seen = there | {part: known[part] for part in ahead} | unseen | recreated
        if not isinstance(limit, ReadMaxRows | ReadMinRows):
            return to_json(latest)
        # What a log holds no more is no work: counted in, a limit would be spent on it, batch after batch.
        first = self._reader().earliest(latest.keys() - unseen.keys())
        from_here = {part: max(begun.get(part, 0), min(first.get(part, 0), end)) for part, end in latest.items()}
        if self._is_too_little(sum(max(0, latest[part] - offset) for part, offset in from_here.items())):
            # The same text as before tells Spark that there is nothing new; what is gone is logged once.
            return to_json({part: min(begun[part], end) for part, end in latest.items() if part in begun})
        if isinstance(limit, ReadMaxRows):
            return to_json(limited(from_here, latest, limit.max_rows))
        return to_json(latest)

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

    def _refuse_another_query(self, noted: Iterable[TopicPartition]) -> None:
        """Raise where the checkpoint's offsets are of topics of which this query reads none."""
        topics = sorted({topic for topic, _ in noted})
        if topics and not any(map(self._options.selection.covers, topics)):
            raise ConfigurationError(
                f"the checkpoint was written by a query over {', '.join(topics)}, but this one has "
                f"{self._options.selection}; give it a checkpointLocation of its own"
            )

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:  # noqa: N802 - Spark's name
        """Return the ends of the logs as last seen, from which Spark's progress tells the lag."""
        return to_json(self._seen) or None

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[InputPartition]:
        """Cut a batch into tasks."""
        begun, ends = from_json(start), from_json(end)
        self._refuse_another_query(ends)
        # A batch that is done again after a restart was planned over logs that may have been cut or deleted since.
        if any(offset > self._seen.get(part, -1) for part, offset in ends.items()):
            ends = self._still_there(begun, ends)
        ends = {part: offset for part, offset in ends.items() if offset > begun.get(part, 0)}
        return tasks(self._options, begun, ends, self._reader().earliest(ends))

    def _still_there(self, start: Offsets, ends: Offsets) -> Offsets:
        """Return the ends of those partitions that there are, none past its log, once what is gone is reported."""
        reader, selection = self._reader(), self._options.selection
        topics = reader.topics(_covered(self._options, ends))
        last = reader.latest(set(selection.pick_existing(topics.counts)) & ends.keys())
        written = written_past(self._options, reader, ends, last, " was to be read up to offset {}")
        for part, offset in sorted(ends.items()):
            said = f"{place(part)} was to be read up to offset {offset}"
            if offset <= start.get(part, 0):
                continue
            if part not in last:
                # Left out, the rows of a partition that is hidden would be skipped for ever.
                self._missing.report(part, said, topics, must_come=True)
            elif last[part] < offset <= written[part]:
                # Cut short, the batch would leave out for ever what is committed later.
                raise SourceError(f"{open_transaction_text(said, last[part])}; start the query again then")
        return {part: min(ends[part], offset) for part, offset in last.items()}

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one task's ranges on an executor."""
        return read_task(self._options, partition)

    def stop(self) -> None:
        """Let the planning connection go."""
        self._kafka = self._open = None

    def _reader(self) -> OffsetReader:
        if self._kafka is None:
            self._kafka = OffsetReader(self._options)
            if self._options.read_committed:
                self._open = OpenTransactions(self._kafka, self._clock)
        return self._kafka

    def _there(self, begun: Offsets) -> tuple[Offsets, Topics]:
        """Return the ends of the logs that can be seen, and what the brokers say of the topics."""
        reader = self._reader()
        # Of those that are known to be missing it is not asked again and again: the others would wait for it.
        topics = reader.topics(_covered(self._options, begun) - self._missing.reported_topics)
        if self._target is not None:
            return self._target, topics
        return reader.latest(self._options.selection.pick_existing(topics.counts)), topics


def _covered(options: SourceOptions, offsets: Offsets) -> set[str]:
    """Return the topics of offsets that the query still reads."""
    return {topic for topic, _ in offsets if options.selection.covers(topic)}
