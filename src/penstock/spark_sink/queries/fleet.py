"""Chooses the replica of an app that runs a sink: the member of the sinks' group with partition 0 of the first topic.

A group assigns a partition to one member at a time. By the cooperative protocol, another member gets it only after the
former has given it back, which it does when its query has ended. So at most one replica runs a sink. The exception is a
member that is frozen or cut off for longer than its session: another member gets its sinks while it may still be in a
batch. Ledgers make that harmless, because only one of two copies stores its batch (sinks with a ledger, and results of
`HandlerSink`). Functions and handlers may see that batch twice, as after a crash. When such a member notices its loss,
it ends the query without waiting for the batch.

A topic that is gone or no longer visible is assigned to no member. Its sink stands by until the topic is back, with a
line in the log. The member reads nothing: the group only assigns partitions.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

from penstock import clients
from penstock.clients.answers import answered
from penstock.clients.bounded_calls import CLOSE_S, end_within
from penstock.clients.groups import describe_groups
from penstock.clients.kafka_errors import concerns_a_group, reason
from penstock.clients.ration import once_in, rationed
from penstock.clients.reading import without_membership
from penstock.clients.rights import group_right, missing_right_text, principal_of, require_rights
from penstock.options import ClientConfig
from penstock.spark_sink.queries.sink_specs import SinkSpec, group_of_sinks
from penstock.spark_sink.source.brokers import REPEAT_S
from penstock.spark_sink.source.plan import Offsets

_log = rationed("penstock.spark_sink")

#: Seconds between two questions for the holders of sinks, and seconds for an answer.
_HOLDERS_S, _ANSWER_S = 15.0, 2.0
#: Milliseconds that the group waits for a member that gives its sinks back, in addition to the time for their batches.
_MARGIN_MS = 60_000
#: Settings of the member that the user may set.
_SESSION = ("session.timeout.ms", "heartbeat.interval.ms")


class Fleet:
    """This replica's membership in the group of sinks. For one thread; any thread may read `mine` and `holder`.

    `on_release` is called with the names of sinks that this replica must no longer run, and whether another replica may
    run them already. It returns within `release_s` seconds, when their queries have ended.
    """

    def __init__(
        self, app: str, specs: Sequence[SinkSpec], bootstrap_servers: str, config: ClientConfig, release_s: float
    ) -> None:
        self.group = group_of_sinks(app)
        self.on_release: Callable[[Collection[str], bool], None] = lambda _names, _is_lost: None
        #: Names of the sinks that this replica runs. Replaced as a whole. None until the group has answered.
        self.mine: frozenset[str] | None = None
        self._servers, self._config = bootstrap_servers, config
        self._topics = {spec.name: spec.topics[0] for spec in specs}
        self._settings: dict[str, Any] = {
            "topic.metadata.refresh.interval.ms": 10_000,
            # As for the app's consumers.
            "socket.timeout.ms": 15_000,
            "session.timeout.ms": 15_000,
            **without_membership(config),
            **{name: config[name] for name in _SESSION if name in config},
            "client.id": f"{socket.gethostname()}-{os.getpid()}",
            "group.id": self.group,
            "partition.assignment.strategy": "cooperative-sticky",
            "max.poll.interval.ms": max(300_000, int(release_s * 1000) + _MARGIN_MS),
            "enable.auto.commit": False,
            "auto.offset.reset": "latest",
        }
        self._member: Consumer | None = None
        #: The holders by topic; replaced as a whole.
        self._holders: dict[str, str] = {}
        self._ask_at = 0.0
        #: The positions that were sent last.
        self._shown: Offsets = {}

    def join(self) -> None:
        """Request to join the group; `poll` receives the answer.

        Raises:
            MissingRightError: the permission to join the group is missing.
        """
        right = group_right(self.group)
        admin = clients.admin(self._servers, self._config)
        what = f"the sinks cannot join their group {self.group}, by which one replica of the app runs each"
        require_rights(admin, what, [right])
        self._member = clients.consumer(self._servers, self._settings)
        self._member.subscribe(
            sorted(set(self._topics.values())),
            on_assign=self._assigned,
            on_revoke=lambda member, parts: self._revoked(member, parts, is_lost=False),
            on_lost=lambda member, parts: self._revoked(member, parts, is_lost=True),
        )

    def poll(self, timeout_s: float = 0.0) -> None:
        """Serve the membership: answers and rebalances."""
        message = None if self._member is None else self._member.poll(timeout_s)
        error = None if message is None else message.error()
        if error is not None:
            text = f"the group {self.group} of the sinks: {reason(error)}"
            if concerns_a_group(error):
                what = f"the group {self.group} cannot be joined, so that this replica runs no sink"
                text = missing_right_text(what, [group_right(self.group)], principal_of(self._config))
            _log.warning("%s; it is tried again", text, extra=once_in(REPEAT_S, text))
        if self.mine is not None and time.monotonic() >= self._ask_at:
            self._ask_holders()

    def commit(self, positions: Offsets) -> None:
        """Commit the positions of this replica's sinks as offsets of the group, for lag tools.

        A query begins at its checkpoint or its sink's ledger, never at these offsets. Nothing waits for the brokers'
        answer. Refused offsets, for example during a rebalance, are sent again with the next question for the holders.
        """
        if self._member is None or not positions or positions == self._shown:
            return
        self._shown = positions
        with suppress(KafkaException):  # sent again later
            self._member.commit(offsets=[TopicPartition(*part, offset) for part, offset in positions.items()])

    def _assigned(self, member: Consumer, parts: list[TopicPartition]) -> None:
        member.incremental_assign(parts)
        member.pause(parts)
        self._ask_at = 0.0
        self.mine = (self.mine or frozenset()) | self._decided_by(parts)

    def _revoked(self, member: Consumer, parts: list[TopicPartition], *, is_lost: bool) -> None:
        if self._member is not None:  # otherwise it is leaving, and the queries have ended
            names = self._decided_by(parts)
            self.mine = (self.mine or frozenset()) - names
            self.on_release(names, is_lost)
        member.incremental_unassign(parts)

    def _decided_by(self, parts: Collection[TopicPartition]) -> frozenset[str]:
        first = {part.topic for part in parts if part.partition == 0}
        return frozenset(name for name, topic in self._topics.items() if topic in first)

    def _ask_holders(self) -> None:
        """Ask the group for the holders, and send the offsets again."""
        self._ask_at, self._shown = time.monotonic() + _HOLDERS_S, {}
        admin = clients.admin(self._servers, self._config)  # for one question: see `clients.groups`
        try:
            members = answered(describe_groups(admin, [self.group])[self.group], _ANSWER_S).members
        except KafkaException:
            return  # the last answer stays
        self._holders = {
            part.topic: f"{member.client_id} at {member.host.lstrip('/')}"
            for member in members
            for part in member.assignment.topic_partitions
            if part.partition == 0
        }

    def holder(self, name: str) -> str | None:
        """Return the replica that has a sink, by host and process, as far as the group has reported it."""
        return self._holders.get(self._topics[name])

    def leave(self) -> None:
        """Leave the group, so that another replica takes the sinks over at once. Call it after their queries ended."""
        member, self._member = self._member, None
        if member is not None:
            end_within(CLOSE_S, "leaving the group of the sinks", member.close)
