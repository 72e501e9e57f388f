"""`QueryProgress`: Spark's reports of one query, as statistics, OpenTelemetry metrics and offsets of a group."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.errors import MessageFormatError
from penstock.spark_sink.progress.group_offsets import GroupOffsets
from penstock.spark_sink.progress.statistics import SinkPartition, SinkState, SinkStatistics
from penstock.spark_sink.sinks.sink import stored_batches
from penstock.spark_sink.source.plan import Offsets, from_json

if TYPE_CHECKING:
    from uuid import UUID

    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.telemetry.metrics.spark import SparkReading
    from penstock.telemetry.settings import Telemetry


class QueryProgress:
    """What is shown of a query, through all its starts. One thread follows the query; any thread may read."""

    def __init__(
        self, name: str, telemetry: Telemetry | None = None, *, group: GroupOffsets | None = None, sink: object = None
    ) -> None:
        #: Replaced as a whole. Whether the query runs is its supervisor's to say.
        self.statistics = SinkStatistics(name=name, state=SinkState.RUNNING)
        #: The run of the last report, and its last batch that was counted.
        self.run: UUID | None = None
        self.batch_of_run: int | None = None
        self._group = group
        self._sink = sink
        self._metrics = None
        if telemetry is not None:
            from penstock.telemetry.metrics.spark import SparkTelemetry

            self._metrics = SparkTelemetry(telemetry, name, self._reading)

    def follow(self, query: StreamingQuery) -> None:
        """Take the reports that Spark has of a query and that were not taken; it keeps those of 100 batches."""
        last = query.lastProgress
        if last is None:
            return
        # All of them take Spark some time, and are needed where there are several since the last time only.
        is_next = last.runId == self.run and self.batch_of_run in (last.batchId, last.batchId - 1)
        for report in (last,) if is_next else query.recentProgress:
            self._take(report)

    def _take(self, report: StreamingQueryProgress) -> None:
        """Take a report; reports come in their order, and a batch counts once however often it is reported."""
        if report.runId != self.run:
            self.run, self.batch_of_run = report.runId, None
        shown = self._at(report)
        if "addBatch" not in report.durationMs:  # there was nothing to do: Spark says so now and then
            self.statistics = shown
        elif self.batch_of_run is None or report.batchId > self.batch_of_run:
            self.batch_of_run = report.batchId
            seconds = {phase: taken / 1_000 for phase, taken in report.durationMs.items()}
            rows_per_s = report.processedRowsPerSecond or 0.0
            self.statistics = replace(
                shown,
                batch_id=report.batchId,
                batches=shown.batches + 1,
                rows=shown.rows + (report.numInputRows or 0),
                rows_per_s=rows_per_s if math.isfinite(rows_per_s) else 0.0,
                batch_seconds=seconds.get("triggerExecution", 0.0),
            )
            if self._metrics is not None:
                self._metrics.batch(seconds)
            if self._group is not None:
                self._group.follow({(part.topic, part.partition): part.position for part in shown.partitions})

    def _at(self, report: StreamingQueryProgress) -> SinkStatistics:
        """Return the statistics with where the query is, as its report says."""
        position: Offsets = {}
        latest: Offsets = {}
        for source in report.sources:
            if ends := _offsets(source.endOffset):
                position |= ends
                latest |= _offsets(source.latestOffset)
        if not position:
            return self.statistics
        lag = {part: max(0, latest[part] - position[part]) for part in position.keys() & latest.keys()}
        # As the sink's batches left it in this process: nobody opens the sink for it.
        key, name = getattr(self._sink, "ledger_key", None), getattr(self._sink, "name", None) or self.statistics.name
        ledger = stored_batches.ends(key, name)
        partitions = tuple(
            SinkPartition(*part, offset, lag.get(part), ledger.get(part)) for part, offset in sorted(position.items())
        )
        return replace(self.statistics, lag=sum(lag.values()) if lag else None, partitions=partitions)

    def restarted(self) -> None:
        """Count that the query is started again."""
        self.statistics = replace(self.statistics, restarts=self.statistics.restarts + 1)

    def _reading(self) -> SparkReading:
        from penstock.telemetry.metrics.spark import SparkReading

        shown = self.statistics
        parts = {(part.topic, part.partition): part for part in shown.partitions}
        return SparkReading(
            rows=shown.rows,
            rows_per_s=shown.rows_per_s,
            lag={place: part.lag for place, part in parts.items() if part.lag is not None},
            ledger={place: part.ledger for place, part in parts.items() if part.ledger is not None},
            restarts=shown.restarts,
        )

    def close(self) -> None:
        """Show no metrics any more, and write the last offsets of the group."""
        if self._metrics is not None:
            self._metrics.close()
        if self._group is not None:
            self._group.close()


def _offsets(given: Any) -> Offsets:
    """Return offsets of Kafka's shape, of our source or Spark's own; none where a source has others."""
    try:
        shaped = json.loads(given) if isinstance(given, str) else given
        return from_json(shaped or {})
    except (MessageFormatError, ValueError):
        return {}
