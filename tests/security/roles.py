"""The main path of each role of docs/security.md, as a program of that user's would take it.

A role finds topics, groups and ids by the names in `World.names`, which stand for the placeholders of the table of
rights. What other users do meanwhile (write a message, coordinate) is done with an administrator's settings.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import OffsetSpec

import penstock
from canary import MESSAGE, PAYLOAD
from commands import Command
from penstock.clients.kafka import admin_client
from penstock.devbroker import DevBroker, User
from penstock.transactions import FileStore, HalfMessage, SqlStore, TransactionState
from waiting import wait_until

#: Seconds for one step of a main path, on a busy machine.
STEP_S = 60.0


@dataclass(frozen=True)
class World:
    """A role's broker, its settings, the names in its part of the broker, and a folder of its own.

    Attributes:
        broker: the secured broker.
        user: the role's user.
        names: what each placeholder of the table stands for here.
        folder: for databases and stores in files.
        command: runs `penstock ARGUMENTS...`.
    """

    broker: DevBroker
    user: User
    names: Mapping[str, str]
    folder: Path
    command: Command

    @property
    def config(self) -> Mapping[str, str]:
        return self.user.config

    @property
    def servers(self) -> str:
        return self.broker.bootstrap_servers

    @property
    def admin_config(self) -> Mapping[str, str]:
        return self.broker.admin_config

    def run(self, *arguments: str, config: Mapping[str, str] | None = None) -> str:
        """Run a command, as the user unless settings are given, and return what it prints."""
        with mock.patch.dict(os.environ, {"PENSTOCK_CONFIG": json.dumps(dict(config or self.config))}):
            ended = self.command(*arguments, "--bootstrap-servers", self.servers)
        assert ended.code in {0, None}, ended
        return ended.out

    def was_allowed(self, operation: str, name: str) -> bool:
        """Tell whether the user has asked for this, and was allowed to."""
        return any(
            one.allowed and one.operation == operation and one.name == name for one in self.broker.asked(self.user)
        )

    def write(self, value: bytes = MESSAGE) -> None:
        """Have somebody else write a message to the topic."""
        producer = Producer({**self.admin_config, "bootstrap.servers": self.servers})
        errors: list[object] = []
        producer.produce(self.names["topic"], value, on_delivery=lambda error, _: errors.append(error))
        assert producer.flush(STEP_S) == 0
        assert errors == [None]


#: Bytes of a message that the topic takes at most.
LARGEST = 10_000

Role = Callable[[World], None]


def make_topic(world: World) -> None:
    world.broker.create_topic(world.names["topic"], 2, {"max.message.bytes": str(LARGEST)})


def make_topics_of_app(world: World) -> None:
    make_topic(world)
    world.broker.create_topic(f"dlq.{world.names['topic']}", 2)
    world.broker.create_topic(f"retry.{world.names['app']}.{world.names['topic']}.100ms", 2)


def make_store(world: World) -> None:
    """Have an administrator's coordinator make the topics of a store in Kafka."""
    make_topic(world)
    with coordinated(world, world.admin_config):
        pass


def make_store_with_audit(world: World) -> None:
    make_store(world)
    world.broker.create_topic(f"{world.names['prefix']}.audit")


def application(world: World) -> None:
    handled: list[bytes | None] = []
    app = penstock.App(world.names["app"], bootstrap_servers=world.servers, config=world.config)
    app.handler(world.names["topic"])(lambda message: handled.append(message.value))
    world.write()
    with app.start() as running:
        wait_until(lambda: running.statistics().handled == 1, STEP_S)


def application_that_gives_up(world: World) -> None:
    give_up(world, world.config, retry_delays=(0.1,))


def give_up(world: World, config: Mapping[str, str], retry_delays: Sequence[float] = ()) -> None:
    """Have an app make a dead letter of a message."""
    tried: list[bytes | None] = []
    app = penstock.App(world.names["app"], bootstrap_servers=world.servers, config=config)

    @app.handler(
        world.names["topic"], retry=penstock.retry(attempts=1), retry_delays=retry_delays, on_failure="dead_letter"
    )
    def fail(message: penstock.Message) -> None:
        tried.append(message.value)
        raise ValueError(f"no good: {message.value!r}")

    world.write()
    with app.start() as running:
        wait_until(lambda: running.statistics().dead_letters == 1, STEP_S)
    assert len(tried) == 1 + len(retry_delays)


def letters(world: World) -> int:
    """Return how many dead letters there are of the topic's messages."""
    admin = admin_client(world.servers, world.admin_config)
    ends = admin.list_offsets(
        {TopicPartition(f"dlq.{world.names['topic']}", part): OffsetSpec.latest() for part in (0, 1)}
    )
    return sum(end.result(STEP_S).offset for end in ends.values())


