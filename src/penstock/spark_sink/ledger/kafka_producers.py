"""The transactional producers by which a task publishes, and what a Python worker keeps of them for later tasks.

Each goes by one of a fixed number of transactional ids of its sink, its *slot*, which follows from the source
partition for ever: whoever publishes rows of a source partition has taken the same id, and has shut out who had it
before.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace

from confluent_kafka import KafkaException, Producer

from penstock import clients
from penstock.clients.transactional.end_watch import CONTEXT, EndWatch
from penstock.clients.transactional.initialisation import initialise
from penstock.spark_sink.ledger.kafka_ledger import ANSWER_S, TRANSACTION_TIMEOUT_S, KafkaLedger
from penstock.spark_sink.ledger.kafka_target import Target
from penstock.spark_sink.ledger.rules import Batch, LedgerEntry
from penstock.spark_sink.source.offsets.planning import TopicPartition
from penstock.spark_sink.source.worker_pool import WorkerPool

#: Transactional ids of a sink. A number for ever: with another one a task that was given up for lost would go by
#: another id than its successor, and be shut out by nobody.
SLOTS = 64

#: Producers that a sink keeps in a process at most: each has threads and connections.
MOST_PRODUCERS = 16


def slot_of(source: TopicPartition) -> int:
    """Return the slot of a source partition; `sinks.frames.slot_column` is the same for Spark."""
    return zlib.crc32(f"{source[0]}/{source[1]}".encode()) % SLOTS


def slot_id(name: str, source: TopicPartition) -> str:
    """Return the transactional id by which a sink publishes rows of a source partition."""
    return f"{name}/{slot_of(source)}"


@dataclass(slots=True)
class SlotProducer:
    """A producer that has taken its transactional id.

    Attributes:
        client: the library's.
        watch: where its log goes: whether the end of its last transaction is known.
        is_kept: whether it has been of use before.
        known: the ledger's entries of source partitions, as this producer has last read or written them.
    """

    client: Producer
    watch: EndWatch
    is_kept: bool = False
    known: dict[TopicPartition, LedgerEntry] = field(default_factory=dict)

    def may_own(self, held: Mapping[TopicPartition, LedgerEntry]) -> bool:
        """Tell whether nobody has published by its id since, as far as the ledger tells.

        It saves the transaction that would be refused. What is certain is the refusal.
        """
        return all(self.known.get(source, entry) == entry for source, entry in held.items())

    def commit(self) -> bool:
        """Commit; tell whether the producer may serve for another transaction.

        An order to commit that arrives late, because the client library has repeated it, would end that one
        (KAFKA-17754).
        """
        begun = time.monotonic()
        self.client.commit_transaction(ANSWER_S)
        took_s = time.monotonic() - begun
        try:
            self.client.poll(0)  # the library's log is served here
        except KafkaException:
            return False
        return self.watch.doubt(took_s) is None

    def discard(self) -> None:
        """Close the client, with what it has not sent."""
        with suppress(KafkaException):
            self.client.purge()
        self.client.close()


class SinkPublisher:
    """What a task publishes by: the reader of its sink's ledger, and producers that have taken an id.

    One task uses it at a time. Another one of the same sink may have it afterwards: then the ledger is read on from
    where it was read to, and a producer serves again whose id nobody else has taken.

    Attributes:
        has_failed: whether something was not published, so that no other task gets it.
    """

    def __init__(self, target: Target) -> None:
        self.ledger = KafkaLedger(target)
        self.has_failed = False
        self._idle: dict[str, SlotProducer] = {}

    def taken(self, transactional_id: str) -> SlotProducer | None:
        """Return the producer of an id, which is kept no longer; None where there is none."""
        return self._idle.pop(transactional_id, None)

    def keep(self, transactional_id: str, producer: SlotProducer) -> None:
        """Keep a producer that has no transaction open, and whose last one is known to have ended."""
        producer.is_kept = True
        self._idle[transactional_id] = producer
        if len(self._idle) > MOST_PRODUCERS:
            self._idle.pop(next(iter(self._idle))).discard()

    def release(self) -> bool:
        """Tell whether another task may use it."""
        return not self.has_failed

    def close(self) -> None:
        """Close the ledger's reader and the producers."""
        self.ledger.close()
        while self._idle:
            self._idle.popitem()[1].discard()


class PublisherPool:
    """Keeps publishers by their sinks; see `WorkerPool`."""

    def __init__(self, pool: WorkerPool[SinkPublisher] | None = None) -> None:
        self._pool = WorkerPool[SinkPublisher]() if pool is None else pool

    def lend(self, target: Target) -> AbstractContextManager[SinkPublisher]:
        """Lend the publisher of a sink for a task."""
        key = (target.servers, frozenset(target.config.items()), target.name, target.ledger)
        return self._pool.lend(key, lambda: SinkPublisher(replace(target, batch=Batch("", -1))))


def take_id(target: Target, transactional_id: str) -> SlotProducer:
    """Return a new producer that has taken an id: whoever had it is shut out, and what it left open is ended."""
    watch = EndWatch(clients.log_of(target.config), debugging=bool(target.config.get("debug")))
    contexts = [one for one in (target.config.get("debug"), CONTEXT) if one]
    settings = {
        "linger.ms": 5,
        "message.max.bytes": 100_000_000,
        # Java's: keys go to the partitions in which Spark's own sink and Java's producers put them.
        "partitioner": "murmur2_random",
        # The waits after CONCURRENT_TRANSACTIONS would be the latency of everything.
        "retry.backoff.ms": 5,
        "retry.backoff.max.ms": 100,
        "topic.metadata.propagation.max.ms": 5_000,
        **target.config,
        "transactional.id": transactional_id,
        # What was taken is known by the commit.
        "delivery.report.only.error": True,
        "transaction.timeout.ms": int(TRANSACTION_TIMEOUT_S * 1000),
        # The client library wants it to be no longer than the transaction's.
        "message.timeout.ms": int(TRANSACTION_TIMEOUT_S * 1000) - 5_000,
        "debug": ",".join(contexts),
        "logger": watch,
    }
    producer = SlotProducer(clients.producer(target.servers, settings), watch)
    try:
        initialise(producer.client, target.ledger, ANSWER_S)
    except KafkaException:
        producer.discard()
        raise
    return producer
