"""`penstock offsets` on a real broker: the list, the result of a reset, and refusals."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from offsets_tools import Standing, rows, stand, stands

import penstock
from commands import Command
from kafka_tools import produce, read_all, transactional, wait_for_markers
from penstock.devbroker import DevBroker
from penstock.errors import PenstockError
from penstock.group_offsets.group import Group
from penstock.group_offsets.planning import change
from waiting import wait_until

NewTopic = Callable[..., str]

DONE = (range(7, 9), range(12, 15))


@pytest.fixture
def offsets(on_broker: Command) -> Command:
    """Return a function that runs `penstock offsets ARGUMENTS...` on the run's broker."""
    return partial(on_broker, "offsets")


@pytest.fixture
def topic(broker: DevBroker, new_topic: NewTopic) -> str:
    """A topic of two partitions, 20 messages in the first."""
    name = new_topic(2)
    produce(broker.bootstrap_servers, name, ((b"k", b"%d" % i) for i in range(20)), partition=0)
    return name


def test_what_a_group_has_committed_and_done_is_listed_and_what_is_odd_is_said(
    offsets: Command, broker: DevBroker, topic: str, admin: AdminClient
) -> None:
    group, servers = f"g-{topic}", broker.bootstrap_servers
    stand(servers, group, topic, 0, 5, done=DONE)
    code, listed, _ = offsets("ls", group)
    stand(servers, group, topic, 0, 5, text="leader of the flock")
    stand(servers, group, topic, 1, 5)
    _, foreign, _ = offsets("ls", group)
    for future in admin.delete_records([TopicPartition(topic, 0, 9)]).values():
        future.result(30)
    _, deleted, _ = offsets("ls", group)

    assert code == 0
    assert rows(listed) == [[topic, "0", "5", "0", "20", "15", "5", "-"], [topic, "1", "-", "0", "0", "-", "-", "-"]]
    assert f"group {group} is empty, with 0 members" in listed
    assert f"{topic}:1: no offset is committed" in listed
    assert [topic, "0", "5", "0", "20", "15", "?", "(foreign)", "-"] in rows(foreign)
    assert f"{topic}:0: the commit's metadata is no offset map of this group" in foreign
    assert "leader" not in foreign
    assert [topic, "1", "5", "0", "0", "-", "0", "-"] in rows(foreign)
    assert f"{topic}:1: the committed offset lies past the end of the log" in foreign
    assert [topic, "0", "5", "9", "20", "11", "?", "(foreign)", "-"] in rows(deleted)
    assert f"{topic}:0: the committed offset lies before the start of the log" in deleted


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_group_with_members_is_listed_with_them_and_is_not_moved(
    offsets: Command, broker: DevBroker, topic: str, protocol: str
) -> None:
    group, servers = f"g-{topic}", broker.bootstrap_servers
    stand(servers, group, topic, 0, 5, done=DONE)
    known = Group(servers, {}, group)
    before = known.state([f"{topic}:0"])
    settings = {"bootstrap.servers": servers, "group.id": group, "client.id": "counter", "group.protocol": protocol}

    with closing(Consumer({**settings, "enable.auto.commit": False})) as member:
        member.subscribe([topic])
        wait_until(lambda: member.poll(0.1) is None and member.assignment())
        wait_until(lambda: "is stable" in offsets("ls", group).out)  # brokers hear of it after the member
        listed = offsets("ls", group)
        refused = offsets("reset", group, "--to", "earliest")
        tried = offsets("reset", group, "--to", "earliest", "--dry-run")
        # As a member that joins while a command is at work.
        with pytest.raises(PenstockError, match="a member joined meanwhile"):
            known.write(before, [change(group, before.positions[0], 0)])

    assert listed.out.count("counter on 127.0.0.1") == 2
    assert f"group {group} is stable, with 1 member\n" in listed.out
    assert refused.code == 1
    assert "it has 1 member: counter on 127.0.0.1; stop all members of the group" in refused.err
    assert tried.code == 0, tried
    assert "it would be refused now" in tried.out
    assert stands(servers, group, topic) == (5, DONE)


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        (("latest",), (["5", "20", "0", "10", "5", "0"], (20, ()))),
        (("10", "--keep-done"), (["5", "10", "0", "3", "5", "3"], (10, DONE[1:]))),
        (("-2", "--keep-done"), (["5", "3", "2", "0", "5", "5"], (3, DONE))),
        (("+1",), (["5", "6", "5", "1", "5", "0"], (6, ()))),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) else "",
)
def test_a_reset_does_what_its_dry_run_shows_and_an_app_handles_what_is_not_done_then(
    offsets: Command, broker: DevBroker, topic: str, to: tuple[str, ...], expected: tuple[list[str], Standing]
) -> None:
    row, after = expected
    group, servers = f"g-{topic}", broker.bootstrap_servers
    stand(servers, group, topic, 0, 5, done=DONE)

    tried = offsets("reset", group, "--to", *to, "--topic", f"{topic}:0", "--dry-run")
    between = stands(servers, group, topic)
    done = offsets("reset", group, "--to", *to, "--topic", f"{topic}:0")
    standing = stands(servers, group, topic)
    handled: list[int] = []
    app = penstock.App(group, bootstrap_servers=servers, commit_interval=0.1)
    app.handler(topic)(lambda message: handled.append(message.offset))
    with app.start():
        wait_until(lambda: stands(servers, group, topic) == (20, ()))

    assert (tried.code, done.code) == (0, 0), (tried, done)
    assert rows(tried.out) == rows(done.out) == [[topic, "0", *row]]
    assert "a dry run: nothing was changed" in tried.out
    assert between == (5, DONE)
    assert f"group {group}: the offsets of 1 partition are written" in done.out
    assert standing == after
    offset, done_above = after
    assert sorted(handled) == [n for n in range(offset, 20) if not any(n in run for run in done_above)]


