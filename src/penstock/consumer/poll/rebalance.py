"""Rebalance callbacks: partitions come, go, and are lost.

The client calls these from within poll, so they run on the poll thread. A revocation has one time budget for all its
steps: stop handing out, wait for running handlers, commit in the callback, drop the assignments. A commit that is not
answered within what is left of it is left to the client: nothing is lost, at worst work is done again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, OFFSET_INVALID, KafkaException, TopicPartition

from penstock.clients.cluster import Clock, ConsumerClient
from penstock.clients.kafka_errors import reason
from penstock.consumer.assignments import Assignment, Assignments
from penstock.consumer.poll.back_pressure import BackPressure
from penstock.consumer.poll.commits import Commits
from penstock.consumer.poll.stop_request import StopRequest

_log = logging.getLogger(__name__)

#: Seconds that the request for the group's committed offsets may take.
_COMMITTED_TIMEOUT_S = 10.0
#: Seconds that finding the first offsets of new topics may take.
_FIRST_TIMEOUT_S = 5.0
#: Seconds between two checks of the running handlers.
_HANDLERS_POLL_S = 0.005
#: Seconds that the commit has in any case, also where running handlers have used the budget up.
_COMMIT_S = 0.5


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Rebalance:
    """Serves the client's rebalance callbacks."""

    assignments: Assignments
    commits: Commits
    clock: Clock
    #: Returns the names of what holds messages of these assignments: slots, completions, the outbox.
    busy: Callable[[Sequence[Assignment]], Sequence[str]]
    #: Called once assignments are inactive: what waited for them goes on.
    on_dropped: Callable[[], None]
    #: Makes an assignment of what the group has committed.
    make_assignment: Callable[[TopicPartition], Assignment]
    back_pressure: BackPressure
    #: The budget of a revocation, in seconds; `stop_request` cuts it short where a stop waits for handlers no longer.
    revoke_timeout: float
    stop_request: StopRequest
    #: Tells whether a topic without an offset begins at its first message, whatever `auto.offset.reset` says.
    begins_at_first: Callable[[str], bool]
    #: What that says, as a logical offset; None where it forbids to begin anywhere.
    offset_reset: int | None
    #: How often partitions were assigned, revoked and lost.
    assigned: int = field(default=0, init=False)
    revoked: int = field(default=0, init=False)
    lost: int = field(default=0, init=False)

    def on_assign(self, client: ConsumerClient, partitions: list[TopicPartition]) -> None:
        """Take partitions over from where the group stands."""
        # Also where nothing is new: the generation is.
        self.commits.note_rebalanced(client)
        if not partitions:
            return
        committed, begun = self._committed(client, partitions)
        made = [self.make_assignment(partition) for partition in committed]
        for partition, assignment in zip(committed, made, strict=True):
            # Where such a partition begins is committed before anything of it is done: whoever comes after this member
            # may take the topic for an old one, or find another end.
            assignment.acknowledged = partition.offset < 0 or partition not in begun
            self.assignments.put(assignment)
        client.incremental_assign(
            [TopicPartition(partition.topic, partition.partition, partition.offset) for partition in committed]
        )
        self.back_pressure.pause_new(client, made)
        self.assigned += len(partitions)
        _log.info("assigned: %s", _names(partitions))

    def _committed(
        self, client: ConsumerClient, partitions: list[TopicPartition]
    ) -> tuple[list[TopicPartition], list[TopicPartition]]:
        """Return the group's offsets, and those of them that are where a partition begins, for the group has none.

        None at all where they must be known and a stop was asked for before they were.

        They may stay out for long: a transaction of the former owner is open, or the group's coordinator is away.
        """
        while True:
            try:
                found = client.committed(partitions, timeout=_COMMITTED_TIMEOUT_S)
                trouble = next((reason(partition.error) for partition in found if partition.error is not None), "")
                if not trouble:
                    return found, self.begin(client, [partition for partition in found if partition.offset < 0])
            except KafkaException as error:
                # Without the map only work is repeated; without the offset the client asks for it itself.
                found = [TopicPartition(partition.topic, partition.partition) for partition in partitions]
                trouble = reason(error)
            if not self.commits.needs_offsets:
                _log.warning("the group's offsets are not known yet: %s; work above them may repeat", trouble)
                return found, []
            _log.warning("the group's offsets are not known yet: %s; they are asked for again", trouble)
            if self.stop_request.is_requested:
                return [], []

    def begin(self, client: ConsumerClient, without: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Say where partitions begin that the group has no offset of; return those of which that is to be committed.

        `KafkaException` where the group's coordinator did not answer.
        """
        at_first = [other for other in without if self.begins_at_first(other.topic)]
        if at_first:
            _log.info("the group has no offset of %s, new topics or its own: they begin at the first", _names(at_first))
        if added := self._added(client, [other for other in without if other not in at_first]):
            _log.warning("%s were added to topics that the group reads: they begin at the first", _names(added))
            at_first += added
        if others := [other for other in without if other not in at_first]:
            _log.info("the group has no offset of %s: auto.offset.reset says where it begins", _names(others))
        for other in others:
            other.offset = OFFSET_INVALID if self.offset_reset is None else self.offset_reset
        for other in at_first:
            other.offset = OFFSET_BEGINNING
        # An end is another at each look, and who begins there later than it was meant to has lost what came between.
        begun = at_first + [other for other in others if other.offset == OFFSET_END]
        end = self.clock.monotonic() + _FIRST_TIMEOUT_S
        for other in begun:
            try:
                known = client.get_watermark_offsets(other, timeout=max(0.0, end - self.clock.monotonic()))
            except KafkaException as error:
                _log.info("where the log of %s begins and ends is not known: %s", _names([other]), reason(error))
            else:
                if known is not None:
                    other.offset = known[0 if other.offset == OFFSET_BEGINNING else 1]
        return begun

    def _added(self, client: ConsumerClient, without: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Return those that a topic got since the group began to read it: they are above all that it has offsets of.

        What is written to one before a member has it is not to be passed over.
        """
        if self.offset_reset != OFFSET_END or not without:
            return []
        counts: dict[str, int] = {}
        for partition in without:
            counts[partition.topic] = max(counts.get(partition.topic, 0), partition.partition)
        below = [TopicPartition(topic, number) for topic, count in counts.items() for number in range(count)]
        highest: dict[str, int] = {}
        for partition in client.committed(below, timeout=_COMMITTED_TIMEOUT_S) if below else ():
            if partition.offset >= 0:
                highest[partition.topic] = max(highest.get(partition.topic, 0), partition.partition)
        return [
            partition
            for partition in without
            if partition.partition > highest.get(partition.topic, partition.partition)
        ]

    def on_revoke(self, client: ConsumerClient, partitions: list[TopicPartition]) -> None:
        """Give partitions back with all that is done committed."""
        if not partitions:
            return
        revoked = self.assignments.deactivate((partition.topic, partition.partition) for partition in partitions)
        begun = self.clock.monotonic()
        # What ends meanwhile is committed meanwhile, as of the generation that takes the partitions away.
        self.commits.note_rebalanced(client)
        while (busy := self.busy(revoked)) and self._left(begun) > 0:
            self.clock.sleep(_HANDLERS_POLL_S)
        if busy:
            _log.warning(
                "there is still work on %s after %.1f s (%s); its messages will be handled again by the next owner",
                _names(partitions),
                self.clock.monotonic() - begun,
                ", ".join(busy),
            )
        self.commits.commit_revoked(client, revoked, max(_COMMIT_S, self._left(begun)))
        self._drop(client, partitions, revoked)
        self.revoked += len(partitions)
        _log.info("revoked: %s", _names(partitions))

    def _left(self, begun: float) -> float:
        """Return the seconds left of the budget of a revocation."""
        # Asked each time: a signal may cut the time short meanwhile. A drain that has used up its own leaves none.
        return min(begun + self.revoke_timeout, self.stop_request.end_by) - self.clock.monotonic()

    def on_lost(self, client: ConsumerClient, partitions: list[TopicPartition]) -> None:
        """Drop partitions that another member may own already: nothing of them may be committed."""
        lost = self.assignments.deactivate((partition.topic, partition.partition) for partition in partitions)
        self._drop(client, partitions, lost)
        self.lost += len(partitions)
        _log.warning("lost without a commit: %s; what was not committed is handled again", _names(partitions))

    def _drop(
        self, client: ConsumerClient, partitions: list[TopicPartition], assignments: Sequence[Assignment]
    ) -> None:
        self.assignments.remove(assignments)
        self.on_dropped()
        # A pause outlives the assignment in the client: when the partition comes back it would stay paused for ever.
        paused = [
            TopicPartition(assignment.topic, assignment.partition)
            for assignment in assignments
            if assignment.paused is not None
        ]
        try:
            if paused:
                client.resume(paused)
        except KafkaException as error:
            _log.debug("not assigned any more: %s", reason(error))
        try:
            client.incremental_unassign(partitions)
        except KafkaException as error:
            # The client has dropped them itself, as it does when the group is left.
            _log.debug("not assigned any more: %s", reason(error))


def _names(partitions: Sequence[TopicPartition]) -> str:
    return ", ".join(f"{partition.topic}:{partition.partition}" for partition in partitions)
