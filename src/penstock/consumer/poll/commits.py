"""Commits: sends commit points to the group on the poll thread, and repeats the commits that fail.

There are two implementations. Either the consumer's client commits, or the outbox commits in Kafka transactions,
together with the messages for other topics.

The client's position lies past markers and aborted ranges, which no message shows. It also lies past messages that the
client has counted but not returned yet, for example when a rebalance callback runs in the middle of `consume`. So it is
read only between fetches, when every returned message is tracked: never in a callback, never after a failed fetch.

A commit point and its offset map are computed together, as one value. A failed commit is counted, logged and soon
repeated, whatever the interval is. It never ends the poll thread. A commit that is refused because the group rebalances
is no failure: it is repeated in the new generation, unless the partition has moved.

One commit is in flight at a time. The client repeats a commit if its broker goes away. A repeated older commit that
arrives after a newer one takes the group back, and both report success. If an answer takes too long, the next commit is
sent without it. Once all answers are there, the commit points are sent again.

A broker may accept less metadata than Kafka's default. Every commit would fail then, so the commit is repeated at once
without its map.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
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
    """Commits the watermarks of the assignments every `interval_s` seconds. Any thread may change the interval."""

    def __init__(self, engine: Engine, refusals: Refusals) -> None:
        self.interval_s = engine.settings.commit_interval
        self._engine = engine
        self._assignments = engine.assignments
        self._clock = engine.clock
        self._refusals = refusals
        self._next_at = 0.0

    def tick(self, client: ConsumerClient, now: float) -> None:
        """Commit what has changed if the interval is over, without waiting for the answer."""
        if now >= self._next_at:
            self._next_at = now + self.interval_s
            self._advance_idle(client)
            self._commit(client, self._assignments.all(), now)

    @abstractmethod
    def _commit(self, client: ConsumerClient, assignments: Sequence[Assignment], now: float) -> Collection[Assignment]:
        """Commit what has changed; return the assignments concerned."""

    @abstractmethod
    def commit_drained(self, client: ConsumerClient, now: float) -> bool:
        """Commit what has changed at the end of a drain; return whether the group has all of it.

        The caller repeats the call between polls.
        """

    @abstractmethod
    def commit_revoked(self, client: ConsumerClient, assignments: Sequence[Assignment], wait_s: float) -> None:
        """Commit what has changed in revoked partitions, within a rebalance callback, in at most `wait_s` seconds."""

    def on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:  # noqa: B027 - a hook
        """Handle the answer to an asynchronous commit. The client calls it from within `poll`."""

    def forget_answers(self) -> None:  # noqa: B027 - a hook
        """Stop waiting for answers: the client that sent the commits has ended, with all its partitions."""

    def _advance_idle(self, client: ConsumerClient) -> None:
        """Advance past markers and aborted ranges at the tail. Only the client's position shows them."""
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
            # All fetched messages are tracked, and nothing is fetched meanwhile: this thread is the one that fetches.
            if position.error is None and position.offset > assignment.tracker.position:
                assignment.tracker.advance(position.offset)


#: Seconds to wait for the answer to a commit before the next one is sent: longer than a group takes to move to another
#: broker, with a session of 9 s.
_ANSWER_S = 20.0
#: Seconds until a failed commit is repeated, if the interval is longer; and between two log lines about it.
_RETRY_S = 0.5
_LOG_INTERVAL_S = 10.0


