"""Shared tools for tests of the broker in memory: the client of the conformance tests, which never waits here."""

from __future__ import annotations

from typing import Any

from confluent_kafka import Message, TopicPartition
from conformance_worlds import Client, MemoryWorld

from penstock.testing import TestBroker
from penstock.testing.memory.client.consumer_client import MemoryConsumer


def broker_of(partitions: int = 1, records: int = 0, **options: Any) -> TestBroker:
    """Return a broker with the topic `t`, and records with the values 0, 1 and so on in its partitions by turns.

    Records 3 and 9 have the same key, the others none.
    """
    broker = TestBroker(**options)
    broker.create_topic("t", partitions)
    for number in range(records):
        key = b"same" if number in (3, 9) else None
        broker.produce("t", b"%d" % number, key=key, partition=number % partitions)
    return broker


class Reader(Client):
    """A consumer of topic `t` in group `g`."""

    client: MemoryConsumer  # type: ignore[assignment] # as far as it is called

    def __init__(self, broker: TestBroker, *topics: str, **config: Any) -> None:
        super().__init__(MemoryWorld(broker), join=bool(topics), **config)

    @property
    def heard(self) -> list[str | None]:
        """The names of the errors, if any, of the asynchronous commits that were answered."""
        return [name for name, _ in self.answers]

    def commit_async(self, partition: int, offset: int) -> None:
        """Commit without waiting."""
        self.client.commit(offsets=[TopicPartition(self.topic, partition, offset)], asynchronous=True)

    def drain(self, number: int = 10_000) -> list[Message]:
        """Return the messages of a few calls, at most so many."""
        found: list[Message] = []
        for _ in range(50):
            found += self.client.consume(number - len(found), 0)
            if len(found) >= number:
                break
        return found


def settle(*readers: Reader) -> list[Message]:
    """Let every reader poll until nothing is left to serve; return their messages."""
    found: list[Message] = []
    for _ in range(10):
        for reader in readers:
            found += reader.client.consume(1_000, 0)
    return found


def offsets(messages: list[Message]) -> list[int | None]:
    """Return the offsets of messages."""
    return [message.offset() for message in messages]
