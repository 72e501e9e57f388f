"""The topics of the broker in memory, and which partition a record goes to."""

from __future__ import annotations

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


class Topics:
    """All logs. The broker's lock guards it."""

    def __init__(self, clock: TestClock) -> None:
        self._clock = clock
        self._topics: dict[str, list[PartitionLog]] = {}
        self._turn: dict[str, int] = {}
        #: Id of each topic; one that is made again gets another.
        self.ids: dict[str, str] = {}
        self._made = 0
        #: Every log by topic and partition.
        self.logs: dict[Place, PartitionLog] = {}
        #: Called with the name of a topic that came, went or grew.
        self.on_change: Callable[[str], None] = lambda _topic: None

    def counts(self) -> dict[str, int]:
        """Return how many partitions each topic has."""
        return {name: len(logs) for name, logs in self._topics.items()}

    def places(self, topics: Iterable[str]) -> list[Place]:
        """Return the partitions of those of the topics that exist, sorted."""
        return [(name, log.partition) for name in sorted(set(topics)) for log in self._topics.get(name, ())]

    def logs_of(self, topic: str) -> list[PartitionLog]:
        """Return the logs of a topic; `TopicNotFoundError` where it does not exist."""
        if topic not in self._topics:
            raise TopicNotFoundError(f"the test broker has no topic {topic}; create it with create_topic first")
        return self._topics[topic]

    def log(self, topic: str, partition: int) -> PartitionLog:
        """Return one log; `TopicNotFoundError` where there is no such topic or partition."""
        logs = self.logs_of(topic)
        if not 0 <= partition < len(logs):
            raise TopicNotFoundError(f"topic {topic} has no partition {partition}, only {len(logs)}; name one of those")
        return logs[partition]

    def create(self, topic: str, partitions: int, config: Mapping[str, str]) -> None:
        """Create a topic; errors as `TestBroker.create_topic`."""
        if topic in self._topics:
            raise PenstockError(f"topic {topic} exists on the test broker; use it, or delete it first")
        if partitions < 1:
            raise ValueError(f"topic {topic} needs at least one partition, but {partitions} were asked for")
        kind = LOG_APPEND_TIME if config.get("message.timestamp.type") == "LogAppendTime" else CREATE_TIME
        self._made += 1
        self.ids[topic] = f"id-{self._made}"
        self._put(topic, [PartitionLog(topic, number, kind) for number in range(partitions)])

    def recreate(self, topic: str) -> None:
        """Delete a topic and create it again, so quickly that no client's metadata showed it gone."""
        logs = self.logs_of(topic)
        self._made += 1
        self.ids[topic] = f"id-{self._made}"
        self._topics[topic] = [PartitionLog(topic, log.partition, log.type) for log in logs]
        self.logs.update({(topic, log.partition): log for log in self._topics[topic]})

    def grow(self, topic: str, partitions: int) -> None:
        """Let a topic have more partitions."""
        logs = self.logs_of(topic)
        more = [PartitionLog(topic, number, logs[0].type) for number in range(len(logs), partitions)]
        self._put(topic, [*logs, *more])

    def delete(self, topic: str) -> None:
        """Delete a topic with all that is in it."""
        for log in self.logs_of(topic):
            del self.logs[topic, log.partition]
        del self._topics[topic], self.ids[topic]
        self.on_change(topic)

    def _put(self, topic: str, logs: list[PartitionLog]) -> None:
        self._topics[topic] = logs
        self.logs.update({(topic, log.partition): log for log in logs})
        self.on_change(topic)

    def append(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: Headers | None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        owner: LoggedTransaction | None = None,
    ) -> tuple[Message, PartitionLog]:
        """Append a record and return it, with its log.

        A record with a key goes where a stable hash of the key says; those without one go round.
        """
        logs = self.logs_of(topic)
        if partition is None or partition < 0:
            partition = self._choose(topic, key, len(logs))
        log = self.log(topic, partition)
        if timestamp_ms is None or log.type == LOG_APPEND_TIME:
            timestamp_ms = int(self._clock.time() * 1000)
        return log.append(value, key, headers, timestamp_ms, owner), log

    def _choose(self, topic: str, key: bytes | None, partitions: int) -> int:
        if key is not None:
            return crc32(key) % partitions
        turn = self._turn.get(topic, 0)
        self._turn[topic] = turn + 1
        return turn % partitions
