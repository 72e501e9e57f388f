"""The contenders of `publish.py`: programs that read messages from a topic and write a result of each to another.

usage: python benchmarks/publish_contenders.py NAME SERVERS SOURCE TARGET GROUP WORKERS HANDLER_SECONDS COUNT

Each runs in its own process, writes the value it read with the same key, and ends in order when standard input ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, Message, Producer

import penstock
from penstock.consumer import ConsumerSettings

KEYS = 10_000
SIZE = 100
NUMBER = slice(8, 16)  # bytes of a value with the message's number; the send time is before it
PADDING = os.urandom(SIZE - NUMBER.stop)
INTERVAL_S = 0.1  # between two transactions

_FETCHED = 10_000
#: As in penstock: the library waits 100 ms after each commit before it asks again whether markers are written.
_TRANSACTIONAL = {"retry.backoff.ms": 1, "retry.backoff.max.ms": 5}


@dataclass(frozen=True)
class Task:
    """The task of a contender."""

    servers: str
    source: str
    target: str
    group: str
    workers: int
    handler_s: float
    count: int

    def arguments(self) -> list[str]:
        """Return it as a command line."""
        return [
            *(self.servers, self.source, self.target, self.group),
            *(str(self.workers), str(self.handler_s), str(self.count)),
        ]


def key_of(number: int) -> bytes:
    """Return the key of a message."""
    return b"k%d" % (number % KEYS)


def value_of(number: int) -> bytes:
    """Return the value of a message with the present time."""
    return time.time_ns().to_bytes(8, "big") + number.to_bytes(8, "big") + PADDING


def number_of(value: bytes) -> int:
    """Return the number of the message with this value."""
    return int.from_bytes(value[NUMBER], "big")


class Sender:
    """A producer whose first failed delivery is raised. Messages of a full buffer wait for room."""

    def __init__(self, servers: str, **config: Any) -> None:
        own = {"enable.idempotence": True, "delivery.report.only.error": True, "on_delivery": self._note}
        self.producer = Producer({"bootstrap.servers": servers, **own, **config})
        self._failed: list[object] = []

    def _note(self, error: object, _message: object) -> None:
        self._failed.append(error)

    def send(self, topic: str, key: bytes | None, value: bytes | None) -> None:
        """Send one message."""
        while True:
            try:
                self.producer.produce(topic, value, key)
            except BufferError:
                self.producer.poll(0.01)
            else:
                return

    def flush(self) -> None:
        """Wait until all sent messages are stored."""
        left = self.producer.flush(60)
        if left or self._failed:
            sys.exit(f"{left} messages are not stored: {self._failed[:1]}")


class Intake:
    """A bare consumer with penstock's fetch settings."""

    def __init__(self, task: Task) -> None:
        config = ConsumerSettings().client_config(task.group)
        self.consumer = Consumer(
            {
                **config,
                "bootstrap.servers": task.servers,
                "enable.auto.offset.store": True,
                "auto.offset.reset": "earliest",
            }
        )
        self.consumer.subscribe([task.source])

    def take(self, timeout: float) -> list[Message]:
        """Return the available messages; wait only for the first one."""
        first = self.consumer.poll(timeout)
        batch = [] if first is None else [first, *self.consumer.consume(_FETCHED, 0)]
        return [message for message in batch if message.error() is None]


def bare_loop(task: Task, stopping: threading.Event) -> None:
    """Consume a batch, produce its results, wait until they are stored, commit."""
    intake, sender = Intake(task), Sender(task.servers)
    while not stopping.is_set():
        batch = intake.take(0.1)
        for message in batch:
            sender.send(task.target, message.key(), message.value())
        if batch:
            sender.flush()
            intake.consumer.commit(asynchronous=False)
    intake.consumer.close()


def bare_transactions(task: Task, stopping: threading.Event) -> None:
    """Consume and produce in Kafka transactions that end, with their offsets, every 100 ms."""
    intake, sender = Intake(task), Sender(task.servers, **_TRANSACTIONAL, **{"transactional.id": task.group})
    producer, consumer = sender.producer, intake.consumer
    producer.init_transactions(30)
    while not stopping.is_set():
        batch, end = intake.take(0.1), time.monotonic() + INTERVAL_S
        if not batch:
            continue
        producer.begin_transaction()
        while True:
            for message in batch:
                sender.send(task.target, message.key(), message.value())
            left = end - time.monotonic()
            if left <= 0:
                break
            batch = intake.take(left)
        positions = [place for place in consumer.position(consumer.assignment()) if place.offset >= 0]
        producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), 30)
        producer.commit_transaction(30)
    consumer.close()


def penstock_app(task: Task, stopping: threading.Event, *, exactly_once: bool) -> None:
    """Publish the results of a handler."""
    app = penstock.App(
        task.group,
        bootstrap_servers=task.servers,
        workers=task.workers,
        exactly_once=exactly_once,
        transaction_interval=INTERVAL_S,
    )

    def empty(message: penstock.Message) -> bytes | None:
        return message.value

    def sleeping(message: penstock.Message) -> bytes | None:
        time.sleep(task.handler_s)
        return message.value

    app.handler(task.source, to=task.target)(sleeping if task.handler_s else empty)
    running = app.start()
    stopping.wait()
    running.stop(timeout=30)


def bare_threads(task: Task, stopping: threading.Event) -> None:
    """Sleep and produce in threads that consume nothing: an upper bound for the others."""
    sender, numbers, lock = Sender(task.servers), iter(range(task.count)), threading.Lock()

    def work() -> None:
        while not stopping.is_set():
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            time.sleep(task.handler_s)
            sender.send(task.target, key_of(number), value_of(number))

    threads = [threading.Thread(target=work) for _ in range(task.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sender.flush()
    stopping.wait()


def main() -> None:
    """Run the contender that the command line names until standard input ends."""
    name, servers, source, target, group, workers, handler_s, count = sys.argv[1:]
    task = Task(servers, source, target, group, int(workers), float(handler_s), int(count))
    stopping = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        stopping.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    if name == "bare-loop":
        bare_loop(task, stopping)
    elif name == "bare-transactions":
        bare_transactions(task, stopping)
    elif name == "bare-threads":
        bare_threads(task, stopping)
    else:
        penstock_app(task, stopping, exactly_once=name == "exactly-once")


if __name__ == "__main__":
    main()
