"""Read-only access to the topics that every store has in Kafka, with a time limit of seconds if a broker is down.

`stores.kafka.inspection` adds the pending transactions of a store in Kafka.
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

#: The default seconds that all requests together wait for brokers.
WAIT_S = 15.0
#: The least seconds of one request.
_MIN_BUDGET_S = 0.3
#: Seconds to close a client: it has nothing left to send.
_CLOSE_BUDGET_S = 1.0
#: Seconds to read partitions to their ends.
_READ_BUDGET_S = 60.0
#: The least seconds without a record after which a read fails: a wait for an open transaction may have used all others.
_MIN_SILENCE_S = 2.0


class Inspection:
    """Requests and reads about one store. For one thread; a context manager.

    All requests together wait about `wait_s` seconds for silent brokers. A read fails if no record arrives for the rest
    of that time. A read that reaches its end does not shorten the rest.

    `topics` must have the real partition counts. All methods raise `BrokerConnectionError` if a broker does not answer
    in time, and `MissingRightError` if this client has no read permission.
    """

    def __init__(
        self, bootstrap_servers: str, config: ClientConfig, topics: StoreTopics, wait_s: float = WAIT_S
    ) -> None:
        self.topics = topics
        self.admin = clients.admin(bootstrap_servers, config)
        self.principal = principal_of(config)
        # The rest of the seconds to wait.
        self._left_s = wait_s
        # By isolation level, each made at its first use.
        self._readers: dict[str, PartitionReader] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_raised: object) -> None:
        for reader in self._readers.values() if kind is None else ():
            # Closing waits for a broker that is down, so after an error the clients are left to end by themselves.
            reader.close(max(_MIN_BUDGET_S, min(_CLOSE_BUDGET_S, self._left_s)))

    def ask(self, request: Callable[[float], T], *topics: str) -> T:
        """Send a request, and repeat it while brokers are not ready: a new topic has no leader for a moment.

        The request gets its time limit in seconds. `topics` are for the error of a missing permission; by default they
        are the three logs.
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
        """Return the begin and end offsets of partitions, including records of open transactions."""
        topics = dict.fromkeys(topic for topic, _ in places)
        return self.ask(lambda limit_s: log_bounds(self.admin, list(places), limit_s), *topics) if places else {}

    def read_all(self, topic: str, last: int | None = None) -> Iterator[Message]:
        """Yield the committed records of a topic, or of the `last` offsets of each partition; none without a topic."""

        def partitions(limit_s: float) -> int:
            metadata = self.admin.list_topics(topic, timeout=limit_s).topics[topic]
            if metadata.error is not None and is_missing_right(metadata.error):
                raise KafkaException(metadata.error)
            return len(metadata.partitions)

        bounds = self.bounds([(topic, number) for number in range(self.ask(partitions, topic))])
        starts = {place: 0 if last is None else end - last for place, (_, end) in bounds.items()}
        return self.read(starts, bounds)

    def read(self, starts: Mapping[Place, int], bounds: Mapping[Place, tuple[int, int]]) -> Iterator[Message]:
        """Yield the committed records of partitions: from `starts`, or from the begin if that is later, to the end.

        It waits for open transactions as for brokers, and then leaves out the records behind them.
        """
        begins = {place: max(start, bounds[place][0]) for place, start in starts.items()}
        ends = {place: bounds[place][1] for place in starts}
        if all(begins[place] >= end for place, end in ends.items()):
            return
        reader = self.ask(lambda limit_s: self.reader("read_committed", limit_s), *(topic for topic, _ in starts))
        silence_s = max(_MIN_SILENCE_S, self._left_s)
        try:
            for records in reader.read(begins, ends, limit_s=_READ_BUDGET_S, silence_s=silence_s):
                yield from records
        except NotReadInTimeError as error:
            self._left_s = 0.0
            if reader.behind <= reader.exhausted:
                return
            raise BrokerConnectionError(
                f"the store {self.topics.prefix} at {self.admin.servers} was not read to its end: {error}; "
                "check that all brokers run, and try again"
            ) from error

    def reader(self, isolation: str, limit_s: float) -> PartitionReader:
        """Return the reader of an isolation level; for use in a request of `ask`: it raises `KafkaException`."""
        if isolation not in self._readers:
            reader = PartitionReader(
                self.admin.servers, self.admin.config, self.topics.coordinators, self._failed, isolation=isolation
            )
            self._readers[isolation] = reader
            # Without metadata the client takes a second for each new topic, as if a broker were silent.
            reader.consumer.list_topics(timeout=limit_s)
        return self._readers[isolation]

    def _failed(self, kind: ErrorKind, error: KafkaError, place: Place) -> None:
        """Raise a missing permission. The client recovers from other errors, or the time limit ends the read."""
        if kind in {ErrorKind.MISSING_RIGHT, ErrorKind.GROUP}:
            raise self._lacking(error, place[0])

    def _lacking(self, error: KafkaError, *topics: str) -> MissingRightError:
        """Return the error of a missing permission."""
        if concerns_a_group(error):
            rights = [group_right(self.topics.coordinators, Operation.DESCRIBE)]
        else:
            names = [name for name in topics if name] or [self.topics.half, self.topics.op, self.topics.done]
            rights = [topic_right(Operation.READ, name) for name in names]
        return MissingRightError(f"the store {self.topics.prefix} cannot be read", rights, self.principal)
