"""The cost of a target that refuses messages for the other targets: their time to visible, before and meanwhile.

    python benchmarks/neighbours.py [--stores kafka sqlite file] [--refuses all some] [--sick 1] [--seconds 20]

Starts an embedded Kafka, and a coordinator and a producer for each store. One target gets 100 messages a second
(`--rate`), and so do the others together. At first all take their messages. Then the others refuse, one after another:
`all`, because their `max.message.bytes` becomes 10, less than the marker that ends a transaction needs; or `some`,
because one message in 27 is too large. A reader of committed records notes the time of each message of the healthy
target; a latency runs from before the send to the reader's hands. Wanted meanwhile: 0.9 of the rate, and at most three
times the former p99. The seconds in which a target begins to refuse are counted.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from penstock import clients
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.devbroker import DevBroker
from penstock.transactions import Coordinator, FileStore, SqlStore, TransactionalProducer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Largest message of a target that refuses some.
LIMIT_BYTES = 2_000
EACH = 27
#: Largest message of a target, by the kind of refusal.
REFUSALS = {"all": 10, "some": LIMIT_BYTES}
SMALL, LARGE = b"x" * 100, b"x" * (2 * LIMIT_BYTES)


class Reader:
    """Reads a topic, and records for each message when it was sent and when it came."""

    def __init__(self, servers: str, topic: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": "neighbours",
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 10,
            }
        )
        self._consumer.assign([TopicPartition(topic, 0, 0)])
        self._ending = threading.Event()
        # Appended by the thread; a list's length and items are read in one step.
        self.seen: list[tuple[int, int]] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            for message in self._consumer.consume(500, 0.1):
                if message.error() is None:
                    value = message.value()
                    assert isinstance(value, bytes)
                    self.seen.append((int.from_bytes(value[:8], "big"), time.time_ns()))

    def close(self) -> None:
        """Stop reading."""
        self._ending.set()
        self._thread.join()
        self._consumer.close()


def limit(admin: Any, topic: str, size: int) -> None:
    """Change the largest message size of a topic."""
    entry = ConfigEntry("max.message.bytes", str(size), incremental_operation=AlterConfigOpType.SET)
    (changed,) = admin.incremental_alter_configs(
        [ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])]
    ).values()
    changed.result(30)


def send(producer: TransactionalProducer, topics: Sequence[str], rate: float, seconds: float, *, each: int = 0) -> None:
    """Send to topics in turn, at a rate, without waiting. Every `each`th message is large."""
    begin, count = time.monotonic(), 0
    while count < rate * seconds:
        time.sleep(max(0.0, begin + count / rate - time.monotonic()))
        count += 1
        filling = LARGE if each and count // len(topics) % each == 0 else SMALL
        value = time.time_ns().to_bytes(8, "big") + filling
        producer.submit(topics[count % len(topics)], key=b"%d" % (count % 50), value=value, wait="sent")


@contextmanager
def a_store(kind: str, servers: str, folder: Path) -> Iterator[TransactionalProducer]:
    """Yield a producer on a store of this kind, with a running coordinator."""
    prefix = f"neighbours-{time.time_ns()}"
    if kind == "kafka":
        coordinator = Coordinator(bootstrap_servers=servers, prefix=prefix, transaction_timeout=3600)
        producer = TransactionalProducer("bench", bootstrap_servers=servers, prefix=prefix, send_timeout=60)
    else:
        store: Any
        if kind == "sqlite":
            store = SqlStore(f"sqlite:///{folder / f'{prefix}.db'}", bootstrap_servers=servers, prefix=prefix, shards=1)
        else:
            store = FileStore(folder / prefix, bootstrap_servers=servers, prefix=prefix)
        coordinator = Coordinator(store=store, transaction_timeout=3600)
        producer = TransactionalProducer("bench", store=store, send_timeout=60)
    with coordinator, producer:
        yield producer


def load(producer: TransactionalProducer, topics: Topics, options: argparse.Namespace, refuses: str = "") -> None:
    """Send to the healthy target and the others at once; `refuses`: the others refuse meanwhile."""
    seconds = options.seconds if refuses else options.warm_up
    each = EACH if refuses == "some" else 0
    beside = threading.Thread(target=partial(send, producer, topics.sick, options.rate, seconds, each=each))
    beside.start()
    harm = threading.Thread(target=topics.harm, args=(refuses, seconds))
    harm.start()
    send(producer, [topics.well], options.rate, seconds)
    beside.join()
    harm.join()


@dataclass
class Topics:
    """A healthy target and those that refuse."""

    servers: str
    count: int
    well: str = ""
    sick: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        now = time.time_ns()
        self.well, self.sick = f"well-{now}", [f"sick-{number}-{now}" for number in range(self.count)]
        self.admin = clients.admin(self.servers, {})
        ensure_topics(self.admin, [TopicSpec(topic, 1) for topic in (self.well, *self.sick)])

    def harm(self, refuses: str, seconds: float) -> None:
        """Make one after the other refuse, in the first half of the time."""
        if refuses in REFUSALS:
            for topic in self.sick:
                limit(self.admin, topic, REFUSALS[refuses])
                time.sleep(seconds / 2 / self.count)


def measure(kind: str, refuses: str, servers: str, folder: Path, options: argparse.Namespace) -> None:
    """Measure one store with one kind of refusal, and print a line for each half."""
    topics = Topics(servers, options.sick)
    reader = Reader(servers, topics.well)
    count, figures = int(options.rate * options.seconds), []
    with a_store(kind, servers, folder) as producer:
        load(producer, topics, options)
        for half in ("before", refuses):
            already = int(options.rate * options.warm_up) + count * (half != "before")
            load(producer, topics, options, half)
            until = time.monotonic() + 60
            while len(reader.seen) < already + count and time.monotonic() < until:
                time.sleep(0.01)
            rows = reader.seen[already:]
            late = sorted((came - sent) / 1e6 for sent, came in rows)
            cuts = quantiles(late, n=100)
            rate = len(rows) / (rows[-1][1] - rows[0][0]) * 1e9
            figures.append((rate, cuts[98]))
            print(
                f"{kind:>7} {half:>7}  {len(rows):>6} of {count}  {rate:>7.1f}/s  p50 {cuts[49]:>7.1f}  "
                f"p99 {cuts[98]:>8.1f}  most {late[-1]:>8.1f} ms",
                flush=True,
            )
        assert len(reader.seen) == len({sent for sent, _ in reader.seen}), "a message came twice"
    reader.close()
    (rate_before, before), (rate_then, then) = figures
    print(f"{'':>24} rate x {rate_then / rate_before:.2f} (wanted: 0.9), p99 x {then / before:.2f} (wanted: at most 3)")


def main() -> None:
    """Measure the chosen stores and refusals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", nargs="+", default=["kafka", "sqlite", "file"], choices=["kafka", "sqlite", "file"])
    parser.add_argument("--refuses", nargs="+", default=["all", "some"], choices=["all", "some"])
    parser.add_argument("--sick", type=int, default=1, help="targets that refuse, one after the other")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each half")
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds before the first measurement of a store")
    parser.add_argument("--rate", type=float, default=100.0, help="messages a second to each target")
    parser.add_argument("--log", action="store_true", help="show the program's log")
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO if options.log else logging.CRITICAL, format="%(asctime)s %(levelname)s %(message)s"
    )
    # A measured broker has both compilers of the JVM.
    os.environ.setdefault("KAFKA_JVM_PERFORMANCE_OPTS", "-XX:+TieredCompilation")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder, DevBroker() as broker:
        print(f"load {os.getloadavg()[0]:.1f}", flush=True)
        for kind in options.stores:
            for refuses in options.refuses:
                measure(kind, refuses, broker.bootstrap_servers, Path(folder), options)
        print(f"load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
