"""What handlers return, on a real broker: a process is killed, and nothing is missing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from confluent_kafka import Message

from kafka_tools import ends, produce, read_all
from penstock.app import App
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError
from support.consumers import NewTopic, all_committed, child, group_of
from waiting import wait_until

CHILD = Path(__file__).with_name("publishing_child.py")
KEYS, MESSAGES = 40, 4_000


def feed(servers: str, source: str) -> None:
    produce(servers, source, ((b"k%d" % (number % KEYS), b"%d" % number) for number in range(MESSAGES)))


def judge(messages: list[Message]) -> None:
    """Require every result once, and of each key the order of its messages."""
    by_key: dict[bytes, list[tuple[int, int]]] = {}
    for message in messages:
        number, part = (message.value() or b"").split(b"/")
        by_key.setdefault(message.key() or b"", []).append((int(number), int(part)))
    assert len(by_key) == KEYS
    for key, seen in by_key.items():
        first = int(key[1:])
        wanted = [(number, part) for number in range(first, MESSAGES, KEYS) for part in range(1 + number % 3)]
        assert seen == wanted, key


def test_a_process_killed_in_mid_stream_loses_no_result_and_keeps_the_order(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    servers, source, target = broker.bootstrap_servers, new_topic(partitions=3), new_topic(partitions=2)
    feed(servers, source)

    # So slow that there is work left when it is killed, however busy the machine is: 20 s for all.
    with child(CHILD, servers, source, target, "0.02") as process:
        wait_until(lambda: sum(ends(servers, target, 2).values()) >= 500)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not all_committed(servers, group_of(source), source, 3), "it was killed too late"
    with child(CHILD, servers, source, target, "0.001") as process:
        wait_until(lambda: all_committed(servers, group_of(source), source, 3), timeout=90, interval=0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0

    judge(read_all(servers, target))


def test_a_setting_that_the_producer_is_refused_ends_the_start_and_not_the_first_result(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    app = App("app", bootstrap_servers=broker.bootstrap_servers, config={"compression.type": "none of these"})
    app.handler(new_topic())(lambda _message: None)

    with pytest.raises(ConfigurationError, match=r"compression\.codec"):
        app.start()
