"""`TestBroker`: a Kafka in memory for tests, without processes, threads or real time.

It is a `Cluster`, so an engine runs on it unchanged. The same seed and the same calls give the same results: the seed
decides the boundaries of fetches and random faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from confluent_kafka import KafkaError, TopicPartition

from penstock.clients.cluster import Cluster
from penstock.clients.rights import Operation as RightOperation
from penstock.clients.rights import Right, Rights, topic_right
from penstock.clients.topics import TopicIds, TopicSpec
from penstock.errors import ConfigurationError, TopicNotFoundError
from penstock.outgoing import is_topic_name
from penstock.testing.memory.client.consumer_client import MemoryConsumer
from penstock.testing.memory.client.producer_client import MemoryProducer
from penstock.testing.memory.faults import NO_ERROR, Effect, Fault, Operation, as_error
from penstock.testing.memory.group.coordinator import Commit
from penstock.testing.memory.log import Place
from penstock.testing.memory.state import BrokerState

T = TypeVar("T")


class ReadyAnswer(Generic[T]):
    """An answer that is available at once."""

    def __init__(self, found: T) -> None:
        self._value = found

    def answer(self) -> T:
        """Return the answer."""
        return self._value

    wait = answer


class TestBroker(BrokerState, Cluster):
    """A Kafka in memory. All methods may be called from any thread.

    Args:
        seed: seed of all random choices.
        max_fetch: maximum number of messages of one fetch. The number is drawn between one and this.
    """

    __test__ = False  # pytest would take the name for a test case

    def __init__(self, seed: int = 0, *, max_fetch: int = 500) -> None:
        if max_fetch < 1:
            raise ValueError(f"max_fetch must be at least 1, but is {max_fetch}; a fetch brings one message or more")
        super().__init__(seed, max_fetch)
        #: Permissions that its clients lack when they ask. Refusals of requests are planned separately, with `fail`.
        self.missing_rights: set[Right] = set()

    def advance(self, seconds: float) -> None:
        """Move the clock and process the events due by then: sessions end, delayed requests arrive."""
        with self.lock:
            self._clock.advance(seconds)
            self.coordinator.tick(self._clock.monotonic())

    def next_due(self) -> float:
        """Return the time of the next event that only needs the clock, on `clock.monotonic`, or infinity."""
        with self.lock:
            return self.coordinator.next_due()

    # The cluster of an engine

    def consumer(self, config: Mapping[str, Any]) -> MemoryConsumer:  # type: ignore[override] # as far as it is called
        """Make a consumer. A test can also end it or cut it off: `kill`, `cut_off`, `heal`.

        `config` holds librdkafka's keys and the callback `on_commit`; unknown keys are ignored.
        """
        return MemoryConsumer(config, self)

    def producer(self, config: Mapping[str, Any]) -> MemoryProducer:  # type: ignore[override] # noqa: ARG002 - the same
        """Make a producer. `config` is ignored."""
        return MemoryProducer(self)

    def require_topics(self, topics: Iterable[str]) -> dict[str, int]:
        """Return the number of partitions of each topic; `TopicNotFoundError` names all missing topics."""
        with self.lock:
            counts, wanted = self.topics(), list(topics)
        missing = sorted(topic for topic in wanted if topic not in counts)
        if missing:
            raise TopicNotFoundError(f"no such topic on the test broker: {', '.join(missing)}; create it first")
        return {topic: counts[topic] for topic in wanted}

    def ensure_topics(self, specs: Iterable[TopicSpec]) -> None:
        """Create the topics that do not exist; `ConfigurationError` if Kafka would refuse a name."""
        with self.lock:
            counts = self.topics()
            for spec in specs:
                if spec.name in counts:
                    continue
                if not is_topic_name(spec.name):
                    raise ConfigurationError(f"Kafka does not take the name of topic {spec.name!r}; {spec.rename}")
                self.create_topic(spec.name, spec.partitions)

    def message_limits(self, topics: Iterable[str]) -> dict[str, int]:  # noqa: ARG002 - a cluster's method takes them
        """Return no limits: no message is too large here."""
        return {}

    def ask_topic_ids(self, topics: Iterable[str]) -> ReadyAnswer[TopicIds]:
        """Return which topics exist, with their ids."""
        with self.lock:
            known, wanted, missing = dict(self._ids), list(topics), set(self.missing_rights)
        absent = frozenset(topic for topic in wanted if topic not in known)
        ids = {topic: known[topic] for topic in wanted if topic in known}
        unreadable = frozenset(topic for topic in wanted if topic_right(RightOperation.READ, topic) in missing)
        return ReadyAnswer(TopicIds(ids, absent, dict.fromkeys(absent, "no such topic"), unreadable))

    def ask_readable_ends(self, places: Sequence[tuple[str, int]]) -> ReadyAnswer[Mapping[tuple[str, int], int]]:
        """Return the ends of partitions for readers of committed messages."""
        with self.lock:
            return ReadyAnswer({place: self._log(*place).last_stable for place in places})

    def in_background(self, what: str, work: Callable[[], T]) -> ReadyAnswer[T]:  # noqa: ARG002 - a cluster's method takes it
        """Run `work` at once."""
        return ReadyAnswer(work())

    def transactional_writer(
        self,
        transactional_id: str,
        config: Mapping[str, Any],  # noqa: ARG002 - a cluster's method takes it
    ) -> NoReturn:
        """Raise `ConfigurationError`: there are no transactional producers here."""
        raise ConfigurationError(f"a broker in memory has no transactional producer {transactional_id}")

    def stable_offsets(self, group: str, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Return a group's committed offsets."""
        found = self.committed(group)
        return [
            TopicPartition(partition.topic, partition.partition, at.offset, metadata=at.metadata)
            for partition in partitions
            if (at := found.get((partition.topic, partition.partition))) is not None
        ]

    def ask_rights(self, needed: Iterable[Right]) -> ReadyAnswer[Rights]:
        """Return which permissions are missing."""
        with self.lock:
            wanted, missing = list(needed), set(self.missing_rights)
        lacked = tuple(right for right in wanted if right in missing)
        return ReadyAnswer(Rights(tuple(right for right in wanted if right not in missing), lacked))

    # Groups

    def committed(self, group: str) -> dict[Place, Commit]:
        """Return a group's last commit of each partition, by topic and partition."""
        with self.lock:
            self.coordinator.tick(self._clock.monotonic())
            return dict(self.coordinator.offsets.get(group, {}))

    def commit_log(self, group: str) -> Sequence[Commit]:
        """Return all accepted commits of a group, in order."""
        with self.lock:
            self.coordinator.tick(self._clock.monotonic())
            return tuple(self.coordinator.history.get(group, ()))

    def members(self, group: str) -> dict[str, tuple[Place, ...]]:
        """Return the partitions of each member of a group, as assigned by the last generation."""
        with self.lock:
            self.coordinator.tick(self._clock.monotonic())
            return {name: member.assigned for name, member in self.coordinator.group(group).members.items()}

    def generation(self, group: str) -> int:
        """Return the number of a group's last generation."""
        with self.lock:
            return self.coordinator.group(group).generation

    def rebalance(self, group: str, *, shuffle: bool = True) -> None:
        """Force a rebalance. With `shuffle`, partitions go to random members, so that some of them move."""
        with self.lock:
            self.coordinator.group(group).rebalance(shuffle=shuffle)

    # Faults

    def fail(self, operation: Operation | str, error: KafkaError | int, times: int = 1) -> None:
        """Refuse the next `times` calls of an operation with an error, or the error of a code.

        `operation` is an `Operation` or its value, such as "commit". "queue" ignores the error.
        """
        self._plan(operation, Fault(Effect.REFUSED, as_error(error)), times)

    def fail_by_chance(self, operation: Operation | str, error: KafkaError | int, probability: float) -> None:
        """Refuse each call of an operation with this probability from now on; 0 ends it."""
        with self.lock:
            self.faults.by_chance(operation, Fault(Effect.REFUSED, as_error(error)), probability)

    def lose_answer(self, operation: Operation | str, times: int = 1) -> None:
        """Let the next commits or deliveries succeed, but report a transport error to the client."""
        self._plan(operation, Fault(Effect.ANSWER_LOST, NO_ERROR), times)

    def delay_answer(self, operation: Operation | str, seconds: float, times: int = 1) -> None:
        """Let the next commits or deliveries succeed at once, and report that to the client after `seconds`."""
        self._plan(operation, Fault(Effect.ANSWER_LATE, NO_ERROR, seconds), times)

    def delay_request(self, operation: Operation | str, seconds: float, times: int = 1) -> None:
        """Let the next commits or messages arrive after `seconds`."""
        self._plan(operation, Fault(Effect.ARRIVES_LATE, NO_ERROR, seconds), times)

    def repeat_request(self, operation: Operation | str, seconds: float, times: int = 1) -> None:
        """Let the next commits or messages arrive at once, and a second time after `seconds`."""
        self._plan(operation, Fault(Effect.REPEATED, NO_ERROR, seconds), times)

    def _plan(self, operation: Operation | str, fault: Fault, times: int) -> None:
        with self.lock:
            self.faults.plan(operation, fault, times)

    def coordinator_away(self, seconds: float) -> None:
        """Make the coordinator of all groups unavailable: commits wait, no member joins, no session ends."""
        with self.lock:
            self.coordinator.away_until = self._clock.monotonic() + seconds
