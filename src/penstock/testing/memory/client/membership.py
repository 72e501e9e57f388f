"""One client's membership of its group: joining, the rebalance callbacks, and the loss of it.

The callbacks are called without the broker's lock, on the thread of the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, Message, TopicPartition

from penstock.clients.cluster import RebalanceCallback
from penstock.testing.memory import codes
from penstock.testing.memory.client.fetching import Fetcher, error_message
from penstock.testing.memory.group.group import Change, Gone, Member
from penstock.testing.memory.log.log import Place
from penstock.testing.memory.state import BrokerState

#: librdkafka's defaults.
_SESSION_MS = 45_000
_POLL_MS = 300_000


class Membership:
    """Keeps a client in its group. The broker's lock guards `member` and the fetcher, which follows the callbacks."""

    def __init__(
        self,
        config: Mapping[str, Any],
        consumer: object,
        state: BrokerState,
        fetcher: Fetcher,
        reachable: Callable[[], bool],
    ) -> None:
        self._instance: str | None = config.get("group.instance.id")
        self._session_s = float(config.get("session.timeout.ms", _SESSION_MS)) / 1000
        self._poll_s = float(config.get("max.poll.interval.ms", _POLL_MS)) / 1000
        self._consumer = consumer
        self._state = state
        self._group = state.coordinator.group(str(config["group.id"]))
        self._fetcher = fetcher
        self._reachable = reachable
        self._topics: list[str] = []
        self._on_assign: RebalanceCallback | None = None
        self._on_revoke: RebalanceCallback | None = None
        self._on_lost: RebalanceCallback | None = None
        self._reported_eviction = False
        #: The membership as the group knows it, or None.
        self.member: Member | None = None
        #: Errors to be handed over in the place of messages.
        self.errors: deque[Message] = deque()

    @property
    def fenced(self) -> bool:
        """Whether another client has taken this one's instance id: it cannot go on."""
        return self.member is not None and self.member.gone is Gone.FENCED

    def subscribe(
        self,
        topics: Sequence[str],
        on_assign: RebalanceCallback | None,
        on_revoke: RebalanceCallback | None,
        on_lost: RebalanceCallback | None,
    ) -> None:
        """Join the group, or stay in it with other topics."""
        with self._state.lock:
            self._topics = list(topics)
            self._on_assign, self._on_revoke, self._on_lost = on_assign, on_revoke, on_lost
            if self.member is not None and self.member.gone is None:
                self._group.subscribe_anew(self.member, topics)
            else:
                self._join()

    def unsubscribe(self) -> None:
        """Want no topic any more: what is assigned is given back by the next call."""
        with self._state.lock:
            self._topics = []
            if self.member is not None and self.member.gone is None:
                self._group.subscribe_anew(self.member, ())

    def _join(self) -> None:
        if not self._reachable():
            return
        now = self._state.clock.monotonic()
        self._state.coordinator.tick(now)
        self._reported_eviction = False
        name = self._state.coordinator.new_name()
        self.member = Member(name, self._instance, tuple(self._topics), self._session_s, self._poll_s, now)
        self._group.join(self.member, now)

    def serve(self) -> None:
        """Call the callbacks that are due."""
        member = self.member
        if member is None:
            if self._topics:
                with self._state.lock:
                    self._join()
        elif member.gone is Gone.FENCED:
            self._fence(member)
        elif member.gone is not None:
            self._lose(member)
        elif member.change is not None:
            self._serve_change(member, member.change)

    def _fence(self, member: Member) -> None:
        # A fenced client says so once, calls no callback, and stays as it is.
        member.needs_client = False
        text = "Fatal error: Broker: Static consumer fenced by other consumer with same group.instance.id"
        self.errors.append(error_message(KafkaError(codes.FATAL, text)))

    def _lose(self, member: Member) -> None:
        if member.gone is Gone.POLL_INTERVAL and not self._reported_eviction:
            # The error comes first, the callback with the next call.
            self._reported_eviction = True
            text = f"Application maximum poll interval ({self._poll_s * 1000:.0f}ms) exceeded"
            self.errors.append(error_message(KafkaError(codes.MAX_POLL_EXCEEDED, text)))
            return
        if self._fetcher.assigned:
            self._drop(self._on_lost or self._on_revoke, list(self._fetcher.assigned))
        with self._state.lock:
            self.member = None
            self._join()

    def _serve_change(self, member: Member, change: Change) -> None:
        absent = [place for place in change.revoked if place not in self._state.topics.logs]
        revoked = [place for place in change.revoked if place in self._state.topics.logs]
        if absent:
            for topic, partition in absent:
                text = f"Subscribed topic not available: {topic}: Broker: Unknown topic or partition"
                error = KafkaError(codes.UNKNOWN_TOPIC_OR_PARTITION, text)
                self.errors.append(error_message(error, topic, partition))
            self._drop(self._on_lost or self._on_revoke, absent)
        if revoked:
            self._drop(self._on_revoke, revoked)
        if member.gone is not None:
            # The callback took too long: the next call hears of it.
            return
        if self._on_assign is not None:
            self._on_assign(self._consumer, [TopicPartition(*place) for place in change.added])
        with self._state.lock:
            for place in change.added:
                if place not in self._fetcher.assigned:
                    self._fetcher.assign(place, codes.INVALID)
            for place in change.revoked:
                member.owned.pop(place, None)
            member.owned.update(dict.fromkeys(change.added))
            self._group.served(member)

    def _drop(self, callback: RebalanceCallback | None, places: Sequence[Place]) -> None:
        """Call a callback and unassign what it left assigned, as the client library does."""
        if callback is not None:
            callback(self._consumer, [TopicPartition(*place) for place in places])
        with self._state.lock:
            for place in places:
                if place in self._fetcher.assigned:
                    self._fetcher.unassign(place)

    def close(self) -> None:
        """Give everything back and leave. A fenced client calls no callback."""
        if self._fetcher.assigned and not self.fenced:
            lost = self.member is not None and self.member.gone is not None
            callback = (self._on_lost or self._on_revoke) if lost else self._on_revoke
            self._drop(callback, list(self._fetcher.assigned))
        with self._state.lock:
            member = self.member
            if member is None or member.gone is not None:
                return
            if self._instance is not None or not self._reachable():
                # With an instance id the group waits for its return (KIP-345).
                self._group.unheard(member, self._state.clock.monotonic())
            else:
                self._group.leave(member)

    def hear_no_more(self) -> None:
        """Let the group hear nothing of this client from now on. Under the lock."""
        if self.member is not None and self.member.gone is None:
            self._group.unheard(self.member, self._state.clock.monotonic())

    def hear_again(self) -> None:
        """Let the group hear this client again. Under the lock."""
        if self.member is not None and self.member.gone is None:
            self._group.heard(self.member, self._state.clock.monotonic())
