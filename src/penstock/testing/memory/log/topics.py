"""The topics of the broker in memory: what a test does to them, and which partition a record goes to."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from zlib import crc32

from confluent_kafka import Message

from penstock.errors import PenstockError, TopicNotFoundError
from penstock.testing.memory.clock import TestClock
from penstock.testing.memory.log.log import (
    CREATE_TIME,
    LOG_APPEND_TIME,
    Headers,
    LoggedTransaction,
    PartitionLog,
    Place,
)
from penstock.testing.memory.log.transaction import TestTransaction


class Topics:
    """The part of a `TestBroker` that keeps logs. Its lock guards all of it."""

    def __init__(self, clock: TestClock, lock: threading.RLock) -> None:
        self._clock = clock
        self._lock = lock
        self._topics: dict[str, list[PartitionLog]] = {}
        # Every log by topic and partition.
        self._logs: dict[Place, PartitionLog] = {}
        self._turn: Counter[str] = Counter()
        self._made = 0
        # Id of each topic; one that is made again gets another.
        self._ids: dict[str, str] = {}
        # Called with the name of a topic that came, went or grew.
        self._on_change: Callable[[str], None] = lambda _topic: None

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

    def create_topic(self, topic: str, partitions: int = 1, config: Mapping[str, str] | None = None) -> None:
        """Create a topic. Of its config, `message.timestamp.type` has a meaning here.

        `PenstockError` where it exists, `ValueError` where it would have no partition.
        """
        if partitions < 1:
            raise ValueError(f"topic {topic} needs at least one partition, but {partitions} were asked for")
        kind = LOG_APPEND_TIME if (config or {}).get("message.timestamp.type") == "LogAppendTime" else CREATE_TIME
        with self._lock:
            if topic in self._topics:
                raise PenstockError(f"topic {topic} exists on the test broker; use it, or delete it first")
            self._make(topic, [PartitionLog(topic, number, kind) for number in range(partitions)])
            self._on_change(topic)

    def _make(self, topic: str, logs: list[PartitionLog]) -> None:
        self._made += 1
        self._ids[topic] = f"id-{self._made}"
        self._put(topic, logs)

    def _put(self, topic: str, logs: list[PartitionLog]) -> None:
        self._topics[topic] = logs
        self._logs.update({(topic, log.partition): log for log in logs})

    def add_partitions(self, topic: str, partitions: int) -> None:
        """Let a topic have so many partitions in all; groups that read it rebalance."""
        with self._lock:
            logs = self._logs_of(topic)
            more = [PartitionLog(topic, number, logs[0].type) for number in range(len(logs), partitions)]
            self._put(topic, [*logs, *more])
            self._on_change(topic)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic with its records and the groups' offsets in it; groups that read it rebalance."""
        with self._lock:
            for log in self._logs_of(topic):
                del self._logs[topic, log.partition]
            del self._topics[topic], self._ids[topic]
            self._on_change(topic)

    def produce(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers = (),
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
        with self._lock:
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
        owner: LoggedTransaction | None = None,
    ) -> Message:
        """Append a record and return it.

        A record with a key goes where a stable hash of the key says; those without one go round.
        """
        logs = self._logs_of(topic)
        if partition is None or partition < 0:
            partition = self._choose(topic, key, len(logs))
        log = self._log(topic, partition)
        if timestamp_ms is None or log.type == LOG_APPEND_TIME:
            timestamp_ms = int(self._clock.time() * 1000)
        return log.append(value, key, headers, timestamp_ms, owner)

    def transaction(self) -> TestTransaction:
        """Begin a transaction: a context manager, or ended by hand, or left open."""
        return TestTransaction(self._append, self._lock)

    def records(self, topic: str, partition: int | None = None, *, committed_only: bool = True) -> list[Message]:
        """Return the records of a topic as a reader gets them, partition by partition."""
        with self._lock:
            logs = self._logs_of(topic) if partition is None else [self._log(topic, partition)]
            return [record for log in logs for record in log.records(committed_only=committed_only)]

    def records_from(self, topic: str, partition: int, offset: int) -> list[Message]:
        """Return the records of one partition as a reader of committed messages gets them from an offset on."""
        with self._lock:
            log = self._log(topic, partition)
            return log.read(max(log.start, offset), log.end - log.start, committed_only=True)[0]

    def topics(self) -> dict[str, int]:
        """Return how many partitions each topic has."""
        with self._lock:
            return {name: len(logs) for name, logs in self._topics.items()}

    def ends(self, topic: str, partition: int = 0) -> tuple[int, int, int]:
        """Return the first offset of a log, its last stable offset, and its end."""
        with self._lock:
            log = self._log(topic, partition)
            return log.start, log.last_stable, log.end

    def compact(self, topic: str, partition: int = 0, *, keep: Callable[[Message], bool] | None = None) -> None:
        """Compact a log: holes where records were. By default the newest of each key stays."""
        with self._lock:
            self._log(topic, partition).compact(keep)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Let a log begin at offset `before`, as retention does."""
        with self._lock:
            self._log(topic, partition).delete_before(before)

    def truncate(self, topic: str, partition: int, end: int) -> None:
        """Let a log end before offset `end`, as after the loss of a leader: offsets are given again."""
        with self._lock:
            self._log(topic, partition).truncate(end)

    def _choose(self, topic: str, key: bytes | None, partitions: int) -> int:
        if key is not None:
            return crc32(key) % partitions
        self._turn[topic] += 1
        return (self._turn[topic] - 1) % partitions
