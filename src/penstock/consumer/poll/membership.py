"""Membership: the client that is this process's member of the group. It is joined, replaced and closed here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from confluent_kafka import KafkaException, TopicPartition

from penstock.clients.cluster import Clock, ConsumerClient
from penstock.clients.factory import TopicsNotKnownError
from penstock.clients.kafka_errors import reason
from penstock.consumer.assignments import Assignments
from penstock.consumer.poll.commits import Commits
from penstock.consumer.poll.rebalance import Rebalance
from penstock.consumer.poll.stop_request import StopRequest

_log = logging.getLogger(__name__)

#: Seconds until a new client takes the place of one that has ended, and between two.
_RENEW_INTERVAL_S = 5.0
#: Seconds until a member joins again that could not.
_JOIN_AGAIN_S = 1.0
#: Seconds that leaving by name may take beyond the revocation, and between two looks.
_UNSUBSCRIBE_S = 1.0
_POLL_S = 0.02
#: Seconds that a stop, or leaving the group, may take beyond the time that running handlers have.
_LEAVE_BUDGET_S = 5.0


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Membership:
    """On the poll thread only, save where it says otherwise."""

    make_client: Callable[[], ConsumerClient]
    topics: list[str]
    group: str
    clock: Clock
    assignments: Assignments
    rebalance: Rebalance
    commits: Commits
    stop_request: StopRequest
    #: The budget of the revocation that leaving begins with, in seconds.
    revoke_timeout: float
    #: Whether the member is named for its restarts within a run alone: where it stops, nobody comes back for its name.
    leaves_its_name: bool
    #: The client that is the member now.
    client: ConsumerClient = field(init=False)
    #: Set when nothing is left to do but to leave the group.
    leaving: threading.Event = field(default_factory=threading.Event, init=False)
    # When a new client takes the place of one that has ended, on the engine's clock; None where none has.
    _renew_at: float | None = field(default=None, init=False)
    # When it is tried again to join; None where that is not to be done.
    _join_at: float | None = field(default=None, init=False)
    # When leaving was seen to have begun, and whether it was logged that nobody waits for its end. Both by the thread
    # that waits for it.
    _leaving_since: float | None = field(default=None, init=False)
    _abandoned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.client = self.make_client()

    def consume(self, topics: list[str]) -> None:
        """Subscribe to these topics instead of those before; what is in both stays where it is."""
        self.topics = topics
        if self._renew_at is not None:
            return  # the client that follows joins with them
        try:
            if topics:
                self.join()
            else:
                self.client.unsubscribe()
        except KafkaException as error:
            # It has ended: `poll` says so, and why.
            _log.warning("the topics of group %s could not be subscribed to: %s", self.group, reason(error))

    def join(self) -> None:
        """Ask to join the group, as soon as there is a topic to consume and brokers know it."""
        self._join_at = None
        if not self.topics:
            return
        try:
            self.client.subscribe(
                self.topics,
                on_assign=self.rebalance.on_assign,
                on_revoke=self.rebalance.on_revoke,
                on_lost=self.rebalance.on_lost,
            )
        except TopicsNotKnownError as error:
            self._join_at = self.clock.monotonic() + _JOIN_AGAIN_S
            _log.warning("group %s is not joined yet: %s; that is tried again", self.group, reason(error))

    def client_ended(self) -> None:
        """Give up what a client had that has ended: nothing of that can be committed any more."""
        if self._renew_at is not None:
            return
        self._renew_at = self.clock.monotonic() + _RENEW_INTERVAL_S
        assigned = [TopicPartition(assignment.topic, assignment.partition) for assignment in self.assignments.all()]
        if assigned:
            self.rebalance.on_lost(self.client, assigned)

    def check(self, now: float) -> None:
        """Join where that could not be done before, and with a new client where the last has ended."""
        if self._renew_at is not None and now >= self._renew_at:
            self.client = self.make_client()
            self.commits.forget_answers()
            self._renew_at = None
            self.join()
        elif self._renew_at is None and self._join_at is not None and now >= self._join_at:
            self.join()

    def leave(self) -> None:
        """Leave the group and close the client, which waits for an absent coordinator and knows no bound but its own.

        Closing revokes: running handlers are waited for, and all that is done is committed there.
        """
        for step in (self._give_name_up, self.client.close) if self.leaves_its_name else (self.client.close,):
            try:
                step()
            except (KafkaException, RuntimeError, SystemError) as error:
                # SystemError: the library mixes up what it raises (2.16.1, seen once while its broker was killed;
                # confluentinc/confluent-kafka-python#865 is near).
                why = reason(error) if isinstance(error, KafkaException) else str(error)
                _log.warning("leaving the group: %s; what was not committed is handled again", why)

    def _give_name_up(self) -> None:
        """Leave the group while the client is open: closing a named member keeps its partitions for it (KIP-345)."""
        self.client.unsubscribe()
        end = self.clock.monotonic() + (self.revoke_timeout if self.assignments.all() else 0.0) + _UNSUBSCRIBE_S
        # The request to leave goes out once the partitions are given back, which `poll` does; then the id is gone.
        while self.client.memberid() and self.clock.monotonic() < end:
            self.client.poll(_POLL_S)

    def leaving_takes_too_long(self) -> bool:
        """Tell whether leaving takes so long that nobody should wait for it. By the thread that waits; logged once.

        The drain ends in time by itself, save where a call of the client hangs: then leaving never begins.
        """
        now, is_leaving = self.clock.monotonic(), self.leaving.is_set()
        if not is_leaving:
            end_by = self.stop_request.end_by + _LEAVE_BUDGET_S
        else:
            if self._leaving_since is None:
                self._leaving_since = now
            begun = self._leaving_since
            end_by = min(begun + self.revoke_timeout, max(begun, self.stop_request.end_by)) + _LEAVE_BUDGET_S
        if now < end_by:
            return False
        if not self._abandoned:
            self._abandoned = True
            _log.warning(
                "%s cannot leave its group: %s; the client goes on trying while the process lives, and what was not "
                "committed is handled again",
                self.group,
                "the coordinator does not answer"
                if is_leaving
                else "a call of its Kafka client does not return, or one of a key function",
            )
        return True
