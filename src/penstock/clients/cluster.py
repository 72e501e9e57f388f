"""Where clients and the time come from: the seam between an engine and Kafka.

`KafkaCluster` is the real one; `penstock.testing` has one in memory, whose clock stands until it is moved. The clients'
methods are those of confluent-kafka that penstock calls, with its types and errors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from confluent_kafka import TopicPartition

from penstock import clients
from penstock.clients.bounded_calls import BackgroundCall, Disposable, LeftBehind
from penstock.clients.groups import committed_offsets, require_consumer_protocol
from penstock.clients.rights import Resource, Right, Rights, ask_rights, principal_of, transactional_right
from penstock.clients.topics import (
    TopicIds,
    TopicSpec,
    ask_topic_ids,
    ensure_topics,
    log_ends,
    message_limits,
    partition_counts,
    require_topics,
)
from penstock.clients.transactional.messages import Pace
from penstock.options import ClientConfig, is_classic

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message
    from confluent_kafka.admin import AdminClient

    from penstock.clients.transactional.writer import TransactionalWriter

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: Seconds that a broker may take to tell topic ids.
_ANSWER_S = 10.0
#: Milliseconds after which the client says that a broker owes an answer, and asks another one, before a question ends.
_UNANSWERED_MS = 8_000
#: Seconds that several questions in the background may take.
_BACKGROUND_S = 120.0

RebalanceCallback = Callable[[Any, list[TopicPartition]], None]
DeliveryCallback = Callable[["KafkaError | None", "Message"], None]


class Clock(Protocol):
    """The time, as the engines read it."""

    def monotonic(self) -> float:
        """Return seconds that only rise; for every duration and timer."""

    def time(self) -> float:
        """Return seconds since the epoch; only for what is compared with times in records."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class ConsumerClient(Protocol):
    """What an engine calls on a consumer: confluent-kafka's `Consumer`, on one thread."""

    def subscribe(
        self,
        topics: list[str],
        on_assign: RebalanceCallback = ...,
        on_revoke: RebalanceCallback = ...,
        on_lost: RebalanceCallback = ...,
    ) -> None:
        """Join the group; the callbacks are called from within `poll`, `consume` and `close`."""

    def poll(self, timeout: float = ...) -> Message | None:
        """Return the next message or error, or None after `timeout` seconds."""

    def consumer_group_metadata(self) -> object:
        """Return the group's metadata, by which a transaction's positions are fenced."""

    def memberid(self) -> str | None:
        """Return the id that the group gave this member; none, or an empty text, where it is not one."""

    def consume(self, num_messages: int = ..., timeout: float = ...) -> list[Message]:
        """Return up to so many messages; with a timeout of 0, what is there."""

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> list[TopicPartition] | None:
        """Commit offsets with their metadata; the answer to an asynchronous one comes to `on_commit`."""

    def committed(self, partitions: list[TopicPartition], timeout: float = ...) -> list[TopicPartition]:
        """Return the group's offsets with their metadata; an offset of -1001 where there is none."""

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Return the next offset to hand over; it lies past markers and aborted ranges."""

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float = ..., cached: bool = ...
    ) -> tuple[int, int] | None:
        """Return the first offset of the log and the one after its last."""

    def pause(self, partitions: list[TopicPartition]) -> None:
        """Hand over nothing of these partitions, and forget what was fetched of them."""

    def resume(self, partitions: list[TopicPartition]) -> None:
        """Hand over again, from the position."""

    def seek(self, partition: TopicPartition) -> None:
        """Go on from an offset, or a logical one, of an assigned partition; what was fetched of it is forgotten."""

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        """Begin with these partitions, at their offsets."""

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        """Stop with these partitions."""

    def unsubscribe(self) -> None:
        """Leave the group, for there is no topic to consume; a callback revokes what is assigned."""

    def close(self) -> None:
        """Revoke what is assigned and leave the group."""


class ProducerClient(Protocol):
    """What an engine calls on a producer: confluent-kafka's `Producer`."""

    def produce(
        self,
        topic: str,
        value: bytes | None = ...,
        key: bytes | None = ...,
        *,
        partition: int = ...,
        headers: Sequence[tuple[str, str | bytes | None]] = ...,
        on_delivery: DeliveryCallback = ...,
    ) -> None:
        """Queue a message, of partition -1 for the partitioner's; `BufferError` where the queue is full."""

    def poll(self, timeout: float = ...) -> int:
        """Call the delivery callbacks that are due."""

    def flush(self, timeout: float = ...) -> int:
        """Wait for deliveries; return how many are still out."""

    def purge(self) -> None:
        """Give up what is queued and on its way; the delivery callbacks get an error."""