class ConsumerCommits(Commits):
    """Commits through the consumer's client."""

    def __init__(self, engine: Engine, refusals: Refusals) -> None:
        super().__init__(engine, refusals)
        # Commits without an answer, and the time of the last one. `_overtaken`: the broker may take an earlier commit
        # after the last one, because two were in flight at once or the client gave up a commit that it had sent.
        self._unanswered = 0
        self._sent_at = self._clock.monotonic()
        self._overtaken = False
        # Earliest time of the next commit after a failed one.
        self._retry_at = 0.0
        # Characters of an offset map that the broker presumably accepts: 0 once it has refused a map.
        self._map_chars = MAX_METADATA_CHARS

    def tick(self, client: ConsumerClient, now: float) -> None:
        """Commit as the base class does, one commit at a time."""
        if not self._unanswered or now - self._sent_at >= _ANSWER_S:
            super().tick(client, now)

    def commit_drained(self, client: ConsumerClient, now: float) -> bool:
        """Commit at the end of a drain.

        Polls bring the answers: a synchronous commit has no time limit while the coordinator is away.
        """
        if not self._unanswered and now >= self._retry_at:
            self._advance_idle(client)
            self._commit(client, self._assignments.all(), now)
        return not self._unanswered and all(assignment.acknowledged for assignment in self._assignments.all())

    def commit_revoked(self, client: ConsumerClient, assignments: Sequence[Assignment], wait_s: float) -> None:
        """Commit revoked partitions, and wait up to `wait_s` until the group has taken or refused the commit.

        A synchronous commit has no time limit while the coordinator is away: it takes as long as a session, or a
        request. The answer to an asynchronous one comes from `poll`, which here would return messages as well. So the
        group's offsets are requested instead, a request with a time limit. The coordinator answers it after the commit,
        because both use one connection. In any case the commit reaches the group before the revocation does: the
        client sends in order.

        A client that closes fetches no offsets (librdkafka 2.16). It waits for the answer to the commit itself.
        """
        sent = self._commit(client, assignments, self._clock.monotonic())
        try:
            if sent and not self._engine.stop_request.leaves_now:
                places = [TopicPartition(assignment.topic, assignment.partition) for assignment in sent]
                client.committed(places, wait_s)
        except KafkaException as error:
            _log.warning(
                "the group is not known to have the commit of %s, which were revoked, within %.1f s: %s; if it does "
                "not arrive, the next owner handles again what was done since the previous commit",
                ", ".join(map(str, sent)),
                wait_s,
                reason(error),
            )

    def _commit(self, client: ConsumerClient, assignments: Sequence[Assignment], now: float) -> Collection[Assignment]:
        sent: list[Assignment] = []
        points: list[TopicPartition] = []
        self._engine.complete_finished()
        for assignment in assignments:
            if not assignment.known:
                # The group may be at any offset; 0 would take it back to the beginning of the log.
                continue
            point = assignment.tracker.commit_point(self._map_chars)
            if point != assignment.committed or not assignment.acknowledged:
                assignment.committed, assignment.acknowledged = point, False
                sent.append(assignment)
                place = assignment.topic, assignment.partition
                points.append(TopicPartition(*place, point.offset, metadata=point.metadata))
        try:
            if points:
                client.commit(offsets=points, asynchronous=True)
                self._overtaken = self._overtaken or self._unanswered > 0
                self._unanswered += 1
                self._sent_at = now
        except KafkaException as error:
            self._note_failure(error.args[0], points)
        return sent

    def on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        """Count the answer, and mark the assignments that the group has or that must be committed again."""
        self._unanswered = max(0, self._unanswered - 1)
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
            # The answer to an earlier commit does not answer the last one.
            if partition not in refused and assignment and assignment.committed.offset == partition.offset:
                assignment.acknowledged = True
        if error is not None and error.code() == KafkaError._TIMED_OUT:  # noqa: SLF001 - the client library's public constants look so
            self._overtaken = True
        elif self._overtaken and not self._unanswered:
            self._overtaken = False
            for assignment in self._assignments.all():
                assignment.acknowledged = not assignment.known

    def forget_answers(self) -> None:
        """Stop waiting for answers."""
        self._unanswered = 0
        self._overtaken = False

    def _report(self, partitions: Sequence[TopicPartition], error: str | None) -> None:
        if self._engine.telemetry is not None:
            for topic, count in Counter(partition.topic for partition in partitions).items():
                self._engine.telemetry.committed(topic, count, error)

    def _note_failure(self, error: KafkaError, partitions: Sequence[TopicPartition]) -> None:
        why, now = reason(error), self._clock.monotonic()
        places = ", ".join(f"{partition.topic}:{partition.partition}" for partition in partitions)
        for partition in partitions:
            assignment = self._assignments.get(partition.topic, partition.partition)
            if assignment is not None:
                assignment.acknowledged = False
        self._retry_at = now + min(_RETRY_S, self.interval_s)
        self._next_at = min(self._next_at, self._retry_at)
        if is_rebalancing(error):
            _log.info("the group rebalances: the owner of %s after that repeats the commit: %s", places, why)
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
                self._retry_at - now,
                extra=once_in(_LOG_INTERVAL_S, error.code(), now),
            )

    def _leave_maps_out(self) -> None:
        """Commit again at once, and from now on, without maps: the broker refuses them."""
        self._next_at = self._retry_at = 0.0
        if not self._map_chars:
            return
        self._map_chars = 0
        _log.warning(
            "the broker refuses commit metadata of less than 4,096 characters, which says what is done above the "
            "committed offset; from now on it is left out, and messages that were done are handled again after a "
            "restart or a rebalance; set offset.metadata.max.bytes to 4096 on the brokers, and start again"
        )


#: Seconds between two checks whether the outbox has committed.
_OUTBOX_POLL_S = 0.005


class TransactionalCommits(Commits):
    """Commits through the outbox."""

    def __init__(self, engine: Engine, refusals: Refusals, outbox: TransactionalOutbox) -> None:
        super().__init__(engine, refusals)
        self._outbox = outbox

    def _commit(self, client: ConsumerClient, assignments: Sequence[Assignment], now: float) -> Collection[Assignment]:  # noqa: ARG002 - the outbox has its own pace
        """Let the outbox commit as soon as possible if something has changed."""
        if self._engine.counts.commits != self._outbox.transactions:
            self._engine.counts.commits = self._outbox.transactions
            self._refusals.taken()
        changed = self._outbox.changed().keys() & assignments
        if changed:
            self._outbox.expedite()
        return changed

    def commit_drained(self, client: ConsumerClient, now: float) -> bool:
        """Commit at the end of a drain, with all results that wait."""
        self._advance_idle(client)
        return not self._commit(client, self._assignments.all(), now) and not self._outbox.waiting

    def commit_revoked(self, client: ConsumerClient, assignments: Sequence[Assignment], wait_s: float) -> None:
        """Commit revoked partitions, and wait for finished messages whose results are not sent yet.

        Their offsets are done by then. Results that are not committed in time are given up: Kafka refuses the positions
        of this generation from now on, and the next owner waits for a transaction that is still open.
        """
        end = self._clock.monotonic() + wait_s
        while (now := self._clock.monotonic()) < end and not self._outbox.has_failed:
            if not (self._commit(client, assignments, now) or self._outbox.has_any_of(assignments)):
                return
            self._outbox.expedite()
            self._outbox.serve()
            self._clock.sleep(_OUTBOX_POLL_S)
