"""The description of a process: what `penstock explain`, reports and the page show of it, as JSON has it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from penstock.consumer import Explanation, LitePushConsumer
from penstock.consumer.inspection.parked_keys import ParkedMessage
from penstock.spark_sink.monitoring.progress import SinkStatistics
from penstock.transactions import Coordinator

#: Parked keys that are shown of one process.
_MOST_PARKED = 50


def description(
    name: str,
    partitions: Iterable[Explanation],
    consumer: LitePushConsumer | None,
    sinks: Iterable[SinkStatistics],
    coordinator: Coordinator | None,
) -> dict[str, object]:
    """Return the description of an app of that name: keys as text, bytes escaped. Any thread."""
    return {
        "group": name,
        "partitions": [{**_fields(one), "text": str(one)} for one in partitions],
        "parked": [] if consumer is None else [_fields(one) for one in consumer.parked_keys(_MOST_PARKED)],
        "counts": None if consumer is None else consumer.statistics().counts(),
        "sinks": [{**asdict(sink), "state": sink.state.value, "text": str(sink)} for sink in sinks],
        "coordinator": None if coordinator is None else coordinator_description(coordinator),
    }


def coordinator_description(coordinator: Coordinator) -> dict[str, object]:
    """Return what reports show of a coordinator: its counts, and what its pending transactions wait for."""
    return {"counts": asdict(coordinator.statistics()), "waits": coordinator.waits()}


def _fields(one: Explanation | ParkedMessage) -> dict[str, Any]:
    """Return the fields of a value that has no values within, with its key as text."""
    # Not `asdict`, which copies deeply: of a thousand partitions that is most of what a report costs.
    told = {field.name: getattr(one, field.name) for field in fields(one)}
    key = one.key.decode(errors="backslashreplace") if isinstance(one.key, bytes) else one.key
    told["key"] = None if key is None else str(key)
    return told
