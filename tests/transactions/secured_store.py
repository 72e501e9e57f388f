"""What the tests of rights share: the fewest rights for each role of a store, and stores on the secured broker."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError

from penstock import clients
from penstock.devbroker import DevBroker, User
from penstock.transactions import Coordinator, CoordinatorStatistics, TransactionalProducer
from penstock.transactions.model import HalfMessage, PendingTransaction, TransactionState
from penstock.transactions.stores.file import FileStore
from penstock.transactions.stores.sql import SqlStore
from penstock.transactions.wire.topics import StoreTopics, open_topics
from rights import Right, give, on_group, on_topic, on_transactional_id
from waiting import wait_until

#: Seconds within which a missing right must be said; a busy machine gets more to show the rest.
TOLD_S = 10
ANSWER_S = 60.0

NewUser = Callable[..., User]
NewTopic = Callable[..., str]


def coordinator_rights(topics: StoreTopics, *targets: str) -> list[Right]:
    """Return what a coordinator of a store in Kafka needs, whose topics exist."""
    return [
        *on_topic(topics.half, "read", "delete", "describe_configs"),
        *on_topic(topics.op, "read", "write", "delete", "describe_configs"),
        *on_topic(topics.done, "read", "write", "delete", "describe_configs"),
        *on_topic(topics.check, "write"),
        *on_topic(topics.discarded, "read", "write"),
        *on_topic(topics.status, "write"),
        *on_group(topics.coordinators, "read"),
        *on_group(topics.checkers(""), "describe", prefix=True),
        *on_transactional_id(f"{topics.coordinators}.", "write", prefix=True),
        *(right for target in targets for right in on_topic(target, "write")),
    ]


def producer_rights(topics: StoreTopics, *targets: str) -> list[Right]:
    """Return what a producer on a store in Kafka needs that answers no checks and does not wait for publication."""
    return [
        *on_topic(topics.half, "write"),
        *on_topic(topics.op, "write"),
        *(right for topic in (topics.done, topics.check, topics.discarded) for right in on_topic(topic, "describe")),
        *(right for target in targets for right in on_topic(target, "describe")),
    ]


def checker_rights(topics: StoreTopics, group: str) -> list[Right]:
    """Return what it needs more to answer checks."""
    return [*on_topic(topics.check, "read"), *on_group(topics.checkers(group), "read")]


def reader_rights(topics: StoreTopics) -> list[Right]:
    """Return what an operator needs who only looks."""
    logs = (topics.half, topics.op, topics.done, topics.discarded, topics.status, topics.audit)
    return [
        *(right for topic in logs for right in on_topic(topic, "read")),
        *on_group(topics.coordinators, "describe"),
    ]


def decider_rights(topics: StoreTopics) -> list[Right]:
    """Return what an operator needs more who decides; for `resume` WRITE on half, too."""
    return [*on_topic(topics.audit, "write"), *on_topic(topics.op, "write")]


def relay_rights(prefix: str, kind: str, *targets: str) -> list[Right]:
    """Return what the coordinator of a store that is not in Kafka needs, whose topics it makes itself."""
    own = f"{prefix}.{kind}"
    return [
        *on_topic(own, "create", "read", "write", "delete", prefix=True),
        *on_topic(f"{prefix}.discarded", "create", "write"),
        *on_transactional_id(own, "write", prefix=True),
        *(right for target in targets for right in on_topic(target, "write")),
    ]


class SecuredStore:
    """A store of one kind on the secured broker, with a coordinator that may do no more than it needs."""

    kind = ""

    def __init__(self, broker: DevBroker, user: User, prefix: str) -> None:
        self.broker, self.user, self.prefix = broker, user, prefix
        self.topics = StoreTopics(prefix)
        self.open = contextlib.ExitStack()

    def send(self, topic: str, key: bytes, value: bytes) -> str:
        """Send a message whose local transaction commits; return its id."""
        return self.producer.send(topic, key=key, value=value).transaction_id

    @property
    def producer(self) -> TransactionalProducer:
        raise NotImplementedError

    def statistics(self) -> CoordinatorStatistics:
        raise NotImplementedError

    def pending(self) -> Sequence[PendingTransaction]:
        raise NotImplementedError


class KafkaSecured(SecuredStore):
    """The store in Kafka."""

    kind = "kafka"

    def __init__(self, broker: DevBroker, user: User, prefix: str, *targets: str) -> None:
        super().__init__(broker, user, prefix)
        servers = broker.bootstrap_servers
        self.topics = open_topics(clients.admin(servers, broker.admin_config), servers, prefix, 1)
        give(broker, user, coordinator_rights(self.topics, *targets))
        self.target = targets[0] if targets else ""
        self.coordinator = self.made_coordinator()
        self._producer = self.made_producer(broker.admin_config)
        self.open.enter_context(self._producer)
        self.open.enter_context(self.coordinator)

    def made_coordinator(self) -> Coordinator:
        """Return a coordinator with the rights of the store's user, not started."""
        return self.coordinator_of(self.broker, self.prefix, self.user.config)

    @staticmethod
    def coordinator_of(broker: DevBroker, prefix: str, config: Any) -> Coordinator:
        return Coordinator(
            bootstrap_servers=broker.bootstrap_servers,
            prefix=prefix,
            config=config,
            transaction_timeout=0.6,
            check_interval=0.4,
        )

    def made_producer(
        self, config: Any, check: Callable[[HalfMessage], TransactionState] | None = None, **more: Any
    ) -> TransactionalProducer:
        servers, prefix = self.broker.bootstrap_servers, self.prefix
        return TransactionalProducer(
            "orders", bootstrap_servers=servers, prefix=prefix, config=config, check=check, **more
        )

    @property
    def producer(self) -> TransactionalProducer:
        return self._producer

    def statistics(self) -> CoordinatorStatistics:
        return self.coordinator.statistics()

    def pending(self) -> Sequence[PendingTransaction]:
        from penstock.transactions.operator.kafka_operator import KafkaAdministration

        with KafkaAdministration(self.broker.bootstrap_servers, self.prefix, self.broker.admin_config) as seen:
            return seen.pending()


