"""Where the logs of the partitions end, as the client last heard of it: no request is made. On the poll thread only."""

from __future__ import annotations

from confluent_kafka import TopicPartition

from penstock.clients.cluster import ConsumerClient
from penstock.consumer.assignments import Assignments

#: Seconds between two looks at each partition, and how many may be looked at in a second: one costs some µs.
_EVERY_S = 1.0
_MOST_PER_S = 1000


class LogEnds:
    """Notes them, for lag and for the causes of a stall. Commits have a pace of their own, which may be an hour."""

    def __init__(self, assignments: Assignments) -> None:
        self._assignments = assignments
        self._next = 0.0

    def note(self, client: ConsumerClient, now: float) -> None:
        """Note them, when it is time."""
        if now < self._next:
            return
        assignments = self._assignments.all()
        self._next = now + max(_EVERY_S, len(assignments) / _MOST_PER_S)
        for assignment in assignments:
            known = client.get_watermark_offsets(TopicPartition(assignment.topic, assignment.partition), cached=True)
            if known is not None and known[1] >= 0:
                assignment.end = known[1]
