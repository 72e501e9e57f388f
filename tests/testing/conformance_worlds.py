"""The broker in memory and a real one, and their clients, as the scenarios of conformance use them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from kafka_tools import produce, transactional
from penstock.clients.cluster import Cluster, ConsumerClient
from penstock.devbroker import DevBroker
from penstock.testing import TestBroker
from penstock.testing.memory.log import TestTransaction
from waiting import wait_until

Seen = list[object]


class MemoryWorld:
    def __init__(self, broker: TestBroker) -> None:
        self.topic, self.group = "t", "g"
        self.cluster = self.broker = broker

    def produce(self, *values: bytes, partition: int = 0) -> None:
        for value in values:
            self.broker.produce(self.topic, value, partition=partition)

    def begin(self) -> TestTransaction:
        return self.broker.transaction()

    def delete_before(self, offset: int) -> None:
        self.broker.delete_records(self.topic, 0, offset)

    def pass_time(self, seconds: float) -> None:
        self.broker.advance(seconds)


class KafkaTransaction:
    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        producer.begin_transaction()

    def produce(self, topic: str, value: bytes, *, partition: int) -> None:
        self._producer.produce(topic, value, partition=partition)
        assert self._producer.flush(60) == 0

    def commit(self) -> None:
        self._producer.commit_transaction(60)

    def abort(self) -> None:
        self._producer.abort_transaction(60)


class KafkaWorld:
    def __init__(self, broker: DevBroker, admin: AdminClient, topic: str) -> None:
        self.topic, self.group = topic, f"conform-{uuid.uuid4().hex}"
        self.cluster = Cluster(broker.bootstrap_servers)
        self._bootstrap, self._admin = broker.bootstrap_servers, admin

    def produce(self, *values: bytes, partition: int = 0) -> None:
        produce(self._bootstrap, self.topic, [(None, value) for value in values], partition=partition)

    def begin(self) -> KafkaTransaction:
        return KafkaTransaction(transactional(self._bootstrap))

    def delete_before(self, offset: int) -> None:
        point = TopicPartition(self.topic, 0, offset)
        self._admin.delete_records([point])[point].result(60)

    def pass_time(self, seconds: float) -> None:
        # On a real broker, time passes by itself.
        time.sleep(seconds)


#: A broker, and the changes that a scenario makes to it without clients.
World = MemoryWorld | KafkaWorld


class Client:
    """A consumer of a world, and the events that it saw."""

    def __init__(self, world: World, *, join: bool = True, group: str | None = None, **config: Any) -> None:
        self.topic = world.topic
        self.events: list[tuple[str, tuple[int, ...]]] = []
        self.answers: list[tuple[str | None, list[str | None]]] = []
        self.errors: list[tuple[str, str | None, int | None, int | None]] = []
        self.client: ConsumerClient = world.cluster.consumer(
            {
                "group.id": group or world.group,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "partition.assignment.strategy": "cooperative-sticky",
                "heartbeat.interval.ms": 300,
                "on_commit": self._on_commit,
                **{key.replace("_", "."): value for key, value in config.items()},
            }
        )
        self.on_revoke: Callable[[], None] = lambda: None
        if join:
            self.client.subscribe([self.topic], on_assign=self._assign, on_revoke=self._revoke, on_lost=self._lost)

    def _on_commit(self, error: KafkaError | None, points: list[TopicPartition]) -> None:
        self.answers.append((error and error.name(), [point.error and point.error.name() for point in points]))

    def _assign(self, _client: object, partitions: list[TopicPartition]) -> None:
        if partitions:
            self.events.append(("assign", tuple(sorted(partition.partition for partition in partitions))))
        self.client.incremental_assign(self.client.committed(partitions, timeout=60) if partitions else [])

    def _revoke(self, _client: object, partitions: list[TopicPartition]) -> None:
        self.events.append(("revoke", tuple(sorted(partition.partition for partition in partitions))))
        self.on_revoke()
        self.client.incremental_unassign(partitions)

    def _lost(self, _client: object, partitions: list[TopicPartition]) -> None:
        self.events.append(("lost", tuple(sorted(partition.partition for partition in partitions))))
        self.client.incremental_unassign(partitions)

    def _poll(self) -> Message | None:
        """Return a message, if one comes, and keep an error that comes in its place."""
        message = self.client.poll(0.1)
        if message is not None and (error := message.error()) is not None:
            self.errors.append((error.name(), message.topic(), message.partition(), message.offset()))
            return None
        return message

    def take(self, number: int) -> Seen:
        """Return offset and value of so many messages, from one call for each."""
        found: Seen = []

        def enough() -> bool:
            if len(found) < number and (message := self._poll()) is not None:
                found.append((message.partition(), message.offset(), message.value(), len(message)))
            return len(found) >= number

        wait_until(enough)
        return found

    def until(self, condition: Callable[[], bool]) -> None:
        """Poll until something has come about; messages are not expected."""

        def come_about() -> bool:
            assert self._poll() is None, "a message came where none was expected"
            return condition()

        wait_until(come_about)

    def idle(self, polls: int = 5) -> Seen:
        """Return the messages of a few polls, to see that none comes."""
        found = [self._poll() for _ in range(polls)]
        return [(message.offset(), message.value()) for message in found if message is not None]

    def position(self, partition: int = 0) -> int:
        return self.client.position([TopicPartition(self.topic, partition)])[0].offset

    def commit(self, offset: int, metadata: str | None = None, partition: int = 0) -> str | None:
        """Commit; return the name of the error."""
        point = TopicPartition(self.topic, partition, offset, *(() if metadata is None else (metadata,)))
        return refusal(lambda: self.client.commit(offsets=[point], asynchronous=False))

    def committed(self, *partitions: int) -> Seen:
        points = [TopicPartition(self.topic, number) for number in partitions or (0,)]
        return [(one.offset, one.metadata, one.error) for one in self.client.committed(points, timeout=60)]


def refusal(call: Callable[[], object]) -> str | None:
    """Return the name of the error that a call raises, or None."""
    try:
        call()
    except KafkaException as error:
        return str(error.args[0].name())
    except RuntimeError as error:
        return str(error)
    return None
