"""Where logs end: for readers of committed messages at the oldest open transaction, or behind all that was written."""

from __future__ import annotations

from collections.abc import Sequence

from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined] # not in its __all__

from penstock.clients.reading import Place
from penstock.clients.requests.answers import answered, known_offset


def log_ends(
    admin: AdminClient,
    places: Sequence[Place],
    timeout_s: float,
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
) -> dict[Place, int]:
    """Return the end of each partition, waiting `timeout_s` at most; `KafkaException` without answer."""
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call] # untyped in the library
    asked = admin.list_offsets(
        {TopicPartition(*place): latest for place in places}, isolation_level=isolation, request_timeout=timeout_s
    )
    return {(one.topic, one.partition): known_offset(answered(future, timeout_s)) for one, future in asked.items()}
