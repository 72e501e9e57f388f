"""`penstock lag` on a real broker: offsets behind, and the age of the message that is to blame."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from offsets_tools import rows, stand

from commands import Command
from kafka_tools import produce, transactional, wait_for_markers
from penstock.devbroker import DevBroker

HOUR_MS = 3_600_000


def test_the_oldest_message_that_is_not_done_is_found_behind_what_is_done_and_what_readers_do_not_see(
    on_broker: Command,
    broker: DevBroker,
    new_topic: Callable[..., str],
    admin: AdminClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers, topic = broker.bootstrap_servers, new_topic(6)
    group, now_ms = f"g-{topic}", int(time.time() * 1000)

    def produce_hours_ago(partition: int, *hours: int) -> None:
        for before in hours:
            produce(servers, topic, [(b"k", b"v")], partition=partition, timestamp=now_ms - before * HOUR_MS)

    produce_hours_ago(0, 9, 8, 7, 6, 5, 4)  # offsets 0 to 5
    stand(servers, group, topic, 0, 2, done=[range(3, 4), range(5, 6)])
    # Deleted up to what is done above the commit.
    produce_hours_ago(1, 9, 8, 7, 6, 5, 4)
    stand(servers, group, topic, 1, 1, done=[range(2, 4)])
    for future in admin.delete_records([TopicPartition(topic, 1, 3)]).values():
        future.result(30)
    # A transaction's marker, then what is done, then the message.
    producer = transactional(servers)
    producer.begin_transaction()
    producer.produce(topic, b"v", partition=2)
    producer.commit_transaction(30)
    wait_for_markers(servers, topic)
    produce_hours_ago(2, 3, 2)
    stand(servers, group, topic, 2, 1, done=[range(2, 3)])
    # Nothing, and what no reader of committed messages sees; of the last partition nothing is committed.
    stand(servers, group, topic, 3, 0)
    stand(servers, group, topic, 4, 0)
    for _ in range(2):
        producer.begin_transaction()
        producer.produce(topic, b"v", partition=4)
        producer.flush(30)
        producer.abort_transaction(30)
    wait_for_markers(servers, topic)

    outcome = on_broker("lag", group, "--json")
    printed = on_broker("lag", group)
    unknown = on_broker("lag", group, "--topic", f"{topic}:5")
    unknown_json = json.loads(on_broker("lag", group, "--topic", f"{topic}:5", "--json").out)
    uncommitted = on_broker("lag", group, "--config", "isolation.level=read_uncommitted")
    monkeypatch.setattr("penstock.clients.factory.Consumer.poll", lambda *_: None)
    silent = on_broker("lag", group, "--topic", f"{topic}:4", "--timeout", "0.2")

    assert outcome.code == printed.code == 0, (outcome, printed)
    found = json.loads(outcome.out)
    names = ("lag", "done_above", "not_done", "oldest_not_done")
    seen = [(*(row[name] for name in names), round((row["oldest_age_s"] or 0) / 3600)) for row in found["partitions"]]
    assert seen == [
        (4, 2, 2, 2, 7),
        (3, 1, 2, 4, 5),
        (3, 1, 2, 3, 2),
        (0, 0, 0, None, 0),
        (4, 0, 4, None, 0),
        (None, None, None, None, 0),
    ]
    assert (found["group"], found["lag"], found["not_done"], found["unknown"]) == (group, 14, 10, 1)
    assert round(found["oldest_age_s"] / 3600) == 7
    assert [topic, "0", "2", "6", "4", "2", "2", "2", "7", "h"] in [row[:10] for row in rows(printed.out)]
    assert "lag 14 in 5 partitions (and 1 with unknown lag), 10 of it not done" in printed.out
    assert ("lag unknown in 1 partition" in unknown.out, unknown_json["lag"]) == (True, None)
    assert f"; the oldest, {topic}:0@2, is 7 h " in printed.out
    assert [topic, "4", "0", "4", "4", "0", "4", "-", "-"] in rows(printed.out)
    assert [topic, "4", "0", "4", "4", "0", "4", "0"] in [row[:8] for row in rows(uncommitted.out)]
    assert (silent.code, f"no record of {topic}:4 arrived within 0.2 s" in silent.err) == (1, True)
