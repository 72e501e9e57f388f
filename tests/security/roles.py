"""The main path of each role of docs/security.md, as a program of that user's would take it.

A role finds topics, groups and ids by the names in `World.names`, which stand for the placeholders of the table of
rights. What other users do meanwhile (write a message, coordinate) is done by an administrator. In the end all that was
sent has arrived, once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import commanding_roles
import tenacity
from confluent_kafka import TopicPartition
from confluent_kafka.admin import OffsetSpec
from world import LARGEST, STEP_S, World

import penstock
from canary import MESSAGE, PAYLOAD
from penstock import clients
from penstock.errors import PublicationNotSeenError
from penstock.transactions import CoordinatorStatistics, FileStore, HalfMessage, SqlStore, TransactionState
from waiting import wait_until

Role = Callable[[World], None]


def make_topic(world: World) -> None:
    world.broker.create_topic(world.names["topic"], 2, {"max.message.bytes": str(LARGEST)})


def make_topics_of_publisher(world: World) -> None:
    make_topic(world)
    world.broker.create_topic(world.names["target"])


def make_topics_of_app(world: World) -> None:
    make_topic(world)
    world.broker.create_topic(f"dlq.{world.names['topic']}", 2)
    world.broker.create_topic(f"retry.{world.names['app']}.{world.names['topic']}.100ms", 2)


def make_topics_of_reports(world: World) -> None:
    make_topic(world)
    world.broker.create_topic(world.names["reports"], 1, {"cleanup.policy": "compact"})


def make_store(world: World) -> None:
    """Have an administrator's coordinator make the topics of a store in Kafka."""
    make_topic(world)
    with coordinated(world.as_administrator()):
        pass


def make_store_with_audit(world: World) -> None:
    make_store(world)
    world.broker.create_topic(f"{world.names['prefix']}.audit")


def application(world: World) -> None:
    handled: list[bytes | None] = []

    def start() -> penstock.RunningApp:
        app = penstock.App(world.names["app"], bootstrap_servers=world.servers, config=world.config)
        app.handler(world.names["topic"])(lambda message: handled.append(message.value))
        return app.start()

    def work() -> None:
        world.write()
        wait_until(lambda: set(world.sent) <= set(handled), STEP_S)

    with world.entered(start):
        world.trial.rounds(work)
    assert Counter(handled) == Counter(world.sent)


def publishing_application(world: World, *, exactly_once: bool = False) -> None:
    """Have an app publish what its handler returns, to be tried as long as that is refused."""
    patient = penstock.retry(attempts=10_000, wait=tenacity.wait_fixed(0.2))

    def start() -> penstock.RunningApp:
        app = penstock.App(
            world.names["app"], bootstrap_servers=world.servers, config=world.config, exactly_once=exactly_once
        )
        app.handler(world.names["topic"], to=world.names["target"], retry=patient)(lambda message: message.value)
        return app.start()

    def work() -> None:
        world.write()
        wait_until(lambda: len(world.arrived(world.names["target"])) >= len(world.sent), STEP_S, interval=0.2)

    with world.entered(start):
        world.trial.rounds(work)
    world.require_all_once(world.names["target"])


def start_reporting(world: World, handled: list[bytes | None]) -> penstock.RunningApp:
    reports = penstock.ReportSettings(topic=world.names["reports"], interval=1.0)
    app = penstock.App(world.names["app"], bootstrap_servers=world.servers, config=world.config, report=reports)
    app.handler(world.names["topic"])(lambda message: handled.append(message.value))
    return app.start()


def reporting_application(world: World) -> None:
    handled: list[bytes | None] = []

    def reports() -> int:
        return len(world.arrived(world.names["reports"]))

    def work() -> None:
        world.write()
        before = reports()
        wait_until(lambda: set(world.sent) <= set(handled), STEP_S)
        wait_until(lambda: reports() > before, STEP_S, interval=0.2)

    with world.entered(lambda: start_reporting(world, handled)):
        world.trial.rounds(work)
    assert Counter(handled) == Counter(world.sent)


def look_at_reports(world: World) -> None:
    group, named = world.names["app"], ("--report-topic", world.names["reports"])
    with start_reporting(world.as_administrator(), []):
        wait_until(lambda: world.arrived(world.names["reports"]), STEP_S, interval=0.2)
        assert group in world.run("status", group, *named)
        assert world.names["topic"] in world.run("explain", "--group", group, *named)


def application_that_gives_up(world: World) -> None:
    give_up(world, retry_delays=(0.1,))


