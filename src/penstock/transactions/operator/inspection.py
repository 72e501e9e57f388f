"""What lies in the topics that every store has in Kafka, read within a few seconds where a broker is away.

Nothing is changed by it. `stores.kafka.inspection` tells what is pending where the store itself is in Kafka.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from penstock import clients
from penstock.clients.answers import asked_until_ready
from penstock.clients.kafka_errors import ErrorKind, concerns_a_group, is_missing_right, reason
from penstock.clients.reading import NotReadInTimeError, PartitionReader, Place
from penstock.clients.rights import MissingRightError, Operation, group_right, principal_of, topic_right
from penstock.clients.topics import ask_topic_ids, log_bounds
from penstock.clients.transactional.missing_rights import is_group_forbidden
from penstock.errors import BrokerConnectionError, MessageFormatError
from penstock.options import ClientConfig
from penstock.transactions.acked_producer import wire_headers
from penstock.transactions.wire.half import Half, decode_discarded
from penstock.transactions.wire.topics import StoreTopics

T = TypeVar("T")

#: Seconds that all questions together wait for brokers, by default; what is read steadily costs nothing of them. And
#: the least that a question has.
WAIT_S = 15.0
_MIN_BUDGET_S = 0.3
#: Seconds for which closing a client may take: it has nothing left to say.
_CLOSE_BUDGET_S = 1.0
_READ_BUDGET_S = 60.0


@dataclass(frozen=True, slots=True)
class Discarded:
    """A record of the discarded topic."""

    partition: int
    offset: int
    half: Half
    reason: str
    check_count: int
    #: When it came there, in milliseconds since the epoch.
    at_ms: int
    #: Who brought it back since; empty: it waits here.
    resumed_by: str = ""


class Patience:
    """The seconds that are left for questions that brokers do not answer at once, all together. Used by one thread."""

    def __init__(self, wait_s: float) -> None:
        self.left_s = wait_s
        self._since: float | None = None
        self._idle_s = 0.0

    @property
    def limit_s(self) -> float:
        """Seconds that the next question may take, or the rest of the one that is asked."""
        waited_s = 0.0 if self._since is None else time.monotonic() - self._since
        return max(_MIN_BUDGET_S, self.left_s - waited_s)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Take what the block waits from what is left."""
        self._since = begun = time.monotonic()
        try:
            yield
        finally:
            self._since = None
            self.left_s = max(0.0, self.left_s - (time.monotonic() - begun))

    def is_out_after(self, idle_s: float) -> bool:
        """Take from what is left what a reader's silence has grown by; tell whether it has lasted for too long."""
        self.left_s = max(0.0, self.left_s - max(0.0, idle_s - self._idle_s))
        self._idle_s = idle_s
        return not self.left_s and idle_s > _MIN_BUDGET_S


