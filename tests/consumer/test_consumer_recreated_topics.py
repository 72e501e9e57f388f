"""A topic that is deleted and created again while it is read: nothing of the new one is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka.admin import AdminClient

import penstock
from kafka_tools import committed, produce
from penstock.devbroker import DevBroker
from penstock.errors import PenstockError
from penstock.testing import TestApp
from support.consumers import app_of
from waiting import wait_until


def noting(seen: list[bytes | None], **config: object) -> penstock.App:
    app = app_of(config=config)
    app.handler("t")(lambda message: seen.append(message.value))
    return app


def recreate(test: TestApp, count: int) -> None:
    """Let the app reach offset 51, and make the topic again with so many messages."""
    for number in range(51):
        test.send("t", f"old {number}")
    test.advance(30)
    test.broker.recreate_topic("t")
    for number in range(count):
        test.send("t", f"new {number}")


def test_a_topic_that_was_recreated_and_is_empty_is_not_committed_at_the_former_position(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[bytes | None] = []

    with TestApp(noting(seen)) as test:
        recreate(test, 0)
        test.advance(30)
        empty = test.committed("t")
        for number in range(60):
            test.send("t", f"new {number}")
        test.advance(30)

    assert empty == {}
    assert "topic t was deleted and created again" in caplog.text
    assert seen[51:] == [b"new %d" % number for number in range(60)]


@pytest.mark.parametrize("reset", ["latest", "error"])
def test_a_topic_that_was_recreated_follows_the_reset_policy(reset: str) -> None:
    seen: list[bytes | None] = []

    with TestApp(noting(seen, **{"auto.offset.reset": "earliest"})) as test:
        test.send("t", "first")
        test.advance(30)
    app = noting(seen, **{"auto.offset.reset": reset})
    with TestApp(app, test.broker) as test:
        recreate(test, 60)
        if reset == "error":
            with pytest.raises(PenstockError, match="forbids to begin again"):
                test.advance(30)
            return
        test.advance(30)
        test.send("t", "later")
        test.advance(30)

    assert seen[-1] == b"later"


def test_a_topic_that_is_recreated_on_a_real_broker_loses_nothing(
    broker: DevBroker, admin: AdminClient, new_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.consumer.poll.topics.WATCH_INTERVAL_S", 0.3)
    servers, topic = broker.bootstrap_servers, new_topic()
    seen: list[bytes | None] = []
    app = penstock.App(f"app-{topic}", bootstrap_servers=servers, commit_interval=0.1)
    app.handler(topic)(lambda message: seen.append(message.value))

    with app.start() as running:
        produce(servers, topic, [(b"k", b"old")] * 51)
        # Not before it is there: a new broker has no coordinator to ask until a member has joined.
        wait_until(lambda: len(seen) == 51)
        wait_until(lambda: committed(servers, f"app-{topic}", topic, 1)[0].offset == 51)
        wait_until(lambda: running._consumer is not None and running._consumer._loop.topics._ids)
        for future in admin.delete_topics([topic]).values():
            future.result(30)
        wait_until(lambda: topic not in admin.list_topics(timeout=30).topics)
        broker.create_topic(topic)
        new = [b"new %d" % number for number in range(60)]
        produce(servers, topic, [(b"k", value) for value in new])

        wait_until(lambda: set(new) <= set(seen))
        wait_until(lambda: committed(servers, f"app-{topic}", topic, 1)[0].offset == 60)
