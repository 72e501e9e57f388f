"""Committed transactions a second, and how soon they are visible, beside plain sends on the same broker.

    python benchmarks/transactions.py [--seconds 4] [--in-flight 1 16 64 256]

Starts an embedded Kafka, a coordinator and a read_committed reader, each in a process of its own, and sends 128-byte
messages from threads: so many threads, so many in flight. For each number of threads, in the same run:

- **transactions**: `TransactionalProducer.send` returns when the decision is stored; counted is what the reader saw,
  and the time from before the half to the reader's hands;
- **plain sync**: an idempotent acks=all send that waits for its acknowledgement, by the same threads, the same reader.

And once **plain async**: idempotent sends that wait for nothing, the ceiling of one producer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from penstock.devbroker import DevBroker
from penstock.kafka import TopicSpec, admin_client, ensure_topics
from penstock.transactions import Coordinator, TransactionalProducer
from penstock.transactions.delivery import AckedProducer

PARTITIONS = 8
SIZE = 128
KEYS = 10_000
STAMP = 8  # bytes of send time at the start of each value


class Child:
    """A process of this script in another role, that answers each line it is told with one line of JSON."""

    def __init__(self, role: str, *arguments: str) -> None:
        command = [sys.executable, __file__, "--role", role, *arguments]
        self._process = subprocess.Popen(  # noqa: S603 - this very script
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._heard()

    def ask(self, line: str = "") -> Any:
        """Tell it a line and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._heard()

    def _heard(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def say(answer: Any) -> None:
    """Answer the parent."""
    print(json.dumps(answer), flush=True)


def coordinate(servers: str) -> None:
    """Role: the coordinator. Each line asks for its statistics."""
    with Coordinator(bootstrap_servers=servers) as coordinator:
        say("ready")
        for _ in sys.stdin:
            now = coordinator.statistics()
            say({"committed": now.committed, "pending": now.pending, "groups": now.groups, "owned": now.partitions})


def read(servers: str, topic: str) -> None:
    """Role: a reader that is always there. A line with a number: wait for so many messages in all, and tell of them."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "reader", "isolation.level": "read_committed"})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    lock, stopping = threading.Lock(), threading.Event()
    seen: list[tuple[int, int]] = []

    def follow() -> None:
        while not stopping.is_set():
            first = consumer.poll(0.1)
            if first is None:
                continue
            batch = [first, *consumer.consume(10_000, 0)]
            now = time.time_ns()
            with lock:
                seen.extend((now, int.from_bytes(m.value()[:STAMP], "big")) for m in batch if m.error() is None)

    thread = threading.Thread(target=follow)
    thread.start()
    say("ready")
    for line in sys.stdin:
        wanted, deadline = int(line), time.monotonic() + 60
        while len(seen) < wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        with lock:
            taken = seen[:]
            seen.clear()
        waits = sorted(now - sent for now, sent in taken)
        last = max((now for now, _ in taken), default=0)
        say({"count": len(taken), "last_ns": last, **{f"p{p}": waits[len(waits) * p // 100] / 1e6 for p in (50, 99)}})
    stopping.set()
    thread.join()
    consumer.close()


def by_threads(threads: int, seconds: float, send: Callable[[bytes, bytes], None]) -> tuple[int, int]:
    """Send from so many threads for so long; return how many were sent and when it began, in nanoseconds."""
    counts, padding = [0] * threads, os.urandom(SIZE - STAMP)
    begin = time.time_ns()
    end = time.monotonic() + seconds

    def work(me: int) -> None:
        number = me
        while time.monotonic() < end:
            send(b"%d" % (number % KEYS), time.time_ns().to_bytes(STAMP, "big") + padding)
            counts[me] += 1
            number += threads

    crowd = [threading.Thread(target=work, args=(me,)) for me in range(threads)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    return sum(counts), begin


def measure(reader: Child, threads: int, seconds: float, send: Callable[[bytes, bytes], None]) -> dict[str, float]:
    """Send, wait until the reader has all of it, and return the rate and the latencies in milliseconds."""
    count, begin = by_threads(threads, seconds, send)
    seen = reader.ask(str(count))
    assert seen["count"] == count, f"sent {count}, visible {seen['count']}"
    return {"rate": count / ((seen["last_ns"] - begin) / 1e9), "p50": seen["p50"], "p99": seen["p99"]}


def asynchronous(servers: str, topic: str, seconds: float) -> float:
    """Return messages a second of idempotent sends that wait for nothing."""
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 20})
    value, count = os.urandom(SIZE), 0
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        try:
            producer.produce(topic, value, b"%d" % (count % KEYS))
            count += 1
        except BufferError:
            producer.poll(0.01)
    assert producer.flush(30) == 0
    return count / (time.monotonic() - begin)


def main() -> None:
    """Run a role, or the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each measurement")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 16, 64, 256], help="numbers of threads")
    parser.add_argument("--bootstrap", help="measure on this broker in place of an embedded one")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        {"coordinate": coordinate, "read": read}[options.role[0]](*options.role[1:])
    elif options.bootstrap:
        run(options.bootstrap, options)
    else:
        with DevBroker() as broker:
            run(broker.bootstrap_servers, options)


def run(servers: str, options: argparse.Namespace) -> None:
    """Measure on a broker and print the table."""
    topic, other = f"bench-{time.time_ns()}", f"bench-async-{time.time_ns()}"
    specs = [TopicSpec(topic, PARTITIONS), TopicSpec(other, PARTITIONS)]
    ensure_topics(admin_client(servers, {}), servers, specs)
    coordinator, reader = Child("coordinate", servers), Child("read", servers, topic)
    plain = AckedProducer(servers, {}, 15.0, "bench")
    plain.start()
    plain_topic_partitions = iter(range(10**12))

    def plain_send(key: bytes, value: bytes) -> None:
        assert plain.send(topic, next(plain_topic_partitions) % PARTITIONS, key, value).wait(15)

    with TransactionalProducer("bench", bootstrap_servers=servers) as producer:

        def transact(key: bytes, value: bytes) -> None:
            producer.send(topic, key=key, value=value)

        while not coordinator.ask()["owned"]:
            time.sleep(0.1)
        measure(reader, 64, 6.0, transact)  # warms the broker (its code is not compiled yet), connections, coordinator
        measure(reader, 64, 2.0, plain_send)
        print(f"{SIZE}-byte messages, one broker, sender, coordinator and reader on {os.cpu_count()} cores")
        print(
            f"{'in flight':>9}  {'transactions/s':>14} {'p50 ms':>7} {'p99 ms':>7} {'a group':>8}  "
            f"{'plain sync/s':>12} {'p50 ms':>7} {'p99 ms':>7}  {'ratio':>5}"
        )
        for threads in options.in_flight:
            before = coordinator.ask()
            ours = measure(reader, threads, options.seconds, transact)
            after = coordinator.ask()
            group = (after["committed"] - before["committed"]) / max(1, after["groups"] - before["groups"])
            sync = measure(reader, threads, options.seconds, plain_send)
            print(
                f"{threads:>9}  {ours['rate']:>14,.0f} {ours['p50']:>7.1f} {ours['p99']:>7.1f} {group:>8.1f}  "
                f"{sync['rate']:>12,.0f} {sync['p50']:>7.1f} {sync['p99']:>7.1f}  {ours['rate'] / sync['rate']:>5.2f}"
            )
    print(f"plain async: {asynchronous(servers, other, options.seconds):,.0f}/s")
    plain.stop(5)
    coordinator.close()
    reader.close()


if __name__ == "__main__":
    main()
