"""Back-pressure: whether more may be fetched now, and which partitions are paused, with the reason.

Pausing a partition makes the client throw away what it had fetched of it, so a brief saturation is met by not asking
for a moment; only a partition that stays full is paused. On the poll thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from confluent_kafka import Consumer, KafkaException, TopicPartition

from penstock.consumer.assignments import Assignment
from penstock.kafka import reason as why

_log = logging.getLogger(__name__)

#: Seconds a partition may be full before it is paused.
GRACE_S = 0.2

FULL = "in-flight limit"
BYTES = "byte limit"
STOPPING = "stopping"


class Intake:
    """Holds the limits.

    Args:
        max_in_flight: messages in flight of one partition.
        max_in_flight_bytes: bytes in flight of all partitions.
    """

    def __init__(self, max_in_flight: int, max_in_flight_bytes: int) -> None:
        self._max_in_flight = max_in_flight
        self._max_bytes = max_in_flight_bytes
        self._bytes_full = False
        #: How often a partition was paused, by reason.
        self.pauses = {FULL: 0, BYTES: 0, STOPPING: 0}

    def admit(self, consumer: Consumer, assignments: Sequence[Assignment], now: float) -> bool:
        """Pause and resume what is due; return whether the caller may fetch now, or should ask again shortly."""
        may_fetch = True
        in_bytes = sum(assignment.tracker.bytes_in_flight for assignment in assignments)
        # Half the limit again before resuming, so that a partition does not flap.
        self._bytes_full = in_bytes >= (self._max_bytes // 2 if self._bytes_full else self._max_bytes)
        for assignment in assignments:
            wanted = self._reason(assignment)
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
        return may_fetch

    def _reason(self, assignment: Assignment) -> str | None:
        limit = self._max_in_flight
        if assignment.paused == FULL:
            limit //= 2
        if assignment.tracker.in_flight >= max(1, limit):
            return FULL
        return BYTES if self._bytes_full else None

    def pause(self, consumer: Consumer, assignment: Assignment, reason: str) -> None:
        """Pause one partition for a named reason."""
        try:
            consumer.pause([TopicPartition(assignment.topic, assignment.partition)])
        except KafkaException as error:
            _log.warning("%s could not be paused: %s", assignment, why(error))
            return
        assignment.paused = reason
        self.pauses[reason] += 1
        _log.debug("%s is paused: %s", assignment, reason)

    def _resume(self, consumer: Consumer, assignment: Assignment) -> None:
        try:
            consumer.resume([TopicPartition(assignment.topic, assignment.partition)])
        except KafkaException as error:
            _log.warning("%s could not be resumed, it is tried again: %s", assignment, why(error))
            return
        assignment.paused = None
        _log.debug("%s is resumed", assignment)


__all__ = ["BYTES", "FULL", "GRACE_S", "STOPPING", "Intake"]