def look_at_dead_letters(world: World) -> None:
    topic = f"dlq.{world.names['topic']}"
    give_up(world, world.admin_config)
    assert topic in world.run("dlq", "ls", "--all")
    world.run("dlq", "ls", topic)
    assert PAYLOAD in world.run("dlq", "show", topic, "--payload")


def replay_dead_letters(world: World) -> None:
    give_up(world, world.admin_config)
    world.run("dlq", "replay", f"dlq.{world.names['topic']}")


@contextmanager
def coordinated(world: World, config: Mapping[str, str], timeout: float = 0.2) -> Iterator[penstock.Coordinator]:
    """Run a coordinator of the store in Kafka as that user, which asks after `timeout` seconds."""
    coordinator = penstock.Coordinator(
        bootstrap_servers=world.servers,
        prefix=world.names["prefix"],
        transaction_timeout=timeout,
        check_interval=0.2,
        check_max=3,
        config=config,
    )
    with coordinator:
        yield coordinator


def transactional(world: World, config: Mapping[str, str], **options: Any) -> penstock.TransactionalProducer:
    """Return a producer of the store in Kafka."""
    return penstock.TransactionalProducer(
        world.names["group"],
        bootstrap_servers=world.servers,
        prefix=world.names["prefix"],
        config=config,
        **options,
    )


def producer(world: World) -> None:
    with coordinated(world, world.admin_config), transactional(world, world.config) as sending:
        result = sending.send(world.names["topic"], value=MESSAGE, execute=lambda _: None, wait="published")
    assert result.state is TransactionState.COMMIT


def check_responder(world: World) -> None:
    asked = threading.Event()

    def check(_half: HalfMessage) -> TransactionState:
        asked.set()
        return TransactionState.COMMIT

    with coordinated(world, world.admin_config) as running, transactional(world, world.config, check=check) as sending:
        sending.send(world.names["topic"], value=MESSAGE, execute=undecided)
        wait_until(asked.is_set, STEP_S)
        wait_until(lambda: running.statistics().committed == 1, STEP_S)


def kafka_coordinator(world: World) -> None:
    """Publish, roll back, ask, discard."""
    with (
        coordinated(world, world.config) as running,
        transactional(world, world.admin_config, check=undecided) as sending,
    ):
        sending.send(world.names["topic"], value=MESSAGE, execute=lambda _: None, wait="published")
        sending.send(world.names["topic"], value=MESSAGE, execute=lambda _: TransactionState.ROLLBACK)
        sending.send(world.names["topic"], value=MESSAGE, execute=undecided)
        wait_until(lambda: running.statistics().discarded == 1, STEP_S)
        wait_until(lambda: running.statistics().rolled_back == 1, STEP_S)
        # What the topic refuses is told to operators.
        sending.send(world.names["topic"], value=os.urandom(2 * LARGEST), execute=lambda _: None)
        wait_until(lambda: world.was_allowed("WRITE", f"{world.names['prefix']}.status"), STEP_S)

        def everything_is_trimmed() -> bool:
            """What is settled is deleted in the end, of the done log when more has been published."""
            sending.send(world.names["topic"], value=MESSAGE, execute=lambda _: None, wait="published")
            logs = (f"{world.names['prefix']}.{log}" for log in ("half", "op", "done"))
            return all(world.was_allowed("DELETE", log) for log in logs)

        wait_until(everything_is_trimmed, STEP_S, interval=0.5)


def undecided(_half: HalfMessage) -> TransactionState:
    return TransactionState.UNKNOWN


def see_a_refusal(world: World, sending: penstock.TransactionalProducer) -> None:
    """Send what the topic refuses, and list what is pending until the coordinator's complaint is read."""
    sending.send(world.names["topic"], value=os.urandom(2 * LARGEST), execute=lambda _: None)

    def is_read() -> bool:
        world.run("tx", "ls", "--prefix", world.names["prefix"])
        return world.was_allowed("READ", f"{world.names['prefix']}.status")

    wait_until(is_read, STEP_S, interval=0.2)


def look_at_transactions(world: World) -> None:
    """Look at what is pending, what an administrator decided, and what was discarded."""
    prefix = ("--prefix", world.names["prefix"])
    topic = world.names["topic"]
    with (
        coordinated(world, world.admin_config, timeout=STEP_S),
        transactional(world, world.admin_config) as sending,
    ):
        first, second = (sending.send(topic, value=MESSAGE, execute=undecided).transaction_id for _ in range(2))
        world.run("tx", "discard", second, *prefix, config=world.admin_config)
        assert first in world.run("tx", "ls", *prefix)
        assert PAYLOAD in world.run("tx", "show", first, "--payload", *prefix)
        assert second in world.run("tx", "ls", "--discarded", *prefix)
        assert "discard" in world.run("tx", "show", second, *prefix)
        see_a_refusal(world, sending)


