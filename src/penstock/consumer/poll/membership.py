"""Membership: the client that is this process's member of the group. It joins, takes partitions, and leaves.

The client calls back from within `poll`, on the poll thread, when partitions are assigned, revoked or lost. All steps
of a revocation share one time budget: stop handing out, wait for running handlers, commit in the callback, drop the
assignments. If the commit is not answered within the rest of the budget, the client goes on with it. Nothing is lost:
at worst, work is repeated.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from confluent_kafka import KafkaException, TopicPartition

from penstock.clients.cluster import Cluster, ConsumerClient
from penstock.clients.factory import TopicsNotKnownError
from penstock.clients.kafka_errors import reason
from penstock.consumer.assignments import Assignment
from penstock.consumer.engine import Engine
from penstock.consumer.poll.back_pressure import BackPressure
from penstock.consumer.poll.commits import Commits
from penstock.consumer.poll.positions import Positions, names
from penstock.consumer.poll.refusals import Refusals
from penstock.consumer.poll.watchdog import Watchdog
from penstock.offsets import decode, owner_of

_log = logging.getLogger(__name__)

#: Seconds before a new client replaces one that has ended.
_RENEW_INTERVAL_S = 5.0
#: Seconds before the next try to join.
_JOIN_RETRY_S = 1.0
#: Seconds between two checks of the running handlers, in a revocation.
_HANDLERS_POLL_S = 0.005
#: Seconds that the commit of a revocation always has, even if running handlers have used up the budget.
_COMMIT_S = 0.5
#: Seconds that leaving by name may take beyond the revocation, and seconds between two polls.
_UNSUBSCRIBE_S = 1.0
_POLL_S = 0.02
#: Seconds that a stop may take beyond the time of the running handlers.
_LEAVE_BUDGET_S = 5.0


class Membership:
    """The membership of one engine in its group. On the poll thread only, except where stated."""

    #: The current client. Made by `connect`.
    client: ConsumerClient
    _make_client: Callable[[], ConsumerClient]
    # Whether the member has a name only for restarts within this run: after a stop, no process comes back for the name.
    _leaves_its_name: bool

    def __init__(
        self,
        engine: Engine,
        commits: Commits,
        back_pressure: BackPressure,
        positions: Positions,
        refusals: Refusals,
        *,
        watchdog: Watchdog,
    ) -> None:
        self._engine = engine
        self._clock = engine.clock
        self._commits = commits
        self._back_pressure = back_pressure
        self._positions = positions
        self._refusals = refusals
        self._watchdog = watchdog
        # The group's metadata, as last seen while this member had an id.
        self._generation: Any = None
        #: Set when only leaving the group is left to do.
        self.leaving = threading.Event()
        # Whether the client has ended; and when a new client replaces it or the next try to join is made, on the
        # engine's clock. None if neither is planned.
        self._has_ended = False
        self._join_at: float | None = None
        # Whether a log line said that leaving takes too long. Used by the thread that waits for the end.
        self._abandoned = False

    def connect(self, cluster: Cluster, config: dict[str, Any]) -> None:
        """Make the client."""
        self._make_client = partial(cluster.consumer, config)
        self._leaves_its_name = (
            "group.instance.id" in config and "group.instance.id" not in self._engine.settings.config
        )
        self.client = self._make_client()

    def join(self) -> None:
        """Join the group if there is a topic to consume and brokers know it; else plan another try."""
        self._join_at = None
        topics = self._engine.routes.topics
        try:
            if topics:
                self.client.subscribe(topics, on_assign=self.on_assign, on_revoke=self.on_revoke, on_lost=self.on_lost)
        except TopicsNotKnownError as error:
            self._join_at = self._clock.monotonic() + _JOIN_RETRY_S
            _log.warning("group %s is not joined yet: %s; it tries again", self._engine.group, reason(error))

    def change_topics(self) -> None:
        """Subscribe to the topics that are consumed now. The partitions of unchanged topics stay assigned."""
        if self._has_ended:
            return  # the next client joins with them
        try:
            if not self._engine.routes.topics:
                self.client.unsubscribe()
            self.join()
        except KafkaException as error:
            # The client has ended: `poll` reports that, and why.
            _log.warning("the topics of group %s could not be subscribed to: %s", self._engine.group, reason(error))

    def client_ended(self) -> None:
        """Give up the partitions of a client that has ended: no more of them can be committed."""
        if self._has_ended:
            return
        self._has_ended, self._join_at = True, self._clock.monotonic() + _RENEW_INTERVAL_S
        assigned = [TopicPartition(place.topic, place.partition) for place in self._engine.assignments.all()]
        if assigned:
            self.on_lost(self.client, assigned)

    def check(self, now: float) -> None:
        """Join if a try is due, with a new client if the last one has ended."""
        if self._join_at is not None and now >= self._join_at:
            if self._has_ended:
                self.client = self._make_client()
                self._commits.forget_answers()
                self._has_ended = False
            self.join()

    def generation(self) -> Any:
        """Return the group's metadata, for positions that a transaction commits; None before this member has an id.

        A member that the group has removed has no id, and Kafka does not fence positions without a member. So the last
        metadata with an id is returned then, and Kafka refuses it. An id is never reused: if it is the same before and
        after, it belongs to the metadata.
        """
        member = self.client.memberid()
        metadata = self.client.consumer_group_metadata()
        if member and self.client.memberid() == member:
            self._generation = metadata
        return self._generation

    def on_assign(self, client: ConsumerClient, partitions: list[TopicPartition]) -> None:
        """Take partitions over, from the group's offsets."""
        # Also if no partition is new.
        self._refusals.taken()
        if not partitions:
            return
        committed, chosen = self._positions.find(client, partitions)
        made = [self._assignment(partition) for partition in committed]
        for partition, assignment in zip(committed, made, strict=True):
            # The start is committed before any message is done: a later owner may take the topic for an old one, or
            # find another end.
            assignment.acknowledged = partition.offset < 0 or partition not in chosen
            self._engine.assignments.put(assignment)
        client.incremental_assign(
            [TopicPartition(partition.topic, partition.partition, partition.offset) for partition in committed]
        )
        self._back_pressure.pause_new(client, made)
        self._engine.counts.assigned += len(partitions)
        _log.info("assigned: %s", names(partitions))

    def _assignment(self, committed: TopicPartition) -> Assignment:
        # Below 0: the group has no offset, or did not answer.
        start = committed.offset if committed.offset >= 0 else None
        owner = owner_of(self._engine.group, committed.topic, committed.partition)
        return Assignment(
            committed.topic,
            committed.partition,
            self._engine.routes[committed.topic],
            start=start,
            restored=None if start is None else decode(start, committed.metadata, owner),
            owner=owner,
        )

    def on_revoke(self, client: ConsumerClient, partitions: list[TopicPartition]) -> None:
        """Give partitions back, with everything that is done committed."""
        if not partitions:
            return
        revoked = self._deactivate(partitions)
        started_at = self._clock.monotonic()
        self._refusals.taken()
        while (busy := self._busy(revoked)) and self._left(started_at) > 0:
            self._clock.sleep(_HANDLERS_POLL_S)
        if busy:
            _log.warning(
                "there is still work on %s after %.1f s (%s); its messages will be handled again by the next owner",
                names(partitions),
                self._clock.monotonic() - started_at,
                ", ".join(busy),
            )
        self._commits.commit_revoked(client, revoked, max(_COMMIT_S, self._left(started_at)))
        self._drop(client, partitions, revoked)
        self._engine.counts.revoked += len(partitions)
        _log.info("revoked: %s", names(partitions))

    def _deactivate(self, partitions: Sequence[TopicPartition]) -> list[Assignment]:
        return self._engine.assignments.deactivate((place.topic, place.partition) for place in partitions)

    def _busy(self, assignments: Sequence[Assignment]) -> list[str]:
        """Return the names of the slots, completions and outbox that hold messages of these assignments."""
        # The poll loop stands still in a revocation, so this does its work: time limits and answers of brokers.
        engine, outbox = self._engine, self._engine.outbox
        self._watchdog.check(self._clock.monotonic())
        engine.complete_finished()
        busy = engine.processor.busy_with(engine.slots(), assignments)
        outbox.serve()
        outbox.expedite()
        return [*busy, "the outbox"] if outbox.has_any_of(assignments) else busy

    def _left(self, started_at: float) -> float:
        # Seconds of the budget. A signal may shorten it meanwhile. A drain that has used up its own time leaves none.
        end_by = min(started_at + self._engine.settings.revoke_timeout, self._engine.stop_request.end_by)
        return end_by - self._clock.monotonic()

    def on_lost(self, client: ConsumerClient, partitions: list[TopicPartition]) -> None:
        """Drop partitions that another member may own already: nothing of them may be committed."""
        self._drop(client, partitions, self._deactivate(partitions))
        self._engine.counts.lost += len(partitions)
        _log.warning("lost without a commit: %s; what was not committed is handled again", names(partitions))

    def _drop(
        self, client: ConsumerClient, partitions: list[TopicPartition], assignments: Sequence[Assignment]
    ) -> None:
        self._engine.assignments.remove(assignments)
        self._engine.processor.wake_all()
        # The client keeps a pause after the assignment ends: the partition would come back paused for ever.
        paused = [TopicPartition(place.topic, place.partition) for place in assignments if place.paused is not None]
        for step, dropped in ((client.resume, paused), (client.incremental_unassign, partitions)):
            try:
                if dropped:
                    step(dropped)
            except KafkaException as error:
                # The client has dropped them itself, as it does when it leaves the group.
                _log.debug("not assigned any more: %s", reason(error))

    def leave(self) -> None:
        """Leave the group and close the client. Closing waits for an absent coordinator, with the client's own limit.

        Closing also revokes: it waits for running handlers and commits everything that is done.
        """
        for step in (self._give_name_up, self.client.close) if self._leaves_its_name else (self.client.close,):
            try:
                step()
            except (KafkaException, RuntimeError, SystemError) as error:
                # SystemError: the library raises the wrong error (2.16.1, seen once while its broker was killed;
                # confluentinc/confluent-kafka-python#865 is similar).
                why = reason(error) if isinstance(error, KafkaException) else str(error)
                _log.warning("leaving the group: %s; what was not committed is handled again", why)

    def _give_name_up(self) -> None:
        """Leave the group before the client closes: a closed named member keeps its partitions (KIP-345)."""
        self.client.unsubscribe()
        revocation_s = self._engine.settings.revoke_timeout if self._engine.assignments.all() else 0.0
        end = self._clock.monotonic() + revocation_s + _UNSUBSCRIBE_S
        # `poll` gives the partitions back, then the client sends the request to leave. The id is gone after that.
        while self.client.memberid() and self._clock.monotonic() < end:
            self.client.poll(_POLL_S)

    def leaving_takes_too_long(self) -> bool:
        """Tell whether leaving takes too long to wait for. For the thread that waits; logged once.

        The drain has a time limit. But if a call of the client hangs, leaving never begins.
        """
        if self._clock.monotonic() < self._engine.stop_request.end_by + _LEAVE_BUDGET_S:
            return False
        if not self._abandoned:
            self._abandoned = True
            _log.warning(
                "%s cannot leave its group: %s; the client goes on trying while the process lives, and what was not "
                "committed is handled again",
                self._engine.group,
                "the coordinator does not answer"
                if self.leaving.is_set()
                else "a call of its Kafka client does not return, or one of a key function",
            )
        return True
