"""What handlers return, on a real broker: a process is killed, and nothing is missing."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kafka_tools import ends, produce, read_all
from penstock.app import App
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError
from support.consumers import NewTopic, all_committed, child
from waiting import wait_until

CHILD = Path(__file__).with_name("publishing_child.py")
#: Messages of each kind, and the kinds with their partitions.
MESSAGES, KEYS = 400, 20
PARTITIONS = {"plain": 3, "retried": 1, "given-up": 1, "later": 1}


def is_done(servers: str, prefix: str) -> bool:
    topics = {f"{prefix}-{kind}": count for kind, count in PARTITIONS.items()}
    topics[f"retry.{prefix}.{prefix}-later.100ms"] = 1
    return all(all_committed(servers, prefix, topic, count) for topic, count in topics.items())


def judge_order(servers: str, topic: str) -> None:
    """Require every result once, and of each key the order of its messages."""
    by_key: dict[bytes, list[tuple[int, int]]] = {}
    for message in read_all(servers, topic):
        number, part = (message.value() or b"").split(b"/")
        by_key.setdefault(message.key() or b"", []).append((int(number), int(part)))
    assert len(by_key) == KEYS
    for key, seen in by_key.items():
        numbers = range(int(key[1:]), MESSAGES, KEYS)
        assert seen == [(number, part) for number in numbers for part in range(1 + number % 3)], key


def values(servers: str, topic: str) -> Counter[bytes | None]:
    return Counter(message.value() for message in read_all(servers, topic))


def numbers(chosen: Callable[[int], object], prefix: bytes = b"") -> Counter[bytes | None]:
    return Counter(prefix + b"%d" % number for number in range(MESSAGES) if chosen(number))


def test_a_process_killed_in_mid_stream_loses_and_repeats_no_result_or_dead_letter_and_keeps_the_order(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    servers, prefix = broker.bootstrap_servers, new_topic()
    out, plain, letters = f"{prefix}-out", f"{prefix}-plain-out", f"dlq.{prefix}-given-up"
    broker.create_topic(out)
    broker.create_topic(plain, 2)
    for kind, partitions in PARTITIONS.items():
        broker.create_topic(f"{prefix}-{kind}", partitions)
        produce(servers, f"{prefix}-{kind}", ((b"k%d" % (number % KEYS), b"%d" % number) for number in range(MESSAGES)))

    # A call that does not end leaves work when it is killed, however busy the machine is.
    with child(CHILD, servers, prefix, "0.02", MESSAGES // 2) as process:
        wait_until(lambda: ends(servers, out, 1)[0] > 50 and ends(servers, letters, 1)[0] > 5)
        wait_until(lambda: sum(ends(servers, plain, 2).values()) > 50)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not is_done(servers, prefix), "it was killed too late"
    with child(CHILD, servers, prefix, "0.001") as process:
        wait_until(lambda: is_done(servers, prefix), timeout=120, interval=0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0

    judge_order(servers, plain)
    assert values(servers, out) == (
        numbers(lambda _: True, b"retried/")
        + numbers(lambda number: number % 2, b"given-up/")
        + numbers(lambda number: number % 4, b"later/")
    )
    assert values(servers, letters) == numbers(lambda number: number % 2 == 0)
    assert values(servers, f"dlq.{prefix}-later") == numbers(lambda number: number % 4 == 0)
    assert values(servers, f"retry.{prefix}.{prefix}-later.100ms") == numbers(lambda number: number % 2 == 0)


def test_a_setting_that_the_producer_is_refused_ends_the_start_and_not_the_first_result(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    app = App("app", bootstrap_servers=broker.bootstrap_servers, config={"compression.type": "none of these"})
    app.handler(new_topic())(lambda _message: None)

    with pytest.raises(ConfigurationError, match=r"compression\.codec"):
        app.start()
