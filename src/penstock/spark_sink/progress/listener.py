"""`ProgressListener`: Spark's reports of its queries, as statistics, OpenTelemetry metrics and offsets of groups."""

from __future__ import annotations

import json
import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from penstock.errors import ConfigurationError, MessageFormatError
from penstock.options import ClientConfig
from penstock.spark_sink.progress.group_offsets import GroupOffsets
from penstock.spark_sink.progress.statistics import SinkPartition, SinkState, SinkStatistics
from penstock.spark_sink.sinks.sink import stored_batches
from penstock.spark_sink.source.plan import Offsets, from_json

if TYPE_CHECKING:
    from penstock.telemetry.metrics.spark import SparkReading, SparkTelemetry
    from penstock.telemetry.settings import Telemetry

#: Batches of a query of which it is remembered that they were counted; Spark itself keeps the reports of 100.
_REMEMBERED = 256


class ProgressListener(StreamingQueryListener):
    """Listens to the queries of a session: `spark.streams.addListener(ProgressListener(Telemetry()))`.

    `App` has one of its own for its sinks; this is for queries that are started by hand. Close it when it is removed.
    Any thread may call its methods.

    Args:
        telemetry: where metrics go; None for nowhere.
        groups: for a query's name, the consumer group that shows its position; a group belongs to one query.
        sinks: for a query's name, its sink, whose ledger is shown as its batches in this process left it.
        queries: names of the queries to show, from the beginning on; all that report when left out.
        bootstrap_servers: addresses of the brokers, for groups.
        config: client settings by librdkafka's names, for groups.

    Raises:
        ConfigurationError: groups without bootstrap_servers, or the Kafka client refused a setting.
    """

    def __init__(
        self,
        telemetry: Telemetry | None = None,
        *,
        groups: Mapping[str, str] | None = None,
        sinks: Mapping[str, object] | None = None,
        queries: Iterable[str] | None = None,
        bootstrap_servers: str | None = None,
        config: ClientConfig | None = None,
    ) -> None:
        if groups and bootstrap_servers is None:
            raise ConfigurationError("groups are kept by the brokers: give bootstrap_servers as well")
        self._telemetry = telemetry
        #: By the name of a query, as all that follows.
        self._groups = {
            query: GroupOffsets(group, bootstrap_servers=bootstrap_servers or "", config=config)
            for query, group in (groups or {}).items()
        }
        self._sinks = dict(sinks or {})
        self._is_fixed = queries is not None
        #: Guards that no report is lost; values are replaced as a whole, and read without it. No telemetry is called
        #: under it: a reader of metrics may hold the SDK's own lock.
        self._writing = threading.Lock()
        self._shown: dict[str, SinkStatistics] = {}
        self._newest: dict[str, StreamingQueryProgress] = {}
        self._metrics: dict[str, SparkTelemetry] = {}
        self._counted: dict[str, deque[tuple[UUID, int]]] = {}
        self._is_closed = False
        for name in queries or ():
            self._show(name)

    def _show(self, name: str) -> None:
        self._shown[name] = SinkStatistics(name=name, state=SinkState.RUNNING)
        self._counted[name] = deque(maxlen=_REMEMBERED)
        if self._telemetry is not None:
            from penstock.telemetry.metrics.spark import SparkTelemetry

            self._metrics[name] = SparkTelemetry(self._telemetry, name, partial(self._reading, name))

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        """Wait for its first batch."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        """Take the report of a batch."""
        self.take(event.progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        """Leave it as it is: an idle query is where its last batch ended."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        """Show it no more, unless it is to be shown whether it runs or not."""
        ended = [name for name, report in self._newest.items() if report.runId == event.runId]
        for name in () if self._is_fixed else ended:
            del self._newest[name], self._shown[name]
            self._forget_metrics(name)

    def take(self, report: StreamingQueryProgress) -> None:
        """Take a report, which may come twice and behind a later one."""
        name = report.name or str(report.id)
        if self._is_closed or (self._is_fixed and name not in self._shown):
            return
        if name not in self._shown:
            self._show(name)
        # Else there was nothing to do: Spark says so now and then.
        is_batch = "addBatch" in report.durationMs
        with self._writing:
            if is_batch and (report.runId, report.batchId) in self._counted[name]:
                return
            shown = self._shown[name]
            if is_batch:
                self._counted[name].append((report.runId, report.batchId))
                shown = replace(shown, batches=shown.batches + 1, rows=shown.rows + (report.numInputRows or 0))
            newest = self._newest.setdefault(name, report)
            if report.timestamp >= newest.timestamp:  # ISO 8601, which sorts as text
                self._newest[name] = report
                shown = self._at(report, _of_batch(report, shown) if is_batch else shown)
            self._shown[name] = shown
        if is_batch and name in self._metrics:
            self._metrics[name].batch(_seconds(report))
        if is_batch and name in self._groups:
            self._groups[name].follow({(part.topic, part.partition): part.position for part in shown.partitions})

    def has_batch_of(self, name: str, run: str) -> bool:
        """Return whether this start of a query, by Spark's id of it, has committed a batch."""
        return any(str(of_batch) == run for of_batch, _ in list(self._counted[name]))

    def _at(self, report: StreamingQueryProgress, shown: SinkStatistics) -> SinkStatistics:
        """Return where a query is, as its newest report says."""
        position: Offsets = {}
        latest: Offsets = {}
        for source in report.sources:
            ends = _offsets(source.endOffset)
            position |= ends
            latest |= _offsets(source.latestOffset) if ends else {}
        if not position:
            return shown
        lag = {part: max(0, latest[part] - position[part]) for part in position.keys() & latest.keys()}
        sink = self._sinks.get(shown.name)
        # As the sink's batches left it in this process: nobody opens the sink for it.
        ledger = stored_batches.ends(getattr(sink, "ledger_key", None), getattr(sink, "name", None) or shown.name)
        partitions = tuple(
            SinkPartition(*part, offset, lag.get(part), ledger.get(part)) for part, offset in sorted(position.items())
        )
        return replace(shown, lag=sum(lag.values()) if lag else None, partitions=partitions)

    def restarted(self, name: str) -> None:
        """Take that a query is started again."""
        with self._writing:
            shown = self._shown[name]
            self._shown[name] = replace(shown, restarts=shown.restarts + 1)

    def statistics(self, name: str) -> SinkStatistics:
        """Return what is known of a query that is shown; whether it runs is its supervisor's to say."""
        return self._shown[name]

    def _reading(self, name: str) -> SparkReading:
        from penstock.telemetry.metrics.spark import SparkReading

        shown = self._shown[name]
        parts = {(part.topic, part.partition): part for part in shown.partitions}
        return SparkReading(
            rows=shown.rows,
            rows_per_s=shown.rows_per_s,
            lag={place: part.lag for place, part in parts.items() if part.lag is not None},
            ledger={place: part.ledger for place, part in parts.items() if part.ledger is not None},
            restarts=shown.restarts,
        )

    def close(self) -> None:
        """Write the last offsets to the groups and show nothing any more."""
        self._is_closed = True
        for group in self._groups.values():
            group.close()
        for name in list(self._metrics):
            self._forget_metrics(name)

    def _forget_metrics(self, name: str) -> None:
        metrics = self._metrics.pop(name, None)
        if metrics is not None:
            metrics.close()


def _of_batch(report: StreamingQueryProgress, shown: SinkStatistics) -> SinkStatistics:
    """Return a query's statistics with the numbers of its last batch."""
    rows_per_s = report.processedRowsPerSecond or 0.0
    return replace(
        shown,
        batch_id=report.batchId,
        rows_per_s=rows_per_s if math.isfinite(rows_per_s) else 0.0,
        batch_seconds=_seconds(report).get("triggerExecution", 0.0),
    )


def _seconds(report: StreamingQueryProgress) -> dict[str, float]:
    return {phase: taken / 1_000 for phase, taken in report.durationMs.items()}


def _offsets(given: Any) -> Offsets:
    """Return offsets of Kafka's shape, of our source or Spark's own; none where a source has others."""
    try:
        shaped = json.loads(given) if isinstance(given, str) else given
        return from_json(shaped or {})
    except (MessageFormatError, ValueError):
        return {}
