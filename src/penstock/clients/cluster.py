"""Where clients and the time come from: the seam between an engine and Kafka.

`Cluster` is the real one; `penstock.testing` has one in memory, whose clock stands until it is moved, and whose clients
have those methods of confluent-kafka's that penstock calls, with its types and errors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from penstock import clients
from penstock.clients.bounded_calls import BackgroundCall, Disposable, LeftBehind
from penstock.clients.factory import AdminClient
from penstock.clients.groups import committed_offsets, require_consumer_protocol
from penstock.clients.rights import Right, Rights, ask_rights, transactional_right
from penstock.clients.topics import (
    TopicIds,
    TopicSpec,
    ask_topic_ids,
    ensure_topics,
    log_ends,
    partition_counts,
    require_topics,
    topic_settings,
)
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.clients.transactional.settings import Pace
from penstock.clients.transactional.writer import TransactionalWriter
from penstock.options import ClientConfig, is_classic

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: Seconds that a broker may take to answer.
_ANSWER_S = 10.0
#: Seconds that it may take to tell topic ids. Consumers ask every 5 s: so `penstock explain` names a broker that is
#: away within 10 s.
TOPIC_IDS_S = 4.0
#: Milliseconds after which the client says that a broker owes an answer, and asks another one, before a question ends.
_UNANSWERED_MS = 8_000
#: Seconds that several questions in the background may take.
_BACKGROUND_S = 120.0

#: What an engine calls on clients is confluent-kafka's own.
ConsumerClient = Consumer
ProducerClient = Producer
RebalanceCallback = Callable[[Any, list[TopicPartition]], None]
DeliveryCallback = Callable[[KafkaError | None, Message], None]


class Clock(Protocol):
    """The time, as the engines read it."""

    def monotonic(self) -> float:
        """Return seconds that only rise; for every duration and timer."""

    def time(self) -> float:
        """Return seconds since the epoch; only for what is compared with times in records."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class Answer(Protocol[T_co]):
    """An answer that is on its way."""

    def answer(self) -> T_co | None:
        """Return what was answered; None as long as it is not there. Never waits."""

    def wait(self) -> T_co:
        """Return what was answered, waiting for it."""


class Cluster:
    """A Kafka cluster, as an engine sees it: clients, topics, and the time.

    Of librdkafka's keys, `config` has those that an admin client needs to reach the brokers. What asks brokers raises
    `BrokerConnectionError` where none answered, save where it says otherwise.
    """

    def __init__(self, bootstrap_servers: str, config: ClientConfig | None = None) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._config = config or {}
        # Asks for topic ids and ends; made at the first question. By one thread: who starts, then the poll thread.
        self._admin: AdminClient | None = None
        self._left = LeftBehind("questions in the background")
        self._pace = Pace()
        # Whether the brokers are known to take members of the protocol "consumer". As `_admin`.
        self._takes_protocol = False

    @property
    def clock(self) -> Clock:
        """The clock all engines on this cluster read: the operating system's."""
        return time

    def consumer(self, config: Mapping[str, Any]) -> ConsumerClient:
        """Make a consumer. `config` holds librdkafka's keys and the callback `on_commit`, without the addresses.

        `ConfigurationError` where the client refused a setting, or the brokers its protocol.
        """
        if not is_classic(config) and not self._takes_protocol:
            self._takes_protocol = require_consumer_protocol(self._bootstrap_servers, config)
        return clients.consumer(self._bootstrap_servers, config)

    def producer(self, config: Mapping[str, Any]) -> ProducerClient:
        """Make a producer. `config` holds librdkafka's keys, without the addresses; errors as `consumer`."""
        return clients.producer(self._bootstrap_servers, config)

    def transactional_writer(self, transactional_id: str, config: Mapping[str, Any]) -> TransactionalWriter:
        """Make a transactional producer; nothing is connected yet."""
        return TransactionalWriter(
            self._bootstrap_servers,
            config,
            transactional_id,
            ids_right=transactional_right(transactional_id.rpartition(".")[0] + "."),
            rights=MissingRights(config),
            pace=self._pace,
        )

    def disposable(self, name: str, left: LeftBehind) -> Disposable:
        """Make a thread for calls of clients that may never return."""
        return Disposable(name, left)

    def stable_offsets(self, group: str, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Return a group's committed offsets with their metadata, once no open transaction changes them.

        `KafkaException` where the coordinator does not answer.
        """
        return committed_offsets(self._bootstrap_servers, self._config, group, partitions, _ANSWER_S)

    def require_topics(self, topics: Iterable[str]) -> dict[str, int]:
        """Return how many partitions each topic has; raise `TopicNotFoundError` where one is absent.

        `MissingRightError` where the clients may not read one and so cannot see it.
        """
        return require_topics(self._new_admin(), topics)

    def topics(self) -> dict[str, int]:
        """Return how many partitions each topic has that the clients may see."""
        return partition_counts(self._new_admin())

    def ensure_topics(self, specs: Iterable[TopicSpec]) -> None:
        """Create the topics that are absent; `MissingRightError` where the clients may not."""
        ensure_topics(self._new_admin(), specs)

    def message_limits(self, topics: Iterable[str]) -> dict[str, int]:
        """Return how many bytes a message of each topic may have; without those that are not known."""
        found, _ = topic_settings(self._new_admin(), topics)
        return {topic: int(limit) for topic, each in found.items() if (limit := each.get("max.message.bytes"))}

    def ask_topic_ids(self, topics: Iterable[str]) -> Answer[TopicIds]:
        """Ask which topics there are, as `in_background`."""
        admin, names = self._lasting_admin(), list(topics)
        return self.in_background("the ids of topics", lambda: ask_topic_ids(admin, names, TOPIC_IDS_S))

    def ask_readable_ends(self, places: Sequence[tuple[str, int]]) -> Answer[Mapping[tuple[str, int], int]]:
        """Ask where partitions end for readers of committed messages, as `in_background`."""
        admin = self._lasting_admin()
        return self.in_background("the readable ends of logs", lambda: log_ends(admin, places, _ANSWER_S))

    def ask_rights(self, needed: Iterable[Right]) -> Answer[Rights]:
        """Ask which of these rights the clients lack, as `in_background`."""
        # By a client that is dropped with the answer, or without it: see `clients.groups`.
        admin, rights = self._new_admin(), list(needed)
        return self.in_background("the rights of this client", lambda: ask_rights(admin, rights, _ANSWER_S))

    def in_background(self, what: str, work: Callable[[], T]) -> Answer[T]:
        """Do something that waits for brokers, without waiting for it; the answer raises what it raised.

        `NotAnsweredError` where it takes too long.
        """
        return BackgroundCall(what, work, _BACKGROUND_S, self._left)

    def _new_admin(self) -> AdminClient:
        return clients.admin(self._bootstrap_servers, self._config)

    def _lasting_admin(self) -> AdminClient:
        if self._admin is None:
            config = {"socket.timeout.ms": _UNANSWERED_MS, **self._config}
            self._admin = clients.admin(self._bootstrap_servers, config)
        return self._admin
