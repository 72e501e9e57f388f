from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from penstock.devbroker import AskedRight, DevBroker, User
from penstock.errors import ConfigurationError, DevBrokerError


class Client:
    """A bare client of the broker, with what it was told went wrong."""

    def __init__(self, broker: DevBroker, config: Mapping[str, Any]) -> None:
        self.errors: list[KafkaError] = []
        self._admin = AdminClient(
            {**config, "bootstrap.servers": broker.bootstrap_servers, "error_cb": self.errors.append, "log_level": 0}
        )
        self._admin.poll(0)

    def topics(self, timeout: float = 60.0) -> set[str]:
        """Return the topics it may see."""
        return set(self._admin.list_topics(timeout=timeout).topics)

    def error_of(self, topic: str) -> int | None:
        """Return why it may not see a topic."""
        error = self._admin.list_topics(topic, timeout=60).topics[topic].error
        return None if error is None else int(error.code())

    def create(self, topic: str) -> None:
        self._admin.create_topics([NewTopic(topic, 1)])[topic].result(60)


@pytest.fixture(scope="module")
def with_passwords() -> Iterator[DevBroker]:
    """Passwords without TLS."""
    with DevBroker(security="sasl_plaintext") as running:
        yield running


@pytest.fixture(scope="module")
def with_client_certificates() -> Iterator[DevBroker]:
    with DevBroker(security="ssl", acls=True) as running:
        yield running


@pytest.mark.chaos
def test_a_client_certificate_is_the_user(with_client_certificates: DevBroker) -> None:
    broker = with_client_certificates
    broker.create_topic("certified")
    broker.allow("orders", "read", topic="certified")

    mine = Client(broker, broker.user("orders").config).topics()
    other = Client(broker, broker.user("stranger").config).topics()

    assert mine == {"certified"}
    assert other == set()
    assert "certified" in Client(broker, broker.admin_config).topics()


def test_a_right_holds_as_soon_as_it_was_given(
    secured: DevBroker, new_user: Callable[..., User], new_secured_topic: Callable[..., str]
) -> None:
    for _ in range(5):
        topic, user = new_secured_topic(), new_user()
        client = Client(secured, user.config)
        before = client.error_of(topic)

        secured.allow(user, "describe", topic=topic)

        assert (before, client.error_of(topic)) == (KafkaError.TOPIC_AUTHORIZATION_FAILED, None)


def test_what_the_broker_looked_up_for_a_user_is_told_in_order(
    secured: DevBroker, new_user: Callable[..., User], new_secured_topic: Callable[..., str]
) -> None:
    topic, user = new_secured_topic(), new_user()
    client = Client(secured, user.config)

    before = secured.asked(user)
    client.error_of(topic)
    secured.allow(user, "read", topic=topic)
    client.error_of(topic)
    client.error_of(topic)

    assert before == []
    assert secured.asked(user) == [
        AskedRight("DESCRIBE", "topic", topic, allowed=False, request="Metadata"),
        AskedRight("DESCRIBE", "topic", topic, allowed=True, request="Metadata"),
    ]


@pytest.mark.chaos
def test_users_rights_and_certificates_outlive_a_restart(with_client_certificates: DevBroker) -> None:
    broker = with_client_certificates
    broker.create_topic("kept")
    user = broker.user("keeper")
    broker.allow(user, "read", topic="kept")

    broker.kill()
    broker.restart()

    assert Client(broker, user.config).topics() == {"kept"}
    assert AskedRight("DESCRIBE", "topic", "kept", allowed=True, request="Metadata") in broker.asked(user)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"security": "tls"}, "security must be one of"),
        ({"acls": True}, "give security= too"),
        ({"config": {"super.users": "User:me"}}, "admin_config"),
    ],
)
def test_options_that_contradict_each_other_are_refused_before_anything_starts(
    options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        DevBroker(**options)


def test_the_missing_library_for_certificates_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)

    with pytest.raises(DevBrokerError, match=r"pip install 'penstock\[dev-broker-tls\]'"):
        DevBroker(security="ssl")


@pytest.mark.chaos
def test_a_broker_without_users_or_rights_says_so(with_passwords: DevBroker) -> None:
    with DevBroker() as broker:
        assert broker.admin_config == {}
        with pytest.raises(DevBrokerError, match="started without security"):
            broker.user("orders")
        with pytest.raises(DevBrokerError, match="started without acls=True"):
            broker.allow("orders", "read", topic="x")
    with pytest.raises(DevBrokerError, match="started without acls=True"):
        with_passwords.asked("orders")


@pytest.mark.chaos
def test_rights_and_users_that_are_none_are_refused(secured: DevBroker, with_client_certificates: DevBroker) -> None:
    with pytest.raises(ConfigurationError, match="an operation must be one of"):
        secured.allow("orders", "reed", topic="x")
    with pytest.raises(ConfigurationError, match="an operation on something"):
        secured.allow("orders", "read")
    with pytest.raises(ConfigurationError, match="must be letters"):
        secured.user("or,ders")
    with pytest.raises(ConfigurationError, match="choose another name"):
        secured.user("admin")
    with pytest.raises(ConfigurationError, match="is empty"):
        secured.user("orders", "")
    with pytest.raises(ConfigurationError, match="have none"):
        with_client_certificates.user("orders", "secret")
