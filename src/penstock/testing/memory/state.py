"""The state of the broker in memory: its logs and groups, what goes wrong, and the lock and clock of all of it.

Its clients are given it. `TestBroker` adds what an engine asks a cluster, and what a test does to groups.
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
    """The part of a `TestBroker` that its clients see. The lock guards all of it."""

    def __init__(self, seed: int, max_fetch: int) -> None:
        self._clock = TestClock()
        self.lock = threading.RLock()
        self.chance = random.Random(seed)  # noqa: S311 - a seed must give the same run again
        self.max_fetch = max_fetch
        #: What goes wrong; `faults.happened` counts what went wrong.
        self.faults = Faults(self.chance)
        self._topics: dict[str, list[PartitionLog]] = {}
        # Every log by topic and partition.
        self.logs: dict[Place, PartitionLog] = {}
        self.coordinator = Coordinator(self._clock, self.logs, self._places, self.chance)
        self._turn: Counter[str] = Counter()
        self._made = 0
        # Id of each topic; one that is made again gets another.
        self._ids: dict[str, str] = {}

    @property
    def clock(self) -> TestClock:
        """The only time there is."""
        return self._clock

    def _places(self, topics: Iterable[str]) -> list[Place]:
        """Return the partitions of those of the topics that exist, sorted."""
        return [(name, log.partition) for name in sorted(set(topics)) for log in self._topics.get(name, ())]

    def _logs_of(self, topic: str) -> list[PartitionLog]:
        """Return the logs of a topic; `TopicNotFoundError` where it does not exist."""
        if topic not in self._topics:
            raise TopicNotFoundError(f"the test broker has no topic {topic}; create it with create_topic first")
        return self._topics[topic]

    def _log(self, topic: str, partition: int) -> PartitionLog:
        """Return one log; `TopicNotFoundError` where there is no such topic or partition."""
        logs = self._logs_of(topic)
        if not 0 <= partition < len(logs):
            raise TopicNotFoundError(f"topic {topic} has no partition {partition}, only {len(logs)}; name one of those")
        return logs[partition]

    def create_topic(self, topic: str, partitions: int = 1) -> None:
        """Create a topic; `PenstockError` where it exists, `ValueError` where it would have no partition."""
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
        """Let a topic have so many partitions in all; groups that read it rebalance."""
        with self.lock:
            logs = self._logs_of(topic)
            self._put(topic, [*logs, *(PartitionLog(topic, number) for number in range(len(logs), partitions))])
            self.coordinator.topic_changed(topic)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic with its records and the groups' offsets in it; groups that read it rebalance."""
        with self.lock:
            for log in self._logs_of(topic):
                del self.logs[topic, log.partition]
            del self._topics[topic], self._ids[topic]
            self.coordinator.topic_changed(topic)

    def recreate_topic(self, topic: str) -> None:
        """Delete a topic and create it again at once: the groups' offsets in it go, and clients that read it go on.

        So it is in Kafka where no metadata showed a client that the topic was gone: it reads the new log from where it
        stood in the old one.
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
            key: decides the partition, where none is given.
            headers: pairs of name and content.
            partition: number of the partition.
            timestamp_ms: create time since the epoch; the clock's when left out.

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

        A record with a key goes where a stable hash of the key says; those without one go round.
        """
        count = len(self._logs_of(topic))
        if partition is None or partition < 0:
            if key is not None:
                partition = crc32(key) % count
            else:
                partition = self._turn[topic] % count
                self._turn[topic] += 1
        if timestamp_ms is None:
            timestamp_ms = int(self._clock.time() * 1000)
        return self._log(topic, partition).append(value, key, headers, timestamp_ms, owner)

    def transaction(self) -> TestTransaction:
        """Begin a transaction: a context manager, or ended by hand, or left open."""
        return TestTransaction(self._append, self.lock)

    def records(self, topic: str, partition: int | None = None) -> list[Message]:
        """Return the records of a topic as a reader of committed messages gets them, partition by partition."""
        with self.lock:
            logs = self._logs_of(topic) if partition is None else [self._log(topic, partition)]
            return [record for log in logs for record in log.records()]

    def topics(self) -> dict[str, int]:
        """Return how many partitions each topic has."""
        with self.lock:
            return {name: len(logs) for name, logs in self._topics.items()}

    def ends(self, topic: str, partition: int = 0) -> tuple[int, int, int]:
        """Return the first offset of a log, its last stable offset, and its end."""
        with self.lock:
            log = self._log(topic, partition)
            return log.start, log.last_stable, log.end

    def compact(self, topic: str, partition: int = 0) -> None:
        """Compact a log: the newest record of each key stays, and holes are where others were."""
        with self.lock:
            self._log(topic, partition).compact()

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Let a log begin at offset `before`, as retention does."""
        with self.lock:
            self._log(topic, partition).delete_before(before)

    def truncate(self, topic: str, partition: int, end: int) -> None:
        """Let a log end before offset `end`, as after the loss of a leader: offsets are given again."""
        with self.lock:
            self._log(topic, partition).truncate(end)