class Answer(Protocol[T_co]):
    """An answer that is on its way."""

    def answer(self) -> T_co | None:
        """Return what was answered; None as long as it is not there. Never waits."""

    def wait(self) -> T_co:
        """Return what was answered, waiting for it."""


class Cluster(Protocol):
    """A Kafka cluster, as an engine sees it: clients, topics, and the time."""

    @property
    def principal(self) -> str:
        """Whom the brokers take the clients for, as `User:name`."""

    @property
    def clock(self) -> Clock:
        """The clock all engines on this cluster read."""

    def consumer(self, config: Mapping[str, Any]) -> ConsumerClient:
        """Make a consumer. `config` holds librdkafka's keys and the callback `on_commit`, without the addresses."""

    def producer(self, config: Mapping[str, Any]) -> ProducerClient:
        """Make a producer. `config` holds librdkafka's keys, without the addresses."""

    def transactional_writer(self, transactional_id: str, config: Mapping[str, Any]) -> TransactionalWriter:
        """Make a transactional producer."""

    def disposable(self, name: str, left: LeftBehind) -> Disposable:
        """Make a thread for calls of clients that may never return."""

    def stable_offsets(self, group: str, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Return a group's committed offsets with their metadata, once no open transaction changes them."""

    def require_topics(self, topics: Iterable[str]) -> dict[str, int]:
        """Return how many partitions each topic has; raise `TopicNotFoundError` where one is absent.

        `MissingRightError` where the clients may not read one and so cannot see it.
        """

    def topics(self) -> dict[str, int]:
        """Return how many partitions each topic has that the clients may see."""

    def ensure_topics(self, specs: Iterable[TopicSpec]) -> None:
        """Create the topics that are absent; `MissingRightError` where the clients may not."""

    def message_limits(self, topics: Iterable[str]) -> dict[str, int]:
        """Return how many bytes a message of each topic may have; without those that are not known."""

    def ask_topic_ids(self, topics: Iterable[str]) -> Answer[TopicIds]:
        """Ask which topics there are, without waiting for the answer; `KafkaException` where that cannot be asked."""

    def ask_readable_ends(self, places: Sequence[tuple[str, int]]) -> Answer[Mapping[tuple[str, int], int]]:
        """Ask where partitions end for readers of committed messages, as `in_background`."""

    def ask_rights(self, needed: Iterable[Right]) -> Answer[Rights]:
        """Ask which of these rights the clients lack, as `ask_topic_ids`."""

    def in_background(self, what: str, work: Callable[[], T]) -> Answer[T]:
        """Do something that waits for brokers, without waiting for it; the answer raises what it raised.

        `NotAnsweredError` where it takes too long.
        """


class KafkaCluster:
    """A real cluster. Of librdkafka's keys, `config` has those that an admin client needs to reach the brokers."""

    #: The operating system's clocks: the module has the three functions of `Clock`.
    clock: Clock = time

    def __init__(self, bootstrap_servers: str, config: ClientConfig | None = None) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._config = config or {}
        # Asks for topic ids and rights; made at the first question. By one thread: who starts, then the poll thread.
        self._admin: AdminClient | None = None
        self._left = LeftBehind("questions in the background")
        self._pace = Pace()
        # Whether the brokers are known to take members of the protocol "consumer". As `_admin`.
        self._takes_protocol = False

    @property
    def principal(self) -> str:
        """Whom the brokers take the clients for, as `User:name`, as far as their configuration tells."""
        return principal_of(self._config)

    def consumer(self, config: Mapping[str, Any]) -> ConsumerClient:
        """Make a consumer; `ConfigurationError` where the client refused a setting, or the brokers its protocol."""
        if not is_classic(config) and not self._takes_protocol:
            self._takes_protocol = require_consumer_protocol(self._bootstrap_servers, config)
        return clients.consumer(self._bootstrap_servers, config)  # type: ignore[return-value] # overloads per argument

    def producer(self, config: Mapping[str, Any]) -> ProducerClient:
        """Make a producer; `ConfigurationError` where the client refused a setting."""
        return clients.producer(self._bootstrap_servers, config)  # type: ignore[return-value] # takes more than is used

    def transactional_writer(self, transactional_id: str, config: Mapping[str, Any]) -> TransactionalWriter:
        """As `Cluster` says; nothing is connected yet."""
        from penstock.clients.transactional.missing_rights import MissingRights
        from penstock.clients.transactional.writer import TransactionalWriter

        return TransactionalWriter(
            self._bootstrap_servers,
            config,
            transactional_id,
            ids_right=transactional_right(transactional_id.rpartition(".")[0] + "."),
            rights=MissingRights(config),
            pace=self._pace,
        )

    def disposable(self, name: str, left: LeftBehind) -> Disposable:
        """As `Cluster` says."""
        return Disposable(name, left)

    def stable_offsets(self, group: str, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """As `Cluster` says; `KafkaException` where the coordinator does not answer."""
        return committed_offsets(self._bootstrap_servers, self._config, group, partitions, _ANSWER_S)

    def require_topics(self, topics: Iterable[str]) -> dict[str, int]:
        """As `Cluster` says; `BrokerConnectionError` where no broker answered."""
        admin = clients.admin(self._bootstrap_servers, self._config)
        return require_topics(admin, self._bootstrap_servers, topics, principal=self.principal)

    def topics(self) -> dict[str, int]:
        """As `Cluster` says; `BrokerConnectionError` where no broker answered."""
        return partition_counts(clients.admin(self._bootstrap_servers, self._config), self._bootstrap_servers)

    def ensure_topics(self, specs: Iterable[TopicSpec]) -> None:
        """As `Cluster` says; `BrokerConnectionError` where no broker answered."""
        admin = clients.admin(self._bootstrap_servers, self._config)
        ensure_topics(admin, self._bootstrap_servers, specs, principal=self.principal)

    def message_limits(self, topics: Iterable[str]) -> dict[str, int]:
        """As `Cluster` says."""
        return message_limits(clients.admin(self._bootstrap_servers, self._config), topics)

    def ask_topic_ids(self, topics: Iterable[str]) -> Answer[TopicIds]:
        """As `Cluster` says."""
        return ask_topic_ids(self._lasting_admin(), topics, _ANSWER_S)

    def ask_readable_ends(self, places: Sequence[tuple[str, int]]) -> Answer[Mapping[tuple[str, int], int]]:
        """As `Cluster` says."""
        admin = self._lasting_admin()
        return self.in_background("the readable ends of logs", lambda: log_ends(admin, places, _ANSWER_S))

    def ask_rights(self, needed: Iterable[Right]) -> Answer[Rights]:
        """As `Cluster` says."""
        rights = list(needed)
        if not any(right.resource is Resource.GROUP for right in rights):
            return ask_rights(self._lasting_admin(), rights, _ANSWER_S)

        def ask() -> Rights:
            # By a client that is dropped with the answer, or without it: see `clients.groups`.
            return ask_rights(clients.admin(self._bootstrap_servers, self._config), rights, _ANSWER_S).wait()

        return self.in_background("the rights of this client", ask)

    def in_background(self, what: str, work: Callable[[], T]) -> Answer[T]:
        """As `Cluster` says."""
        return BackgroundCall(what, work, _BACKGROUND_S, self._left)

    def _lasting_admin(self) -> AdminClient:
        if self._admin is None:
            config = {"socket.timeout.ms": _UNANSWERED_MS, **self._config}
            self._admin = clients.admin(self._bootstrap_servers, config)
        return self._admin
