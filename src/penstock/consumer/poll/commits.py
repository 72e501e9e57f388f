"""Commits: what is sent to the group, when, and what happens when that fails. The poll thread's.

There are two ways: the consumer's client commits, or the outbox does so with what goes to other topics, in Kafka
transactions.

The client's own position lies past markers and aborted ranges, which no message shows. It also lies past messages that
the client has counted but not handed over yet, as when a rebalance callback runs in the middle of `consume`. So it is
read only between fetches, when all that came out was tracked: never in a callback, and never after a fetch that failed
half-way.

A commit point is computed once and is one value with its offset map. A commit that fails is counted, logged and soon
made again, whatever the interval is: it never ends the poll thread. One that is refused because the group rebalances is
no failure: it is made again in the new generation, unless the partition has moved.

One commit is under way at a time. The client repeats a commit whose broker went away, and a repeated older commit that
arrives after a newer one takes the group back, with success reported for both. Where an answer stays out too long the
next is sent without it; when all answers are there, the commit points are sent once more.

A broker may be set to take less metadata than Kafka does by default. Then commits would fail for ever, so they are made
again at once without maps.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from penstock.clients.cluster import Clock, ConsumerClient
from penstock.clients.kafka_errors import is_missing_right, is_rebalancing, reason
from penstock.consumer.assignments import Assignment, Assignments
from penstock.consumer.outbox.transactional_outbox import TransactionalOutbox
from penstock.consumer.poll.refusals import Refusals
from penstock.offsets import MAX_METADATA_CHARS

_log = logging.getLogger(__name__)


class Commits(ABC):
    """Commits the assignments' watermarks every `interval_s` seconds, which any thread may change."""

    #: Whether a partition may be taken over only once the group's offset of it is known.
    needs_offsets = False

    def __init__(self, assignments: Assignments, interval_s: float, clock: Clock, refusals: Refusals) -> None:
        self._assignments = assignments
        self.interval_s = interval_s
        self._clock = clock
        self._refusals = refusals
        #: Called for every commit, where telemetry is on: its partitions, and what went wrong. Set at start.
        self.on_result: Callable[[Sequence[TopicPartition], str | None], None] | None = None
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

    def note_rebalanced(self, client: ConsumerClient) -> None:  # noqa: ARG002 - for those who commit as of it
        """Take note of a generation of the group, which takes this member."""
        self._refusals.of_group = None

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


#: Seconds to wait for the answer to a commit before the next is sent all the same: longer than a group takes to move to
#: another broker, with a session of 9 s.
_ANSWER_S = 20.0
#: Seconds after which an answer that stays out casts doubt on the coordinator.
_DOUBT_AFTER_S = 0.5
#: Seconds after which a commit that failed is made again; as often as it fails again they double, up to the most. While
#: a drain waits for it they do not grow.
_RETRY_S = 0.5
_MOST_RETRY_S = 16.0


