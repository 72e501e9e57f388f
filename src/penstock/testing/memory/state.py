"""The state of the broker in memory: logs, groups and faults, with their lock and clock.

Its clients share it. `TestBroker` adds the requests of an engine to its cluster, and a test's control of groups.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterable
from zlib import crc32

from confluent_kafka import Message

from penstock.errors import PenstockError, TopicNotFoundError
from penstock.testing.memory.clock import TestClock
from penstock.testing.memory.faults import Faults
from penstock.testing.memory.group.coordinator import Coordinator
from penstock.testing.memory.log import Headers, PartitionLog, Place, TestTransaction


class BrokerState:
    """The part of a `TestBroker` that its clients use. The lock guards all of it."""

    def __init__(self, seed: int, max_fetch: int) -> None:
        self._clock = TestClock()
        self.lock = threading.RLock()
        self.chance = random.Random(seed)  # noqa: S311 - a seed must give the same run again
        self.max_fetch = max_fetch
        #: The planned faults; `faults.happened` counts those that happened.
        self.faults = Faults(self.chance)
        self._topics: dict[str, list[PartitionLog]] = {}
        # All logs by topic and partition.
        self.logs: dict[Place, PartitionLog] = {}
        self.coordinator = Coordinator(self._clock, self.logs, self._places, self.chance)
        self._next_turn: Counter[str] = Counter()
        self._made = 0
        # The id of each topic; a recreated topic gets a new one.
        self._ids: dict[str, str] = {}

    @property
    def clock(self) -> TestClock:
        """The only source of time."""
        return self._clock

    def _places(self, topics: Iterable[str]) -> list[Place]:
        """Return the partitions of these topics, sorted, without topics that do not exist."""
        return [(name, log.partition) for name in sorted(set(topics)) for log in self._topics.get(name, ())]

    def _logs_of(self, topic: str) -> list[PartitionLog]:
        """Return the logs of a topic; `TopicNotFoundError` if it does not exist."""
        if topic not in self._topics:
            raise TopicNotFoundError(f"the test broker has no topic {topic}; create it with create_topic first")
        return self._topics[topic]

    def _log(self, topic: str, partition: int) -> PartitionLog:
        """Return the log of a partition; `TopicNotFoundError` if there is no such topic or partition."""
        logs = self._logs_of(topic)
        if not 0 <= partition < len(logs):
            raise TopicNotFoundError(f"topic {topic} has no partition {partition}, only {len(logs)}; name one of those")
        return logs[partition]

    def create_topic(self, topic: str, partitions: int = 1) -> None:
        """Create a topic; `PenstockError` if it exists, `ValueError` if it would have no partition."""
        if partitions < 1:
            raise ValueError(f"topic {topic} needs at least one partition, but {partitions} were asked for")
        with self.lock:
            if topic in self._topics:
                raise PenstockError(f"topic {topic} exists on the test broker; use it, or delete it first")
            self._make(topic, partitions)
            self.coordinator.topic_changed(topic)

    def _make(self, topic: str, partitions: int) -> None:
        self._made += 1
        self._ids[topic] = f"id-{self._made}"
        self._put(topic, [PartitionLog(topic, number) for number in range(partitions)])

    def _put(self, topic: str, logs: list[PartitionLog]) -> None:
        self._topics[topic] = logs
        self.logs.update({(topic, log.partition): log for log in logs})

    def add_partitions(self, topic: str, partitions: int) -> None:
        """Increase a topic's partitions to this total; its groups rebalance."""
        with self.lock:
            logs = self._logs_of(topic)
            self._put(topic, [*logs, *(PartitionLog(topic, number) for number in range(len(logs), partitions))])
            self.coordinator.topic_changed(topic)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic with its records and the groups' offsets in it; its groups rebalance."""
        with self.lock:
            for log in self._logs_of(topic):
                del self.logs[topic, log.partition]
            del self._topics[topic], self._ids[topic]
            self.coordinator.topic_changed(topic)

    def recreate_topic(self, topic: str) -> None:
        """Delete a topic and create it again at once: the groups' offsets in it are deleted, its readers go on.

        The same happens in Kafka if no metadata showed the client that the topic was gone: the client reads the new log
        from its position in the old one.
        """
        with self.lock:
            self._make(topic, len(self._logs_of(topic)))
            self.coordinator.forget_offsets(topic)

    def produce(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers | None = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> Message:
        """Append a record and return it.

        Args:
            topic: name of the topic.
            value: the body, or None for a tombstone.
            key: decides the partition, unless `partition` is given.
            headers: pairs of name and content.
            partition: number of the partition.
            timestamp_ms: create time in milliseconds since the epoch; the clock's time if left out.

        Raises:
            TopicNotFoundError: there is no such topic or partition.
        """
        with self.lock:
            return self._append(topic, value, key, headers, partition=partition, timestamp_ms=timestamp_ms)

    def _append(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: Headers | None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        owner: TestTransaction | None = None,
    ) -> Message:
        """Append a record and return it.

        A stable hash of the key decides the partition. Records without a key go to all partitions in turn.
        """
        count = len(self._logs_of(topic))
        if partition is None or partition < 0:
            if key is not None:
                partition = crc32(key) % count
            else:
                partition = self._next_turn[topic] % count
                self._next_turn[topic] += 1
        if timestamp_ms is None:
            timestamp_ms = int(self._clock.time() * 1000)
        return self._log(topic, partition).append(value, key, headers, timestamp_ms, owner)

    def transaction(self) -> TestTransaction:
        """Begin a transaction. Use it as a context manager, end it by its methods, or leave it open."""
        return TestTransaction(self._append, self.lock)

    def records(self, topic: str, partition: int | None = None) -> list[Message]:
        """Return the records of a topic for a reader of committed messages, partition by partition."""
        with self.lock:
            logs = self._logs_of(topic) if partition is None else [self._log(topic, partition)]
            return [record for log in logs for record in log.records()]

    def topics(self) -> dict[str, int]:
        """Return the number of partitions of each topic."""
        with self.lock:
            return {name: len(logs) for name, logs in self._topics.items()}

    def ends(self, topic: str, partition: int = 0) -> tuple[int, int, int]:
        """Return the first offset of a log, its last stable offset, and its end."""
        with self.lock:
            log = self._log(topic, partition)
            return log.start, log.last_stable, log.end

    def compact(self, topic: str, partition: int = 0) -> None:
        """Compact a log: keep the newest record of each key. The others leave gaps in the offsets."""
        with self.lock:
            self._log(topic, partition).compact()

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Delete the records before offset `before`, as retention does."""
        with self.lock:
            self._log(topic, partition).delete_before(before)

    def truncate(self, topic: str, partition: int, end: int) -> None:
        """Delete the records from offset `end`, as after the loss of a leader. Their offsets will be used again."""
        with self.lock:
            self._log(topic, partition).truncate(end)
