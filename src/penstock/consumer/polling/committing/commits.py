"""Commits: what the poll thread asks of the two ways in which offsets go to the group, and what both know.

The client's own position lies past markers and aborted ranges, which no message shows. It also lies past messages that
the client has counted but not handed over yet, as when a rebalance callback runs in the middle of `consume`. So it is
read only between fetches, when all that came out was tracked: never in a callback, and never after a fetch that failed
half-way.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from penstock.clients.cluster import Clock, ConsumerClient
from penstock.clients.kafka_errors import reason
from penstock.consumer.assignments import Assignment, Assignments

_log = logging.getLogger(__name__)


class Commits(ABC):
    """Commits the assignments' watermarks every `interval_s` seconds, which any thread may change."""

    #: Whether a partition may be taken over only once the group's offset of it is known.
    needs_offsets = False

    def __init__(self, assignments: Assignments, interval_s: float, clock: Clock) -> None:
        self._assignments = assignments
        self.interval_s = interval_s
        self._clock = clock
        #: Called for every commit, where telemetry is on: its partitions, and what went wrong. Set at start.
        self.on_result: Callable[[Sequence[TopicPartition], str | None], None] | None = None
        #: Called when a commit is refused for want of a right. Set at start.
        self.on_missing_right: Callable[[], None] = lambda: None
        self._next = 0.0
        #: Commits the broker took, and commits that failed.
        self.succeeded = 0
        self.failed = 0

    @abstractmethod
    def tick(self, client: ConsumerClient, now: float) -> None:
        """Commit what has changed, when it is time, without waiting for the answer."""

    @abstractmethod
    def commit_drained(self, client: ConsumerClient, now: float) -> bool:
        """Commit what has changed at the end of a drain; return whether the group has all of it.

        To be asked again between polls.
        """

    @abstractmethod
    def commit_revoked(self, client: ConsumerClient, assignments: Sequence[Assignment], wait_s: float) -> None:
        """Commit what has changed of revoked partitions, from within a rebalance callback, in at most `wait_s`."""

    def note_rebalanced(self, client: ConsumerClient) -> None:  # noqa: B027 - a hook
        """Take note of a generation of the group."""

    def repeat(self, client: ConsumerClient, now: float) -> None:  # noqa: B027 - a hook
        """Commit a point that the group has already, where nothing was committed for a while."""

    def on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:  # noqa: B027 - a hook
        """Take the answer to a commit that was not waited for. The client calls it from within poll."""

    def forget_answers(self) -> None:  # noqa: B027 - a hook
        """Wait for no answer any more: the client that sent the commits has ended, with all its partitions."""

    def _advance_idle(self, client: ConsumerClient, assignments: Sequence[Assignment]) -> None:
        """Move past markers and aborted ranges at the tail: only the client's position shows them."""
        idle = [
            assignment
            for assignment in assignments
            if not assignment.tracker.in_flight and (assignment.known or not assignment.is_sought)
        ]
        if not idle:
            return
        try:
            positions = client.position([TopicPartition(assignment.topic, assignment.partition) for assignment in idle])
        except KafkaException as error:
            _log.debug("positions are not known now: %s", reason(error))
            return
        for assignment, position in zip(idle, positions, strict=True):
            # All that was fetched is tracked, and nothing is fetched meanwhile: this is the thread that fetches.
            if position.error is None and position.offset > assignment.tracker.position:
                assignment.tracker.advance(position.offset)
