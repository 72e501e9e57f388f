"""Back-pressure: whether more may be fetched now, and which partitions are paused, with the reason.

Pausing a partition makes the client throw away what it had fetched of it, so a brief saturation is met by not asking
for a moment; only a partition that stays full is paused. On the poll thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from confluent_kafka import KafkaException, TopicPartition

from penstock.cluster import ConsumerClient
from penstock.consumer.assignments import Assignment
from penstock.kafka import reason as why
from penstock.offsets import MAX_METADATA_CHARS

_log = logging.getLogger(__name__)

#: Seconds a partition may be full before it is paused.
GRACE_S = 0.2

FULL = "in-flight limit"
BYTES = "byte limit"
PARKED = "parked limit"
MAP = "offset map limit"
STOPPING = "stopping"

#: Offsets taken in between two looks at the size of an offset map: they add at most a fifth of what metadata holds.
_MAP_LOOK = 4_000
#: Seconds between two looks at a map that is full.
_MAP_LOOK_S = 0.1
#: The part of the metadata's bound at which a partition takes nothing more in.
_MAP_FULL = 0.7
_MAP_FREE = 0.5


class Intake:
    """Holds the limits, which any thread may change.

    Args:
        max_in_flight: messages in flight of one partition, parked ones left out.
        max_in_flight_bytes: bytes in flight of all partitions, parked ones left out.
        max_parked: parked messages of one partition.
        max_parked_bytes: bytes parked of all partitions.
    """

    def __init__(self, max_in_flight: int, max_in_flight_bytes: int, max_parked: int, max_parked_bytes: int) -> None:
        self.max_in_flight = max_in_flight
        self.max_in_flight_bytes = max_in_flight_bytes
        self.max_parked = max_parked
        self.max_parked_bytes = max_parked_bytes
        self._bytes_full = False
        self._parked_full = False
        #: How often a partition was paused, by reason.
        self.pauses = {FULL: 0, BYTES: 0, PARKED: 0, MAP: 0, STOPPING: 0}

    def admit(self, consumer: ConsumerClient, assignments: Sequence[Assignment], now: float) -> bool:
        """Pause and resume what is due; return whether the caller may fetch now, or should ask again shortly."""
        may_fetch = True
        in_bytes = parked_bytes = 0
        counts = []
        for assignment in assignments:
            parked, weight = assignment.tracker.parked
            in_bytes += assignment.tracker.bytes_in_flight
            parked_bytes += weight
            counts.append((assignment, assignment.tracker.in_flight - parked, parked))
        # Half the limit again before resuming, so that a partition does not flap.
        self._bytes_full = in_bytes - parked_bytes >= self.max_in_flight_bytes // (2 if self._bytes_full else 1)
        self._parked_full = parked_bytes >= self.max_parked_bytes // (2 if self._parked_full else 1)
        for assignment, healthy, parked in counts:
            wanted = self._reason(assignment, healthy, parked, now)
            if wanted is None:
                assignment.full_since = None
                if assignment.paused is not None:
                    self._resume(consumer, assignment)
            elif assignment.paused is None:
                if assignment.full_since is None:
                    assignment.full_since = now
                if now - assignment.full_since >= GRACE_S:
                    self.pause(consumer, assignment, wanted)
                else:
                    may_fetch = False
            else:
                assignment.paused = wanted
        return may_fetch

    def _reason(self, assignment: Assignment, healthy: int, parked: int, now: float) -> str | None:
        if healthy >= max(1, self.max_in_flight // (2 if assignment.paused == FULL else 1)):
            return FULL
        if parked and (
            self._parked_full or parked >= max(1, self.max_parked // (2 if assignment.paused == PARKED else 1))
        ):
            return PARKED
        if _map_is_full(assignment, now):
            return MAP
        return BYTES if self._bytes_full else None

    def pause(self, consumer: ConsumerClient, assignment: Assignment, reason: str) -> None:
        """Pause one partition for a named reason."""
        try:
            consumer.pause([TopicPartition(assignment.topic, assignment.partition)])
        except KafkaException as error:
            _log.warning("%s could not be paused: %s", assignment, why(error))
            return
        assignment.paused = reason
        self.pauses[reason] += 1
        _log.debug("%s is paused: %s", assignment, reason)

    def _resume(self, consumer: ConsumerClient, assignment: Assignment) -> None:
        try:
            consumer.resume([TopicPartition(assignment.topic, assignment.partition)])
        except KafkaException as error:
            _log.warning("%s could not be resumed, it is tried again: %s", assignment, why(error))
            return
        assignment.paused = None
        _log.debug("%s is resumed", assignment)


def _map_is_full(assignment: Assignment, now: float) -> bool:
    """Tell whether the map of what is done above the watermark nears what a commit can carry.

    Looked at before the map can have outgrown it: a map that is cut costs a replay of what was cut.
    """
    tracker = assignment.tracker
    position = tracker.position
    if position - assignment.map_at >= _MAP_LOOK or (assignment.map_full and now >= assignment.map_look):
        assignment.map_at = position
        assignment.map_look = now + _MAP_LOOK_S
        size = len(tracker.commit_point().metadata)
        assignment.map_full = size >= MAX_METADATA_CHARS * (_MAP_FREE if assignment.map_full else _MAP_FULL)
    return assignment.map_full


__all__ = ["BYTES", "FULL", "GRACE_S", "MAP", "PARKED", "STOPPING", "Intake"]
