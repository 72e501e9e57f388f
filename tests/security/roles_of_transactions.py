"""The roles of docs/security.md that have to do with transactions, as programs of those users would take them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from world import LARGEST, STEP_S, FailedCommandError, World

import penstock
from canary import MESSAGE, PAYLOAD
from penstock.errors import PublicationNotSeenError
from penstock.transactions import CoordinatorStatistics, FileStore, HalfMessage, SqlStore, TransactionState
from waiting import wait_until

#: The machine is busy, and each connection has TLS.
PATIENT = ("--connect-timeout", "60")


def make_topic(world: World) -> None:
    world.broker.create_topic(world.names["topic"], 2, {"max.message.bytes": str(LARGEST)})


def make_store(world: World) -> None:
    """Have an administrator's coordinator make the topics of a store in Kafka."""
    make_topic(world)
    with coordinated(world.as_administrator()):
        pass


def make_store_with_audit(world: World) -> None:
    make_store(world)
    world.broker.create_topic(f"{world.names['prefix']}.audit")


@contextmanager
def coordinated(world: World, timeout: float = 0.2, check_max: int = 3) -> Iterator[penstock.Coordinator]:
    """Run a coordinator of the store in Kafka as that user, which asks after `timeout` seconds."""

    def make() -> penstock.Coordinator:
        return penstock.Coordinator(
            bootstrap_servers=world.servers,
            prefix=world.names["prefix"],
            partitions=1,
            transaction_timeout=timeout,
            check_interval=0.2,
            check_max=check_max,
            config=world.config,
        )

    with world.entered(make) as running:
        yield running


def transactional(world: World, **options: Any) -> AbstractContextManager[penstock.TransactionalProducer]:
    """Return a producer of the store in Kafka, to enter."""

    def make() -> penstock.TransactionalProducer:
        return penstock.TransactionalProducer(
            world.names["group"],
            bootstrap_servers=world.servers,
            prefix=world.names["prefix"],
            config=world.config,
            publish_timeout=STEP_S,
            **options,
        )

    return world.entered(make)


def commit(_half: HalfMessage | penstock.Transaction) -> TransactionState:
    return TransactionState.COMMIT


def undecided(_half: HalfMessage | penstock.Transaction) -> TransactionState:
    return TransactionState.UNKNOWN


def send(world: World, sending: penstock.TransactionalProducer, *, is_undecided: bool = False) -> str:
    """Send a message that is published, and return its id. Where it is undecided, a check has to commit it."""

    def once() -> str:
        value = world.value()
        if is_undecided:
            result = sending.send(world.names["topic"], value=value, execute=undecided)
        else:
            try:
                result = sending.send(world.names["topic"], value=value, execute=commit, wait="published")
            except PublicationNotSeenError as error:
                world.sent.append(value)
                if "lacks the permission" in str(error):
                    raise
                return ""  # what tells of it was deleted before the right was back
        world.sent.append(value)
        return result.transaction_id

    return world.trial.attempt(once)


def drop(world: World, sending: penstock.TransactionalProducer, execute: Any = undecided) -> str:
    """Send a message that is never published, and return its id."""
    topic = world.names["topic"]
    return world.trial.attempt(lambda: sending.send(topic, value=MESSAGE, execute=execute)).transaction_id


def producer(world: World) -> None:
    with coordinated(world.as_administrator()), transactional(world) as sending:
        world.trial.rounds(lambda: send(world, sending))
    world.require_all_once(world.names["topic"])


def check_responder(world: World) -> None:
    with (
        coordinated(world.as_administrator(), check_max=1000) as running,
        transactional(world, check=commit) as sending,
    ):

        def work() -> None:
            send(world, sending, is_undecided=True)
            wait_until(lambda: running.statistics().committed == len(world.sent), STEP_S)

        world.trial.rounds(work)
    world.require_all_once(world.names["topic"])


def kafka_coordinator(world: World) -> None:
    """Publish, roll back, ask, discard."""
    administrator = world.as_administrator()
    logs = [f"{world.names['prefix']}.{log}" for log in ("half", "op", "done")]
    with coordinated(world) as running, transactional(administrator, check=undecided) as sending:

        def is_settled(before: CoordinatorStatistics) -> bool:
            now = running.statistics()
            return now.discarded > before.discarded and now.rolled_back > before.rolled_back

        def is_given_up(refused: str) -> bool:
            """Discard a transaction, unless it is being published just now."""
            try:
                administrator.run("tx", "discard", refused, "--prefix", world.names["prefix"])
            except FailedCommandError:
                return False
            return True

        def everything_is_trimmed() -> bool:
            """Settled records are deleted in the end; those of the done log after more was published."""
            send(administrator, sending)
            return all(world.was_allowed("DELETE", log) for log in logs)

        def work() -> None:
            before = running.statistics()
            send(administrator, sending)
            drop(administrator, sending, lambda _: TransactionState.ROLLBACK)
            drop(administrator, sending)
            wait_until(lambda: is_settled(before), STEP_S)
            # Operators see what the topic refuses; as long as it is pending, logs are kept.
            refused = sending.send(world.names["topic"], value=os.urandom(2 * LARGEST), execute=commit).transaction_id
            wait_until(lambda: world.was_allowed("WRITE", f"{world.names['prefix']}.status"), STEP_S)
            wait_until(lambda: is_given_up(refused), STEP_S, interval=0.5)
            wait_until(everything_is_trimmed, STEP_S, interval=0.5)

        world.trial.rounds(work)
    world.require_all_once(world.names["topic"])


