"""Back-pressure: whether more may be fetched now, and which partitions are paused, with the reason.

Pausing a partition makes the client throw away what it had fetched of it, so a brief saturation is met by not asking
for a moment; only a partition that stays full is paused. On the poll thread only.

The bytes of all are bounded together. Lest a topic that is held, or slow, take them all and stop the others, a small
share is kept free for each partition: who holds less may fetch whatever the others hold.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from confluent_kafka import KafkaException, TopicPartition

from penstock.clients.cluster import ConsumerClient
from penstock.clients.kafka import reason as why
from penstock.consumer.assignments import Assignment
from penstock.offsets import MAX_METADATA_CHARS

_log = logging.getLogger(__name__)

#: Seconds a partition may be full before it is paused.
GRACE_S = 0.2
#: How many times its limit a partition may take in meanwhile, where others are hungry: the client hands over one
#: partition after another, and what is next in its queue may be for them.
_OVER = 2

FULL = "in-flight limit"
BYTES = "byte limit"
PARKED = "parked limit"
MAP = "offset map limit"
STOPPING = "stopping"

#: The part of all bytes that is kept free for partitions that hold little, each its even share of it.
_KEPT = 1 / 4

#: Offsets from the watermark on of which any pattern fits into the metadata, by the bitmap form of the map.
_MAP_ANY = 26_000
#: Messages that may be taken in at once on the strength of that, holes or not.
_MAP_ONCE = 10_000
#: Characters of the map that an open message may come to cost, at most about, when those around it are done: in a log
#: with holes, where the run lengths are deflated. In one without it is a bit of the bitmap.
_MAP_COST = 0.25
#: Offsets, and seconds, between two looks at the size of a map that might outgrow the metadata: a look costs as much as
#: a commit.
_MAP_LOOK = 1_000
_MAP_LOOK_S = 0.1
#: Messages for which there must be room in the map: below the first the partition takes nothing in until the second.
_MAP_FULL = 1_000
_MAP_FREE = 2_000


class BackPressure:
    """Holds the limits, which any thread may change.

    Args:
        max_in_flight: messages in flight of one partition, parked ones left out.
        max_in_flight_bytes: bytes in flight of all partitions, parked ones left out; a partition that holds less than a
            quarter of its even part may always fetch.
        max_parked: parked messages of one partition.
        max_parked_bytes: bytes parked of all partitions.
        fetch_size: messages of one fetch.
    """

    def __init__(
        self, max_in_flight: int, max_in_flight_bytes: int, max_parked: int, max_parked_bytes: int, *, fetch_size: int
    ) -> None:
        self.max_in_flight = max_in_flight
        self.max_in_flight_bytes = max_in_flight_bytes
        self.max_parked = max_parked
        self.max_parked_bytes = max_parked_bytes
        self._fetch_size = fetch_size
        self._bytes_full = False
        self._parked_full = False
        #: How many messages may be fetched now, by the last `admit`.
        self.room = fetch_size
        #: How often a partition was paused, by reason.
        self.pauses = {FULL: 0, BYTES: 0, PARKED: 0, MAP: 0, STOPPING: 0}

    def admit(  # noqa: C901 - one look at all, then one verdict for each
        self, consumer: ConsumerClient, assignments: Sequence[Assignment], now: float
    ) -> bool:
        """Pause and resume what is due; return whether the caller may fetch now, or should ask again shortly."""
        may_fetch = True
        self.room = self._fetch_size
        taken = parked_bytes = 0
        counts = []
        hungry = False
        # One byte at least: a partition that holds nothing may take a message in.
        share = max(1, int(self.max_in_flight_bytes * _KEPT) // max(1, len(assignments)))
        little = share
        messages = total_size_in_bytes = 0
        for assignment in assignments:
            parked, weight = assignment.tracker.parked
            in_flight, in_bytes = assignment.tracker.in_flight, assignment.tracker.bytes_in_flight
            # In flight each message weighs as the mean of its fetch, parked it weighs what it weighs. Small ones parked
            # out of large ones must not count as healthy for ever, nor large ones make room for others.
            healthy_bytes = max(0, in_bytes - max(weight, in_bytes * parked // max(1, in_flight)))
            # What it does not hold of its share is kept for it.
            taken += max(share, healthy_bytes)
            if healthy_bytes < share:
                little = min(little, share - healthy_bytes)
            messages += in_flight
            total_size_in_bytes += in_bytes
            parked_bytes += weight
            holds_share = healthy_bytes >= max(1, share // (2 if assignment.paused == BYTES else 1))
            counts.append((assignment, in_flight - parked, parked, holds_share))
            hungry = hungry or in_flight - parked < self.max_in_flight // 2
        # Half the limit again before resuming, so that a partition does not flap.
        self._bytes_full = taken >= max(1, self.max_in_flight_bytes // (2 if self._bytes_full else 1))
        if self._bytes_full:
            # Only those that hold little fetch now, and no more of them than their shares hold, by what is in flight.
            self.room = max(1, min(self.room, little * messages // max(1, total_size_in_bytes)))
        self._parked_full = parked_bytes >= max(1, self.max_parked_bytes // (2 if self._parked_full else 1))
        for assignment, healthy, parked, holds_share in counts:
            bytes_full = self._bytes_full and holds_share
            wanted = self._reason(assignment, healthy, parked, now, bytes_full=bytes_full)
            if wanted is None:
                assignment.full_since = None
                if assignment.paused is not None:
                    self._resume(consumer, assignment)
            elif assignment.paused is None:
                if assignment.full_since is None:
                    assignment.full_since = now
                if now - assignment.full_since >= GRACE_S:
                    self.pause(consumer, assignment, wanted)
                elif (
                    wanted != FULL
                    or not hungry
                    or healthy >= _OVER * self.max_in_flight
                    or self._reason_beside_full(assignment, healthy, parked, now, bytes_full=bytes_full) is not None
                ):
                    may_fetch = False
            else:
                assignment.paused = wanted
        return may_fetch

    def _reason(self, assignment: Assignment, healthy: int, parked: int, now: float, *, bytes_full: bool) -> str | None:
        if healthy >= max(1, self.max_in_flight // (2 if assignment.paused == FULL else 1)):
            return FULL
        return self._reason_beside_full(assignment, healthy, parked, now, bytes_full=bytes_full)

    def _reason_beside_full(
        self, assignment: Assignment, healthy: int, parked: int, now: float, *, bytes_full: bool
    ) -> str | None:
        if parked and (
            self._parked_full or parked >= max(1, self.max_parked // (2 if assignment.paused == PARKED else 1))
        ):
            return PARKED
        room = _map_room(assignment, healthy + parked, now, self._fetch_size)
        if room < (_MAP_FREE if assignment.paused == MAP else _MAP_FULL):
            return MAP
        self.room = min(self.room, room)
        return BYTES if bytes_full else None

    def pause_if_full(self, consumer: ConsumerClient, assignments: Sequence[Assignment]) -> None:
        """Take new assignments in: paused where the bytes are full, or each would bring a fetch beyond them (I5)."""
        if self._bytes_full:
            for assignment in assignments:
                self.pause(consumer, assignment, BYTES)

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


def _map_room(assignment: Assignment, in_flight: int, now: float, fetch_size: int) -> int:
    """Return how many messages may be taken in so that the map of what is done above the watermark fits into a commit.

    It must fit at every moment until they are done, whatever is done of them first: a map that is cut costs a replay of
    what was cut.
    """
    tracker = assignment.tracker
    position = tracker.position
    dense = _MAP_ANY - (position - tracker.watermark)
    if dense >= fetch_size:
        return dense
    if position - assignment.map_at >= _MAP_LOOK or now >= assignment.map_look:
        assignment.map_at = position
        assignment.map_look = now + _MAP_LOOK_S
        free = MAX_METADATA_CHARS - len(tracker.commit_point().metadata)
        assignment.map_room = int(free / _MAP_COST) - in_flight
    # What was in flight at that look was counted as if it had to be told; what came since is counted by its offsets.
    # In a log with holes messages span more offsets than they are: not as many as `dense` may be taken at once.
    return max(min(dense, _MAP_ONCE), assignment.map_room - (position - assignment.map_at))


__all__ = ["BYTES", "FULL", "GRACE_S", "MAP", "PARKED", "STOPPING", "BackPressure"]
