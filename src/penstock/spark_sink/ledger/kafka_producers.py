"""The transactional producers by which a task publishes, and what a Python worker keeps of them for later tasks.

Each goes by one of a fixed number of transactional ids of its sink, its *slot*, which follows from the source
partition for ever: whoever publishes rows of a source partition has taken the same id, and has shut out who had it
before.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from penstock.clients.transactional.missing_rights import MissingRights
from penstock.clients.transactional.writer import TransactionalWriter
from penstock.errors import PenstockError
from penstock.spark_sink.ledger.kafka_ledger import ANSWER_S, TRANSACTION_TIMEOUT_S, KafkaLedger
from penstock.spark_sink.ledger.kafka_target import Target
from penstock.spark_sink.ledger.rules import Batch, LedgerEntry
from penstock.spark_sink.source.plan import TopicPartition
from penstock.spark_sink.source.pool import WorkerPool

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
        writer: writes its transactions.
        is_kept: whether it has been of use before.
        known: the ledger's entries of source partitions, as this producer has last read or written them.
    """

    writer: TransactionalWriter
    is_kept: bool = False
    known: dict[TopicPartition, LedgerEntry] = field(default_factory=dict)

    def may_own(self, held: Mapping[TopicPartition, LedgerEntry]) -> bool:
        """Tell whether nobody has published by its id since, as far as the ledger tells.

        It saves the transaction that would be refused. What is certain is the refusal.
        """
        return all(self.known.get(source, entry) == entry for source, entry in held.items())


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
            self._idle.pop(next(iter(self._idle))).writer.close()

    def release(self) -> bool:
        """Tell whether another task may use it."""
        return not self.has_failed

    def close(self) -> None:
        """Close the ledger's reader and the producers."""
        self.ledger.close()
        while self._idle:
            self._idle.popitem()[1].writer.close()


class PublisherPool:
    """Keeps publishers by their sinks; see `WorkerPool`."""

    def __init__(self, pool: WorkerPool[SinkPublisher] | None = None) -> None:
        self._pool = WorkerPool[SinkPublisher]() if pool is None else pool

    def lend(self, target: Target) -> AbstractContextManager[SinkPublisher]:
        """Lend the publisher of a sink for a task."""
        key = (target.servers, frozenset(target.config.items()), target.name, target.ledger)
        return self._pool.lend(key, lambda: SinkPublisher(replace(target, batch=Batch("", -1))))


def take_id(target: Target, transactional_id: str) -> SlotProducer:
    """Return a new producer that has taken an id: whoever had it is shut out, and what it left open is ended.

    Raises `NotOpenedError` or `IdLostError`.
    """
    # Java's partitioner: keys go to the partitions in which Spark's own sink and Java's producers put them.
    config = {"partitioner": "murmur2_random", **target.config}
    writer = TransactionalWriter(
        target.servers,
        config,
        transactional_id,
        log_topic=target.ledger,
        ids_right=target.ids_right,
        rights=MissingRights(config),
        apart=False,
        reports_all=False,
        step=lambda _call: None,
        transaction_s=TRANSACTION_TIMEOUT_S,
    )
    try:
        writer.open(ANSWER_S, ANSWER_S)
    except PenstockError:
        writer.close()
        raise
    return SlotProducer(writer)
