"""Topics of a store that exist already, with settings that would lose transactions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource

from penstock import clients
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError
from penstock.transactions import Coordinator, TransactionalProducer
from penstock.transactions.stores.kafka.logs.topic_lookup import correct_settings, wrong_settings
from penstock.transactions.wire.topics import StoreTopics
from waiting import wait_until

RIGHT = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "message.timestamp.type": "LogAppendTime",
    "max.message.bytes": "1048588",
}


@pytest.mark.parametrize(
    ("wrong", "mended"),
    [
        ({"retention.ms": "604800000"}, {"retention.ms": "-1"}),
        ({"retention.bytes": "1000"}, {"retention.bytes": "-1"}),
        ({"cleanup.policy": "compact"}, {"cleanup.policy": "delete"}),
        ({"cleanup.policy": "compact,delete"}, {"cleanup.policy": "delete"}),
        ({"message.timestamp.type": "CreateTime"}, {"message.timestamp.type": "LogAppendTime"}),
        ({"max.message.bytes": "1000"}, {}),
        ({}, {}),
    ],
)
def test_what_would_lose_transactions_is_wrong_in_half_and_op(wrong: dict[str, str], mended: dict[str, str]) -> None:
    assert wrong_settings({**RIGHT, **wrong}, is_done=False) == mended


def test_the_done_log_may_have_any_time_and_must_have_room() -> None:
    settings = {**RIGHT, "message.timestamp.type": "CreateTime"}

    assert wrong_settings(settings, is_done=True) == {}
    assert wrong_settings({**settings, "max.message.bytes": "100000"}, is_done=True) == {"max.message.bytes": "2097152"}


class Admin:
    """A broker with topics that have a retention, and rights as a test gives them."""

    def __init__(self, describing: int | None = None, altering: int | None = None) -> None:
        self._describing, self._altering = describing, altering

    def describe_configs(self, resources: list[ConfigResource], request_timeout: float) -> dict[Any, Future[Any]]:
        assert request_timeout
        settings = {name: SimpleNamespace(value=value) for name, value in {**RIGHT, "retention.ms": "1000"}.items()}
        return {resource: answer(self._describing, settings) for resource in resources}

    def incremental_alter_configs(self, resources: list[Any], request_timeout: float) -> dict[Any, Future[Any]]:
        assert request_timeout
        return {resource: answer(self._altering, None) for resource in resources}


def answer(error: int | None, result: object) -> Future[Any]:
    future: Future[Any] = Future()
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(KafkaException(KafkaError(error)))
    return future


def mended(admin: Admin, *, refuses: bool) -> None:
    correct_settings(admin, "kafka:9092", StoreTopics("store"), refuses=refuses)  # type: ignore[arg-type] # as far as used


def test_a_coordinator_refuses_what_it_may_not_mend_with_the_command_that_does() -> None:
    command = (
        "kafka-configs.sh --bootstrap-server kafka:9092 --alter --entity-type topics --entity-name store.half "
        "--add-config retention.ms=-1"
    )

    with pytest.raises(ConfigurationError) as refused:
        mended(Admin(altering=KafkaError.TOPIC_AUTHORIZATION_FAILED), refuses=True)

    assert "topic store.half has retention.ms=1000" in str(refused.value)
    assert command in str(refused.value)
    assert "kafka-acls.sh" in str(refused.value)
    assert "--operation AlterConfigs --topic 'store.half'" in str(refused.value)


def settings_of(admin: AdminClient, topic: str) -> dict[str, str | None]:
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    return {name: entry.value for name, entry in admin.describe_configs([resource])[resource].result().items()}


@pytest.mark.parametrize("who", ["coordinator", "producer"])
def test_topics_that_an_operator_made_with_the_brokers_defaults_are_mended_at_start(
    who: str, broker: DevBroker, admin: AdminClient, new_topic: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    prefix, servers = new_topic(), broker.bootstrap_servers
    topics = StoreTopics(prefix, 1)
    compacted = {"cleanup.policy": "compact", "max.message.bytes": "1000"}
    specs = [TopicSpec(topics.half, 1), TopicSpec(topics.op, 1, {"retention.bytes": "1000"})]
    ensure_topics(clients.admin(servers, {}), servers, [*specs, TopicSpec(topics.done, 1, compacted)])

    if who == "coordinator":
        Coordinator(bootstrap_servers=servers, prefix=prefix).start().stop()
    else:
        TransactionalProducer("orders", bootstrap_servers=servers, prefix=prefix).start().stop()

    for topic in (topics.half, topics.op, topics.done):
        # A broker tells of a change a moment after it was acknowledged.
        wait_until(lambda: wrong_settings(settings_of(admin, topic), is_done=topic == topics.done) == {})  # noqa: B023 - waited for here
        assert f"topic {topic} had " in caplog.text
