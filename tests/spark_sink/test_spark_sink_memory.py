"""What one task of the source holds of a log of large messages, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from confluent_kafka import Producer

from penstock.devbroker import DevBroker
from penstock.spark_sink.source.partition_reader import TASK_BYTES

CHILD = Path(__file__).with_name("memory_child.py")
LARGE = 990_000  # what a message may have by default, with its frame, is 1 MB
BODY = os.urandom(LARGE)

#: What the libraries take for themselves, seen where they read one small record: 56 MB.
LIBRARIES = 64 * 1024 * 1024


def fill(servers: str, topic: str, records: Iterable[dict[str, object]]) -> int:
    """Write records to partition 0 and return their number."""
    producer = Producer(
        {"bootstrap.servers": servers, "queue.buffering.max.kbytes": 32_768, "enable.idempotence": True}
    )
    count = 0
    for record in records:
        while True:
            try:
                producer.produce(topic, partition=0, **record)  # type: ignore[arg-type] # keys and values of several kinds
            except BufferError:
                producer.poll(1)
            else:
                break
        count += 1
    assert producer.flush(120) == 0
    return count


def read_apart(servers: str, topic: str, rows: int, **settings: str) -> dict[str, int]:
    """Read the topic in a child and return its report."""
    settings["kafka.bootstrap.servers"] = servers
    done = subprocess.run(
        [sys.executable, str(CHILD), topic, str(rows), json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    report: dict[str, int] = json.loads(done.stdout)
    assert report["rows"] == rows
    return report


@pytest.mark.timeout(400)  # a child reads it
@pytest.mark.parametrize(
    ("large", "settings"),
    [
        ([{"value": BODY}] * 240, {}),
        # The client library does not count keys and headers in what it fetches ahead: there a number bounds them.
        ([{"key": BODY}] * 120 + [{"headers": [("h", BODY)]}] * 120, {"kafka.queued.min.messages": "16"}),
    ],
    ids=["values", "keys and headers"],
)
def test_a_task_holds_no_more_of_large_messages_than_is_stated(
    broker: DevBroker, new_topic: Callable[..., str], large: list[dict[str, object]], settings: dict[str, str]
) -> None:
    topic = new_topic()
    small = [{"value": b"x"}] * 10_000  # after these a reader thinks that thousands fit
    rows = fill(broker.bootstrap_servers, topic, small + large)

    report = read_apart(broker.bootstrap_servers, topic, rows, **settings)

    assert len(large) * LARGE > TASK_BYTES + LIBRARIES, "a task that held everything would not be noticed"
    assert report["grown"] <= TASK_BYTES + LIBRARIES
    assert report["largest"] <= TASK_BYTES // 2