def test_one_message_is_skipped_and_gets_a_dead_letter(offsets: Command, broker: DevBroker, topic: str) -> None:
    group, servers = f"g-{topic}", broker.bootstrap_servers
    stand(servers, group, topic, 0, 5, done=DONE)

    tried = offsets("skip", group, f"{topic}:0@6", "--dry-run")
    between = stands(servers, group, topic)
    done = offsets("skip", group, f"{topic}:0@6")
    again = offsets("skip", group, f"{topic}:0@6")

    assert (tried.code, done.code, again.code) == (0, 0, 1), (tried, done, again)
    assert between == (5, DONE)
    assert stands(servers, group, topic) == (5, (range(6, 9), DONE[1]))
    (letter,) = read_all(servers, f"dlq.{topic}")
    assert (letter.key(), letter.value()) == (b"k", b"6")
    headers = dict(letter.headers() or [])
    assert (headers["__dlq.errors.topic"], headers["__dlq.errors.offset"]) == (topic.encode(), b"6")
    assert headers["penstock-exception-class"] == b"penstock.errors.GivenUpError"
    assert "is done already; nothing was changed" in again.err


def test_a_skip_makes_the_dead_letter_topic_as_large_as_an_app_does(
    offsets: Command, broker: DevBroker, new_name: Callable[..., str], admin: AdminClient
) -> None:
    topic, servers = new_name(), broker.bootstrap_servers
    broker.create_topic(topic, 2, {"max.message.bytes": "3000000"})
    producer = Producer({"bootstrap.servers": servers, "message.max.bytes": 3_000_000})
    producer.produce(topic, b"x" * 2_000_000, b"k", partition=1)
    producer.flush()
    stand(servers, topic, topic, 1, 0)

    done = offsets("skip", topic, f"{topic}:1@0")

    assert done.code == 0, done
    assert len(admin.list_topics(f"dlq.{topic}", timeout=30).topics[f"dlq.{topic}"].partitions) == 2


def test_members_that_run_give_the_message_up_that_is_to_be_skipped(
    offsets: Command, broker: DevBroker, topic: str, new_name: Callable[..., str]
) -> None:
    commands = penstock.CommandSettings(new_name("commands"), new_name("audit"))
    app = penstock.App(topic, bootstrap_servers=broker.bootstrap_servers, commands=commands, commit_interval=0.1)
    policy = penstock.retry(attempts=99, wait=lambda _: 600.0)
    topics = ("--commands-topic", commands.topic, "--audit-topic", commands.audit_topic)

    @app.handler(topic, retry=policy)
    def handle(message: penstock.Message) -> None:
        if message.offset == 0:
            raise ValueError("no good")

    with app.start() as running:
        wait_until(lambda: "parked" in [found.state for found in running.explain()])
        assert running._listener is not None
        assert running._listener.is_listening.wait(60)
        refused = offsets("skip", topic, f"{topic}:0@7", *topics)
        done = offsets("skip", topic, f"{topic}:0@0", *topics)
        wait_until(lambda: stands(broker.bootstrap_servers, topic, topic)[0] == 20)

    assert (refused.code, done.code) == (1, 0), (refused, done)
    assert "it does not hold" in refused.err
    assert f"{topic}:0@0 was given up: dlq.{topic} has it" in done.out


