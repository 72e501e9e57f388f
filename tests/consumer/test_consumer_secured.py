"""What a client of a broker with permissions cannot tell apart, and what ends it; parts are in tests/security."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import KafkaError
from stepped import new_item

from penstock.clients.cluster import KafkaCluster
from penstock.clients.rights import MissingRightError
from penstock.consumer.handlers.results import Result
from penstock.consumer.outbox.outbox import Submission
from penstock.consumer.outbox.plain_outbox import PlainOutbox
from penstock.devbroker import DevBroker, User
from rights import give, on_topic
from waiting import wait_until

NewTopic = Callable[..., str]
NewUser = Callable[..., User]


def test_a_topic_that_does_not_exist_is_told_apart_by_who_may_know_and_is_a_missing_right_for_others(
    secured: DevBroker, new_user: NewUser
) -> None:
    user = new_user()
    cluster = KafkaCluster(secured.bootstrap_servers, user.config)

    with pytest.raises(MissingRightError, match="topic no-such cannot be seen"):
        cluster.require_topics(["no-such"])
    give(secured, user, on_topic("no-such", "describe"))
    with pytest.raises(LookupError, match="no such topic"):
        cluster.require_topics(["no-such"])


def test_a_producer_that_may_write_nowhere_fails_for_ever_and_its_follower_writes_once_it_may(
    secured: DevBroker, new_secured_topic: NewTopic, new_user: NewUser
) -> None:
    topic = new_secured_topic()
    user = new_user(*on_topic(topic, "describe"))
    cluster = KafkaCluster(secured.bootstrap_servers, user.config)
    outbox = PlainOutbox()
    outbox.connect(cluster, {**user.config, "enable.idempotence": True, "log_level": 0}, at_once=True)
    ended: list[Submission] = []

    def is_sent() -> bool:
        count = len(ended)
        outbox.submit([new_item()], [Result(topic, b"v", b"k", [], -1)], ended.append)
        wait_until(lambda: outbox.serve() is None and len(ended) > count, timeout=60)
        return ended[-1].is_written

    def is_forbidden() -> bool:
        refusal = None if is_sent() else ended[-1].refusal
        return refusal is not None and refusal[1].code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED

    wait_until(is_forbidden, timeout=60)
    give(secured, user, on_topic(topic, "write"))
    wait_until(is_sent, timeout=60)
