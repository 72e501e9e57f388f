"""Converts Spark's reports on queries to statistics and OpenTelemetry metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from penstock.places import counted
from penstock.spark_sink.source.plan import Offsets, reported_offsets

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.telemetry import Telemetry


class SinkState(Enum):
    """The states of a sink's query."""

    #: Another replica of the app runs it; this one takes over when the other ends.
    STANDBY = "standby"
    #: Its query runs.
    RUNNING = "running"
    #: Its query failed and will be restarted after a wait.
    WAITING = "waiting"
    #: Everything was read, or the query was stopped from outside.
    ENDED = "ended"
    #: It failed and will not be restarted; the app stops.
    FAILED = "failed"
    #: The app stopped it.
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class SinkPartition:
    """A snapshot of one partition of a sink.

    Attributes:
        topic: name of the topic.
        partition: number of the partition.
        position: next offset after the last committed batch.
        lag: offsets from there to the end of the log as the source last saw it; None while it is unknown.
    """

    topic: str
    partition: int
    position: int
    lag: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkStatistics:
    """A snapshot of a sink.

    Attributes:
        name: name of its query.
        state: state of its query.
        batch_id: the last batch committed in this process, or None.
        batches: batches committed in this process.
        rows: rows in these batches.
        rows_per_s: rows that Spark processed per second in the last batch.
        batch_seconds: seconds of the last batch, from its trigger to its commit.
        lag: the sum over the partitions; None while it is unknown.
        restarts: number of restarts of the query.
        retry_in: seconds until the next restart, while it waits.
        last_error: the last failure of the query in one line, or None.
        holder: the replica of the app that runs it, by host and process, as far as the group has reported it.
        partitions: the partitions that it has read.
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
        """Return it as a sentence."""
        if self.state is SinkState.STANDBY:
            return f"sink {self.name}: standby, {self.holder or 'a replica that is not known yet'} runs it"
        lag = "unknown" if self.lag is None else str(self.lag)
        text = f"sink {self.name}: {self.state.value}, lag {lag}"
        if self.batch_id is None:
            text += ", no batch committed yet"
        else:
            text += f", batch {self.batch_id} took {self.batch_seconds:.1f} s at {self.rows_per_s:.0f} rows/s"
        if self.restarts:
            text += f", restarted {counted(self.restarts, 'time')}"
        if self.retry_in is not None:
            text += f", next start in {self.retry_in:.1f} s"
        if self.last_error is not None and self.state is not SinkState.RUNNING:
            text += f"; ended by {self.last_error}"
        return text


class QueryProgress:
    """The progress of a query through all its starts. One thread follows the query; any thread may read."""

    def __init__(self, name: str, telemetry: Telemetry | None = None) -> None:
        #: Replaced as a whole. The supervisor sets the state.
        self.statistics = SinkStatistics(name=name, state=SinkState.RUNNING)
        #: The run of the last report, and its last batch that was counted.
        self.run: object = None
        self.batch_of_run: int | None = None
        self._metrics = None
        if telemetry is not None:
            from penstock.telemetry.spark import SparkTelemetry

            self._metrics = SparkTelemetry(telemetry, name, lambda: self.statistics)

    def follow(self, query: StreamingQuery) -> None:
        """Process Spark's new reports of a query. Spark keeps reports of 100 batches."""
        last = query.lastProgress
        if last is None:
            return
        # Reading all reports takes Spark some time, and is needed only if there are several new ones.
        is_next = last.runId == self.run and self.batch_of_run in (last.batchId, last.batchId - 1)
        for report in (last,) if is_next else query.recentProgress:
            self._take(report)

    def _take(self, report: StreamingQueryProgress) -> None:
        """Process a report. Reports arrive in order, and a repeated batch counts once."""
        if report.runId != self.run:
            self.run, self.batch_of_run = report.runId, None
        shown = self._at(report)
        if "addBatch" not in report.durationMs:  # an idle report without a batch
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
        """Return the statistics with the positions of a report."""
        position, latest = Offsets(), Offsets()
        for source in report.sources:
            if ends := reported_offsets(source.endOffset):
                position |= {part: max(0, offset) for part, offset in ends.items()}
                latest |= reported_offsets(source.latestOffset)
        if not position:
            return self.statistics
        lag = {part: max(0, latest[part] - position[part]) for part in position.keys() & latest.keys()}
        partitions = tuple(SinkPartition(*part, offset, lag.get(part)) for part, offset in sorted(position.items()))
        return replace(self.statistics, lag=sum(lag.values()) if lag else None, partitions=partitions)

    def restarted(self) -> None:
        """Count a restart of the query."""
        self.statistics = replace(self.statistics, restarts=self.statistics.restarts + 1)

    def close(self) -> None:
        """Remove the query from the metrics."""
        if self._metrics is not None:
            self._metrics.close()
