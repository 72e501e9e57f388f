"""Where logs begin and end: for readers of committed messages at the oldest open transaction, or behind all records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

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
    return _offsets(asked, timeout_s)


def log_bounds(admin: AdminClient, places: Sequence[Place], timeout_s: float) -> dict[Place, tuple[int, int]]:
    """Return where each partition begins and ends, records of open transactions included; as `log_ends`."""
    earliest = OffsetSpec.earliest()  # type: ignore[no-untyped-call] # untyped in the library
    lows = admin.list_offsets({TopicPartition(*place): earliest for place in places}, request_timeout=timeout_s)
    ends = log_ends(admin, places, timeout_s, IsolationLevel.READ_UNCOMMITTED)
    return {place: (low, ends[place]) for place, low in _offsets(lows, timeout_s).items()}


def _offsets(asked: Mapping[TopicPartition, Future[Any]], timeout_s: float) -> dict[Place, int]:
    return {(place.topic, place.partition): known_offset(answered(it, timeout_s)) for place, it in asked.items()}