def give_up(world: World, retry_delays: Sequence[float] = ()) -> None:
    """Have an app make a dead letter of a message."""
    tried: list[bytes | None] = []

    def fail(message: penstock.Message) -> None:
        tried.append(message.value)
        raise ValueError(f"no good: {message.value!r}")

    def start() -> penstock.RunningApp:
        app = penstock.App(world.names["app"], bootstrap_servers=world.servers, config=world.config)
        topic = world.names["topic"]
        app.handler(topic, retry=penstock.retry(attempts=1), retry_delays=retry_delays, on_failure="dead_letter")(fail)
        return app.start()

    def work() -> None:
        world.write()
        wait_until(lambda: letters(world) >= len(world.sent), STEP_S)

    with world.entered(start):
        world.trial.rounds(work)
    assert Counter(tried) == Counter(world.sent * (1 + len(retry_delays)))
    assert letters(world) == len(world.sent)


def letters(world: World) -> int:
    """Return how many dead letters there are of the topic's messages."""
    admin = clients.admin(world.servers, world.broker.admin_config)
    ends = admin.list_offsets(
        {TopicPartition(f"dlq.{world.names['topic']}", part): OffsetSpec.latest() for part in (0, 1)}
    )
    return sum(end.result(STEP_S).offset for end in ends.values())


def look_at_dead_letters(world: World) -> None:
    topic = f"dlq.{world.names['topic']}"
    give_up(world.as_administrator())
    # First: the list of all has what the user may see.
    world.run("dlq", "ls", topic)
    assert topic in world.run("dlq", "ls", "--all")
    assert PAYLOAD in world.run("dlq", "show", topic, "--payload")


def replay_dead_letters(world: World) -> None:
    give_up(world.as_administrator())
    world.run("dlq", "replay", f"dlq.{world.names['topic']}")
    assert world.arrived(world.names["topic"]) == sorted(world.sent * 2)


def look_at_offsets(world: World) -> None:
    group, chosen = world.names["app"], ("--topic", world.names["topic"])
    application(world.as_administrator())
    world.write()
    assert f"group {group} is empty" in world.run("offsets", "ls", group, *chosen)
    assert '"offset": 1' in world.run("offsets", "export", group, "-", *chosen)
    # A partition without a commit would have no lag.
    world.as_administrator().run("offsets", "reset", group, "--to", "earliest")
    assert f"{len(world.sent)} of it not done; the oldest" in world.run("lag", group, *chosen)


def move_offsets(world: World) -> None:
    """Have an app handle a message once more, and again."""
    group, topic, file = world.names["app"], world.names["topic"], str(world.folder / "offsets.json")
    application(world.as_administrator())
    world.as_administrator().run("offsets", "export", group, file)
    world.run("offsets", "reset", group, "--to", "earliest", "--topic", topic)
    world.run("offsets", "import", group, file)
    world.run("offsets", "reset", group, "--to", "earliest", "--topic", topic)
    application(world.as_administrator())


@contextmanager
def coordinated(world: World, timeout: float = 0.2, check_max: int = 3) -> Iterator[penstock.Coordinator]:
    """Run a coordinator of the store in Kafka as that user, which asks after `timeout` seconds."""

    def make() -> penstock.Coordinator:
        return penstock.Coordinator(
            bootstrap_servers=world.servers,
            prefix=world.names["prefix"],
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
            **options,
        )

    return world.entered(make)


def commit(_half: HalfMessage | penstock.Transaction) -> TransactionState:
    return TransactionState.COMMIT


def roll_back(_half: HalfMessage | penstock.Transaction) -> TransactionState:
    return TransactionState.ROLLBACK


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
            except PublicationNotSeenError:
                world.sent.append(value)
                raise
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

        def everything_is_trimmed() -> bool:
            """What is settled is deleted in the end, of the done log when more has been published."""
            send(administrator, sending)
            return all(world.was_allowed("DELETE", log) for log in logs)

        def work() -> None:
            before = running.statistics()
            send(administrator, sending)
            drop(administrator, sending, roll_back)
            drop(administrator, sending)
            wait_until(lambda: is_settled(before), STEP_S)
            # What the topic refuses is told to operators.
            sending.send(world.names["topic"], value=os.urandom(2 * LARGEST), execute=commit)
            wait_until(lambda: world.was_allowed("WRITE", f"{world.names['prefix']}.status"), STEP_S)
            wait_until(everything_is_trimmed, STEP_S, interval=0.5)

        world.trial.rounds(work)
    world.require_all_once(world.names["topic"])


