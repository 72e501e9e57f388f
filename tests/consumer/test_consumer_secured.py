"""An app on a broker with rights, with the fewest it can do with: each is taken away in turn, and given again."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from canary import MESSAGE
from commands import commands
from penstock.app import App
from penstock.clients.cluster import KafkaCluster
from penstock.clients.renewal import LastingProducer
from penstock.clients.rights import MissingRightError
from penstock.consumer import retry
from penstock.devbroker import DevBroker, User
from penstock.message import Message
from penstock.running import RunningApp
from rights import Right, give, on_group, on_topic, take
from waiting import wait_until

NewTopic = Callable[..., str]
NewUser = Callable[..., User]

#: Seconds within which a missing right must be said; a busy machine gets more to show the rest.
TOLD_S = 10


class PoisonError(Exception):
    """What a poison message raises."""


class SecuredApp:
    """An app with dead letters and retry topics, run as a user with the rights that it needs and no more."""

    def __init__(self, broker: DevBroker, topic: str, user: User) -> None:
        self.broker, self.topic, self.user, self.group = broker, topic, user, f"g-{topic}"
        self.letters, self.retries = f"dlq.{topic}", f"retry.{self.group}.{topic}.100ms"
        broker.create_topic(self.letters)
        broker.create_topic(self.retries)
        self.rights: dict[str, list[Right]] = {
            "read": on_topic(topic, "read"),
            "group": on_group(self.group, "read"),
            "letters": on_topic(self.letters, "write"),
            "retries": on_topic(self.retries, "read", "write"),
        }
        self.handled: list[bytes | None] = []
        self._lock = threading.Lock()
        self._producer = Producer(
            {**broker.admin_config, "bootstrap.servers": broker.bootstrap_servers, "enable.idempotence": True}
        )

    def give_all(self) -> None:
        for rights in self.rights.values():
            give(self.broker, self.user, rights)

    def app(self) -> App:
        app = App(
            self.group,
            bootstrap_servers=self.broker.bootstrap_servers,
            workers=2,
            config={**self.user.config, "log_level": 0},
            commit_interval=0.2,
        )

        @app.handler(self.topic, retry=retry(attempts=1), retry_delays=(0.1,), on_failure="dead_letter")
        def handle(message: Message) -> None:
            if message.value == b"poison":
                raise PoisonError(message.key)
            with self._lock:
                self.handled.append(message.value)

        return app

    @contextmanager
    def running(self) -> Iterator[RunningApp]:
        with self.app().start() as running:
            wait_until(lambda: running.statistics().partitions, timeout=60)
            yield running

    def send(self, *values: bytes) -> None:
        for value in values:
            self._producer.produce(self.topic, value, key=MESSAGE + value)
        assert self._producer.flush(30) == 0

    def committed(self) -> int:
        admin = {**self.broker.admin_config, "bootstrap.servers": self.broker.bootstrap_servers}
        reader = Consumer({**admin, "group.id": self.group, "enable.auto.commit": False})
        try:
            return reader.committed([TopicPartition(self.topic, 0)], timeout=30)[0].offset
        finally:
            reader.close()


@pytest.fixture
def secured_app(secured: DevBroker, new_secured_topic: NewTopic, new_user: NewUser) -> SecuredApp:
    return SecuredApp(secured, new_secured_topic(), new_user())


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ("read", "--operation Read --topic '{topic}'"),
        ("group", "--operation Read --group '{group}'"),
        ("letters", "--operation Write --topic '{letters}'"),
        ("retries", "--operation Read --topic '{retries}'; kafka-acls.sh"),
    ],
)
def test_an_app_that_lacks_a_right_at_its_start_says_so_with_the_command_and_starts_once_it_has_it(
    secured_app: SecuredApp, missing: str, line: str
) -> None:
    one = secured_app
    one.give_all()
    take(one.broker, one.user, one.rights[missing])

    with pytest.raises(MissingRightError) as raised:
        one.app().start()

    assert line.format_map(vars(one)) in str(raised.value)
    assert f"User:{one.user.name} lacks the right " in str(raised.value)
    give(one.broker, one.user, one.rights[missing])
    one.send(b"1")
    with one.running():
        wait_until(lambda: one.handled == [b"1"], timeout=60)


def test_a_topic_for_dead_letters_that_may_not_be_created_is_told_as_a_missing_right(
    secured: DevBroker, new_secured_topic: NewTopic, new_user: NewUser
) -> None:
    topic = new_secured_topic()
    letters = f"dlq.{topic}"
    user = new_user(*on_topic(topic, "read"), *on_group(f"g-{topic}", "read"), *on_topic(letters, "write"))
    app = App(f"g-{topic}", bootstrap_servers=secured.bootstrap_servers, config=user.config)
    app.handler(topic, on_failure="dead_letter")(lambda _message: None)

    with pytest.raises(MissingRightError, match=f"--operation Create --topic '{letters}'"):
        app.start()

    give(secured, user, on_topic(letters, "create"))
    with app.start():
        pass


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


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ("read", "--operation Read --topic '{topic}'"),
        ("group", "--operation Read --group '{group}'"),
        ("letters", "--operation Write --topic '{letters}'"),
        pytest.param("retries", "--operation Write --topic '{retries}'", marks=pytest.mark.chaos),
    ],
)
def test_a_right_that_is_taken_from_a_running_app_is_said_in_time_and_it_goes_on_when_it_is_given(
    secured_app: SecuredApp, missing: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = secured_app
    one.give_all()
    said = line.format_map(vars(one))
    with one.running() as running:
        one.send(b"before")
        wait_until(lambda: one.handled == [b"before"] and one.committed() == 1, timeout=60)
        take(one.broker, one.user, one.rights[missing])
        one.send(b"poison", b"during")
        wait_until(lambda: said in caplog.text, timeout=TOLD_S)
        wait_until(lambda: any(said in str(found) for found in running.explain()), timeout=TOLD_S)
        is_written = missing in {"letters", "retries"}
        if is_written:
            wait_until(lambda: running.statistics().dead_letter_failures >= 1, timeout=60)
        while_missing = one.committed()
        give(one.broker, one.user, one.rights[missing])
        one.send(b"after")
        wait_until(lambda: running.statistics().dead_letters == 1, timeout=90)
        wait_until(lambda: {b"before", b"during", b"after"} <= set(one.handled), timeout=90)
        wait_until(lambda: one.committed() == 4, timeout=90)
        wait_until(lambda: not any(found.trouble for found in running.explain()), timeout=60)

    if not is_written:
        assert while_missing == 1
    assert len(caplog.text.split(said)) - 1 <= 3


def test_a_producer_that_may_write_nowhere_fails_for_ever_and_its_follower_writes_once_it_may(
    secured: DevBroker, new_secured_topic: NewTopic, new_user: NewUser
) -> None:
    topic = new_secured_topic()
    user = new_user(*on_topic(topic, "describe"))
    cluster = KafkaCluster(secured.bootstrap_servers, user.config)
    producer = LastingProducer(
        lambda: cluster.producer({**user.config, "enable.idempotence": True, "log_level": 0}), cluster.clock
    )
    errors: list[KafkaError | None] = []

    def is_sent() -> bool:
        try:
            producer.produce(topic, b"v", b"k", on_delivery=lambda error, _: errors.append(error))
        except KafkaException as error:
            errors.append(error.args[0])
            return False
        count = len(errors)
        wait_until(lambda: producer.poll(0.1) >= 0 and len(errors) > count, timeout=60)
        return errors[-1] is None

    wait_until(lambda: not is_sent() and errors[-1].code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED, timeout=60)
    give(secured, user, on_topic(topic, "write"))
    wait_until(is_sent, timeout=60)

    assert producer.replaced >= 1


def test_check_tells_which_rights_of_an_app_are_missing_and_run_ends_with_a_sentence(
    secured_app: SecuredApp,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = secured_app
    one.give_all()
    take(one.broker, one.user, one.rights["letters"])
    module = ModuleType("secured_orders")
    module.app = one.app()  # type: ignore[attr-defined] # a module takes any
    monkeypatch.setitem(sys.modules, "secured_orders", module)
    command = commands(monkeypatch, capsys)

    told, run = command("check", "secured_orders:app"), command("run", "secured_orders:app")
    give(one.broker, one.user, one.rights["letters"])
    after = command("check", "secured_orders:app")

    line = f"--allow-principal 'User:{one.user.name}' --operation Write --topic '{one.letters}'"
    assert told.code == run.code == 1
    assert line in told.err
    assert line in run.err
    assert "Traceback" not in told.err + run.err
    assert f"missing  Write on topic {one.letters}" in told.out
    assert f"ok       Read on group {one.group}" in told.out
    assert after.code == 0
    assert "missing  " not in after.out


def test_a_topic_that_is_found_without_a_right_is_told_with_it_and_the_others_go_on(
    secured: DevBroker,
    new_secured_topic: NewTopic,
    new_user: NewUser,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = new_secured_topic()
    group, unread, unwritten = f"g-{first}", f"{first}.unread", f"{first}.unwritten"
    user = new_user(*on_group(group, "read"), *on_topic(first, "read"), *on_topic(unread, "describe"))
    producer = Producer(
        {**secured.admin_config, "bootstrap.servers": secured.bootstrap_servers, "enable.idempotence": True}
    )
    seen: list[str] = []
    config = {**user.config, "topic.metadata.refresh.interval.ms": 300, "group.protocol": "consumer"}
    app = App(group, bootstrap_servers=secured.bootstrap_servers, commit_interval=0.1, config=config)
    app.handler(pattern=re.escape(first) + r"(\.unread)?")(lambda message: seen.append(message.topic))
    app.handler(pattern=r".*\.unwritten", on_failure="dead_letter")(lambda message: seen.append(message.topic))

    def send(topic: str) -> None:
        producer.produce(topic, b"v")
        assert producer.flush(30) == 0

    with app.start() as running:
        for topic in (unread, unwritten):
            secured.create_topic(topic)
            send(topic)
        give(secured, user, on_topic(unwritten, "read"))

        def told() -> str:
            return "\n".join(map(str, running.explain()))

        wait_until(lambda: f"lacks the right Read on topic {unread}" in told())
        wait_until(lambda: f"Create on topic dlq.{unwritten}" in told())
        send(first)
        wait_until(lambda: seen == [first])
        give(secured, user, [*on_topic(unread, "read"), *on_topic(f"dlq.{unwritten}", "create", "write")])
        wait_until(lambda: sorted(seen) == sorted([first, unread, unwritten]))

    assert f"topic {unread} cannot be read" in caplog.text
    assert f"topic {unwritten} matches a pattern and cannot be consumed" in caplog.text
