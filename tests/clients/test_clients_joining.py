"""Members of `group.protocol=consumer`: no two have a partition at once, even if a heartbeat is answered late."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from kafka_proxy import KafkaProxy, What
from kafka_tools import produce
from penstock import App, clients
from penstock.clients import factory
from penstock.clients.answers import answered
from penstock.clients.factory import Consumer, TopicsNotKnownError
from penstock.clients.groups import describe_groups
from penstock.devbroker import DevBroker
from waiting import wait_until

HEARTBEAT = 68
PARTITIONS = 4


class Member:
    """A member that records its partitions; `while_revoking` is called before it gives any back."""

    def __init__(self, servers: str, group: str, protocol: str = "consumer") -> None:
        self.has: set[int] = set()
        #: What another had when it was assigned to this one.
        self.taken: set[int] = set()
        self.others: Callable[[], set[int]] = set
        self.while_revoking: Callable[[], object] = lambda: None
        self.client: Consumer = clients.consumer(
            servers, {"group.id": group, "group.protocol": protocol, "auto.offset.reset": "earliest"}
        )

    def join(self, topic: str) -> None:
        self.client.subscribe([topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked)

    def _assigned(self, client: Any, partitions: list[TopicPartition]) -> None:
        came = {partition.partition for partition in partitions}
        self.taken |= came & self.others()
        self.has |= came
        client.incremental_assign(partitions)

    def _revoked(self, client: Any, partitions: list[TopicPartition]) -> None:
        self.while_revoking()
        self.has -= {partition.partition for partition in partitions}
        client.incremental_unassign(partitions)


def poll_until(is_done: Callable[[], bool], *members: Member) -> None:
    def is_done_after_a_poll() -> bool:
        for member in members:
            member.client.poll(0.05)
        return is_done()

    wait_until(is_done_after_a_poll)


@pytest.fixture
def proxy(broker: DevBroker) -> Iterator[KafkaProxy]:
    with KafkaProxy(broker.bootstrap_servers) as made:
        yield made


def test_a_partition_comes_to_a_member_once_another_has_given_it_back_though_a_heartbeat_was_answered_late(
    broker: DevBroker, proxy: KafkaProxy, new_topic: Callable[..., str], new_name: Callable[[], str]
) -> None:
    topic, group = new_topic(partitions=PARTITIONS), new_name()
    admin = clients.admin(broker.bootstrap_servers, {})
    first, second = Member(proxy.bootstrap_servers, group), Member(broker.bootstrap_servers, group)
    second.others = lambda: first.has
    # Longer than the interval of heartbeats: another is due when the answer is there.
    late_until = time.monotonic() + 6
    with contextlib.closing(first.client), contextlib.closing(second.client):
        with proxy.fault(HEARTBEAT, What.DELAY_ANSWER) as fault:
            first.join(topic)
            poll_until(lambda: fault.fired == 1, first)
            second.join(topic)
            poll_until(lambda: len(answered(describe_groups(admin, [group])[group], 30).members) == 2, second)
            poll_until(lambda: time.monotonic() > late_until, second)

        # So long that the second would hear of what it must not have yet.
        revoking_until = time.monotonic() + 6
        first.while_revoking = lambda: poll_until(lambda: time.monotonic() > revoking_until, second)
        poll_until(lambda: len(first.has) == len(second.has) == PARTITIONS // 2, first, second)
        first.while_revoking = lambda: None

    assert second.taken == set()


def test_a_member_does_not_join_before_brokers_have_said_what_its_topics_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "_TOPICS_S", 0.2)
    member = Member("127.0.0.1:1", "nobody")

    with contextlib.closing(member.client), pytest.raises(TopicsNotKnownError):
        member.join("orders")


def test_an_app_joins_as_soon_as_brokers_have_said_what_its_topics_are(
    broker: DevBroker,
    new_topic: Callable[..., str],
    new_name: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic, handled = new_topic(), list[bytes | None]()
    list_topics, unanswered = Consumer.list_topics, [1, 2]

    def answers_late(self: Consumer, *asked: Any, **limits: Any) -> Any:
        if unanswered:
            unanswered.pop()
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return list_topics(self, *asked, **limits)

    monkeypatch.setattr(Consumer, "list_topics", answers_late)
    app = App(new_name(), bootstrap_servers=broker.bootstrap_servers, config={"group.protocol": "consumer"})
    app.handler(topic)(lambda message: handled.append(message.value))
    produce(broker.bootstrap_servers, topic, [(b"k", b"1")])

    running = app.start()
    wait_until(lambda: handled == [b"1"])
    running.stop()

    assert not unanswered
    assert caplog.text.count(f"group {app.name} is not joined yet") == 2