def see_a_refusal(world: World, sending: penstock.TransactionalProducer) -> None:
    """Send what the topic refuses, and list what is pending until the coordinator's complaint is read."""
    sending.send(world.names["topic"], value=os.urandom(2 * LARGEST), execute=commit)

    def is_read() -> bool:
        world.run("tx", "ls", "--prefix", world.names["prefix"])
        return world.was_allowed("READ", f"{world.names['prefix']}.status")

    wait_until(is_read, STEP_S, interval=0.2)


def look_at_transactions(world: World) -> None:
    """Look at what is pending, what an administrator decided, and what was discarded."""
    prefix = ("--prefix", world.names["prefix"])
    administrator = world.as_administrator()
    with coordinated(administrator, timeout=STEP_S), transactional(administrator) as sending:
        first, second = (drop(administrator, sending) for _ in range(2))
        administrator.run("tx", "discard", second, *prefix)
        assert first in world.run("tx", "ls", *prefix)
        assert PAYLOAD in world.run("tx", "show", first, "--payload", *prefix)
        assert second in world.run("tx", "ls", "--discarded", *prefix)
        assert "discard" in world.run("tx", "show", second, *prefix)
        see_a_refusal(world, sending)


def decide_transactions(world: World) -> None:
    prefix = ("--prefix", world.names["prefix"])
    administrator = world.as_administrator()
    with coordinated(administrator) as running, transactional(administrator, check=undecided) as sending:
        drop(administrator, sending)
        wait_until(lambda: running.statistics().discarded == 1, STEP_S)
    with coordinated(administrator, timeout=STEP_S) as running, transactional(administrator) as sending:
        discarded = world.run("tx", "ls", "--discarded", *prefix).split("\n")[1].split()[0]
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
    return SqlStore(url, bootstrap_servers=world.servers, prefix=world.names["prefix"], config=world.config)


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
        return penstock.TransactionalProducer(world.names["group"], store=in_database(world))

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
    """Publish and discard through a relay, and start it anew.

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
            penstock.TransactionalProducer(world.names["group"], store=theirs, check=undecided) as sending,
        ):
            yield coordinator, sending

    def work(coordinator: Any, sending: penstock.TransactionalProducer) -> None:
        send(sender, sending)
        before = coordinator.statistics().discarded
        drop(sender, sending)
        wait_until(lambda: coordinator.statistics().discarded > before, STEP_S)

    def is_trimmed(sending: penstock.TransactionalProducer) -> bool:
        """What is settled is deleted in the end, when more has been published."""
        send(sender, sending)
        return any(one.operation == "DELETE" and one.allowed for one in world.broker.asked(world.user))

    with world.entered(running) as (coordinator, sending):
        world.trial.rounds(lambda: work(coordinator, sending))
    with world.entered(running) as (coordinator, sending):
        work(coordinator, sending)
        wait_until(lambda: is_trimmed(sending), STEP_S, interval=0.5)
    world.require_all_once(world.names["topic"])


#: The main path of each part.
PARTS: dict[str, Role] = {
    "app": application,
    "app with dead letters and retry topics": application_that_gives_up,
    "app that publishes": publishing_application,
    "app that publishes exactly once": partial(publishing_application, exactly_once=True),
    "app that reports": reporting_application,
    "producer": producer,
    "producer that answers checks": check_responder,
    "coordinator": kafka_coordinator,
    "operator who looks": look_at_transactions,
    "operator who decides": decide_transactions,
    "producer on a SqlStore": sql_producer,
    "coordinator of a SqlStore": sql_coordinator,
    "process with a FileStore": file_store,
    "operator who looks at dead letters": look_at_dead_letters,
    "operator who replays dead letters": replay_dead_letters,
    "operator who looks at offsets": look_at_offsets,
    "operator who moves offsets": move_offsets,
    "operator who looks at reports": look_at_reports,
    **commanding_roles.PARTS,
}

#: What an administrator makes before a part runs; the others need the topic alone.
PREPARATIONS: dict[str, Role] = {
    "app with dead letters and retry topics": make_topics_of_app,
    "app that publishes": make_topics_of_publisher,
    "app that publishes exactly once": make_topics_of_publisher,
    "app that reports": make_topics_of_reports,
    "operator who looks at reports": make_topics_of_reports,
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
    **commanding_roles.PREPARATIONS,
}
