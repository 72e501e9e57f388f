"""One configuration makes all clients: settings that a kind does not take are left out."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError

import penstock
from penstock import clients
from penstock.clients.factory import AdminClient, Consumer, Producer, settings
from penstock.clients.rights import Operation, ask_rights, group_right, topic_right
from penstock.clients.topics import described
from penstock.errors import ConfigurationError
from penstock.options import ClientConfig
from waiting import wait_until

NOWHERE = "127.0.0.1:1"

#: What one app may have: settings for each kind of client besides those of the connection.
EVERYTHING = {
    "group.id": "orders",
    "auto.offset.reset": "earliest",
    "session.timeout.ms": 45_000,
    "max.poll.interval.ms": 300_000,
    "partition.assignment.strategy": "cooperative-sticky",
    "fetch.wait.max.ms": 100,
    "linger.ms": 5,
    "compression.type": "zstd",
    "enable.idempotence": True,
    "transactional.id": "orders",
    "delivery.timeout.ms": 30_000,
    "partitioner": "murmur2_random",
    "statistics.interval.ms": 1_000,
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "OAUTHBEARER",
    "client.id": "orders",
    "socket.timeout.ms": 10_000,
}

MAKERS = [clients.consumer, clients.producer, clients.admin]
KINDS = [Consumer, Producer, AdminClient]
#: One kind in each run; what they share is made by the same lines.
ONE_MAKER = [clients.producer, *(pytest.param(make, marks=pytest.mark.thorough) for make in MAKERS[::2])]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.mark.parametrize("value", ["secret\udcff", "secret\0"])
@pytest.mark.parametrize("make", ONE_MAKER)
def test_a_text_that_the_library_cannot_take_is_refused_by_its_setting_and_not_shown(
    make: Callable[[str, ClientConfig], Any], value: str
) -> None:
    with pytest.raises(ConfigurationError, match=r"config\['client.id'\] must be text in UTF-8") as refused:
        make(NOWHERE, {"client.id": value})

    assert "secret" not in str(refused.value)


def test_brokers_are_not_asked_about_what_can_be_no_topics_name() -> None:
    found, failed = described(clients.admin(NOWHERE, {}), ["", " ", "orders\0", "\udcff"])

    assert found == {}
    assert {error.args[0].code() for error in failed.values()} == {KafkaError.TOPIC_EXCEPTION}
    assert len(failed) == 4


def test_brokers_are_not_asked_about_rights_on_what_can_be_no_name() -> None:
    wanted = [topic_right(Operation.READ, name) for name in ("", "\udcff")] + [group_right("\udcff")]

    assert ask_rights(clients.admin(NOWHERE, {}), wanted).unknown == tuple(wanted)


@pytest.mark.parametrize("make", ONE_MAKER)
def test_every_kind_asks_the_users_callback_for_its_token(make: Callable[[str, ClientConfig], Any]) -> None:
    asked = []

    def token(config: str) -> tuple[str, float]:
        asked.append(config)
        return "abc", 4e9

    make(NOWHERE, {**EVERYTHING, "sasl.oauthbearer.config": "scope=kafka", "oauth_cb": token})

    assert asked == ["scope=kafka"]


@pytest.mark.parametrize("make", MAKERS)
def test_the_librarys_own_tokens_reach_every_kind(make: Callable[[str, ClientConfig], Any]) -> None:
    errors: list[str] = []
    unsecured = {"enable.sasl.oauthbearer.unsecure.jwt": True, "sasl.oauthbearer.config": "no such setting"}

    client = make(NOWHERE, {**EVERYTHING, **unsecured, "error_cb": lambda error: errors.append(str(error))})

    # It looks at the configuration of tokens only where it makes them.
    wait_until(lambda: client.poll(0.05) or any("oauthbearer.config" in line for line in errors))


@pytest.mark.parametrize(("make", "kind"), list(zip(MAKERS, KINDS, strict=True)))
def test_a_kind_does_not_get_settings_that_only_others_take(
    make: Callable[[str, ClientConfig], Any], kind: Any
) -> None:
    log = logging.getLogger("kinds")
    log.propagate = False
    log.addHandler(lines := Lines())
    connection = {"sasl.mechanism": "PLAIN", "sasl.username": "u", "sasl.password": "p"}
    client = make(NOWHERE, {**EVERYTHING, **connection, "on_commit": print, "on_delivery": print, "logger": log})

    wait_until(lambda: client.poll(0.05) or any("Connect" in line for line in lines.said))

    assert not [line for line in lines.said if "property" in line]
    # Whatever says how brokers are reached, known here or not.
    assert settings(kind, NOWHERE, {"sasl.new.setting": 1})["sasl.new.setting"] == 1


def test_a_setting_that_is_refused_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r'No such configuration property: "sasl\.pasword"'):
        clients.admin(NOWHERE, {"sasl.pasword": "x"})
    with pytest.raises(ConfigurationError, match="error_cb"):
        clients.consumer(NOWHERE, {"group.id": "g", "error_cb": "print"})


def test_a_value_that_is_refused_is_not_shown() -> None:
    with pytest.raises(ConfigurationError, match=r'"security\.protocol"') as caught:
        clients.producer(NOWHERE, {"security.protocol": "canary-4711"})

    assert "canary-4711" not in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_nothing_makes_clients_elsewhere() -> None:
    source = Path(penstock.__file__).parent
    made = re.compile(r"(?<![\w.`])(Consumer|Producer|AdminClient)\(")
    found = [
        path.relative_to(source).as_posix()
        for path in sorted(source.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if made.search(line) and not line.lstrip().startswith(("class ", "#"))
    ]

    assert made.search("x = Consumer({})")
    assert found == []