class RelaySecured(SecuredStore):
    """A store in a database or in files."""

    def __init__(
        self,
        broker: DevBroker,
        user: User,
        prefix: str,
        where: str | Path,
        *targets: str,
        rights: Sequence[Right] | None = None,
        started: bool = True,
    ) -> None:
        super().__init__(broker, user, prefix)
        self._where = where
        self.kind = "file" if isinstance(where, Path) else "sql"
        needed = relay_rights(prefix, "file." if self.kind == "file" else "sql-", *targets)
        give(broker, user, needed if rights is None else rights)
        self.store: SqlStore | FileStore
        self.coordinator: Coordinator
        self._producer: TransactionalProducer
        self.renew()
        if started:
            self.open.enter_context(self._producer)
            self.coordinator.start()
            self.open.callback(self.coordinator.stop)

    def renew(self) -> None:
        """Make the objects of a store anew, as a new process would; they are not started."""
        servers, config = self.broker.bootstrap_servers, self.user.config
        if isinstance(self._where, Path):
            self.store = FileStore(self._where, bootstrap_servers=servers, prefix=self.prefix, config=config)
        else:
            self.store = SqlStore(self._where, bootstrap_servers=servers, prefix=self.prefix, config=config, shards=1)
        self.coordinator = Coordinator(store=self.store, transaction_timeout=600.0)
        self._producer = TransactionalProducer("orders", store=self.store)

    @property
    def producer(self) -> TransactionalProducer:
        return self._producer

    def statistics(self) -> CoordinatorStatistics:
        return self.coordinator.statistics()

    def pending(self) -> Sequence[PendingTransaction]:
        return self.store.administration().pending()


def told(store: SecuredStore, part: str) -> str:
    """Wait until a coordinator tells of a missing right; return the sentence, which names it and what gives it."""

    def found() -> str:
        return next((one for one in store.statistics().missing_rights if part in one), "")

    begun = time.monotonic()
    text = wait_until(found, ANSWER_S)
    assert time.monotonic() - begun < 3 * TOLD_S
    assert f"User:{store.user.name} lacks the right" in text
    assert "kafka-acls.sh" in text
    return text


def committed(broker: DevBroker, topic: str) -> dict[bytes | None, list[bytes | None]]:
    """Return the values that a reader of committed records sees in a topic with one partition, by key, in order."""
    found: dict[bytes | None, list[bytes | None]] = defaultdict(list)
    consumer = Consumer(
        {
            **broker.admin_config,
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "rights-tests",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
        }
    )
    try:
        consumer.subscribe([topic])
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            message = consumer.poll(1.0)
            error = None if message is None else message.error()
            if error is not None and error.code() == KafkaError._PARTITION_EOF:
                return dict(found)
            if message is not None and error is None:
                found[message.key()].append(message.value())
    finally:
        consumer.close()
    raise AssertionError(f"{topic} was not read to its end")