def test_a_reset_to_a_time_finds_its_first_message_and_one_to_the_end_passes_over_no_open_transaction(
    offsets: Command, broker: DevBroker, new_topic: NewTopic
) -> None:
    # Brokers delete records of more than seven days whenever they look, every five minutes.
    servers, topic = broker.bootstrap_servers, new_topic(2, {"retention.ms": "-1"})
    group, day_ms = f"g-{topic}", 86_400_000
    begun_ms = int(time.time() * 1000) - 9 * day_ms
    for number in range(6):
        produce(servers, topic, [(b"k", b"v")], partition=0, timestamp=begun_ms + number * day_ms)
    produce(servers, topic, [(b"k", b"v")], partition=1, timestamp=begun_ms)
    stand(servers, group, topic, 0, 6)

    code, out, _ = offsets("reset", group, "--to", f"{begun_ms + 2 * day_ms - 5}ms")
    at_time = [stands(servers, group, topic, number) for number in (0, 1)]
    producer = transactional(servers)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    producer.flush(30)
    offsets("reset", group, "--to", "latest", "--topic", f"{topic}:0")
    while_open = stands(servers, group, topic)
    offsets("reset", group, "--to", "latest", "--config", "isolation.level=read_uncommitted")
    uncommitted = stands(servers, group, topic)
    producer.abort_transaction(30)

    assert code == 0
    assert at_time == [(2, ()), (1, ())], "where no message is so late: the end"
    assert [topic, "1", "-", "1", "0", "1", "-", "0"] in rows(out)
    assert (while_open, uncommitted) == ((6, ()), (7, ()))


def test_a_group_that_is_not_there_is_an_error_and_can_be_given_offsets_that_its_log_has(
    offsets: Command, broker: DevBroker, topic: str
) -> None:
    group = f"new-{topic}"
    absent = [offsets("ls", group), offsets("reset", group, "--to", "earliest")]
    unknown = offsets("reset", group, "--to", "earliest", "--topic", "no-such-topic")
    outside = offsets("reset", group, "--to", "21", "--topic", topic)
    given = offsets("reset", group, "--to", "latest", "--topic", topic)

    for outcome in absent:
        assert outcome.code == 1
        assert f"group {group} has no members, and no offsets" in outcome.err
    assert (unknown.code, "no such topic" in unknown.err) == (1, True)
    said = f"{topic}:0 cannot begin at 21: its log begins at 0 and ends at 20"
    assert (outside.code, said in outside.err) == (2, True)
    assert given.code == 0, given
    assert rows(given.out)[0][:4] == [topic, "0", "-", "20"], "the refused ones changed nothing"
    assert stands(broker.bootstrap_servers, group, topic) == (20, ())


def test_offsets_of_an_open_transaction_are_waited_for(
    offsets: Command, broker: DevBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, servers = f"g-{topic}", broker.bootstrap_servers
    monkeypatch.setattr("penstock.group_offsets.group._RETRY_BUDGET_S", 0.5)
    stand(servers, group, topic, 0, 5)
    producer = transactional(servers)
    consumer = Consumer({"bootstrap.servers": servers, "group.id": group})
    producer.begin_transaction()
    producer.produce(topic, b"result", partition=1)
    producer.send_offsets_to_transaction([TopicPartition(topic, 0, 9)], consumer.consumer_group_metadata(), 30)

    while_open = offsets("reset", group, "--to", "+1")
    producer.commit_transaction(30)
    wait_for_markers(servers, topic)
    monkeypatch.undo()
    consumer.close()

    assert while_open.code == 1
    assert "a transaction with some of them is still open" in while_open.err
    wait_until(lambda: stands(servers, group, topic) == (9, ()))
