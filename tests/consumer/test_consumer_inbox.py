"""Handlers with an inbox: the group is known on their threads, and their rows are written once."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import penstock
from chaos.counting import STEPS, Counting
from databases import TestDatabase, new_database
from kafka_tools import produce
from penstock import Message, create_inbox_table, inbox
from penstock.consumer import LitePushConsumer, handler
from penstock.devbroker import DevBroker
from penstock.testing import TestApp, TestBroker
from penstock.transactions import inboxes
from support.consumers import NewTopic, app_of, consumer_of
from waiting import wait_until

Connect = Callable[[], sqlite3.Connection]


@pytest.fixture
def connect(tmp_path: Path) -> Connect:
    """What opens a connection to a database with an inbox and counters."""
    opens = partial(sqlite3.connect, tmp_path / "shop.db")
    with closing(opens()) as connection:
        create_inbox_table(connection)
        connection.execute("CREATE TABLE counters (key TEXT PRIMARY KEY, n INTEGER)")
        connection.commit()
    return opens


def groups(connect: Connect) -> list[tuple[str, str]]:
    with closing(connect()) as connection:
        return connection.execute("SELECT consumer_group, topic FROM penstock_inbox ORDER BY topic").fetchall()


def three_handlers(connect: Connect) -> dict[str, tuple[Callable[..., Any], dict[str, int]]]:
    """Return a handler of each kind, by topic, with its options."""

    def record(work: Any) -> None:
        with closing(connect()) as connection, connection:
            inbox(connection, work)

    async def on_loop(message: Message) -> None:
        await asyncio.sleep(0)
        record(message)

    return {"a": (on_loop, {}), "b": (record, {"batch": 2}), "c": (record, {})}


def test_the_inbox_knows_the_group_of_handlers_on_threads_and_on_the_event_loop(connect: Connect) -> None:
    handlers = {topic: handler(function, **more) for topic, (function, more) in three_handlers(connect).items()}
    broker = TestBroker()
    consumer: LitePushConsumer = consumer_of(broker, handlers)

    with consumer:
        for topic in handlers:
            broker.produce(topic, b"v")
        wait_until(lambda: len(groups(connect)) == 3)
        wait_until(lambda: consumer.committed() == {(topic, 0): 1 for topic in handlers})

    assert groups(connect) == [("group-a", topic) for topic in "abc"]


def test_the_inbox_knows_the_group_of_an_app_under_test(connect: Connect) -> None:
    app = app_of()
    for topic, (function, more) in three_handlers(connect).items():
        app.handler(topic, **more)(function)

    with TestApp(app) as test:
        for topic in app.handlers:
            test.send(topic, "v")
        test.settle()

    assert groups(connect) == [("app", topic) for topic in "abc"]


def test_a_running_app_trims_its_inboxes_of_what_is_older_than_the_waits_of_its_retry_topics(
    connect: Connect, broker: DevBroker, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, kept = new_topic(), list[int]()

    def trim_some(_user: object, _name: str, place: Mapping[str, int]) -> int:
        kept.append(place["keep"])
        return 0

    app = penstock.App(topic, bootstrap_servers=broker.bootstrap_servers)
    app.handler(topic, retry_delays=[60, 3600])(lambda _message: None)
    produce(broker.bootstrap_servers, topic, [(b"key", b"value")])
    app.inbox_database(connect, keep=timedelta(hours=1))
    monkeypatch.setattr(inboxes, "_TRIM_INTERVAL_S", 0.01)
    monkeypatch.setattr(inboxes, "_trim_some", trim_some)

    with app.start():
        wait_until(lambda: kept)

    assert kept[0] == 3600 + 60 + 3600


def test_the_databases_of_an_app_are_checked_when_they_are_named() -> None:
    with pytest.raises(penstock.ConfigurationError, match="connect must be"):
        app_of().inbox_database("sqlite:///shop.db")  # type: ignore[arg-type] # the mistake


@pytest.mark.parametrize("batch", [1, 4])
def test_each_message_counts_once_wherever_an_app_crashes_and_whatever_fails(connect: Connect, batch: int) -> None:
    chance = random.Random(batch)  # noqa: S311 - chance, not secrecy
    # What happens at which step, in this order: the process ends there, or the handler fails.
    plan = [(step, crashes) for step in STEPS for crashes in (True, False)] * 3
    chance.shuffle(plan)
    app = app_of(commit_interval=5.0)
    known: list[int] = []
    crashed: list[str] = []

    def step(name: str) -> None:
        if crashed:
            raise RuntimeError("the process has ended")
        if plan and plan[-1][0] == name and chance.random() < 0.3:
            if plan.pop()[1]:
                crashed.append(name)
            raise RuntimeError(name)

    def count(work: Any) -> None:
        messages = work if isinstance(work, list) else [work]
        with closing(connect()) as connection:
            step("begun")
            new = inbox(connection, messages)
            known.append(len(messages) - len(new))
            step("recorded")
            for message in new:
                add = "INSERT INTO counters VALUES (?, 1) ON CONFLICT (key) DO UPDATE SET n = n + 1"
                connection.execute(add, (message.key.decode(),))
            step("written")
            connection.commit()
            step("committed")

    retries = {"retry": penstock.retry(attempts=2), "retry_delays": [1.0] * 50}
    app.handler("t", batch=batch, **retries)(count)
    sent: Counter[str] = Counter()
    with TestApp(app, partitions=2) as test:
        while plan or test.statistics().in_flight or sum(n for _, n in counted(connect)) < sent.total():
            if plan or sent.total() < 40:
                key = f"k{sent.total() % 5}"
                test.send("t", "v", key=key)
                sent[key] += 1
            test.advance(0.5)
            restart_crashed(test, crashed)

    assert Counter(dict(counted(connect))) == sent
    assert sum(known) > 0


def restart_crashed(test: TestApp, crashed: list[str]) -> None:
    """Crash an app where one of its handlers has said so, and start it again."""
    if crashed:
        test.crash()
        crashed.clear()
        test.restart()


def counted(connect: Connect) -> list[tuple[str, int]]:
    with closing(connect()) as connection:
        return connection.execute("SELECT key, n FROM counters ORDER BY key").fetchall()


@pytest.mark.thorough
def test_each_message_counts_once_in_postgresql_though_its_member_is_killed_at_every_step(
    broker: DevBroker, new_topic: NewTopic, postgresql_url: str, tmp_path: Path
) -> None:
    database: TestDatabase = new_database(postgresql_url)
    group = Counting(broker, database, (new_topic(), new_topic()), 1, tmp_path)
    try:
        group.feed(200, 10)
        for seed, step in enumerate(STEPS):
            # Later ones have less left.
            member = group.start("member", seed=seed, failures=0.01, dies_at={step: 3})
            assert member.wait(60) == -9
        group.start("member", failures=0.05)
        group.wait_done(60)
        group.stop()

        assert group.faults() == []
        assert all(group.met()[f"killed {step}"] == 1 for step in STEPS)
        assert group.met()["known"] > 0
    finally:
        group.close()
