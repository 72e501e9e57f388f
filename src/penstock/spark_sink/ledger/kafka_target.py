"""Where a sink publishes, what, and which rights that takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException

from penstock import clients
from penstock.clients.kafka_errors import is_missing_right, is_transient
from penstock.clients.requests.granted_rights import missing_rights
from penstock.clients.rights import Operation, Resource, Right, topic_right, transactional_right
from penstock.options import ClientConfig
from penstock.spark_sink.ledger.rules import Batch
from penstock.spark_sink.source import plan as planning


class Row(NamedTuple):
    """A row as it is published, and where it comes from. What it holds is never shown.

    One without a target topic publishes nothing: it moves the ledger past its offset. A partition of -1 is left to the
    partitioner.
    """

    source: planning.TopicPartition
    offset: int
    target_topic: str | None
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    target_partition: int = -1

    def __repr__(self) -> str:
        return f"Row({self.source[0]}[{self.source[1]}] offset {self.offset} to {self.target_topic})"


def topics_of(rows: Iterable[Row]) -> set[str]:
    """Return the topics that rows are published to."""
    return {row.target_topic for row in rows if row.target_topic is not None}


def publishing(rows: Iterable[Row]) -> int:
    """Return how many rows publish something."""
    return sum(1 for row in rows if row.target_topic is not None)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a sink publishes. Can be pickled.

    `batch` is what is published; a task writes the entries of the partitions whose rows it has.
    """

    servers: str
    config: ClientConfig = field(repr=False)
    name: str
    ledger: str
    batch: Batch = field(default_factory=lambda: Batch("", -1))

    @property
    def ids_right(self) -> Right:
        """The right that its transactional ids take."""
        return transactional_right(f"{self.name}/")

    def rights(self, topics: Iterable[str]) -> list[Right]:
        """Return the rights on topics that it takes to publish to some, and to keep the ledger."""
        on_ledger = [topic_right(operation, self.ledger) for operation in (Operation.READ, Operation.WRITE)]
        return [topic_right(Operation.WRITE, topic) for topic in sorted(set(topics))] + on_ledger


def least_rights(target: Target, topics: Iterable[str]) -> list[Right]:
    """Return all that it takes to publish to some topics: the ledger is made by whoever starts first."""
    making = topic_right(Operation.CREATE, target.ledger)
    return [*target.rights(topics), making, target.ids_right]


def missing_for(target: Target, topics: Collection[str], error: KafkaException) -> list[Right]:
    """Return the rights for want of which nothing was published to topics; none where something else is the matter.

    The client library tells of a topic's missing WRITE as INVALID_TXN_STATE or as purged records, by chance: so the
    brokers are asked wherever an error is none that passes.
    """
    if is_transient(error):
        return []
    code = error.args[0].code() if isinstance(error.args[0], KafkaError) else None
    if code == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
        return [target.ids_right]
    if code == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
        return [Right(Operation.IDEMPOTENT_WRITE, Resource.CLUSTER)]
    needed = target.rights(topics)
    missing = missing_rights(clients.admin(target.servers, target.config), needed)
    # Refused a moment ago, and given by now or not known: then any of them may have been meant.
    return missing or (needed if is_missing_right(error) else [])
