"""The memory of one source task on a log of large messages, measured in a process: this file.

It stands still before each take, as on a busy machine, so that the client library has fetched ahead all that it may.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Message, Producer

from penstock.clients import factory
from penstock.devbroker import DevBroker
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import OffsetRange
from penstock.spark_sink.source.pool import WorkerPool
from penstock.spark_sink.source.reading import TASK_BYTES, read_ranges

LARGE = 990_000  # what a message may have by default, with its frame, is 1 MB
BODY = os.urandom(LARGE)
#: What the libraries take for themselves, seen where they read one small record: 56 MB.
LIBRARIES = 64 * 1024 * 1024


class HesitantConsumer(factory.Consumer):
    """Delays each take of more than one record: this is the tested case."""

    def consume(self, count: int = 1, wait_s: float = -1) -> list[Message]:
        if count > 1:
            time.sleep(0.03)
        return super().consume(count, wait_s)


def read(topic: str, rows: int, settings: dict[str, str]) -> None:
    """Print the rows of a topic, the bytes of the largest batch, and the growth of the process in bytes."""
    options = SourceOptions.parse({"subscribe": topic, "includeHeaders": "true", **settings})
    factory.Consumer = HesitantConsumer
    before = resident("VmRSS")
    sizes = [(one.num_rows, one.nbytes) for one in read_ranges(options, [OffsetRange(topic, 0, 0, rows)], WorkerPool())]
    report = [sum(n for n, _ in sizes), max(size for _, size in sizes), resident("VmHWM") - before]
    print(json.dumps(report))  # noqa: T201 - a child's report


def resident(what: str) -> int:
    """Return the bytes the process has now (VmRSS) or had at most (VmHWM). `getrusage` would tell its parent's peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


@pytest.mark.thorough
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
def test_a_task_holds_large_messages_within_the_stated_limit(
    broker: DevBroker, new_topic: Callable[..., str], large: list[dict[str, object]], settings: dict[str, str]
) -> None:
    topic, servers = new_topic(), {"bootstrap.servers": broker.bootstrap_servers}
    records = [{"value": b"x"}] * 10_000 + large  # after the small ones a reader thinks that thousands fit
    producer = Producer({**servers, "queue.buffering.max.kbytes": 400_000, "enable.idempotence": True})
    for record in records:
        producer.produce(topic, partition=0, **record)  # type: ignore[arg-type] # keys and values of several kinds
    assert producer.flush(120) == 0
    given = {**settings, "kafka.bootstrap.servers": broker.bootstrap_servers}

    arguments = [sys.executable, __file__, topic, str(len(records)), json.dumps(given)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=True)
    rows, largest, grown = json.loads(done.stdout)

    assert rows == len(records)
    assert len(large) * LARGE > TASK_BYTES + LIBRARIES, "a task that held everything would not be noticed"
    assert grown <= TASK_BYTES + LIBRARIES
    assert largest <= TASK_BYTES // 2


if __name__ == "__main__":
    read(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
