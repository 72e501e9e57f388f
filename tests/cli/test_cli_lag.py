"""`penstock lag` on a real broker: offsets behind, and the age of the message that is to blame."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from offsets_tools import commit, rows, stand

from commands import Command, Outcome
from kafka_tools import produce, transactional, wait_for_markers
from penstock.devbroker import DevBroker

NewTopic = Callable[..., str]
Lag = Callable[..., Outcome]

HOUR_MS = 3_600_000


@pytest.fixture
def lag(penstock_command: Command, broker: DevBroker) -> Lag:
    """Return a function that runs `penstock lag ARGUMENTS...` on the run's broker."""

    def call(*arguments: str) -> Outcome:
        return penstock_command("lag", "--bootstrap-servers", broker.bootstrap_servers, *arguments)

    return call


def hours_ago(hours: float) -> int:
    return int(time.time() * 1000 - hours * HOUR_MS)


@pytest.mark.thorough
def test_the_oldest_message_that_is_not_done_is_found_behind_what_is_done(
    lag: Lag, broker: DevBroker, new_topic: NewTopic, admin: AdminClient
) -> None:
    servers, topic = broker.bootstrap_servers, new_topic(5)
    group = f"g-{topic}"
    for hours in range(9, 3, -1):  # offsets 0 to 5
        produce(servers, topic, [(b"k", b"v")], partition=0, timestamp=hours_ago(hours))
    stand(servers, group, topic, 0, 2, done=[range(3, 4), range(5, 6)])
    # Deleted up to what is done above the commit.
    for hours in range(9, 3, -1):
        produce(servers, topic, [(b"k", b"v")], partition=1, timestamp=hours_ago(hours))
    stand(servers, group, topic, 1, 1, done=[range(2, 4)])
    for future in admin.delete_records([TopicPartition(topic, 1, 3)]).values():
        future.result(30)
    # A transaction's marker, then what is done, then the message.
    producer = transactional(servers)
    producer.begin_transaction()
    producer.produce(topic, b"v", partition=2)
    producer.commit_transaction(30)
    wait_for_markers(servers, topic)
    for hours in (3, 2):
        produce(servers, topic, [(b"k", b"v")], partition=2, timestamp=hours_ago(hours))
    stand(servers, group, topic, 2, 1, done=[range(2, 3)])
    commit(servers, group, topic, 3, 0)

    outcome = lag(group, "--json")
    printed = lag(group)

    assert outcome.code == printed.code == 0, (outcome, printed)
    told = json.loads(outcome.out)
    seen = [
        (
            one["lag"],
            one["done_above"],
            one["not_done"],
            one["oldest_not_done"],
            round((one["oldest_age_s"] or 0) / 3600),
        )
        for one in told["partitions"]
    ]
    assert seen == [
        (4, 2, 2, 2, 7),
        (3, 1, 2, 4, 5),
        (3, 1, 2, 3, 2),
        (0, 0, 0, None, 0),
        (None, None, None, None, 0),
    ]
    assert (told["group"], told["lag"], told["not_done"], told["unknown"]) == (group, 10, 6, 1)
    assert round(told["oldest_age_s"] / 3600) == 7
    assert [topic, "0", "2", "6", "4", "2", "2", "2", "7", "h", "0", "min"] in rows(printed.out)
    assert "lag 10 in 4 partitions (and 1 whose lag is not known), 6 of it not done" in printed.out
    assert f"; the oldest, {topic}:0@2, is 7 h 0 min old" in printed.out


def test_what_no_reader_of_committed_messages_sees_has_no_age_and_what_does_not_arrive_is_said(
    lag: Lag, broker: DevBroker, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, topic = broker.bootstrap_servers, new_topic()
    group = f"g-{topic}"
    commit(servers, group, topic, 0, 0)
    producer = transactional(servers)
    for _ in range(2):
        producer.begin_transaction()
        producer.produce(topic, b"v", partition=0)
        producer.flush(30)
        producer.abort_transaction(30)
    wait_for_markers(servers, topic)

    committed = lag(group)
    uncommitted = lag(group, "--config", "isolation.level=read_uncommitted")
    monkeypatch.setattr("penstock.clients.factory.Consumer.poll", lambda *_: None)
    silent = lag(group, "--timeout", "0.2")

    assert rows(committed.out) == [[topic, "0", "0", "4", "4", "0", "4", "-", "-"]]
    assert rows(uncommitted.out)[0][:8] == [topic, "0", "0", "4", "4", "0", "4", "0"]
    assert (silent.code, f"no record of {topic}:0 arrived within 0.2 s" in silent.err) == (1, True)
