"""Reading a topic beside the engines: what a plain read_committed client finds in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import chain

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException

from penstock import clients
from penstock.clients.kafka_errors import ErrorKind, reason
from penstock.clients.reading import NotReadInTimeError, PartitionReader, Place
from penstock.clients.topics import require_topics
from penstock.demo.flights import Flight
from penstock.errors import BrokerConnectionError

#: The client wants one; nothing is committed under it.
_GROUP = "penstock-demo-reader"

#: Seconds to wait for records before looking whether to stop.
_POLL_S = 0.2

#: Seconds in which brokers say where a topic ends.
_ANSWER_S = 10.0

#: Seconds without a record or an end of a partition after which a reading to the end gives up.
_SILENCE_S = 30.0


def read_to_end(bootstrap_servers: str, topic: str) -> list[Flight]:
    """Return every committed record of a topic of flights, up to the end it has now."""
    places = _places(bootstrap_servers, topic)
    with _reader(bootstrap_servers) as reader:
        try:
            bounds = reader.bounds(topic, [number for _, number in places], _ANSWER_S)
            ends = {(topic, number): end for number, (_, end) in bounds.items()}
            starts = dict.fromkeys(places, OFFSET_BEGINNING)
            records = chain.from_iterable(reader.read(starts, ends, silence_s=_SILENCE_S))
            return [Flight.from_json(record.value() or b"") for record in records]
        except (NotReadInTimeError, KafkaException) as error:
            why = reason(error) if isinstance(error, KafkaException) else str(error)
            raise BrokerConnectionError(
                f"topic {topic} was not read to its end: {why}; look at the broker's log"
            ) from error


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
            places = _places(self._bootstrap_servers, self._topic)
            with _reader(self._bootstrap_servers) as reader:
                reader.start(dict.fromkeys(places, OFFSET_BEGINNING))
                while not self._stopping.is_set():
                    for record in reader.poll(_POLL_S):
                        self.sequences.add(Flight.from_json(record.value() or b"").sequence)
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits for this one
            self._failed(error)


def _reader(bootstrap_servers: str) -> PartitionReader:
    return PartitionReader(bootstrap_servers, {}, _GROUP, _not_read, given={"fetch.wait.max.ms": 100})


def _places(bootstrap_servers: str, topic: str) -> list[Place]:
    admin = clients.admin(bootstrap_servers, {})
    return [(topic, number) for number in range(require_topics(admin, bootstrap_servers, [topic])[topic])]


def _not_read(kind: ErrorKind, error: KafkaError, place: Place) -> None:
    if kind is not ErrorKind.PASSING:
        raise BrokerConnectionError(f"topic {place[0]} cannot be read: {reason(error)}; look at the broker's log")
