"""What Spark reports of queries: as statistics, and as OpenTelemetry metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from penstock.spark_sink.source.plan import Offsets, reported_offsets

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.telemetry import Telemetry


class SinkState(Enum):
    """Where a sink's query is in its life."""

    #: Another replica of the app runs it; this one takes over when that one ends.
    STANDBY = "standby"
    #: Its query runs.
    RUNNING = "running"
    #: Its query failed and is started again when the wait is over.
    WAITING = "waiting"
    #: All was read that was asked for, or somebody stopped the query.
    ENDED = "ended"
    #: It failed and is not started again; the app stops.
    FAILED = "failed"
    #: The app stopped it.
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class SinkPartition:
    """One partition that a sink reads, at one moment.

    Attributes:
        topic: name of the topic.
        partition: number of the partition.
        position: next offset to read after the last committed batch.
        lag: offsets from there to the end of the log as the source last saw it, or None while it is not known.
    """

    topic: str
    partition: int
    position: int
    lag: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkStatistics:
    """A sink at one moment.

    Attributes:
        name: name of its query.
        state: where its query is in its life.
        batch_id: the last batch committed in this process, or None.
        batches: batches committed in this process.
        rows: rows in them.
        rows_per_s: rows that Spark processed in a second of the last batch.
        batch_seconds: seconds the last batch took from its trigger to its commit.
        lag: the sum over the partitions, or None while it is not known.
        restarts: how often the query was started again.
        retry_in: seconds until it is started again, while it waits.
        last_error: what ended the query last, in one line, or None.
        holder: which replica of the app runs it, by host and process, as far as the group has said.
        partitions: the partitions it has read.
    """

    name: str
    state: SinkState
    batch_id: int | None = None
    batches: int = 0
    rows: int = 0
    rows_per_s: float = 0.0
    batch_seconds: float = 0.0
    lag: int | None = None
    restarts: int = 0
    retry_in: float | None = None
    last_error: str | None = None
    holder: str | None = None
    partitions: tuple[SinkPartition, ...] = field(default=())

    def __str__(self) -> str:
        """Say it in a sentence."""
        if self.state is SinkState.STANDBY:
            return f"sink {self.name}: standby, {self.holder or 'a replica that is not known yet'} runs it"
        lag = "unknown" if self.lag is None else str(self.lag)
        text = f"sink {self.name}: {self.state.value}, lag {lag}"
        if self.batch_id is None:
            text += ", no batch committed yet"
        else:
            text += f", batch {self.batch_id} took {self.batch_seconds:.1f} s at {self.rows_per_s:.0f} rows/s"
        if self.restarts:
            text += f", restarted {self.restarts} time{'' if self.restarts == 1 else 's'}"
        if self.retry_in is not None:
            text += f", next start in {self.retry_in:.1f} s"
        if self.last_error is not None and self.state is not SinkState.RUNNING:
            text += f"; ended by {self.last_error}"
        return text


class QueryProgress:
    """What is shown of a query, through all its starts. One thread follows the query; any thread may read."""

    def __init__(self, name: str, telemetry: Telemetry | None = None) -> None:
        #: Replaced as a whole. Whether the query runs is its supervisor's to say.
        self.statistics = SinkStatistics(name=name, state=SinkState.RUNNING)
        #: The run of the last report, and its last batch that was counted.
        self.run: object = None
        self.batch_of_run: int | None = None
        self._metrics = None
        if telemetry is not None:
            from penstock.telemetry.spark import SparkTelemetry

            self._metrics = SparkTelemetry(telemetry, name, lambda: self.statistics)

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

    def _at(self, report: StreamingQueryProgress) -> SinkStatistics:
        """Return the statistics with where the query is, as its report says."""
        position, latest = Offsets(), Offsets()
        for source in report.sources:
            if ends := reported_offsets(source.endOffset):
                position |= ends
                latest |= reported_offsets(source.latestOffset)
        if not position:
            return self.statistics
        lag = {part: max(0, latest[part] - position[part]) for part in position.keys() & latest.keys()}
        partitions = tuple(SinkPartition(*part, offset, lag.get(part)) for part, offset in sorted(position.items()))
        return replace(self.statistics, lag=sum(lag.values()) if lag else None, partitions=partitions)

    def restarted(self) -> None:
        """Count that the query is started again."""
        self.statistics = replace(self.statistics, restarts=self.statistics.restarts + 1)

    def close(self) -> None:
        """Show no metrics any more."""
        if self._metrics is not None:
            self._metrics.close()
