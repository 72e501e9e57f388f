"""Commits by Kafka transactions: offsets go to the group with the results of their messages, by the publisher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from penstock.clients.cluster import Clock, ConsumerClient
from penstock.consumer.assignments import Assignment, Assignments
from penstock.consumer.polling.committing.commits import Commits
from penstock.consumer.publishing.transaction import Places
from penstock.consumer.publishing.transactional_publisher import TransactionalPublisher
from penstock.offsets import CommitPoint

#: Seconds between two looks whether the publisher has committed.
_LOOK_S = 0.005
_NOTHING: Mapping[Assignment, Places] = MappingProxyType({})


class TransactionalCommits(Commits):
    """Has the publisher commit, and knows what it has committed. On the poll thread, save `changed`."""

    # Without its map, results that are visible would be written again.
    needs_offsets = True

    def __init__(
        self,
        assignments: Assignments,
        interval_s: float,
        clock: Clock,
        complete_finished: Callable[[], None],
        publisher: TransactionalPublisher,
    ) -> None:
        super().__init__(assignments, interval_s, clock, complete_finished)
        self._publisher = publisher

    def changed(self, with_done: Mapping[Assignment, Places] = _NOTHING) -> dict[Assignment, CommitPoint]:
        """Return what is to be committed once these places are done. Any thread."""
        self._complete_finished()
        found = {}
        for assignment in self._assignments.all():
            if assignment.known:
                point = assignment.tracker.commit_point(self._map_chars, with_done=with_done.get(assignment, {}))
                if point != assignment.committed or not assignment.acknowledged:
                    found[assignment] = point
        return found

    def tick(self, client: ConsumerClient, now: float) -> None:
        """As `Commits`; and after a transaction that failed, tell the publisher the group's generation at once."""
        if self._publisher.wants_metadata:
            self.note_rebalanced(client)
        if self._publisher.lacks_right:
            self._publisher.lacks_right = False
            self.on_missing_right()
        super().tick(client, now)

    def note_rebalanced(self, client: ConsumerClient) -> None:
        """Positions are committed as of the group's new generation.

        A member that was put out has no id, and Kafka fences no positions that name no member. So what the publisher
        has stays then: it is refused. An id is never given twice; where it is the same after as before, it is the
        metadata's.
        """
        member = client.memberid()
        metadata = client.consumer_group_metadata()
        if member and client.memberid() == member:
            self._publisher.set_metadata(metadata)

    def _commit(
        self,
        client: ConsumerClient,
        assignments: Sequence[Assignment],  # noqa: ARG002 - the publisher commits all that has changed
        now: float,  # noqa: ARG002 - it has a clock of its own
        map_chars: int,  # noqa: ARG002 - and knows how long a map may be
    ) -> list[Assignment]:
        self.note_rebalanced(client)
        self.succeeded = self._publisher.transactions
        if self.changed():
            self._publisher.expedite()
        return []

    def repeat(self, client: ConsumerClient, now: float) -> None:
        """A right that was taken away shows in the next transaction."""

    def commit_drained(self, client: ConsumerClient, now: float) -> bool:
        """Have the publisher commit what has changed; return whether the group has all of it."""
        self._advance_idle(client, self._assignments.all())
        self._commit(client, (), now, self._map_chars)
        return not self._publisher.waiting and not self.changed()

    def commit_revoked(self, client: ConsumerClient, assignments: Sequence[Assignment], wait_s: float) -> None:
        """Have the publisher commit what has changed of revoked partitions, and wait for it at most so long.

        What is not committed then is given up: the positions of this generation are refused from now on, and the next
        owner waits for a transaction that is still open.
        """
        end = self._clock.monotonic() + wait_s
        self._commit(client, assignments, 0.0, self._map_chars)
        while self._clock.monotonic() < end and any(assignment in assignments for assignment in self.changed()):
            self._clock.sleep(_LOOK_S)
