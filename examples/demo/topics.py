"""Reading a topic without the engines: what a plain read_committed client finds in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition

from demo.children import DemoError
from demo.flights import Flight

#: Seconds to wait for records before looking whether to stop.
_POLL_S = 0.2

#: Seconds in which brokers say which partitions there are.
_ANSWER_S = 30.0

#: Seconds without a record after which a reading to the end gives up.
_SILENCE_S = 30.0


def read_to_end(bootstrap_servers: str, topic: str) -> list[Flight]:
    """Return every committed record of a topic of flights, up to the end it has now."""
    consumer, partitions = _consumer(bootstrap_servers, topic)
    try:
        flights: list[Flight] = []
        at_end: set[int | None] = set()
        deadline = time.monotonic() + _SILENCE_S
        while len(at_end) < partitions:
            message = consumer.poll(_POLL_S)
            if message is None:
                if time.monotonic() > deadline:
                    raise DemoError(f"topic {topic} was not read to its end; look at the broker's log")
                continue
            deadline = time.monotonic() + _SILENCE_S
            if _is_end(message):
                at_end.add(message.partition())
            else:
                flights.append(_flight(message))
        return flights
    finally:
        consumer.close()


class PublishedFlights:
    """The flights seen in the topic so far: one thread reads the topic, any thread asks.

    `sequences` only grows, by its reader thread; looking up a number in a set is one step. `failed` is called with the
    error, on that thread, when it cannot go on.
    """

    def __init__(self, bootstrap_servers: str, topic: str, failed: Callable[[BaseException], None]) -> None:
        self._place = bootstrap_servers, topic
        self._failed = failed
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read, name="penstock-demo-published", daemon=True)
        self.sequences: set[int] = set()

    def start(self) -> None:
        """Begin to read, at the beginning of the topic."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reading."""
        self._stopping.set()
        self._thread.join()

    def _read(self) -> None:
        try:
            consumer, _ = _consumer(*self._place)
            while not self._stopping.is_set():
                messages = consumer.consume(1000, _POLL_S)
                self.sequences.update(_flight(message).sequence for message in messages if not _is_end(message))
            consumer.close()
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits for this one
            self._failed(error)


def _consumer(bootstrap_servers: str, topic: str) -> tuple[Consumer, int]:
    """Return a consumer at the beginning of every partition, in no group, and how many partitions there are."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "penstock-demo-reader",  # the client wants a name; nothing is committed under it
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 100,
        }
    )
    partitions = consumer.list_topics(topic, _ANSWER_S).topics[topic].partitions
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
    return consumer, len(partitions)


def _is_end(message: Message) -> bool:
    error = message.error()
    return error is not None and error.code() == KafkaError._PARTITION_EOF  # noqa: SLF001 - its public name


def _flight(message: Message) -> Flight:
    if (error := message.error()) is not None:
        raise DemoError(f"topic {message.topic()} cannot be read: {error.str()}; look at the broker's log")
    return Flight.from_json(message.value() or b"")
