"""Reading a topic beside the engines: what a plain read_committed client finds in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition

from penstock import clients
from penstock.clients.kafka_errors import reason
from penstock.clients.requests.topics import require_topics
from penstock.demo.flights import Flight
from penstock.errors import BrokerConnectionError

_BATCH = 1_000

#: Seconds to wait for records before looking whether to stop.
_POLL_S = 0.2

#: Seconds without a record or an end of a partition after which a reading to the end gives up.
_SILENCE_S = 30.0


def read_to_end(bootstrap_servers: str, topic: str) -> list[Flight]:
    """Return every committed record of a topic of flights, up to the end it has now."""
    flights: list[Flight] = []
    with _whole_topic(bootstrap_servers, topic) as (consumer, partitions):
        open_partitions = set(range(partitions))
        heard = time.monotonic()
        while open_partitions:
            messages = consumer.consume(_BATCH, _POLL_S)
            if messages:
                heard = time.monotonic()
            elif time.monotonic() > heard + _SILENCE_S:
                raise BrokerConnectionError(
                    f"topic {topic} gave no record and no end for {_SILENCE_S:g} s, partitions "
                    f"{sorted(open_partitions)} are unread; look at the broker's log"
                )
            for message in messages:
                if _is_end(message, topic):
                    open_partitions.discard(message.partition() or 0)
                else:
                    flights.append(Flight.from_json(message.value() or b""))
    return flights


class PublishedFlights:
    """The flights seen in the topic so far: one thread reads the topic, any thread asks.

    `sequences` only grows, by its reader thread; looking up a number in a set is one step. `failed` is called with the
    error, on that thread, when it cannot go on.
    """

    def __init__(self, bootstrap_servers: str, topic: str, failed: Callable[[BaseException], None]) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._topic = topic
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
            with _whole_topic(self._bootstrap_servers, self._topic) as (consumer, _):
                while not self._stopping.is_set():
                    for message in consumer.consume(_BATCH, _POLL_S):
                        if not _is_end(message, self._topic):
                            self.sequences.add(Flight.from_json(message.value() or b"").sequence)
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits for this one
            self._failed(error)


@contextmanager
def _whole_topic(bootstrap_servers: str, topic: str) -> Iterator[tuple[Consumer, int]]:
    partitions = require_topics(clients.admin(bootstrap_servers, {}), bootstrap_servers, [topic])[topic]
    consumer = clients.consumer(
        bootstrap_servers,
        {
            "group.id": "penstock-demo-reader",  # needed by the client; nothing is committed under it
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 100,
        },
    )
    try:
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(partitions)])
        yield consumer, partitions
    finally:
        consumer.close()


def _is_end(message: Message, topic: str) -> bool:
    error = message.error()
    if error is None:
        return False
    if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the client's public name for it
        return True
    raise BrokerConnectionError(f"topic {topic} cannot be read: {reason(error)}; look at the broker's log")
