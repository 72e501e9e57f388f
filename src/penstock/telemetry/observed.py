"""Tables of the metrics that are read from statistics: of consumers, coordinators and queries.

Counts begin at zero with each consumer, as after a restart of the process. `ConsumerStatistics`,
`CoordinatorStatistics` and `SinkStatistics` document the fields.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.telemetry import names
from penstock.telemetry.gauges import Kind, ObservedMetric, Point, registry_of
from penstock.telemetry.settings import Telemetry

_Metrics = tuple[ObservedMetric, ...]


def _by(attribute: str, values: Mapping[str, int]) -> Iterable[Point]:
    return [(value, {attribute: name}) for name, value in values.items()]


def _bytes_in_flight(it: Any) -> Iterable[Point]:
    return [(sum(partition.bytes_in_flight for partition in it.partitions), {})]


def _lag(it: Any) -> Iterable[Point]:
    return [
        (part.lag, {names.DESTINATION_NAME: part.topic, names.DESTINATION_PARTITION_ID: str(part.partition)})
        for part in it.partitions
        if part.lag is not None
    ]


def _pauses(it: Any) -> Iterable[Point]:
    return _by("penstock.pause.reason", it.pauses)


def _rebalanced(it: Any) -> Iterable[Point]:
    return _by("penstock.rebalance.kind", {"assigned": it.assigned, "revoked": it.revoked, "lost": it.lost})


def _commits(it: Any) -> Iterable[Point]:
    return _by("penstock.commit.outcome", {"ok": it.commits, "failed": it.failed_commits})


def _held(it: Any) -> Iterable[Point]:
    return _by("penstock.transactions.held_by", {"target": it.held, "key": it.held_by_key, "time": it.delayed})


def _finished(it: Any) -> Iterable[Point]:
    """Return cumulative counts by upper bound, because OpenTelemetry has no observable histogram."""
    bounds = [*(f"{bound:g}" for bound in it.finish_bounds), "+Inf"]
    counts = itertools.accumulate(it.finish_times)
    return [(count, {"penstock.transactions.within_s": bound}) for bound, count in zip(bounds, counts, strict=False)]


def _metrics(prefix: str, *rows: tuple[Kind, str, str, str | Callable[[Any], Iterable[Point]], str]) -> _Metrics:
    return tuple(ObservedMetric(kind, prefix + name, unit, read, text) for kind, name, unit, read, text in rows)


_C, _U, _G = Kind.COUNTER, Kind.UP_DOWN_COUNTER, Kind.GAUGE

#: The observed metrics of a consumer; each has the consumer group as attribute.
METRICS: _Metrics = _metrics(
    "penstock.",
    (_U, "lane.count", "{lane}", "lanes", "Lanes of the consumer."),
    (_U, "lane.ready", "{lane}", "ready_lanes", "Lanes that wait for a worker."),
    (_U, "worker.count", "{worker}", "workers", "Workers of the consumer."),
    (_U, "worker.busy", "{worker}", "busy_workers", "Workers with a message in a handler."),
    (_U, "worker.abandoned", "{call}", "abandoned_calls", "Calls given up that have not returned."),
    (_U, "in_flight.messages", "{message}", "in_flight", "Messages taken in and not done."),
    (_U, "in_flight.size", "By", _bytes_in_flight, "Bytes of the messages taken in and not done."),
    (_G, "partition.lag", "{offset}", _lag, "Offsets from the watermark to the end of the log."),
    (_U, "key.parked", "{key}", "parked_keys", "Keys that wait for the retry of their message."),
    (_U, "key.held", "{key}", "held_keys", "Keys whose message is held for good by its handler's choice."),
    (_C, "handled_messages", "{message}", "handled", "Messages whose handler returned."),
    (_C, "handler.failures", "{call}", "failed", "Calls of a handler that raised."),
    (_C, "handler.time_limits", "{call}", "over_time_limit", "Failures of handlers over their time limit."),
    (_G, "handler.oldest", "s", "oldest_call", "Seconds since the oldest call of a handler under way began."),
    (_C, "handler.retries", "{call}", "retried", "Calls of a handler that were not the first for their message."),
    (_C, "handler.stalls", "{message}", "stalls", "Messages that the watchdog reported for a handler's time."),
    (_C, "dead_letters", "{message}", "dead_letters", "Messages written to a dead-letter topic."),
    (_C, "dead_letter_failures", "{try}", "dead_letter_failures", "Failed writes of dead letters: those are held."),
    (_C, "dropped_messages", "{message}", "dropped", "Messages given up by the handler's choice."),
    (_C, "pauses", "{pause}", _pauses, "Pauses of partitions, by reason."),
    (_C, "rebalanced_partitions", "{partition}", _rebalanced, "Partitions that were assigned, revoked or lost."),
    (_C, "commits", "{commit}", _commits, "Commits of offsets, by outcome."),
)

#: The metrics of a coordinator; each has the prefix of its store as attribute. `forged` and `lost` are None, and not
#: reported, for stores without topics that others could write to, or that have a retention.
TRANSACTION_METRICS: _Metrics = _metrics(
    "penstock.transactions.",
    (_U, "pending", "{transaction}", "pending", "Transactions not settled."),
    (_G, "oldest_pending_age", "s", "oldest_pending_age", "Age of the oldest transaction not settled."),
    (_U, "held", "{transaction}", _held, "Transactions that wait, by what for."),
    (_C, "committed", "{transaction}", "committed", "Transactions published."),
    (_C, "rolled_back", "{transaction}", "rolled_back", "Transactions rolled back."),
    (_C, "discarded", "{transaction}", "discarded", "Transactions moved to the discarded topic."),
    (_C, "refused", "{decision}", "refused", "Decisions refused: a second one, an unknown id, a wrong group."),
    (_C, "forged", "{record}", "forged", "Records of the store that could not be what they claim to be."),
    (_C, "checks", "{check}", "checks", "Checks sent."),
    (_C, "no_producer", "{check}", "no_producer", "Checks that were due and reached nobody."),
    (_C, "lost", "{record}", "lost", "Records of the store that were deleted before they were read."),
    (_C, "finished", "{transaction}", _finished, "Published transactions by seconds until published, cumulative."),
    (_C, "finish_time", "s", "finish_seconds", "Seconds from birth to published, added up over the transactions."),
)

#: The observed metrics of a Spark query; each has the query's name as attribute.
SPARK_METRICS: _Metrics = _metrics(
    "penstock.spark.",
    (_C, "rows", "{row}", "rows", "Rows of committed batches."),
    (_G, "rows_per_second", "{row}/s", "rows_per_s", "Rows that Spark processed in a second of the last batch."),
    (_G, "partition.lag", "{offset}", _lag, "Offsets from the query's position to the end of the log."),
    (_C, "restarts", "{restart}", "restarts", "Restarts of the query after failures."),
)


class CoordinatorTelemetry:
    """Reports the metrics of a coordinator until `close`. `read` is called on the metric readers' threads."""

    def __init__(self, telemetry: Telemetry, prefix: str, read: Callable[[], Any]) -> None:
        self.close = registry_of(telemetry, TRANSACTION_METRICS, names.STORE_PREFIX).add(prefix, read)
