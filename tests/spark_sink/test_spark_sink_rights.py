"""On a secured broker: what source and sinks need, and what they say when one right of it is taken away."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Producer

from canary import MESSAGE
from penstock.clients.rights import MissingRightError
from penstock.devbroker import DevBroker, User
from penstock.spark_sink import DeadLetters, KafkaSink
from penstock.spark_sink.ledger.kafka_producers import SinkPublisher, slot_id
from penstock.spark_sink.ledger.kafka_publisher import publish
from penstock.spark_sink.ledger.kafka_target import Row, Target
from penstock.spark_sink.monitoring.group_offsets import GroupOffsets
from penstock.spark_sink.sinks.kafka_publication import require_target
from penstock.spark_sink.sinks.sql.rows.row_validator import Rejected
from penstock.spark_sink.source.batch_reader import BatchReader
from penstock.spark_sink.source.options.options import SourceOptions
from rights import Right, give, on_group, on_topic, on_transactional_id, take

#: The topic of the ledger of all sinks here; each has a name, and so entries, of its own.
LEDGER = "rights-ledger"


@pytest.fixture
def filled(secured: DevBroker, new_secured_topic: Callable[..., str]) -> str:
    """A topic of two partitions with three messages in each."""
    topic = new_secured_topic(2)
    settings: Mapping[str, Any] = {**secured.admin_config, "bootstrap.servers": secured.bootstrap_servers}
    producer = Producer(settings)
    for offset in range(6):
        producer.produce(topic, MESSAGE, MESSAGE, offset % 2)
    assert producer.flush(60) == 0
    return topic


def missing(act: Callable[[], object]) -> str:
    with pytest.raises(MissingRightError) as told:
        act()
    assert "canary" not in str(told.value)
    return str(told.value)


def names(text: str, user: User, right: Right) -> bool:
    """Tell whether a text names the user, the right and the command that gives it."""
    kind = right.resource.replace("_", "-")
    said = f"{right.operation.capitalize()} on {kind} {right.name}{'*' if right.is_prefix else ''}"
    command = f"--allow-principal 'User:{user.name}' --operation {right.operation.capitalize()} --{kind} '{right.name}'"
    return f"User:{user.name} lacks" in text and said in text and command in text


def allowed(secured: DevBroker, user: User) -> set[tuple[str, str, str]]:
    """Return what the user needed and had."""
    return {(one.resource, one.name, one.operation) for one in secured.asked(user) if one.allowed}


def rows_read(secured: DevBroker, user: User, topic: str) -> int:
    """Plan and read a topic as Spark does."""
    options = {"kafka.bootstrap.servers": secured.bootstrap_servers, "subscribe": topic}
    given = SourceOptions.parse(options | {f"kafka.{name}": value for name, value in user.config.items()})
    reader = BatchReader(given)
    return sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part))


def test_the_source_needs_to_read_its_topic_and_nothing_else(
    secured: DevBroker, new_user: Callable[..., User], filled: str
) -> None:
    user = new_user(*on_topic(filled, "READ"))

    assert rows_read(secured, user, filled) == 6

    assert allowed(secured, user) == {("topic", filled, "DESCRIBE"), ("topic", filled, "READ")}
    # The client library asks for the group's coordinator by itself, and is refused without harm.
    assert {one.name for one in secured.asked(user) if one.resource == "group"} <= {"penstock-spark"}


@pytest.mark.parametrize("held", [[], ["DESCRIBE"]])
def test_a_source_that_may_not_read_says_so_before_a_task_is_planned(
    secured: DevBroker, new_user: Callable[..., User], filled: str, held: Sequence[str]
) -> None:
    user = new_user(*on_topic(filled, *held))

    text = missing(lambda: rows_read(secured, user, filled))

    assert text.startswith(f"topic {filled} cannot be read: ")
    assert names(text, user, on_topic(filled, "READ")[0])
    give(secured, user, on_topic(filled, "READ"))
    assert rows_read(secured, user, filled) == 6


def test_a_topic_that_is_not_there_is_told_as_a_missing_right_only_to_those_who_may_not_know(
    secured: DevBroker, new_user: Callable[..., User]
) -> None:
    text = missing(lambda: rows_read(secured, new_user(), "no-such-topic"))

    assert "topic no-such-topic cannot be read" in text


class Publishing:
    """A `KafkaSink` at work: its check on the driver, and what its tasks do."""

    def __init__(self, secured: DevBroker, user: User, topic: str, name: str) -> None:
        self.sink = KafkaSink(secured.bootstrap_servers, topic, name=name, config=user.config, ledger_topic=LEDGER)
        self._target = Target(secured.bootstrap_servers, user.config, name, LEDGER)
        self._topic = topic

    def publish(self, offset: int) -> int:
        """Publish the row of an offset; return how many were applied before."""
        publisher = SinkPublisher(self._target)
        row = Row(("orders", 0), offset, self._topic, MESSAGE, MESSAGE, [])
        try:
            return publish(self._target, slot_id(self._target.name, ("orders", 0)), [row], publisher)
        finally:
            publisher.close()


@pytest.fixture(scope="module")
def ledger_topic(secured: DevBroker) -> str:
    secured.create_topic(LEDGER, 16)
    return LEDGER


def test_a_kafka_sink_publishes_with_the_least_rights_and_names_each_that_is_taken_away(
    secured: DevBroker, new_user: Callable[..., User], new_secured_topic: Callable[..., str], ledger_topic: str
) -> None:
    copies = new_secured_topic()
    name = f"sink-of-{copies}"
    on_topics = [*on_topic(copies, "WRITE"), *on_topic(ledger_topic, "READ", "WRITE")]
    on_ids = on_transactional_id(f"{name}/", "WRITE", prefix=True)
    user = new_user(*on_topics, *on_ids)
    work = Publishing(secured, user, copies, name)

    check = partial(require_target, work.sink._target(), [copies])
    check()
    assert work.publish(0) == 0
    needed = {("topic", copies), ("topic", ledger_topic), ("transactional_id", slot_id(name, ("orders", 0)))}
    assert {(kind, of) for kind, of, _ in allowed(secured, user)} == needed

    for offset, right in enumerate(on_topics, start=1):
        take(secured, user, [right])
        assert names(missing(check), user, right)
        # A task meets it where it is taken away in the middle of a batch.
        text = missing(lambda at=offset: work.publish(at))  # type: ignore[misc] # called at once
        assert names(text, user, right)
        assert "INVALID_TXN_STATE" not in text
        give(secured, user, [right])
        assert work.publish(offset) == 0
    take(secured, user, on_ids)
    assert names(missing(lambda: work.publish(4)), user, on_ids[0])
    give(secured, user, on_ids)
    assert work.publish(4) == 0
    assert work.publish(4) == 1, "it is published once"
    assert work.sink.position_of("", [("orders", 0)]) == {("orders", 0): 5}


def test_a_ledger_that_may_not_be_read_is_no_empty_one(
    secured: DevBroker, new_user: Callable[..., User], ledger_topic: str
) -> None:
    user = new_user()
    sink = KafkaSink(secured.bootstrap_servers, "copies", name="q", config=user.config, ledger_topic=ledger_topic)

    text = missing(lambda: sink.position_of("q", [("orders", 0)]))

    assert names(text, user, on_topic(ledger_topic, "READ")[0])


def test_dead_letters_of_a_table_need_two_rights_and_go_on_when_they_are_given_again(
    secured: DevBroker, new_user: Callable[..., User], filled: str
) -> None:
    letters = f"dlq.{filled}"
    secured.create_topic(letters, 2)
    rights = [*on_topic(filled, "READ"), *on_topic(letters, "WRITE")]
    user = new_user(*rights)
    writer = DeadLetters(secured.bootstrap_servers, config=user.config)
    rejected = [Rejected(filled, 1, 2, "CheckViolation")]

    writer.write(rejected)
    assert {(kind, of) for kind, of, _ in allowed(secured, user)} == {("topic", filled), ("topic", letters)}

    for right in rights:
        take(secured, user, [right])
        assert names(missing(lambda: writer.write(rejected)), user, right)
        give(secured, user, [right])
        writer.write(rejected)


def test_topics_that_may_not_be_made_are_told_with_the_right_to_make_them(
    secured: DevBroker, new_user: Callable[..., User], filled: str
) -> None:
    letters, ledger = f"dlq.{filled}", f"{filled}-ledger"
    user = new_user(*on_topic(filled, "READ", "WRITE"), *on_topic(letters, "WRITE"), *on_topic(ledger, "READ", "WRITE"))
    writer = DeadLetters(secured.bootstrap_servers, config=user.config)
    sink = KafkaSink(secured.bootstrap_servers, filled, name="q", config=user.config, ledger_topic=ledger)
    acts = {
        letters: lambda: writer.write([Rejected(filled, 1, 2, "CheckViolation")]),
        ledger: partial(require_target, sink._target(), [filled]),
    }

    for topic, act in acts.items():
        create = on_topic(topic, "CREATE")
        text = missing(act)
        assert names(text, user, create[0])
        give(secured, user, create)
        act()


def test_offsets_of_a_group_that_may_not_be_written_are_told_at_once_and_written_when_they_may(
    secured: DevBroker, new_user: Callable[..., User], filled: str, caplog: pytest.LogCaptureFixture
) -> None:
    group = f"group-of-{filled}"
    rights = [*on_group(group, "READ"), *on_topic(filled, "READ")]
    user = new_user(*rights)
    offsets = GroupOffsets(group, bootstrap_servers=secured.bootstrap_servers, config=user.config)

    offsets.warn_missing_rights([filled])
    assert offsets.advance({(filled, 0): 1}) == {(filled, 0): 1}
    assert caplog.text == ""
    for number, right in enumerate(rights, start=2):
        position = {(filled, 0): number}
        take(secured, user, [right])
        caplog.clear()
        offsets.warn_missing_rights([filled])
        assert names(caplog.text, user, right)
        assert offsets.advance(position) == {}
        assert caplog.text.count("lacks the right") == 1, "it is told once"
        give(secured, user, [right])
        assert offsets.advance(position) == position
    offsets.close()