def decide_transactions(world: World) -> None:
    prefix = ("--prefix", world.names["prefix"])
    topic = world.names["topic"]
    with (
        coordinated(world, world.admin_config) as running,
        transactional(world, world.admin_config, check=undecided) as sending,
    ):
        sending.send(topic, value=MESSAGE, execute=undecided)
        wait_until(lambda: running.statistics().discarded == 1, STEP_S)
    with (
        coordinated(world, world.admin_config, timeout=STEP_S) as running,
        transactional(world, world.admin_config) as sending,
    ):
        discarded = world.run("tx", "ls", "--discarded", *prefix).split("\n")[1].split()[0]
        world.run("tx", "resume", discarded, *prefix)
        world.run("tx", "commit", discarded, *prefix)
        sent = sending.send(topic, value=MESSAGE, execute=undecided)
        world.run("tx", "rollback", sent.transaction_id, *prefix)
        see_a_refusal(world, sending)
        wait_until(lambda: running.statistics().committed == 1, STEP_S)


Store = SqlStore | FileStore

OPTIONS: Any = {"transaction_timeout": 0.2, "check_interval": 0.2, "check_max": 1}


def in_database(world: World, config: Mapping[str, str]) -> SqlStore:
    url = f"sqlite:///{world.folder / 'store.db'}"
    return SqlStore(url, bootstrap_servers=world.servers, prefix=world.names["prefix"], config=config)


def in_folder(world: World, config: Mapping[str, str]) -> FileStore:
    path = world.folder / "store"
    return FileStore(path, bootstrap_servers=world.servers, prefix=world.names["prefix"], config=config)


def make_sql_store(world: World) -> None:
    """Have an administrator's coordinator make tables and topics."""
    make_topic(world)
    with penstock.Coordinator(store=in_database(world, world.admin_config), **OPTIONS):
        pass


def make_file_store(world: World) -> None:
    """Have an administrator's coordinator make the folder and the topics."""
    make_topic(world)
    with in_folder(world, world.admin_config) as store, penstock.Coordinator(store=store, **OPTIONS):
        pass


def sql_producer(world: World) -> None:
    its = in_database(world, world.config)
    with (
        penstock.Coordinator(store=in_database(world, world.admin_config), **OPTIONS),
        penstock.TransactionalProducer(world.names["group"], store=its) as sending,
    ):
        sending.send(world.names["topic"], value=MESSAGE, execute=lambda _: None, wait="published")


def sql_coordinator(world: World) -> None:
    relayed(world, lambda: (in_database(world, world.config), in_database(world, world.admin_config)))


def file_store(world: World) -> None:
    """Producer and coordinator, which are one process."""

    def stores() -> tuple[FileStore, FileStore]:
        store = in_folder(world, world.config)
        return store, store

    relayed(world, stores)


def relayed(world: World, stores: Callable[[], tuple[Store, Store]]) -> None:
    """Publish through a relay, start it anew, and let it discard.

    Args:
        world: where.
        stores: returns the coordinator's store and the producer's.
    """
    topic = world.names["topic"]
    for is_second in (False, True):
        its, theirs = stores()
        with (
            penstock.Coordinator(store=its, **OPTIONS) as running,
            penstock.TransactionalProducer(world.names["group"], store=theirs, check=undecided) as sending,
        ):
            sending.send(topic, value=MESSAGE, execute=lambda _: None, wait="published")
            if is_second:
                sending.send(topic, value=MESSAGE, execute=undecided)
                wait_until(lambda running=running: running.statistics().discarded == 1, STEP_S)
                wait_until(lambda: any(one.operation == "DELETE" for one in world.broker.asked(world.user)), STEP_S)


#: What an administrator makes before a part runs; the others need the topic alone.
PREPARATIONS: dict[str, Role] = {
    "app with dead letters and retry topics": make_topics_of_app,
    "operator who looks at dead letters": make_topics_of_app,
    "operator who replays dead letters": make_topics_of_app,
    "producer": make_store,
    "producer that answers checks": make_store,
    "coordinator": make_store,
    "operator who looks": make_store_with_audit,
    "operator who decides": make_store_with_audit,
    "producer on a SqlStore": make_sql_store,
    "coordinator of a SqlStore": make_sql_store,
    "process with a FileStore": make_file_store,
}
