"""The main path of each role of docs/security.md, as a program of that user's would take it.

A role finds topics, groups and ids by the names in `World.names`, which stand for the placeholders of the table of
rights. What other users do meanwhile (write a message, coordinate) is done by an administrator. In the end all that was
sent has arrived, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import commanding_roles
import tenacity
from confluent_kafka import TopicPartition
from confluent_kafka.admin import OffsetSpec
from roles_of_transactions import (
    check_responder,
    decide_transactions,
    file_store,
    kafka_coordinator,
    look_at_transactions,
    make_file_store,
    make_sql_store,
    make_store,
    make_store_with_audit,
    make_topic,
    producer,
    sql_coordinator,
    sql_producer,
)
from world import STEP_S, World

import penstock
from canary import PAYLOAD
from penstock import clients
from waiting import wait_until

Role = Callable[[World], None]


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
        assert world.names["topic"] in world.run("explain", group, "--reports", *named)


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
    # A partition without a commit would have no lag.
    world.as_administrator().run("offsets", "reset", group, "--to", "earliest")
    assert f"{len(world.sent)} of it not done; the oldest" in world.run("lag", group, *chosen)


def move_offsets(world: World) -> None:
    """Have an app handle a message once more, and again."""
    group, topic = world.names["app"], world.names["topic"]
    application(world.as_administrator())
    world.run("offsets", "reset", group, "--to", "earliest", "--topic", topic)
    application(world.as_administrator())


#: What an administrator makes before each part runs, and its main path.
PARTS: dict[str, tuple[Role, Role]] = {
    "app": (make_topic, application),
    "app with dead letters and retry topics": (make_topics_of_app, application_that_gives_up),
    "app that publishes": (make_topics_of_publisher, publishing_application),
    "app that publishes exactly once": (make_topics_of_publisher, partial(publishing_application, exactly_once=True)),
    "app that reports": (make_topics_of_reports, reporting_application),
    "producer": (make_store, producer),
    "producer that answers checks": (make_store, check_responder),
    "coordinator": (make_store, kafka_coordinator),
    "operator who looks": (make_store_with_audit, look_at_transactions),
    "operator who decides": (make_store_with_audit, decide_transactions),
    "producer on a SqlStore": (make_sql_store, sql_producer),
    "coordinator of a SqlStore": (make_sql_store, sql_coordinator),
    "process with a FileStore": (make_file_store, file_store),
    "operator who looks at dead letters": (make_topics_of_app, look_at_dead_letters),
    "operator who replays dead letters": (make_topics_of_app, replay_dead_letters),
    "operator who looks at offsets": (make_topic, look_at_offsets),
    "operator who moves offsets": (make_topic, move_offsets),
    "operator who looks at reports": (make_topics_of_reports, look_at_reports),
    "member that hears commands": (commanding_roles.make_topics, commanding_roles.hear_commands),
    "dashboard that commands members": (commanding_roles.make_topics, commanding_roles.command_members),
}
