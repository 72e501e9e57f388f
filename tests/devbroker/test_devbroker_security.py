from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import AdminClient

from penstock.devbroker import AskedRight, DevBroker, User
from penstock.errors import ConfigurationError, DevBrokerError


def client_of(broker: DevBroker, user: User | None = None) -> AdminClient:
    """Return a bare client of a user; without one, of the administrator."""
    config = broker.admin_config if user is None else user.config
    return AdminClient({**config, "bootstrap.servers": broker.bootstrap_servers, "log_level": 0})


def topics_of(broker: DevBroker, user: User | None = None) -> set[str]:
    return set(client_of(broker, user).list_topics(timeout=60).topics)


def error_of(client: AdminClient, topic: str) -> int | None:
    """Return why a client may not see a topic."""
    error = client.list_topics(topic, timeout=60).topics[topic].error
    return None if error is None else int(error.code())


@pytest.mark.chaos
def test_a_client_certificate_is_the_user_whose_rights_outlive_a_restart() -> None:
    with DevBroker(security="ssl", acls=True) as broker:
        broker.create_topic("certified")
        user = broker.user("orders")
        broker.allow("orders", "read", topic="certified")
        with pytest.raises(ConfigurationError, match="have none"):
            broker.user("orders", "secret")
        before = topics_of(broker, user), topics_of(broker, broker.user("stranger"))
        all_topics = topics_of(broker)

        broker.kill()
        broker.restart()

        assert before == ({"certified"}, set())
        assert "certified" in all_topics
        assert topics_of(broker, user) == {"certified"}
        assert AskedRight("DESCRIBE", "topic", "certified", allowed=True, request="Metadata") in broker.asked(user)


def test_a_right_holds_as_soon_as_it_was_given_and_what_the_broker_looked_up_is_reported_in_order(
    secured: DevBroker, new_user: Callable[..., User], new_secured_topic: Callable[..., str]
) -> None:
    for _ in range(5):
        topic, user = new_secured_topic(), new_user()
        client = client_of(secured, user)
        asked, before = secured.asked(user), error_of(client, topic)

        secured.allow(user, "read", topic=topic)

        after = [error_of(client, topic) for _ in range(2)]
        assert (before, after) == (KafkaError.TOPIC_AUTHORIZATION_FAILED, [None, None])
        assert asked == []
        assert secured.asked(user) == [
            AskedRight("DESCRIBE", "topic", topic, allowed=False, request="Metadata"),
            AskedRight("DESCRIBE", "topic", topic, allowed=True, request="Metadata"),
        ]


def test_the_missing_library_for_certificates_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)

    with pytest.raises(DevBrokerError, match=r"pip install 'penstock\[dev-broker-tls\]'"):
        DevBroker(security="ssl")


@pytest.mark.chaos
def test_a_broker_without_users_or_rights_says_so() -> None:
    with DevBroker() as broker:
        assert broker.admin_config == {}
        with pytest.raises(DevBrokerError, match="started without security"):
            broker.user("orders")
        with pytest.raises(DevBrokerError, match="started without acls=True"):
            broker.allow("orders", "read", topic="x")
    # Passwords without TLS.
    with DevBroker(security="sasl_plaintext") as broker, pytest.raises(DevBrokerError, match="started without acls"):
        broker.asked("orders")


@pytest.mark.chaos
def test_rights_and_users_that_are_none_are_refused(secured: DevBroker) -> None:
    with pytest.raises(ConfigurationError, match="an operation must be one of"):
        secured.allow("orders", "reed", topic="x")
    with pytest.raises(ConfigurationError, match="a permission needs an operation and a resource"):
        secured.allow("orders", "read")
    with pytest.raises(ConfigurationError, match="must be letters"):
        secured.user("or,ders")
    with pytest.raises(ConfigurationError, match="choose another name"):
        secured.user("admin")
    with pytest.raises(ConfigurationError, match="is empty"):
        secured.user("orders", "")
