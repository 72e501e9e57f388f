"""The description of a process, as JSON values, for `penstock explain`, reports and the page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from penstock.consumer import Explanation, LitePushConsumer
from penstock.consumer.inspect.details import ParkedMessage
from penstock.spark_sink.progress import SinkStatistics
from penstock.transactions import Coordinator

#: Most parked keys that are shown of one process.
_MOST_PARKED = 50
#: Most pending transactions that are shown, oldest first.
_MOST_TRANSACTIONS = 50
#: Most calls of a stack that are shown, the innermost ones.
_MOST_FRAMES = 20


def description(
    name: str,
    partitions: Iterable[Explanation],
    consumer: LitePushConsumer | None,
    sinks: Iterable[SinkStatistics],
    coordinator: Coordinator | None,
) -> dict[str, object]:
    """Return the description of an app: keys as text, bytes escaped. Any thread."""
    return {
        "group": name,
        "partitions": [{**_fields(partition), "text": str(partition)} for partition in partitions],
        **({"parked": []} if consumer is None else _details(consumer)),
        "counts": None if consumer is None else consumer.statistics().counts(),
        "sinks": [{**asdict(sink), "state": sink.state.value, "text": str(sink)} for sink in sinks],
        "coordinator": None if coordinator is None else coordinator_description(coordinator),
    }


def stacks_of_blocking_calls(
    partitions: Iterable[Explanation], stacks: Callable[[Iterable[str]], Mapping[str, str]]
) -> dict[str, list[str]]:
    """Return the stacks of the calls that block partitions, by worker: files, lines and functions, no code.

    Show them only on this machine.
    """
    workers = {part.worker for part in partitions if part.worker is not None}
    # The second line of a call is source code, which may hold secrets.
    return {
        worker: [line.strip() for line in text.splitlines() if line.startswith('  File "')][-_MOST_FRAMES:]
        for worker, text in stacks(workers).items()
    }


def process_of_coordinator(coordinator: Coordinator) -> dict[str, object]:
    """Return the description of a process that has only a coordinator."""
    return {"coordinator": coordinator_description(coordinator), "commands": coordinator.hears_commands}


def coordinator_description(coordinator: Coordinator) -> dict[str, object]:
    """Return the description of a coordinator: counts, oldest transactions with their obstacles, and its operator.

    `operator` says who can settle pending transactions: anybody if the store is in Kafka; otherwise the coordinator, if
    it accepts commands, under this group and member.
    """
    hears = {"group": coordinator.group, "member": coordinator.member} if coordinator.hears_commands else {}
    return {
        "counts": asdict(coordinator.statistics()),
        "operator": {"store": "kafka" if coordinator.is_in_kafka else "other", **hears},
        "waits": coordinator.waits(),
        "transactions": [
            {
                "id": transaction.transaction_id,
                "prefix": coordinator.prefix,
                "group": transaction.group,
                "topics": ", ".join(transaction.topics),
                "age": transaction.age_s,
                "checks": transaction.check_count,
                "decided": None if transaction.decided is None else transaction.decided.name,
                "deliver_in": None
                if transaction.deliver_at_ms is None
                else max(0.0, transaction.deliver_at_ms / 1000 - time.time()),
                "waits_for": transaction.waits_for,
            }
            for transaction in coordinator.pending(_MOST_TRANSACTIONS)
        ],
    }


def _details(consumer: LitePushConsumer) -> dict[str, object]:
    """Return the description of a consumer, without its partitions and counts."""
    found = consumer.details(_MOST_PARKED)
    return {
        "parked": [_fields(message) for message in found.parked],
        "lanes": found.lanes,
        "latencies": found.latencies,
        "dead_letters": [{**asdict(reason), "age": age} for reason, age in found.dead_letters],
    }


def _fields(described: Explanation | ParkedMessage) -> dict[str, Any]:
    """Return the fields of a flat value, with its key as text."""
    # Not `asdict`, whose deep copies are most of the cost of a report on a thousand partitions.
    shown = {field.name: getattr(described, field.name) for field in fields(described)}
    key = described.key.decode(errors="backslashreplace") if isinstance(described.key, bytes) else described.key
    shown["key"] = None if key is None else str(key)
    return shown
