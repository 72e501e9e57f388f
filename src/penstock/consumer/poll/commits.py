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

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from penstock.clients.cluster import ConsumerClient
from penstock.clients.kafka_errors import is_missing_right, is_rebalancing, reason
from penstock.clients.ration import once_in, rationed
from penstock.consumer.assignments import Assignment
from penstock.consumer.engine import Engine
from penstock.consumer.outbox.transactional_outbox import TransactionalOutbox
from penstock.consumer.poll.refusals import Refusals
from penstock.offsets import MAX_METADATA_CHARS

_log = rationed(__name__)


class Commits(ABC):
    """Commits the assignments' watermarks every `interval_s` seconds, which any thread may change."""

    def __init__(self, engine: Engine, refusals: Refusals) -> None:
        self.interval_s = engine.settings.commit_interval
        self._engine = engine
        self._assignments = engine.assignments
        self._clock = engine.clock
        self._refusals = refusals
        self._next = 0.0

    def tick(self, client: ConsumerClient, now: float) -> None:
        """Commit what has changed, when it is time, without waiting for the answer."""
        if now >= self._next:
            self._next = now + self.interval_s
            self._advance_idle(client)
            self._commit(client, self._assignments.all(), now)

    @abstractmethod
    def _commit(self, client: ConsumerClient, assignments: Sequence[Assignment], now: float) -> Collection[Assignment]:
        """Have what has changed committed; return of which assignments that is."""

    @abstractmethod
    def commit_drained(self, client: ConsumerClient, now: float) -> bool:
        """Commit what has changed at the end of a drain; return whether the group has all of it.

        To be asked again between polls.
        """

    @abstractmethod
    def commit_revoked(self, client: ConsumerClient, assignments: Sequence[Assignment], wait_s: float) -> None:
        """Commit what has changed of revoked partitions, from within a rebalance callback, in at most `wait_s`."""

    def on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:  # noqa: B027 - a hook
        """Take the answer to a commit that was not waited for. The client calls it from within poll."""

    def forget_answers(self) -> None:  # noqa: B027 - a hook
        """Wait for no answer any more: the client that sent the commits has ended, with all its partitions."""

    def _advance_idle(self, client: ConsumerClient) -> None:
        """Move past markers and aborted ranges at the tail: only the client's position shows them."""
        idle = [
            assignment
            for assignment in self._assignments.all()
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
#: Seconds until a commit that failed is made again, where the interval is longer; and between two log lines about it.
_RETRY_S = 0.5
_LOG_AGAIN_S = 10.0


class ConsumerCommits(Commits):
    """Has the consumer's client commit."""

    def __init__(self, engine: Engine, refusals: Refusals) -> None:
        super().__init__(engine, refusals)
        # Commits without an answer yet, when the last was sent, and whether the broker may take an earlier one behind
        # it: two were under way at once, or the client gave one up that it had sent.
        self._under_way = 0
        self._sent_at = self._clock.monotonic()
        self._overtaken = False
        # When the next may be made after one that failed.
        self._again_at = 0.0
        # Characters of an offset map that the broker is believed to take: 0 once it has refused one.
        self._map_chars = MAX_METADATA_CHARS

    def tick(self, client: ConsumerClient, now: float) -> None:
        """As `Commits` says, one at a time."""
        if not self._under_way or now - self._sent_at >= _ANSWER_S:
            super().tick(client, now)

    def commit_drained(self, client: ConsumerClient, now: float) -> bool:
        """As `Commits` says.

        Polls bring the answers: waiting for one in the client would know no bound while the coordinator is away.
        """
        if not self._under_way and now >= self._again_at:
            self._advance_idle(client)
            self._commit(client, self._assignments.all(), now)
        return not self._under_way and all(assignment.acknowledged for assignment in self._assignments.all())

    def commit_revoked(self, client: ConsumerClient, assignments: Sequence[Assignment], wait_s: float) -> None:
        """As `Commits` says.

        A commit that is waited for in the client knows no bound while the coordinator is away: as long as a session, or
        a request. Its answer would come from `poll`, which here would hand over messages as well. So the group is asked
        for its offsets instead, a question that ends in time, which the coordinator answers after the commit, for both
        go one way. The commit goes out before the group hears of the revocation in any case: the client sends in
        order. It is waited `wait_s` seconds until the group is known to have taken or refused it.
        """
        sent = self._commit(client, assignments, self._clock.monotonic())
        try:
            if sent:
                client.committed([TopicPartition(each.topic, each.partition) for each in sent], wait_s)
        except KafkaException as error:
            _log.warning(
                "the group is not known to have the commit of %s, which were revoked, within %.1f s: %s; where it does "
                "not arrive, the next owner handles again what was done since the commit before",
                ", ".join(map(str, sent)),
                wait_s,
                reason(error),
            )

    def _commit(self, client: ConsumerClient, assignments: Sequence[Assignment], now: float) -> Collection[Assignment]:
        """As `Commits` says."""
        sent: list[Assignment] = []
        self._engine.complete_finished()
        for assignment in assignments:
            if not assignment.known:
                # The group may stand anywhere; 0 would take it back to the beginning of the log.
                continue
            point = assignment.tracker.commit_point(self._map_chars)
            if point != assignment.committed or not assignment.acknowledged:
                assignment.committed, assignment.acknowledged = point, False
                sent.append(assignment)
        points = [
            TopicPartition(each.topic, each.partition, each.committed.offset, metadata=each.committed.metadata)
            for each in sent
        ]
        self._send(client, points, now)
        return sent

    def _send(self, client: ConsumerClient, points: list[TopicPartition], now: float) -> None:
        if not points:
            return
        try:
            client.commit(offsets=points, asynchronous=True)
            self._overtaken = self._overtaken or self._under_way > 0
            self._under_way += 1
            self._sent_at = now
        except KafkaException as error:
            self._note_failure(error.args[0], points)

    def on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        """As `Commits` says."""
        self._under_way = max(0, self._under_way - 1)
        refused = [partition for partition in partitions if error is not None or partition.error is not None]
        why = error or next((partition.error for partition in refused), None)
        if why is not None:
            self._note_failure(why, refused)
        else:
            self._engine.counts.commits += 1
            self._refusals.taken()
            self._report(partitions, None)
        for partition in partitions:
            assignment = self._assignments.get(partition.topic, partition.partition)
            # An answer to an earlier commit does not answer the last one.
            if partition not in refused and assignment and assignment.committed.offset == partition.offset:
                assignment.acknowledged = True
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

    def _report(self, partitions: Sequence[TopicPartition], error: str | None) -> None:
        topics = [partition.topic for partition in partitions]
        if self._engine.telemetry is not None:
            for topic in dict.fromkeys(topics):
                self._engine.telemetry.committed(topic, topics.count(topic), error)

    def _note_failure(self, error: KafkaError, partitions: Sequence[TopicPartition]) -> None:
        why, now = reason(error), self._clock.monotonic()
        places = ", ".join(f"{partition.topic}:{partition.partition}" for partition in partitions)
        for partition in partitions:
            assignment = self._assignments.get(partition.topic, partition.partition)
            if assignment is not None:
                assignment.acknowledged = False
        self._again_at = now + min(_RETRY_S, self.interval_s)
        self._next = min(self._next, self._again_at)
        if is_rebalancing(error):
            _log.info("the group rebalances: the commit of %s is made again by whoever has them then: %s", places, why)
            return
        self._engine.counts.failed_commits += 1
        self._report(partitions, why)
        if error.code() == KafkaError.OFFSET_METADATA_TOO_LARGE:
            self._leave_maps_out()
        elif is_missing_right(error):
            self._refusals.note_missing_right(error, partitions[0].topic if partitions else None)
        else:
            _log.warning(
                "the commit of %s failed: %s; it is made again in %g s",
                places,
                why,
                self._again_at - now,
                extra=once_in(_LOG_AGAIN_S, error.code(), now),
            )

    def _leave_maps_out(self) -> None:
        """Commit again at once, and from now on, without maps: the broker does not take one."""
        self._next = self._again_at = 0.0
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
    """Has the outbox commit."""

    def __init__(self, engine: Engine, refusals: Refusals, outbox: TransactionalOutbox) -> None:
        super().__init__(engine, refusals)
        self._outbox = outbox

    def _commit(self, client: ConsumerClient, assignments: Sequence[Assignment], now: float) -> Collection[Assignment]:  # noqa: ARG002 - the outbox has a pace of its own
        """As `Commits` says."""
        if self._engine.counts.commits != self._outbox.transactions:
            self._engine.counts.commits = self._outbox.transactions
            self._refusals.taken()
        changed = self._outbox.changed().keys() & assignments
        if changed:
            self._outbox.expedite()
        return changed

    def commit_drained(self, client: ConsumerClient, now: float) -> bool:
        """As `Commits` says."""
        self._advance_idle(client)
        return not self._commit(client, self._assignments.all(), now) and not self._outbox.waiting

    def commit_revoked(self, client: ConsumerClient, assignments: Sequence[Assignment], wait_s: float) -> None:
        """As `Commits` says.

        What handlers finished and what is not sent yet is waited for as well: its offsets are done by then. What is not
        committed in time is given up: the positions of this generation are refused from now on, and the next
        owner waits for a transaction that is still open.
        """
        end = self._clock.monotonic() + wait_s
        while (now := self._clock.monotonic()) < end and not self._outbox.has_failed:
            if not (self._commit(client, assignments, now) or self._outbox.has_any_of(assignments)):
                return
            self._outbox.expedite()
            self._outbox.serve()
            self._clock.sleep(_OUTBOX_POLL_S)
