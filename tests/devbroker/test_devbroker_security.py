from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from penstock.devbroker import AskedRight, DevBroker, User, unsecured_token
from penstock.errors import ConfigurationError, DevBrokerError
from waiting import wait_until

#: What properties files, JAAS settings and passwords may each take wrongly.
ODD_PASSWORD = "q\"uo\\te' ;#=$\n ü"  # noqa: S105 - made for this test


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

    def refusal(self) -> str:
        """Return why it is not let in."""

        def told() -> str:
            with pytest.raises(KafkaException):
                self.topics(0.3)
            self._admin.poll(0)
            return "; ".join(error.str() for error in self.errors)

        return wait_until(told)


@pytest.fixture(scope="module")
def with_passwords() -> Iterator[DevBroker]:
    """Passwords without TLS; two users from the start."""
    users = {"odd": ODD_PASSWORD, "early": "bird"}
    with DevBroker(security="sasl_plaintext", users=users, start_timeout=150) as running:
        yield running


@pytest.fixture(scope="module")
def with_client_certificates() -> Iterator[DevBroker]:
    with DevBroker(security="ssl", acls=True, start_timeout=150) as running:
        yield running


@pytest.fixture(scope="module")
def with_tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevBroker]:
    folder = tmp_path_factory.mktemp("tokens") / "kept ünd named oddly"
    with DevBroker(security="oauthbearer", acls=True, data_dir=folder, start_timeout=150) as running:
        yield running


@pytest.mark.chaos
def test_a_user_that_comes_later_has_no_plain_until_the_broker_starts_anew(with_passwords: DevBroker) -> None:
    broker = with_passwords
    first = broker.user("late", "first")
    with pytest.raises(ConfigurationError, match=r"came later.*restart\(\)"):
        broker.user("late", mechanism="PLAIN")
    second = broker.user("late", "second")
    old = Client(broker, first.config).refusal()

    broker.restart()
    plain = broker.user("late", mechanism="PLAIN")

    assert "SASL authentication error" in old
    assert plain.config["sasl.password"] == second.config["sasl.password"] == "second"
    assert Client(broker, plain.config).topics() >= set()
    assert Client(broker, broker.admin_config).topics() >= set()


@pytest.mark.chaos
def test_passwords_show_neither_in_what_is_printed_nor_to_others(with_passwords: DevBroker) -> None:
    user = with_passwords.user("early")
    folder = with_passwords.log_path.parent
    command_line = Path(f"/proc/{with_passwords.pid}/cmdline").read_bytes()

    shown = [repr(user), str(user), repr(with_passwords), with_passwords.log_path.read_text(), str(command_line)]

    assert not any("bird" in text for text in shown)
    readable = [
        file
        for file in folder.glob("*")
        if file.is_file() and b"bird" in file.read_bytes() and file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
    ]
    assert "bird" in (folder / "server.properties").read_text()
    assert not readable


@pytest.mark.chaos
def test_a_client_certificate_is_the_user(with_client_certificates: DevBroker) -> None:
    broker = with_client_certificates
    broker.create_topic("certified")
    broker.allow("orders", "read", topic="certified")

    mine = Client(broker, broker.user("orders").config).topics()
    same = Client(broker, broker.certificate("orders").config).topics()
    other = Client(broker, broker.certificate("stranger").config).topics()

    assert mine == same == {"certified"}
    assert other == set()
    assert "certified" in Client(broker, broker.admin_config).topics()


@pytest.mark.chaos
@pytest.mark.parametrize("kind", ["expired", "foreign", "none"])
def test_a_client_certificate_that_is_no_good_is_refused(with_client_certificates: DevBroker, kind: str) -> None:
    broker = with_client_certificates
    config = broker.certificate("orders", expired=kind == "expired", foreign=kind == "foreign").config
    if kind == "none":
        config = {name: value for name, value in config.items() if "certificate" not in name and "key" not in name}

    assert Client(broker, config).refusal()


@pytest.mark.chaos
def test_tokens_of_the_library_and_of_a_callback_name_the_user(with_tokens: DevBroker) -> None:
    broker = with_tokens
    broker.create_topic("tokens")
    broker.allow("orders", "read", topic="tokens")
    user = broker.user("orders")
    called: list[str] = []

    def token(config: str) -> tuple[str, float]:
        called.append(config)
        return unsecured_token("orders")

    by_callback = {key: value for key, value in user.config.items() if "unsecure" not in key} | {"oauth_cb": token}

    assert Client(broker, user.config).topics() == {"tokens"}
    assert Client(broker, by_callback).topics() == {"tokens"}
    assert called
    assert "tokens" in Client(broker, broker.admin_config).topics()


def test_a_right_holds_when_it_was_given_and_no_longer_when_it_was_taken(
    secured: DevBroker, new_user: Callable[..., User], new_secured_topic: Callable[..., str]
) -> None:
    topic, user = new_secured_topic(), new_user()
    client = Client(secured, user.config)

    seen = []
    for _ in range(5):
        seen.append(client.error_of(topic))
        secured.allow(user, "describe", topic=topic)
        seen.append(client.error_of(topic))
        secured.disallow(user, "describe", topic=topic)

    assert seen == 5 * [KafkaError.TOPIC_AUTHORIZATION_FAILED, None]


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
def test_users_rights_and_certificates_outlive_a_restart(with_tokens: DevBroker) -> None:
    broker = with_tokens
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
        ({"users": {"orders": "x"}}, "users= has passwords"),
        ({"security": "ssl", "users": {"orders": "x"}}, "users= has passwords"),
        ({"security": "sasl_ssl", "users": {"or,ders": "x"}}, "must be letters"),
        ({"security": "sasl_ssl", "users": {"admin": "x"}}, "choose another name"),
        ({"security": "sasl_ssl", "users": {"orders": ""}}, "is empty"),
        ({"security": "sasl_plaintext", "expired_certificate": True}, "needs a certificate"),
        ({"expired_certificate": True}, "needs a certificate"),
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
def test_a_broker_without_users_or_rights_says_so(broker: DevBroker, with_passwords: DevBroker) -> None:
    assert broker.admin_config == {}
    with pytest.raises(DevBrokerError, match="started without security"):
        broker.user("orders")
    with pytest.raises(DevBrokerError, match="started without acls=True"):
        broker.allow("orders", "read", topic="x")
    with pytest.raises(DevBrokerError, match="started without acls=True"):
        with_passwords.asked("orders")
    with pytest.raises(DevBrokerError, match="has no certificates"):
        with_passwords.certificate("orders")


@pytest.mark.chaos
def test_rights_that_are_none_are_refused(secured: DevBroker, with_tokens: DevBroker) -> None:
    with pytest.raises(ConfigurationError, match="an operation must be one of"):
        secured.allow("orders", "reed", topic="x")
    with pytest.raises(ConfigurationError, match="an operation on something"):
        secured.allow("orders", "read")
    with pytest.raises(ConfigurationError, match="an operation on something"):
        secured.disallow("orders", topic="x")
    with pytest.raises(ConfigurationError, match="mechanism must be one of"):
        secured.user("orders", mechanism="GSSAPI")
    with pytest.raises(ConfigurationError, match="have none"):
        with_tokens.user("orders", "secret")
