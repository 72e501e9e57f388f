"""How fast penstock consumes, beside what the ground allows, measured in the same run.

usage: python benchmarks/consume.py [--rounds N] [--only W0,W1,W2,W3]

W0  empty handler, 1,000,000 messages of 100 B, 10,000 keys, 8 partitions, 8 workers; beside two bare `consume` loops:
    one with the client's own defaults, one with the fetch settings that penstock chooses
W1  10 ms handler, 60,000 messages, 64 workers; beside 64 bare threads that only sleep
W2  1 ms handler, 300,000 messages, 64 workers; beside 64 bare threads
W3  5 ms handler, 60,000 messages of which 2 % have one key, 64 workers; beside the ideal, 1,200 x 5 ms

The rounds alternate between penstock and the ground, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from penstock.consumer import ConsumerSettings, LitePushConsumer, handler
from penstock.devbroker import DevBroker
from penstock.message import Message

KEYS = 10_000
PARTITIONS = 8
SIZE = 100


@dataclass(frozen=True)
class Work:
    """One workload."""

    name: str
    count: int
    workers: int
    handler_s: float
    hot_every: int = 0


WORKS = {
    "W0": Work("W0", 1_000_000, 8, 0.0),
    "W1": Work("W1", 60_000, 64, 0.010),
    "W2": Work("W2", 300_000, 64, 0.001),
    "W3": Work("W3", 60_000, 64, 0.005, hot_every=50),
}


def produce(bootstrap: str, work: Work) -> str:
    """Make the workload's topic and fill it."""
    topic = f"{work.name.lower()}-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result()
    producer = Producer(
        {"bootstrap.servers": bootstrap, "linger.ms": 20, "batch.size": 1_000_000, "enable.idempotence": True}
    )
    value = os.urandom(SIZE)
    for number in range(work.count):
        key = b"hot" if work.hot_every and number % work.hot_every == 0 else b"k%d" % (number % KEYS)
        while True:
            try:
                producer.produce(topic, value, key=key)
                break
            except BufferError:
                producer.poll(0.1)
        if number % 1000 == 0:
            producer.poll(0)
    producer.flush()
    return topic


def raw_consume(bootstrap: str, topic: str, count: int, *, tuned: bool) -> float:
    """Return messages/s of a bare `consume` loop, from the first message to the last."""
    config = ConsumerSettings().client_config(uuid.uuid4().hex)
    if not tuned:
        for key in ("fetch.queue.backoff.ms", "max.partition.fetch.bytes"):
            del config[key]
    consumer = Consumer({**config, "bootstrap.servers": bootstrap})
    consumer.subscribe([topic])
    seen, begun = 0, 0.0
    while seen < count:
        batch = consumer.consume(10_000, 0.1)
        if batch and not begun:
            begun = time.perf_counter()
        seen += sum(message.error() is None for message in batch)
    took = time.perf_counter() - begun
    consumer.close()
    return count / took


def bare_threads(work: Work) -> float:
    """Return handler calls/s of bare threads that share a counter and only sleep."""
    left = iter(range(work.count))
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                if next(left, None) is None:
                    return
            time.sleep(work.handler_s)

    threads = [threading.Thread(target=run) for _ in range(work.workers)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return work.count / (time.perf_counter() - begun)


class Clock:
    """Sees the first and the last call of a handler. Counting is atomic in C: `next` on an iterator."""

    def __init__(self, count: int) -> None:
        self.begun = self.ended = 0.0
        self.done = threading.Event()
        self._turn = iter(range(1, count + 1))
        self._count = count

    def tick(self) -> None:
        """Note one call."""
        turn = next(self._turn)
        if turn == 1:
            self.begun = time.perf_counter()
        if turn == self._count:
            self.ended = time.perf_counter()
            self.done.set()


def penstock_rate(bootstrap: str, topic: str, work: Work) -> float:
    """Return messages/s of penstock, from the first handler call to the last one's end."""
    clock = Clock(work.count)
    tick, sleep, seconds = clock.tick, time.sleep, work.handler_s
    begun: list[float] = []

    def empty(_message: Message) -> None:
        tick()

    def sleeping(_message: Message) -> None:
        if not begun:
            begun.append(time.perf_counter())
        sleep(seconds)
        tick()

    consumer = LitePushConsumer(
        f"bench-{uuid.uuid4().hex}",
        {topic: handler(sleeping if seconds else empty)},
        bootstrap_servers=bootstrap,
        settings=ConsumerSettings(workers=work.workers),
    )
    with consumer:
        if not clock.done.wait(600):
            sys.exit(f"{work.name} did not end: {consumer.statistics()}")
    handled = consumer.statistics().handled
    if handled != work.count:
        sys.exit(f"{work.name}: {handled} handled of {work.count}")
    return work.count / (clock.ended - (begun[0] if begun else clock.begun))


def spread(values: list[float], form: str = "{:,.0f}") -> str:
    """Return min / median / max."""
    return " / ".join(form.format(one) for one in (min(values), statistics.median(values), max(values)))


def grounds(bootstrap: str, topic: str, work: Work) -> dict[str, Callable[[], float]]:
    """Return what a workload is held against: names and functions that return messages/s."""
    if work.name == "W0":
        raw_consume(bootstrap, topic, work.count, tuned=True)  # fills the page cache
        return {
            "bare loop, defaults": lambda: raw_consume(bootstrap, topic, work.count, tuned=False),
            "bare loop, same settings": lambda: raw_consume(bootstrap, topic, work.count, tuned=True),
        }
    if work.hot_every:
        return {"ideal": lambda: work.hot_every / work.handler_s}
    return {f"{work.workers} bare threads": lambda: bare_threads(work)}


def compare(bootstrap: str, work: Work, rounds: int) -> None:
    """Run one workload and its grounds in turn and print all with the ratios, round by round."""
    topic = produce(bootstrap, work)
    held_against = grounds(bootstrap, topic, work)
    found: dict[str, list[float]] = {name: [] for name in held_against}
    mine: list[float] = []
    for _ in range(rounds):
        for name, measure in held_against.items():
            found[name].append(measure())
        mine.append(penstock_rate(bootstrap, topic, work))
    print(f"{work.name}  {work.count:,} messages, {work.workers} workers, {work.handler_s * 1000:g} ms handler")
    print(f"    {'penstock':26} {spread(mine)} msg/s")
    for name, rates in found.items():
        print(f"    {name:26} {spread(rates)} msg/s")
        print(f"    {'  ratio to it':26} {spread([a / b for a, b in zip(mine, rates, strict=True)], '{:.3f}')}")
    sys.stdout.flush()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each workload (default 3)")
    parser.add_argument("--only", default="W0,W1", help="workloads, with commas between (default W0,W1)")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}; min / median / max of {options.rounds} rounds")
    with DevBroker() as broker:
        for name in options.only.split(","):
            compare(broker.bootstrap_servers, WORKS[name.strip()], options.rounds)


if __name__ == "__main__":
    main()
