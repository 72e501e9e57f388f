"""Stopping: one time for all of it, whatever handlers do, and what is left undone is told."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable

import pytest
from tenacity import wait_fixed

from kafka_tools import produce
from penstock.app import App
from penstock.consumer import DeferredCompletion, retry
from penstock.devbroker import DevBroker
from penstock.message import Message
from penstock.testing import TestApp
from waiting import wait_until

NewTopic = Callable[..., str]

#: Seconds: far more than a stop may take here, and less than any wait for a handler that does not come back.
_LONG_S = 60.0
_SHORT_S = 20.0


@pytest.mark.parametrize("kind", ["thread", "task"])
@pytest.mark.parametrize("signals", [1, 2])
def test_a_handler_that_does_not_come_back_holds_no_stop_beyond_its_time(
    broker: DevBroker, new_topic: NewTopic, kind: str, signals: int
) -> None:
    topic, begun, go = new_topic(), threading.Event(), threading.Event()
    produce(broker.bootstrap_servers, topic, [(b"k", b"1")])
    app = App(
        f"app-{topic}",
        bootstrap_servers=broker.bootstrap_servers,
        stop_timeout=1.0 if signals == 1 else 2 * _LONG_S,
        revoke_timeout=_LONG_S,
    )

    def sleep() -> None:
        begun.set()
        go.wait(2 * _LONG_S)

    if kind == "thread":

        @app.handler(topic)
        def handle(_message: Message) -> None:
            sleep()

    else:

        @app.handler(topic)
        async def handle_async(_message: Message) -> None:
            sleep()

    running = app.start()
    try:
        wait_until(begun.is_set)

        asked = time.monotonic()
        for number in (signal.SIGTERM, signal.SIGINT)[:signals]:
            running.on_signal(number, None)
        wait_until(lambda: running.wait(0.1), timeout=_SHORT_S)
        drained = running.stop()

        assert time.monotonic() - asked < _SHORT_S
        assert not drained
    finally:
        go.set()


def test_a_drain_that_has_used_up_its_time_leaves_none_to_the_revocation() -> None:
    app = App("app", bootstrap_servers="unused:1", stop_timeout=30.0, revoke_timeout=5.0)
    app.handler("t")(lambda _message: DeferredCompletion())

    with TestApp(app) as test:
        test.send("t", "x")
        test.settle()
        before = test.clock.monotonic()

        drained = test.stop()

        assert not drained
        assert test.clock.monotonic() - before == pytest.approx(30.0, abs=1.0)


def test_a_drain_says_what_it_holds_why_it_is_not_over_and_what_it_leaves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="penstock.consumer.inspection.drain_report")
    app = App("orders", bootstrap_servers="unused:1", stop_timeout=30.0)
    app.handler("t")(lambda _message: DeferredCompletion())

    with TestApp(app) as test:
        for key in ("a", "b"):
            test.send("t", "x", key=key)
        test.settle()
        loop = test._running().loop
        assert loop is not None
        deadline = loop.drain.begin()
        while not loop.drain_step(deadline):
            test.broker.advance(0.5)
        test.crash()

    first, *middle, last = [record.getMessage() for record in caplog.records]
    assert first == "orders stops: 2 messages are in flight, and have 30.0 s to be done"
    # Every few seconds, not at every turn.
    assert 2 <= len(middle) <= 6
    assert all("2 messages are in flight (completions are put off)" in line for line in middle)
    assert last.startswith("orders stops with 2 messages not done (completions are put off)")


def test_what_waits_for_later_than_the_drain_is_not_work_left_undone(caplog: pytest.LogCaptureFixture) -> None:
    app = App("orders", bootstrap_servers="unused:1", stop_timeout=30.0)

    @app.handler("t", retry=retry(wait=wait_fixed(3600)))
    def fail(_message: Message) -> None:
        raise ValueError

    with TestApp(app) as test:
        test.send("t", "x")
        test.settle()
        test.stop()

    assert "not done" not in caplog.text
