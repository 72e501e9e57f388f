"""Where logs begin and end: for readers of committed messages at the oldest open transaction, or behind all records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from confluent_kafka import OFFSET_INVALID, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ListOffsetsResultInfo, OffsetSpec  # type: ignore[attr-defined] # not in its __all__

from penstock.clients.reading import Place
from penstock.clients.requests.answers import Asked

FIRST: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call] # untyped in the library
LAST: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call] # untyped in the library

#: Offsets that are known, and why one is not.
Offsets = tuple[dict[Place, int], dict[Place, KafkaException]]


def ask_offsets(
    admin: AdminClient,
    specs: Mapping[Place, OffsetSpec],
    timeout_s: float,
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
) -> Asked[Place, ListOffsetsResultInfo, Offsets]:
    """Ask for offsets of partitions; `KafkaException` where the client library refuses to ask."""
    asked = admin.list_offsets(
        {TopicPartition(*place): spec for place, spec in specs.items()},
        isolation_level=isolation,
        request_timeout=timeout_s,
    )
    return Asked(admin, {(place.topic, place.partition): future for place, future in asked.items()}, timeout_s, _read)


def _read(found: Mapping[Place, ListOffsetsResultInfo], failed: Mapping[Place, KafkaException]) -> Offsets:
    offsets = {place: int(answer.offset) for place, answer in found.items() if answer.offset != OFFSET_INVALID}
    # Where a partition has no leader for a moment, the client library (2.16, seen) may answer so. Taken for the end of
    # a log, it would mean that all in it is gone.
    text = "the answer holds no offset: the partition may have no leader yet"
    invalid = KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE, text))
    return offsets, {**failed, **dict.fromkeys(found.keys() - offsets.keys(), invalid)}


def known_offsets(
    admin: AdminClient,
    specs: Mapping[Place, OffsetSpec],
    timeout_s: float,
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
) -> dict[Place, int]:
    """Return offsets of partitions, waiting `timeout_s` at most; `KafkaException` where one is not known: try again."""
    found, failed = ask_offsets(admin, specs, timeout_s, isolation).wait()
    for error in failed.values():
        raise error
    return found


def log_ends(
    admin: AdminClient,
    places: Sequence[Place],
    timeout_s: float,
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
) -> dict[Place, int]:
    """Return the end of each partition; errors as `known_offsets`."""
    return known_offsets(admin, dict.fromkeys(places, LAST), timeout_s, isolation)


def log_bounds(admin: AdminClient, places: Sequence[Place], timeout_s: float) -> dict[Place, tuple[int, int]]:
    """Return where each partition begins and ends, records of open transactions included; errors as `known_offsets`."""
    uncommitted = IsolationLevel.READ_UNCOMMITTED
    lows = known_offsets(admin, dict.fromkeys(places, FIRST), timeout_s, uncommitted)
    ends = log_ends(admin, places, timeout_s, uncommitted)
    return {place: (low, ends[place]) for place, low in lows.items()}
