"""Commits by Kafka transactions: the outbox commits offsets with what goes to other topics for their messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.clients.cluster import Clock, ConsumerClient
from penstock.consumer.assignments import Assignment, Assignments
from penstock.consumer.outbox.transactional_outbox import TransactionalOutbox
from penstock.consumer.polling.committing.commits import Commits

#: Seconds between two looks whether the outbox has committed.
_LOOK_S = 0.005


class TransactionalCommits(Commits):
    """Has the outbox commit, and tells it the group's generation."""

    # Without its map, results that are visible would be written again.
    needs_offsets = True

    def __init__(self, assignments: Assignments, interval_s: float, clock: Clock, outbox: TransactionalOutbox) -> None:
        super().__init__(assignments, interval_s, clock)
        self._outbox = outbox

    def tick(self, client: ConsumerClient, now: float) -> None:
        """As `Commits` says; and after a transaction that failed, tell the outbox the group's generation at once."""
        if self._outbox.wants_metadata:
            self.note_rebalanced(client)
        if self._outbox.lacks_right:
            self._outbox.lacks_right = False
            self.on_missing_right()
        if now >= self._next:
            self._next = now + self.interval_s
            self._advance_idle(client, self._assignments.all())
            self._commit(client)

    def note_rebalanced(self, client: ConsumerClient) -> None:
        """Positions are committed as of this generation.

        A member that was put out has no id, and Kafka fences no positions that name no member. So what the outbox has
        stays then: it is refused. An id is never given twice; where it is the same after as before, it is the
        metadata's.
        """
        member = client.memberid()
        metadata = client.consumer_group_metadata()
        if member and client.memberid() == member:
            self._outbox.set_metadata(metadata)

    def _commit(self, client: ConsumerClient) -> Collection[Assignment]:
        """Have the outbox commit what has changed; return of which assignments that is."""
        self.note_rebalanced(client)
        self.succeeded = self._outbox.transactions
        changed = self._outbox.changed()
        if changed:
            self._outbox.expedite()
        return changed

    def commit_drained(self, client: ConsumerClient, now: float) -> bool:  # noqa: ARG002 - the outbox has a pace of its own
        """As `Commits` says."""
        self._advance_idle(client, self._assignments.all())
        return not self._commit(client) and not self._outbox.waiting

    def commit_revoked(self, client: ConsumerClient, assignments: Sequence[Assignment], wait_s: float) -> None:
        """As `Commits` says.

        What is not committed then is given up: the positions of this generation are refused from now on, and the next
        owner waits for a transaction that is still open.
        """
        end = self._clock.monotonic() + wait_s
        while any(assignment in assignments for assignment in self._commit(client)):
            if self._clock.monotonic() >= end or self._outbox.has_ended:
                return
            self._clock.sleep(_LOOK_S)
