"""What a coordinator shows by OpenTelemetry: one table of metrics for the coordinators of all stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from penstock.transactions.model import FINISH_BUCKETS_S, CoordinatorStatistics

if TYPE_CHECKING:
    from penstock.telemetry import CoordinatorTelemetry, PublicationSpans, Telemetry

#: What only a store in Kafka can tell: others write its topics, and topics have retentions.
_OF_TOPICS = frozenset({"forged", "lost"})


def publication_spans(telemetry: Telemetry | None, prefix: str) -> PublicationSpans | None:
    """Return what makes the spans of what one writer publishes; None where nobody wants them."""
    if telemetry is None:
        return None
    from penstock.telemetry import PublicationSpans

    return PublicationSpans(telemetry, prefix)


def observe(
    telemetry: Telemetry | None, prefix: str, read: Callable[[], CoordinatorStatistics], *, in_kafka: bool = False
) -> CoordinatorTelemetry | None:
    """Show the metrics of a coordinator until what is returned is closed; None where nobody wants them.

    `read` tells the counts of this coordinator and what lies in its part of the store; it is called on the metric
    readers' threads. `in_kafka` tells whether the store lies in topics.
    """
    if telemetry is None:
        return None
    from penstock.telemetry import CoordinatorReading, CoordinatorTelemetry

    names = {field.name for field in fields(CoordinatorReading)} - {"finish_bounds"}

    def reading() -> CoordinatorReading:
        now = read()
        shown: dict[str, Any] = {
            name: getattr(now, name) if in_kafka or name not in _OF_TOPICS else None for name in names
        }
        return CoordinatorReading(finish_bounds=FINISH_BUCKETS_S, **shown)

    return CoordinatorTelemetry(telemetry, prefix, reading)
