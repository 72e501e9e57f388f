"""What the tests of the broker in memory share: a consumer that writes down its callbacks, and plain reading."""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from penstock.testing import TestBroker
from penstock.testing.memory.client.consumer_client import MemoryConsumer


class Reader:
    """A consumer with its callbacks written down in `events`, and the answers to its commits in `answers`."""

    def __init__(self, broker: TestBroker, *topics: str, group: str = "g", **config: Any) -> None:
        self.events: list[tuple[str, tuple[int, ...]]] = []
        self.answers: list[int | None] = []
        self.refusals: list[int] = []
        self.commit_on_revoke = False
        self.client: MemoryConsumer = broker.consumer(
            {
                "group.id": group,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "on_commit": lambda error, _points: self.answers.append(None if error is None else error.code()),
                **{key.replace("_", "."): value for key, value in config.items()},
            }
        )
        if topics:
            self.client.subscribe(list(topics), on_assign=self._assign, on_revoke=self._revoke, on_lost=self._lost)

    def _assign(self, client: MemoryConsumer, partitions: list[TopicPartition]) -> None:
        self.events.append(("assign", tuple(one.partition for one in partitions)))
        client.incremental_assign(client.committed(partitions, timeout=5))

    def _revoke(self, client: MemoryConsumer, partitions: list[TopicPartition]) -> None:
        self.events.append(("revoke", tuple(one.partition for one in partitions)))
        if self.commit_on_revoke:
            self.commit(*[(one.partition, 7) for one in partitions], topic=partitions[0].topic)
        client.incremental_unassign(partitions)

    def _lost(self, client: MemoryConsumer, partitions: list[TopicPartition]) -> None:
        self.events.append(("lost", tuple(one.partition for one in partitions)))
        client.incremental_unassign(partitions)

    def commit(self, *points: tuple[int, int], topic: str = "t", metadata: str | None = None) -> int | None:
        """Commit and wait; return the code of the error, if any."""
        more = () if metadata is None else (metadata,)
        try:
            self.client.commit(
                offsets=[TopicPartition(topic, partition, offset, *more) for partition, offset in points],
                asynchronous=False,
            )
        except KafkaException as error:
            return code(error)
        return None

    def commit_async(self, partition: int, offset: int, topic: str = "t") -> None:
        """Commit without waiting."""
        self.client.commit(offsets=[TopicPartition(topic, partition, offset)], asynchronous=True)

    def take(self, number: int = 10_000) -> list[Message]:
        """Return what comes in a few calls, at most so many messages."""
        found: list[Message] = []
        for _ in range(50):
            found += self.client.consume(number - len(found), 0)
            if len(found) >= number:
                break
        return found

    def position(self, partition: int = 0, topic: str = "t") -> int:
        """Return the position of one partition."""
        return self.client.position([TopicPartition(topic, partition)])[0].offset


def code(error: KafkaException) -> int:
    """Return the code inside an exception of the client library."""
    inner = error.args[0]
    assert isinstance(inner, KafkaError)
    return inner.code()


def settle(*readers: Reader) -> list[Message]:
    """Let every reader poll until nothing is left to serve; return what they got."""
    found: list[Message] = []
    for _ in range(10):
        for reader in readers:
            found += reader.client.consume(1_000, 0)
    return found


def offsets(messages: list[Message]) -> list[int | None]:
    """Return the offsets of messages."""
    return [message.offset() for message in messages]