class Inspection:
    """Asks and reads about a store whose topics have their real counts. Used by one thread.

    As a context manager it keeps its clients from one question to the next, else each question makes new ones.

    What reads raises `BrokerConnectionError` where a broker does not answer, or not in time, and `MissingRightError`
    where this client may not read.
    """

    def __init__(
        self, bootstrap_servers: str, config: ClientConfig, topics: StoreTopics, patience: Patience | None = None
    ) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._topics = topics
        self._principal = principal_of(config)
        self._reader = partial(PartitionReader, bootstrap_servers, config, topics.coordinators)
        self._admin = clients.admin(bootstrap_servers, config)
        self._patience = patience or Patience(WAIT_S)
        # The clients that are kept, by isolation; None: each question makes its own.
        self._kept: dict[str, PartitionReader] | None = None

    def __enter__(self) -> Self:
        self._kept = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        kept, self._kept = self._kept or {}, None
        for reader in kept.values() if kind is None else ():
            # Where a broker is away, closing waits for it as well: such clients end on threads of their own.
            with self._patience.waiting():
                reader.close(min(_CLOSE_BUDGET_S, self._patience.limit_s))

    def discarded(self) -> list[Discarded]:
        """Return what lies in the discarded topic, oldest first."""
        numbers = dict.fromkeys(range(self.partitions_of(self._topics.discarded)), 0)
        found = [_discarded(message) for message in self.read(self._topics.discarded, numbers)]
        return sorted(filter(None, found), key=lambda record: record.at_ms)

    def end(self, topic: str, number: int) -> int:
        """Return where a partition ends, records of open transactions included."""
        return self._bounds(topic, [number])[topic, number][1]

    def partitions_of(self, topic: str) -> int:
        """Return how many partitions a topic has; 0 where there is none."""

        def count() -> int:
            found = self._admin.list_topics(topic, timeout=self._patience.limit_s).topics[topic]
            if found.error is not None and is_missing_right(found.error):
                raise KafkaException(found.error)
            return len(found.partitions)

        return self.ask(count, topic)

    def ids_and_bounds(
        self, logs: Mapping[str, str], places: list[Place]
    ) -> tuple[dict[str, str], dict[Place, tuple[int, int]]]:
        """Return the topic ids of logs, and the bounds of partitions."""
        ids = ask_topic_ids(self._admin, logs.values(), self._patience.limit_s).ids
        bounds = log_bounds(self._admin, places, self._patience.limit_s)
        return {log: ids[topic] for log, topic in logs.items() if topic in ids}, bounds

    def committed(self, places: list[TopicPartition]) -> dict[Place, TopicPartition]:
        """Return the positions that coordinators committed.

        A reader of uncommitted records gets them at once, others wait for the transactions that write them.
        """
        with self._client("read_uncommitted") as reader:
            try:
                found = reader.consumer.committed(places, self._patience.limit_s)
            except KafkaException:
                if is_group_forbidden(reader.consumer):
                    raise KafkaException(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)) from None
                raise
        for place in found:
            if place.error is not None and is_missing_right(place.error):
                raise KafkaException(place.error)
        return {(place.topic, place.partition): place for place in found}

    @contextmanager
    def _client(self, isolation: str) -> Iterator[PartitionReader]:
        """Yield a client of an isolation: the one that is kept, or one for this question alone."""
        kept = self._kept
        if kept is not None and isolation in kept:
            yield kept[isolation]
            return
        reader = self._reader(self._fail, isolation=isolation)
        if kept is not None:
            kept[isolation] = reader
        try:
            yield reader
        finally:
            if kept is None:
                reader.close(_CLOSE_BUDGET_S)

    def _fail(self, kind: ErrorKind, error: KafkaError, place: Place) -> None:
        """Raise what ends reading; the client recovers from all else by itself, or the time limit ends it."""
        if kind in {ErrorKind.MISSING_RIGHT, ErrorKind.GROUP}:
            raise self._lacking(error, place[0])

    def _bounds(self, topic: str, numbers: Iterable[int]) -> dict[Place, tuple[int, int]]:
        places = [(topic, number) for number in numbers]
        return self.ask(lambda: log_bounds(self._admin, places, self._patience.limit_s), topic) if places else {}

    def ask(self, question: Callable[[], T], *topics: str) -> T:
        """Ask brokers, and again where they are not ready: a topic that is new has no leader for a moment.

        Where it is about no topics, it is about the three logs.
        """
        with self._patience.waiting():
            try:
                return asked_until_ready(question, self._patience.left_s)
            except KafkaException as error:
                if is_missing_right(error):
                    raise self._lacking(error.args[0], *topics) from error
                raise self._gone(error) from error

    def read(self, topic: str, starts: Mapping[int, int]) -> Iterator[Message]:
        """Yield the committed records of partitions, each from its start to the end it has now; as `read_places`."""
        return self.read_places(
            {(topic, number): start for number, start in starts.items()}, self._bounds(topic, starts)
        )

    def read_places(self, starts: Mapping[Place, int], bounds: Mapping[Place, tuple[int, int]]) -> Iterator[Message]:
        """Yield the committed records of partitions, each from its start to the end in `bounds`.

        Open transactions are waited for as brokers are; then what stands behind them is left out.
        """
        begins = {place: max(start, bounds[place][0]) for place, start in starts.items()}
        ends = {place: bounds[place][1] for place in starts}
        if all(begins[place] >= end for place, end in ends.items()):
            return
        with self._client("read_committed") as reader:
            # A topic that the client has not heard of takes it a second, as if a broker were silent.
            self.ask(lambda: reader.consumer.list_topics(timeout=self._patience.limit_s))

            def step(_behind: set[Place], idle_s: float) -> None:
                if self._patience.is_out_after(idle_s):
                    raise reader.late(idle_s)

            try:
                for records in reader.read(begins, ends, limit_s=_READ_BUDGET_S, step=step):
                    yield from records
            except NotReadInTimeError as error:
                if reader.behind <= reader.exhausted:
                    return
                raise BrokerConnectionError(
                    f"the store {self._topics.prefix} at {self._bootstrap_servers} was not read to its end: {error}; "
                    "check that all brokers run, and try again"
                ) from error

    def _lacking(self, error: KafkaError, *topics: str) -> MissingRightError:
        """Return the error of a client that may not ask, or not read."""
        if concerns_a_group(error):
            rights = [group_right(self._topics.coordinators, Operation.DESCRIBE)]
        else:
            names = [name for name in topics if name] or [self._topics.half, self._topics.op, self._topics.done]
            rights = [topic_right(Operation.READ, name) for name in names]
        return MissingRightError(f"the store {self._topics.prefix} cannot be read", rights, self._principal)

    def _gone(self, error: KafkaException) -> BrokerConnectionError:
        return BrokerConnectionError(
            f"the store {self._topics.prefix} at {self._bootstrap_servers} cannot be read: {reason(error)}; "
            "check that all brokers run"
        )


def _discarded(message: Message) -> Discarded | None:
    """Read a record of the discarded topic; None where it is none."""
    try:
        found = decode_discarded(message.key(), message.value(), wire_headers(message))
    except MessageFormatError:
        return None
    return Discarded(message.partition() or 0, message.offset() or 0, *found, message.timestamp()[1])
