"""The seam between an engine and Kafka: it makes clients, asks brokers, and gives the time.

`Cluster` is the real one. `penstock.testing` has one in memory: its clock moves only when a test moves it, and its
clients have the methods of confluent-kafka that penstock calls, with the same types and errors.
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
#: Seconds that a broker may take to return topic ids. Consumers ask every 5 s, so `penstock explain` reports an
#: unreachable broker within 10 s.
TOPIC_IDS_S = 4.0
#: Milliseconds after which the client logs an unanswered request and asks another broker. Shorter than a question.
_UNANSWERED_MS = 8_000
#: Seconds that background work may take.
_BACKGROUND_S = 120.0

#: Engines use confluent-kafka's own client interface.
ConsumerClient = Consumer
ProducerClient = Producer
RebalanceCallback = Callable[[Any, list[TopicPartition]], None]
DeliveryCallback = Callable[[KafkaError | None, Message], None]


class Clock(Protocol):
    """The time source of the engines."""

    def monotonic(self) -> float:
        """Return seconds that never go back, for durations and timers."""

    def time(self) -> float:
        """Return seconds since the epoch, only for comparison with the times of records."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class Answer(Protocol[T_co]):
    """An answer that may not have arrived yet."""

    def answer(self) -> T_co | None:
        """Return the answer, or None if it has not arrived. Never waits."""

    def wait(self) -> T_co:
        """Wait for the answer and return it."""


class Cluster:
    """A Kafka cluster, as an engine sees it: clients, topics, and the time.

    `config` has the librdkafka keys that an admin client needs to reach the brokers. Methods that ask brokers raise
    `BrokerConnectionError` if none answers, except where another error is documented.
    """

    def __init__(self, bootstrap_servers: str, config: ClientConfig | None = None) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._config = config or {}
        # Asks for topic ids and ends; made at the first question. Used by the starting thread, then the poll thread.
        self._admin: AdminClient | None = None
        self._left = LeftBehind("questions in the background")
        self._pace = Pace()
        # Whether the brokers are known to accept members of the protocol "consumer". Used as `_admin` is.
        self._takes_protocol = False

    @property
    def clock(self) -> Clock:
        """The clock all engines on this cluster read: the operating system's."""
        return time

    def consumer(self, config: Mapping[str, Any]) -> ConsumerClient:
        """Make a consumer. `config` holds librdkafka's keys and the callback `on_commit`, without the addresses.

        Raises `ConfigurationError` if the client refuses a setting, or the brokers do not support its protocol.
        """
        if not is_classic(config) and not self._takes_protocol:
            self._takes_protocol = require_consumer_protocol(self._bootstrap_servers, config)
        return clients.consumer(self._bootstrap_servers, config)

    def producer(self, config: Mapping[str, Any]) -> ProducerClient:
        """Make a producer. `config` holds librdkafka's keys, without the addresses; errors as `consumer`."""
        return clients.producer(self._bootstrap_servers, config)

    def transactional_writer(self, transactional_id: str, config: Mapping[str, Any]) -> TransactionalWriter:
        """Make a transactional producer. It does not connect yet."""
        return TransactionalWriter(
            self._bootstrap_servers,
            config,
            transactional_id,
            ids_right=transactional_right(transactional_id.rpartition(".")[0] + "."),
            rights=MissingRights(config),
            pace=self._pace,
        )

    def disposable(self, name: str, left: LeftBehind) -> Disposable:
        """Make a thread for client calls that may never return."""
        return Disposable(name, left)

    def stable_offsets(self, group: str, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Wait until no open transaction changes a group's committed offsets, and return them with their metadata.

        Raises `KafkaException` if the coordinator does not answer.
        """
        return committed_offsets(self._bootstrap_servers, self._config, group, partitions, _ANSWER_S)

    def require_topics(self, topics: Iterable[str]) -> dict[str, int]:
        """Return the number of partitions of each topic.

        Raises `TopicNotFoundError` if one does not exist, `MissingRightError` if one is hidden for want of permission.
        """
        return require_topics(self._new_admin(), topics)

    def topics(self) -> dict[str, int]:
        """Return the number of partitions of each topic that the clients may see."""
        return partition_counts(self._new_admin())

    def ensure_topics(self, specs: Iterable[TopicSpec]) -> None:
        """Create the topics that do not exist; `MissingRightError` if the clients lack the permission."""
        ensure_topics(self._new_admin(), specs)

    def message_limits(self, topics: Iterable[str]) -> dict[str, int]:
        """Return the maximum message size of each topic, in bytes. Topics with an unknown limit are left out."""
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
        # A client of its own, dropped after the question: see `clients.groups`.
        admin, rights = self._new_admin(), list(needed)
        return self.in_background("the rights of this client", lambda: ask_rights(admin, rights, _ANSWER_S))

    def in_background(self, what: str, work: Callable[[], T]) -> Answer[T]:
        """Run `work`, which waits for brokers, on a background thread. The answer raises what `work` raised.

        The answer raises `NotAnsweredError` if `work` takes too long.
        """
        return BackgroundCall(what, work, _BACKGROUND_S, self._left)

    def _new_admin(self) -> AdminClient:
        return clients.admin(self._bootstrap_servers, self._config)

    def _lasting_admin(self) -> AdminClient:
        if self._admin is None:
            config = {"socket.timeout.ms": _UNANSWERED_MS, **self._config}
            self._admin = clients.admin(self._bootstrap_servers, config)
        return self._admin
