"""What lies in the topics that every store has in Kafka, read within a few seconds where a broker is away.

Nothing is changed by it. `stores.kafka.inspection` tells what is pending where the store itself is in Kafka.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Self, TypeVar

from confluent_kafka import KafkaError, KafkaException, Message

from penstock import clients
from penstock.clients.answers import asked_until_ready
from penstock.clients.kafka_errors import ErrorKind, concerns_a_group, is_missing_right, reason
from penstock.clients.reading import NotReadInTimeError, PartitionReader, Place
from penstock.clients.rights import MissingRightError, Operation, group_right, principal_of, topic_right
from penstock.clients.topics import log_bounds
from penstock.errors import BrokerConnectionError
from penstock.options import ClientConfig
from penstock.transactions.wire.topics import StoreTopics

T = TypeVar("T")

#: Seconds that all questions together wait for brokers, by default. And the least that a question has.
WAIT_S = 15.0
_MIN_BUDGET_S = 0.3
#: Seconds for which closing a client may take: it has nothing left to say.
_CLOSE_BUDGET_S = 1.0
_READ_BUDGET_S = 60.0


class Inspection:
    """Asks and reads about a store whose topics have their real counts. Used by one thread; a context manager.

    All questions together wait about `wait_s` seconds for brokers that do not answer at once; what is read steadily
    costs nothing of them.

    What reads raises `BrokerConnectionError` where a broker does not answer, or not in time, and `MissingRightError`
    where this client may not read.
    """

    def __init__(
        self, bootstrap_servers: str, config: ClientConfig, topics: StoreTopics, wait_s: float = WAIT_S
    ) -> None:
        self.topics = topics
        self.admin = clients.admin(bootstrap_servers, config)
        self.principal = principal_of(config)
        # Of the seconds to wait, those that are left.
        self._left_s = wait_s
        # By isolation, each made at its first use.
        self._readers: dict[str, PartitionReader] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_raised: object) -> None:
        for reader in self._readers.values() if kind is None else ():
            # Where a broker is away, closing waits for it as well: such clients end on threads of their own.
            reader.close(max(_MIN_BUDGET_S, min(_CLOSE_BUDGET_S, self._left_s)))

    def ask(self, request: Callable[[float], T], *topics: str) -> T:
        """Send a request, and repeat it while brokers are not ready: a new topic has no leader for a moment.

        The question is given the seconds that it may take. Where it is about no topics, it is about the three logs.
        """
        begun = time.monotonic()

        def spent_s() -> float:
            return time.monotonic() - begun

        try:
            return asked_until_ready(lambda: request(max(_MIN_BUDGET_S, self._left_s - spent_s())), self._left_s)
        except KafkaException as error:
            if is_missing_right(error):
                raise self._lacking(error.args[0], *topics) from error
            raise BrokerConnectionError(
                f"the store {self.topics.prefix} at {self.admin.servers} cannot be read: {reason(error)}; "
                "check that all brokers run"
            ) from error
        finally:
            self._left_s = max(0.0, self._left_s - spent_s())

    def bounds(self, places: Collection[Place]) -> dict[Place, tuple[int, int]]:
        """Return where partitions begin and end, records of open transactions included."""
        topics = dict.fromkeys(topic for topic, _ in places)
        return self.ask(lambda limit_s: log_bounds(self.admin, list(places), limit_s), *topics) if places else {}

    def partitions_of(self, topic: str) -> int:
        """Return how many partitions a topic has; 0 where there is none."""

        def count(limit_s: float) -> int:
            metadata = self.admin.list_topics(topic, timeout=limit_s).topics[topic]
            if metadata.error is not None and is_missing_right(metadata.error):
                raise KafkaException(metadata.error)
            return len(metadata.partitions)

        return self.ask(count, topic)

    def read_all(self, topic: str, last: int | None = None) -> Iterator[Message]:
        """Yield the committed records of a topic, or those among the `last` of each partition; none where it is not."""
        bounds = self.bounds([(topic, number) for number in range(self.partitions_of(topic))])
        starts = {place: 0 if last is None else end - last for place, (_, end) in bounds.items()}
        return self.read(starts, bounds)

    def read(self, starts: Mapping[Place, int], bounds: Mapping[Place, tuple[int, int]]) -> Iterator[Message]:
        """Yield the committed records of partitions, each from its start, or where it begins, to the end in `bounds`.

        Open transactions are waited for as brokers are; then what stands behind them is left out.
        """
        begins = {place: max(start, bounds[place][0]) for place, start in starts.items()}
        ends = {place: bounds[place][1] for place in starts}
        if all(begins[place] >= end for place, end in ends.items()):
            return
        reader = self.ask(lambda limit_s: self.reader("read_committed", limit_s), *(topic for topic, _ in starts))
        waited_s = 0.0

        def step(_behind: set[Place], idle_s: float) -> None:
            """Take what the silence has grown by from what is left; end it where it has lasted for too long."""
            nonlocal waited_s
            self._left_s = max(0.0, self._left_s - max(0.0, idle_s - waited_s))
            waited_s = idle_s
            if not self._left_s and idle_s > _MIN_BUDGET_S:
                raise reader.late(idle_s)

        try:
            for records in reader.read(begins, ends, limit_s=_READ_BUDGET_S, step=step):
                yield from records
        except NotReadInTimeError as error:
            if reader.behind <= reader.exhausted:
                return
            raise BrokerConnectionError(
                f"the store {self.topics.prefix} at {self.admin.servers} was not read to its end: {error}; "
                "check that all brokers run, and try again"
            ) from error

    def reader(self, isolation: str, limit_s: float) -> PartitionReader:
        """Return the client of an isolation, which is closed at the end. For questions: raises `KafkaException`."""
        if isolation not in self._readers:
            reader = PartitionReader(
                self.admin.servers, self.admin.config, self.topics.coordinators, self._failed, isolation=isolation
            )
            self._readers[isolation] = reader
            # Without metadata the client takes a second for each new topic, as if a broker were silent.
            reader.consumer.list_topics(timeout=limit_s)
        return self._readers[isolation]

    def _failed(self, kind: ErrorKind, error: KafkaError, place: Place) -> None:
        """Raise what ends reading; the client recovers from all else by itself, or the time limit ends it."""
        if kind in {ErrorKind.MISSING_RIGHT, ErrorKind.GROUP}:
            raise self._lacking(error, place[0])

    def _lacking(self, error: KafkaError, *topics: str) -> MissingRightError:
        """Return the error of a client that may not ask, or not read."""
        if concerns_a_group(error):
            rights = [group_right(self.topics.coordinators, Operation.DESCRIBE)]
        else:
            names = [name for name in topics if name] or [self.topics.half, self.topics.op, self.topics.done]
            rights = [topic_right(Operation.READ, name) for name in names]
        return MissingRightError(f"the store {self.topics.prefix} cannot be read", rights, self.principal)
