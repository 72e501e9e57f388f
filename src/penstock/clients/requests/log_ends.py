"""Where logs begin and end: for readers of committed messages at the oldest open transaction, or behind all records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from confluent_kafka import OFFSET_INVALID, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ListOffsetsResultInfo, OffsetSpec  # type: ignore[attr-defined] # not in its __all__

from penstock.clients.reading import Place
from penstock.clients.requests.answers import Asked

FIRST: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call] # untyped in the library
LAST: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call] # untyped in the library


class AskedOffsets:
    """A question for offsets of partitions, sent when it is made; `KafkaException` where that is refused."""

    def __init__(
        self,
        admin: AdminClient,
        specs: Mapping[Place, OffsetSpec],
        timeout_s: float,
        isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    ) -> None:
        asked = admin.list_offsets(
            {TopicPartition(*place): spec for place, spec in specs.items()},
            isolation_level=isolation,
            request_timeout=timeout_s,
        )
        self._asked = Asked({(place.topic, place.partition): future for place, future in asked.items()}, timeout_s)

    @property
    def is_over(self) -> bool:
        """Whether it is answered, or its time is over."""
        return self._asked.is_over

    def answers(self) -> tuple[dict[Place, int], dict[Place, KafkaException]]:
        """Return the offsets, and why one is not known, waiting for them until the time is over."""
        found, failed = self._asked.answers()
        offsets = {place: answer.offset for place, answer in found.items() if not _is_invalid(answer)}
        # Where a partition has no leader for a moment, the client library (2.16, seen) may answer so. Taken for the end
        # of a log, it would mean that all in it is gone.
        invalid = KafkaException(
            KafkaError(
                KafkaError.LEADER_NOT_AVAILABLE, "the answer holds no offset: the partition may have no leader yet"
            )
        )
        return offsets, {**failed, **dict.fromkeys(found.keys() - offsets.keys(), invalid)}

    def wait(self) -> dict[Place, int]:
        """Return all offsets, waiting for them; `KafkaException` where one is not known: try again."""
        found, failed = self.answers()
        for error in failed.values():
            raise error
        return found


def _is_invalid(answer: ListOffsetsResultInfo) -> bool:
    return bool(answer.offset == OFFSET_INVALID)


def log_ends(
    admin: AdminClient,
    places: Sequence[Place],
    timeout_s: float,
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
) -> dict[Place, int]:
    """Return the end of each partition, waiting `timeout_s` at most; `KafkaException` without answer."""
    return AskedOffsets(admin, dict.fromkeys(places, LAST), timeout_s, isolation).wait()


def log_bounds(admin: AdminClient, places: Sequence[Place], timeout_s: float) -> dict[Place, tuple[int, int]]:
    """Return where each partition begins and ends, records of open transactions included; as `log_ends`."""
    asked = [
        AskedOffsets(admin, dict.fromkeys(places, spec), timeout_s, IsolationLevel.READ_UNCOMMITTED)
        for spec in (FIRST, LAST)
    ]
    lows, ends = (question.wait() for question in asked)
    return {place: (low, ends[place]) for place, low in lows.items()}