def see_a_refusal(world: World, sending: penstock.TransactionalProducer) -> None:
    """Send messages that the topic refuses, and list the pending ones until the coordinator's complaint is read."""
    sending.send(world.names["topic"], value=os.urandom(2 * LARGEST), execute=commit)

    def is_read() -> bool:
        world.run("tx", "ls", *PATIENT, "--prefix", world.names["prefix"])
        return world.was_allowed("READ", f"{world.names['prefix']}.status")

    wait_until(is_read, STEP_S, interval=0.2)


def look_at_transactions(world: World) -> None:
    """Read pending transactions, decisions of an administrator, and discarded ones."""
    prefix = ("--prefix", world.names["prefix"])
    administrator = world.as_administrator()
    with coordinated(administrator, timeout=STEP_S), transactional(administrator) as sending:
        first, second = (drop(administrator, sending) for _ in range(2))
        administrator.run("tx", "discard", second, *prefix)
        assert first in world.run("tx", "ls", *PATIENT, *prefix)
        assert PAYLOAD in world.run("tx", "show", first, "--payload", *prefix)
        assert second in world.run("tx", "ls", *PATIENT, "--discarded", *prefix)
        assert "discard" in world.run("tx", "show", second, *prefix)
        see_a_refusal(world, sending)


def decide_transactions(world: World) -> None:
    prefix = ("--prefix", world.names["prefix"])
    administrator = world.as_administrator()
    with coordinated(administrator) as running, transactional(administrator, check=undecided) as sending:
        drop(administrator, sending)
        wait_until(lambda: running.statistics().discarded == 1, STEP_S)
    with coordinated(administrator, timeout=STEP_S) as running, transactional(administrator) as sending:
        discarded = world.run("tx", "ls", *PATIENT, "--discarded", *prefix).split("\n")[1].split()[0]
        world.run("tx", "resume", discarded, *prefix)
        world.run("tx", "commit", discarded, *prefix)
        world.run("tx", "rollback", drop(administrator, sending), *prefix)
        see_a_refusal(world, sending)
        wait_until(lambda: running.statistics().committed == 1, STEP_S)
    assert world.arrived(world.names["topic"]) == [MESSAGE]


Store = SqlStore | FileStore
OPTIONS: Any = {"transaction_timeout": 0.2, "check_interval": 0.2, "check_max": 1}


def in_database(world: World) -> SqlStore:
    url = f"sqlite:///{world.folder / 'store.db'}"
    return SqlStore(url, bootstrap_servers=world.servers, prefix=world.names["prefix"], config=world.config, shards=1)


def in_folder(world: World) -> FileStore:
    path = world.folder / "store"
    return FileStore(path, bootstrap_servers=world.servers, prefix=world.names["prefix"], config=world.config)


def make_sql_store(world: World) -> None:
    """Have an administrator's coordinator make tables and topics."""
    make_topic(world)
    with penstock.Coordinator(store=in_database(world.as_administrator()), **OPTIONS):
        pass


def make_file_store(world: World) -> None:
    """Have an administrator's coordinator make the folder and the topics."""
    make_topic(world)
    with in_folder(world.as_administrator()) as store, penstock.Coordinator(store=store, **OPTIONS):
        pass


def sql_producer(world: World) -> None:
    def make() -> penstock.TransactionalProducer:
        return penstock.TransactionalProducer(world.names["group"], store=in_database(world), publish_timeout=STEP_S)

    with penstock.Coordinator(store=in_database(world.as_administrator()), **OPTIONS), world.entered(make) as sending:
        world.trial.rounds(lambda: send(world, sending))
    world.require_all_once(world.names["topic"])


def sql_coordinator(world: World) -> None:
    administrator = world.as_administrator()
    relayed(world, lambda: (in_database(world), in_database(administrator)), administrator)


def file_store(world: World) -> None:
    """Producer and coordinator, which are one process."""

    def stores() -> tuple[FileStore, FileStore]:
        store = in_folder(world)
        return store, store

    relayed(world, stores, world)


def relayed(world: World, stores: Callable[[], tuple[Store, Store]], sender: World) -> None:
    """Publish and discard through a relay, and start it again.

    Args:
        world: where.
        stores: returns the coordinator's store and the producer's.
        sender: whose the producer is.
    """

    @contextmanager
    def running() -> Iterator[tuple[Any, penstock.TransactionalProducer]]:
        its, theirs = stores()
        with (
            penstock.Coordinator(store=its, **OPTIONS) as coordinator,
            penstock.TransactionalProducer(
                world.names["group"], store=theirs, check=undecided, publish_timeout=STEP_S
            ) as sending,
        ):
            yield coordinator, sending

    def work(coordinator: Any, sending: penstock.TransactionalProducer) -> None:
        send(sender, sending)
        before = coordinator.statistics().discarded
        drop(sender, sending)
        wait_until(lambda: coordinator.statistics().discarded > before, STEP_S)

    def is_trimmed(sending: penstock.TransactionalProducer) -> bool:
        """Settled records are deleted in the end, after more was published."""
        send(sender, sending)
        return any(one.operation == "DELETE" and one.allowed for one in world.broker.asked(world.user))

    with world.entered(running) as (coordinator, sending):
        world.trial.rounds(lambda: work(coordinator, sending))
    with world.entered(running) as (coordinator, sending):
        work(coordinator, sending)
        wait_until(lambda: is_trimmed(sending), STEP_S, interval=0.5)
    world.require_all_once(world.names["topic"])
