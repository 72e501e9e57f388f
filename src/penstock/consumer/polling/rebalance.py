"""Rebalance callbacks: partitions come, go, and are lost.

The client calls these from within poll, so they run on the poll thread. A revocation has one time budget for all its
steps: stop handing out, wait for running handlers, commit in the callback, drop the assignments. A commit that is not
answered within what is left of it is left to the client: what it tells is not lost, at worst it is done again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from confluent_kafka import KafkaException, TopicPartition

from penstock.clients.cluster import Clock, ConsumerClient
from penstock.clients.kafka import reason
from penstock.consumer.assignments import Assignment, Assignments
from penstock.consumer.polling.commits import Commits

_log = logging.getLogger(__name__)

#: Seconds the group may take to tell its committed offsets.
_COMMITTED_TIMEOUT_S = 10.0
#: Seconds between two looks at the running handlers.
_LOOK_S = 0.005
#: Seconds that the commit has in any case, also where running handlers have used the budget up.
_COMMIT_S = 0.5


class Rebalance:
    """Serves the client's rebalance callbacks.

    Args:
        assignments: the table to keep.
        commits: who commits.
        clock: the engine's clock.
        busy: returns the names of what still handles messages of these assignments.
        let_go: called with nothing once assignments are inactive: what waited for them goes on.
        make: makes an assignment of topic, partition, start offset and commit metadata.
        pause_if_full: called with the client and new assignments once they are the client's.
        revoke_timeout: the budget of a revocation, in seconds.
        end_by: returns when a stop waits for handlers no longer, on the engine's clock; infinity while none is asked.
    """

    def __init__(
        self,
        assignments: Assignments,
        commits: Commits,
        *,
        clock: Clock,
        busy: Callable[[Sequence[Assignment]], Sequence[str]],
        let_go: Callable[[], None],
        make: Callable[[TopicPartition], Assignment],
        pause_if_full: Callable[[ConsumerClient, Sequence[Assignment]], None],
        revoke_timeout: float,
        end_by: Callable[[], float],
    ) -> None:
        self._assignments = assignments
        self._commits = commits
        self._clock = clock
        self._busy = busy
        self._let_go = let_go
        self._make = make
        self._pause_if_full = pause_if_full
        self._revoke_timeout = revoke_timeout
        self._end_by = end_by
        #: How often partitions were assigned, revoked and lost.
        self.assigned = 0
        self.revoked = 0
        self.lost = 0

    def on_assign(self, consumer: ConsumerClient, partitions: list[TopicPartition]) -> None:
        """Take partitions over from where the group stands."""
        if not partitions:
            return
        try:
            committed = consumer.committed(partitions, timeout=_COMMITTED_TIMEOUT_S)
        except KafkaException as error:
            # Without the map only work is repeated; without the offset the client asks for it itself.
            _log.warning("the group's offsets are not known yet: %s; work above them may repeat", reason(error))
            committed = [TopicPartition(one.topic, one.partition) for one in partitions]
        else:
            if begun := [one for one in committed if one.offset < 0]:
                _log.info("the group has no offset of %s: auto.offset.reset says where it begins", _names(begun))
        made = [self._make(one) for one in committed]
        for assignment in made:
            self._assignments.put(assignment)
        consumer.incremental_assign([TopicPartition(one.topic, one.partition, one.offset) for one in committed])
        self._pause_if_full(consumer, made)
        self.assigned += len(partitions)
        _log.info("assigned: %s", _names(partitions))

    def on_revoke(self, consumer: ConsumerClient, partitions: list[TopicPartition]) -> None:
        """Give partitions back with all that is done committed."""
        if not partitions:
            return
        revoked = self._assignments.deactivate((one.topic, one.partition) for one in partitions)
        begun = self._clock.monotonic()
        while (busy := self._busy(revoked)) and self._left(begun) > 0:
            self._clock.sleep(_LOOK_S)
        if busy:
            _log.warning(
                "%d handlers of %s still run after %.1f s; their messages will be handled again by the next owner",
                len(busy),
                _names(partitions),
                self._clock.monotonic() - begun,
            )
        self._commits.commit_revoked(consumer, revoked, max(_COMMIT_S, self._left(begun)))
        self._drop(consumer, partitions, revoked)
        self.revoked += len(partitions)
        _log.info("revoked: %s", _names(partitions))

    def _left(self, begun: float) -> float:
        """Return the seconds left of the budget of a revocation."""
        # Asked each time: a signal may cut the time short meanwhile. A drain that has used up its own leaves none.
        return min(begun + self._revoke_timeout, self._end_by()) - self._clock.monotonic()

    def on_lost(self, consumer: ConsumerClient, partitions: list[TopicPartition]) -> None:
        """Drop partitions that another member may own already: nothing of them may be committed."""
        lost = self._assignments.deactivate((one.topic, one.partition) for one in partitions)
        self._drop(consumer, partitions, lost)
        self.lost += len(partitions)
        _log.warning("lost without a commit: %s; what was not committed is handled again", _names(partitions))

    def _drop(
        self, consumer: ConsumerClient, partitions: list[TopicPartition], assignments: Sequence[Assignment]
    ) -> None:
        self._assignments.remove(assignments)
        self._let_go()
        # A pause outlives the assignment in the client: when the partition comes back it would stay paused for ever.
        paused = [TopicPartition(one.topic, one.partition) for one in assignments if one.paused is not None]
        try:
            if paused:
                consumer.resume(paused)
        except KafkaException as error:
            _log.debug("not assigned any more: %s", reason(error))
        try:
            consumer.incremental_unassign(partitions)
        except KafkaException as error:
            # The client has dropped them itself, as it does when the group is left.
            _log.debug("not assigned any more: %s", reason(error))


def _names(partitions: Sequence[TopicPartition]) -> str:
    return ", ".join(f"{one.topic}[{one.partition}]" for one in partitions)


__all__ = ["Rebalance"]