class ConsumerCommits(Commits):
    """Has the consumer's client commit.

    `complete_finished` is called before commit points are computed: it completes what handlers finished of the runs
    they are still at, so that one that hangs keeps none of it from the commit.
    """

    def __init__(
        self,
        assignments: Assignments,
        interval_s: float,
        clock: Clock,
        refusals: Refusals,
        complete_finished: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(assignments, interval_s, clock, refusals)
        self._complete_finished = complete_finished
        # Commits without an answer yet, when the last was sent, and whether the broker may take an earlier one behind
        # it: two were under way at once, or the client gave one up that it had sent.
        self._under_way = 0
        self._sent_at = clock.monotonic()
        self._overtaken = False
        # How many commits have failed since the last that did not, and whether the end of a drain has begun to commit.
        self._failures = 0
        self._draining = False
        # Characters of an offset map that the broker is believed to take: 0 once it has refused one.
        self._map_chars = MAX_METADATA_CHARS

    def tick(self, client: ConsumerClient, now: float) -> None:
        """As `Commits` says."""
        if now < self._next:
            return
        self._next = now + self.interval_s
        if self._under_way and now - self._sent_at < _ANSWER_S:
            return
        assignments = self._assignments.all()
        self._advance_idle(client, assignments)
        self._commit(client, assignments, now, self._map_chars)

    def commit_drained(self, client: ConsumerClient, now: float) -> bool:
        """As `Commits` says.

        Polls bring the answers: waiting for one in the client would know no bound while the coordinator is away.
        """
        if not self._under_way and (not self._draining or now >= self._next):
            self._draining = True
            self._next = now + self.interval_s
            assignments = self._assignments.all()
            self._advance_idle(client, assignments)
            self._commit(client, assignments, now, self._map_chars)
        return not self._under_way and all(assignment.acknowledged for assignment in self._assignments.all())

    def commit_revoked(self, client: ConsumerClient, assignments: Sequence[Assignment], wait_s: float) -> None:
        """As `Commits` says.

        A commit that is waited for in the client knows no bound while the coordinator is away: as long as a session, or
        a request. Its answer would come from `poll`, which here would hand over messages as well. So the group is asked
        for its offsets instead, a question that ends in time, which the coordinator answers after the commit, for both
        go one way. The commit goes out before the group hears of the revocation in any case: the client sends in
        order. It is waited `wait_s` seconds until the group is known to have it, and not at all where the last commit
        failed or stays out, for then the coordinator may be away.
        """
        now = self._clock.monotonic()
        late = self._under_way > 0 and now - self._sent_at > _DOUBT_AFTER_S
        end = now if late or self._failures else now + wait_s
        sent = self._commit(client, assignments, now, self._map_chars)
        missing = self._not_taken(client, sent, end)
        if missing and any(assignment.committed.metadata for assignment in missing):
            # It may be the map that the broker refuses, and for these partitions there is no next commit.
            self._commit(client, missing, now, 0)
            missing = self._not_taken(client, missing, end)
        if missing is None or missing:
            _log.warning(
                "the group is not known to have the commit of %s, which were revoked, %.1f s after it was sent; where "
                "it does not arrive, the next owner handles again what was done since the commit before",
                ", ".join(map(str, sent if missing is None else missing)),
                self._clock.monotonic() - now,
            )

    def _not_taken(
        self, client: ConsumerClient, assignments: Sequence[Assignment], end: float
    ) -> list[Assignment] | None:
        """Return which of these the group answers to have another commit of than was sent; None without an answer."""
        if not assignments:
            return []
        wait_s = end - self._clock.monotonic()
        if wait_s <= 0:
            return None
        try:
            found = client.committed(
                [TopicPartition(assignment.topic, assignment.partition) for assignment in assignments], wait_s
            )
        except KafkaException as error:
            _log.info("the group's offsets are not known: %s", reason(error))
            return None
        taken = {
            (assignment.topic, assignment.partition): (assignment.offset, assignment.metadata or "")
            for assignment in found
            if assignment.error is None
        }
        missing = []
        for assignment in assignments:
            assignment.acknowledged = taken.get((assignment.topic, assignment.partition)) == (
                assignment.committed.offset,
                assignment.committed.metadata,
            )
            if not assignment.acknowledged:
                missing.append(assignment)
        return missing

    def _commit(
        self, client: ConsumerClient, assignments: Sequence[Assignment], now: float, map_chars: int
    ) -> list[Assignment]:
        """Send what has changed, with at most so many characters of offset maps; return of which it was sent."""
        sent: list[Assignment] = []
        self._complete_finished()
        for assignment in assignments:
            if not assignment.known:
                # The group may stand anywhere; 0 would take it back to the beginning of the log.
                continue
            point = assignment.tracker.commit_point(map_chars)
            if point != assignment.committed or not assignment.acknowledged:
                assignment.committed = point
                assignment.acknowledged = False
                sent.append(assignment)
        if not sent:
            return []
        points = [
            TopicPartition(
                assignment.topic,
                assignment.partition,
                assignment.committed.offset,
                metadata=assignment.committed.metadata,
            )
            for assignment in sent
        ]
        try:
            client.commit(offsets=points, asynchronous=True)
            self._overtaken = self._overtaken or self._under_way > 0
            self._under_way += 1
            self._sent_at = now
        except KafkaException as error:
            self._note_failure(error.args[0], points)
        return sent

    def on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        """As `Commits` says."""
        self._under_way = max(0, self._under_way - 1)
        if error is not None:
            self._note_failure(error, partitions)
        else:
            self._note_success(partitions)
        if error is not None and error.code() == KafkaError._TIMED_OUT:  # noqa: SLF001 - the client library's public constants look so
            self._overtaken = True
        elif self._overtaken and not self._under_way:
            self._overtaken = False
            for assignment in self._assignments.all():
                assignment.acknowledged = not assignment.known

    def forget_answers(self) -> None:
        """As `Commits` says."""
        self._under_way = 0
        self._overtaken = False

    def _note_success(self, partitions: list[TopicPartition]) -> None:
        error = next((partition.error for partition in partitions if partition.error is not None), None)
        if error is not None:
            self._note_failure(error, [partition for partition in partitions if partition.error is not None])
        else:
            self.succeeded += 1
            self._failures, self._refusals.of_group = 0, None
            if self.on_result is not None:
                self.on_result(partitions, None)
        for partition in partitions:
            assignment = self._assignments.get(partition.topic, partition.partition)
            # An answer to an earlier commit does not answer the last one.
            if partition.error is None and assignment is not None and assignment.committed.offset == partition.offset:
                assignment.acknowledged = True

    def _note_failure(self, error: KafkaError, partitions: Sequence[TopicPartition]) -> None:
        why = reason(error)
        places = ", ".join(f"{partition.topic}:{partition.partition}" for partition in partitions)
        for partition in partitions:
            assignment = self._assignments.get(partition.topic, partition.partition)
            if assignment is not None:
                assignment.acknowledged = False
        if is_rebalancing(error):
            # `_failures` stays: the coordinator answers, so a revocation may wait for it.
            self._next = min(self._next, self._clock.monotonic() + _RETRY_S)
            _log.info("the group rebalances: the commit of %s is made again by whoever has them then: %s", places, why)
            return
        self.failed += 1
        if self.on_result is not None:
            self.on_result(partitions, why)
        if error.code() == KafkaError.OFFSET_METADATA_TOO_LARGE:
            self._leave_maps_out()
            return
        again_s = self._retry_soon()
        if is_missing_right(error):
            self._refusals.note(error, partitions[0].topic if partitions else None, self._clock.monotonic())
        else:
            _log.warning("the commit of %s failed: %s; it is made again in %g s", places, why, again_s)

    def _retry_soon(self) -> float:
        """See to it that the next commit does not wait for the interval where that is long; return the seconds."""
        wait_s = _RETRY_S if self._draining else min(_RETRY_S * 2**self._failures, _MOST_RETRY_S)
        self._failures = min(self._failures + 1, 10)
        now = self._clock.monotonic()
        self._next = min(self._next, now + min(wait_s, self.interval_s))
        return max(0.0, self._next - now)

    def _leave_maps_out(self) -> None:
        """Commit again at once, and from now on, without maps: the broker does not take one."""
        self._next = 0.0
        if not self._map_chars:
            return
        self._map_chars = 0
        _log.warning(
            "the broker refuses commit metadata of less than 4,096 characters, which says what is done above the "
            "committed offset; from now on it is left out, and messages that were done are handled again after a "
            "restart or a rebalance; set offset.metadata.max.bytes to 4096 on the brokers, and start again"
        )


#: Seconds between two looks whether the outbox has committed.
_OUTBOX_POLL_S = 0.005


class TransactionalCommits(Commits):
    """Has the outbox commit, and tells it the group's generation."""

    # Without its map, results that are visible would be written again.
    needs_offsets = True

    def __init__(
        self,
        assignments: Assignments,
        interval_s: float,
        clock: Clock,
        refusals: Refusals,
        outbox: TransactionalOutbox,
    ) -> None:
        super().__init__(assignments, interval_s, clock, refusals)
        self._outbox = outbox

    def tick(self, client: ConsumerClient, now: float) -> None:
        """As `Commits` says; and after a transaction that failed, tell the outbox the group's generation at once."""
        if self._outbox.wants_metadata:
            self._tell_generation(client)
        if (refusal := self._outbox.refusal) is not None:
            self._outbox.refusal = None
            self._refusals.note(refusal, None, now)
        if now >= self._next:
            self._next = now + self.interval_s
            self._advance_idle(client, self._assignments.all())
            self._commit(client)

    def note_rebalanced(self, client: ConsumerClient) -> None:
        """As `Commits` says: positions are committed as of this generation."""
        super().note_rebalanced(client)
        self._tell_generation(client)

    def _tell_generation(self, client: ConsumerClient) -> None:
        """Give the outbox the group's metadata.

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
        self._tell_generation(client)
        if self.succeeded != self._outbox.transactions:
            self.succeeded = self._outbox.transactions
            self._refusals.of_group = None
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
            self._clock.sleep(_OUTBOX_POLL_S)
