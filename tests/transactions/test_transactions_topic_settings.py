"""Topics of a store that exist already, with settings that would lose transactions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import ConfigResource

from fake_admin import FakeAdmin
from penstock import clients
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError
from penstock.transactions import Coordinator
from penstock.transactions.stores.kafka.logs.topic_settings import check_settings, wrong_settings
from penstock.transactions.wire.topics import StoreTopics

RIGHT = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "message.timestamp.type": "LogAppendTime",
    "max.message.bytes": "1048588",
}


@pytest.mark.parametrize(
    ("wrong", "corrected"),
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
def test_what_would_lose_transactions_is_wrong_in_half_and_op(wrong: dict[str, str], corrected: dict[str, str]) -> None:
    assert wrong_settings({**RIGHT, **wrong}, is_done=False) == corrected


def test_the_done_log_may_have_any_time_and_must_have_room() -> None:
    settings = {**RIGHT, "message.timestamp.type": "CreateTime"}

    assert wrong_settings(settings, is_done=True) == {}
    assert wrong_settings({**settings, "max.message.bytes": "100000"}, is_done=True) == {"max.message.bytes": "2097152"}


class Admin(FakeAdmin):
    """A broker with topics that have a retention, or that does not show their settings."""

    servers = "kafka:9092"

    def __init__(self, describing: int | None = None) -> None:
        self._describing = describing

    def describe_configs(self, resources: list[ConfigResource], request_timeout: float) -> dict[Any, Future[Any]]:
        assert request_timeout
        settings = {name: SimpleNamespace(value=value) for name, value in {**RIGHT, "retention.ms": "1000"}.items()}
        answer: Future[Any] = Future()
        if self._describing is None:
            answer.set_result(settings)
        else:
            answer.set_exception(KafkaException(KafkaError(self._describing)))
        return dict.fromkeys(resources, answer)


def checked(admin: Admin) -> None:
    check_settings(admin, StoreTopics("store"))  # type: ignore[arg-type] # as far as used


def test_a_coordinator_refuses_what_would_lose_transactions_with_the_command_that_corrects_it() -> None:
    command = (
        "kafka-configs.sh --bootstrap-server kafka:9092 --alter --entity-type topics --entity-name store.half "
        "--add-config retention.ms=-1"
    )

    with pytest.raises(ConfigurationError) as refused:
        checked(Admin())

    assert "topic store.half has retention.ms=1000" in str(refused.value)
    assert command in str(refused.value)


def test_settings_that_may_not_be_read_do_not_prevent_the_start(caplog: pytest.LogCaptureFixture) -> None:
    checked(Admin(KafkaError.TOPIC_AUTHORIZATION_FAILED))

    said = [record for record in caplog.records if "it is not known whether topic store." in record.getMessage()]
    assert [record.levelno for record in said] == [logging.WARNING] * 3
    assert "lacks the permission DescribeConfigs on topic store.half" in said[0].getMessage()


@pytest.mark.parametrize(
    ("log", "settings"),
    [("half", {}), ("op", {"retention.bytes": "1000"}), ("done", {"cleanup.policy": "compact"})],
)
def test_a_topic_that_an_operator_made_with_the_brokers_defaults_is_refused_by_a_coordinator(
    log: str, settings: dict[str, str], broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    prefix, servers = new_topic(), broker.bootstrap_servers
    ensure_topics(clients.admin(servers, {}), [TopicSpec(f"{prefix}.{log}", 1, settings)])

    with pytest.raises(ConfigurationError, match=rf"topic {prefix}\.{log} has .*change it by `kafka-configs\.sh"):
        Coordinator(bootstrap_servers=servers, prefix=prefix, partitions=1).start()
