"""Metrics of a transaction coordinator.

OpenTelemetry has no histogram that is observed, so the coordinator's finish times are shown as counts by upper bound,
each with those below it, as Prometheus keeps a histogram.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.telemetry import names
from penstock.telemetry.metrics.gauge_registry import Observed, registry_of
from penstock.telemetry.metrics.readings import ObservedMetric, Point, counter, gauge, up_down_counter
from penstock.telemetry.settings import Telemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorReading:
    """A coordinator at one moment. Counts are of transactions, and since its start, where nothing else is said."""

    #: Not settled now, and seconds since the birth of the oldest of them.
    pending: int
    oldest_pending_age: float
    #: Committed, and their target cannot take them; those that wait for an earlier one of their key, or for their time.
    held: int
    held_by_key: int
    delayed: int
    committed: int
    rolled_back: int
    discarded: int
    #: Decisions refused.
    refused: int
    #: Records that could not be what they claim to be; None where the store has none that others could write.
    forged: int | None
    #: Checks sent, and checks that were due and reached nobody.
    checks: int
    no_producer: int
    #: Records deleted before they were read; None where the store has no retention.
    lost: int | None
    #: Upper bounds of the buckets of finish times, in seconds; transactions in each bucket and above the last bound,
    #: empty where they are not measured; and the sum of finish times.
    finish_bounds: Sequence[float]
    finish_times: Sequence[int]
    finish_seconds: float


def _finished(reading: CoordinatorReading) -> Iterable[Point]:
    bounds = [*(f"{bound:g}" for bound in reading.finish_bounds), "+Inf"]
    counts = itertools.accumulate(reading.finish_times)
    return [(count, {names.WITHIN_S: bound}) for bound, count in zip(bounds, counts, strict=False)]


#: All metrics of a coordinator; each also carries the prefix of its store.
TRANSACTION_METRICS: tuple[ObservedMetric[CoordinatorReading], ...] = (
    up_down_counter(
        "penstock.transactions.pending", "{transaction}", "Transactions not settled.", lambda it: it.pending
    ),
    gauge(
        "penstock.transactions.oldest_pending_age",
        "s",
        "Age of the oldest transaction not settled.",
        lambda it: it.oldest_pending_age,
    ),
    up_down_counter(
        "penstock.transactions.held",
        "{transaction}",
        "Transactions that wait: for their target, for an earlier one of their key, or for their time.",
        lambda it: [
            (it.held, {names.HELD_BY: "target"}),
            (it.held_by_key, {names.HELD_BY: "key"}),
            (it.delayed, {names.HELD_BY: "time"}),
        ],
    ),
    counter("penstock.transactions.committed", "{transaction}", "Transactions published.", lambda it: it.committed),
    counter(
        "penstock.transactions.rolled_back", "{transaction}", "Transactions rolled back.", lambda it: it.rolled_back
    ),
    counter(
        "penstock.transactions.discarded",
        "{transaction}",
        "Transactions moved to the discarded topic.",
        lambda it: it.discarded,
    ),
    counter(
        "penstock.transactions.refused",
        "{decision}",
        "Decisions refused: a second one, an unknown id, a wrong group.",
        lambda it: it.refused,
    ),
    counter(
        "penstock.transactions.forged",
        "{record}",
        "Records of the store that could not be what they claim to be.",
        lambda it: it.forged,
    ),
    counter("penstock.transactions.checks", "{check}", "Checks sent.", lambda it: it.checks),
    counter(
        "penstock.transactions.no_producer",
        "{check}",
        "Checks that were due and reached nobody.",
        lambda it: it.no_producer,
    ),
    counter(
        "penstock.transactions.lost",
        "{record}",
        "Records of the store that were deleted before they were read.",
        lambda it: it.lost,
    ),
    counter(
        "penstock.transactions.finished",
        "{transaction}",
        "Published transactions by seconds from birth to published, each bound with those below it.",
        _finished,
    ),
    counter(
        "penstock.transactions.finish_time",
        "s",
        "Seconds from birth to published, added up over the published transactions.",
        lambda it: it.finish_seconds,
    ),
)


class CoordinatorTelemetry:
    """Shows the metrics of one coordinator until it is closed; `read` is called on the metric readers' threads."""

    def __init__(self, telemetry: Telemetry, prefix: str, read: Callable[[], CoordinatorReading]) -> None:
        self._registry = registry_of(telemetry, TRANSACTION_METRICS, names.STORE_PREFIX)
        self._observed = Observed(prefix, read)
        self._registry.add(self._observed)

    def close(self) -> None:
        """Show it no more."""
        self._registry.remove(self._observed)
