"""Retries, dead letters, retry topics, deferred completions, batches and filters, exactly once on a real broker."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kafka_tools import ends, produce, read_all
from penstock.devbroker import DevBroker
from support.consumers import all_committed, child
from waiting import wait_until

CHILD = Path(__file__).with_name("publishing_kinds_child.py")
KINDS = ("retried", "given-up", "later")
MESSAGES, KEYS = 200, 20


def is_done(servers: str, prefix: str) -> bool:
    topics = [f"{prefix}-{kind}" for kind in KINDS]
    topics.append(f"retry.{prefix}.{prefix}-later.100ms")
    return all(all_committed(servers, prefix, topic) for topic in topics)


def values(servers: str, topic: str) -> Counter[bytes | None]:
    return Counter(message.value() for message in read_all(servers, topic))


def numbers(chosen: Callable[[int], bool]) -> Counter[bytes | None]:
    return Counter(b"%d" % number for number in range(MESSAGES) if chosen(number))


@pytest.mark.thorough
@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.chaos)], ids=["", "killed"])
def test_whatever_way_a_message_ends_its_result_or_dead_letter_is_visible_once(
    is_killed: bool, broker: DevBroker, new_name: Callable[..., str]
) -> None:
    servers, prefix = broker.bootstrap_servers, new_name("kinds")
    for name in (*KINDS, "out"):
        broker.create_topic(f"{prefix}-{name}")
    for kind in KINDS:
        produce(servers, f"{prefix}-{kind}", ((b"k%d" % (number % KEYS), b"%d" % number) for number in range(MESSAGES)))

    if is_killed:
        letters, out = f"dlq.{prefix}-given-up", f"{prefix}-out"
        with child(CHILD, servers, prefix) as process:
            wait_until(lambda: ends(servers, out, 1)[0] > 50)
            wait_until(lambda: ends(servers, letters, 1)[0] > 5)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert not is_done(servers, prefix), "it was killed too late"
    with child(CHILD, servers, prefix) as process:
        wait_until(lambda: is_done(servers, prefix), timeout=120, interval=0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0

    seen = values(servers, f"{prefix}-out")
    wanted = {
        "retried": lambda _: True,
        "given-up": lambda number: number % 2,
        "later": lambda number: number % 4,
    }
    for kind, chosen in wanted.items():
        of_kind = Counter(
            {v.partition(b"/")[2]: n for v, n in seen.items() if v and v.startswith(kind.encode() + b"/")}
        )
        assert of_kind == numbers(chosen), kind
    assert values(servers, f"dlq.{prefix}-given-up") == numbers(lambda number: number % 2 == 0)
    assert values(servers, f"dlq.{prefix}-later") == numbers(lambda number: number % 4 == 0)
    assert values(servers, f"retry.{prefix}.{prefix}-later.100ms") == numbers(lambda number: number % 2 == 0)
