"""Stopping: one time limit for all of it, a report of unfinished work; signals and leaving."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException
from stepped import Stepped
from tenacity import wait_fixed

from kafka_tools import produce
from penstock.app import App
from penstock.consumer import ConsumerSettings, DeferredCompletion, handler, retry
from penstock.consumer.engine import Engine
from penstock.consumer.poll.loop import PollLoop
from penstock.consumer.poll.membership import Membership
from penstock.devbroker import DevBroker
from penstock.message import Message
from penstock.running import RunningApp
from penstock.spark_sink.queries.app_sinks import AppSinks
from penstock.testing import TestApp, TestClock
from support.consumers import NewTopic
from waiting import wait_until


@pytest.mark.parametrize("kind", ["thread", "task"])
@pytest.mark.parametrize("signals", [1, 2])
def test_a_handler_that_does_not_come_back_holds_no_stop_beyond_its_time(
    broker: DevBroker, new_topic: NewTopic, kind: str, signals: int
) -> None:
    topic, begun, released = new_topic(), threading.Event(), threading.Event()
    produce(broker.bootstrap_servers, topic, [(b"k", b"1")])
    # The second signal does not wait for what the first waits for: in an hour this would not end.
    timeouts = {"stop_timeout": 1.0 if signals == 1 else 3600.0, "revoke_timeout": 3600.0}
    app = App(f"app-{topic}", bootstrap_servers=broker.bootstrap_servers, **timeouts)

    def hang(_message: Message) -> None:
        begun.set()
        released.wait()

    async def hang_the_loop(message: Message) -> None:
        hang(message)

    app.handler(topic)(hang if kind == "thread" else hang_the_loop)
    running = app.start()
    try:
        wait_until(begun.is_set)
        for number in (signal.SIGTERM, signal.SIGINT)[:signals]:
            running.on_signal(number, None)
        wait_until(lambda: running.wait(0.1))

        assert not running.stop()
    finally:
        released.set()


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
    caplog.set_level(logging.INFO, logger="penstock.consumer.poll.loop")
    app = App("orders", bootstrap_servers="unused:1", stop_timeout=30.0)
    app.handler("t")(lambda _message: DeferredCompletion())

    with TestApp(app) as test:
        for key in ("a", "b"):
            test.send("t", "x", key=key)
        test.settle()
        loop = test._running().loop
        assert loop is not None
        loop.begin_drain()
        while not loop.drain_step():
            test.broker.advance(0.5)
        test.crash()

    first, *middle, last = [record.getMessage() for record in caplog.records]
    assert first == "orders stops: 2 messages are in flight, and have 30.0 s to be done"
    # Every few seconds, not at every turn.
    assert 2 <= len(middle) <= 6
    assert all("2 messages are in flight (deferred completions are open)" in line for line in middle)
    assert last.startswith("orders stops with 2 messages not done (deferred completions are open)")


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


@pytest.mark.parametrize(
    "error",
    [
        KafkaException(KafkaError(KafkaError._TIMED_OUT)),
        RuntimeError("closed already"),
        SystemError("exception <class 'str'> is not a BaseException subclass"),
    ],
)
def test_what_the_library_raises_while_it_leaves_is_logged_and_ends_nothing(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Client:
        def close(self) -> None:
            raise error

        unsubscribe = close

    membership = object.__new__(Membership)
    membership.client = Client()  # type: ignore[assignment] # what is used of it
    membership._leaves_its_name = True

    membership.leave()

    assert caplog.text.count("leaving the group: ") == 2
    assert "what was not committed is handled again" in caplog.text


def test_a_poll_thread_that_hangs_before_it_leaves_holds_no_stop(caplog: pytest.LogCaptureFixture) -> None:
    clock = TestClock()
    loop = PollLoop(Engine("shop", {"t": handler(print)}, ConsumerSettings(), clock))
    membership = loop.membership

    clock.advance(3600)
    while_it_runs = membership.leaving_takes_too_long()
    loop.stop_request.drain(10)
    clock.advance(10)
    in_time = membership.leaving_takes_too_long()
    clock.advance(10)
    too_late = [membership.leaving_takes_too_long() for _ in range(2)]

    assert (while_it_runs, in_time, too_late) == (False, False, [True, True])
    assert caplog.text.count("shop cannot leave its group: a call of its Kafka client does not return") == 1


class Sinks:
    """Sinks that go on."""

    ended = False

    def raise_failure(self) -> None:
        """Have none."""

    def request_stop(self, *, now: bool = False) -> None:
        """Go on all the same."""


def interrupted_everywhere(call: Callable[[], object], signal_handler: Callable[[], object]) -> bool:
    """Run a call with a handler at every line of it, on one thread, as signals come; return whether it ended."""

    def at_each_line(_frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            sys.settrace(None)
            signal_handler()
            sys.settrace(at_each_line)
        return at_each_line

    def run() -> None:
        sys.settrace(at_each_line)
        try:
            call()
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def test_a_signal_while_an_app_with_sinks_only_is_waited_for_ends_the_wait() -> None:
    running = RunningApp(None, None, [], cast("AppSinks", Sinks()))
    ended: list[bool] = []

    assert interrupted_everywhere(lambda: ended.append(running.wait(5)), running._stop_requested.set)
    assert ended == [True]


def test_a_signal_while_a_stop_is_asked_for_asks_once_more() -> None:
    stepped = Stepped({"t": handler(print)})
    loop = stepped.loop

    def leave() -> None:
        loop.stop_request.leave(1.0)

    assert interrupted_everywhere(loop.stop_request.drain, loop.stop_request.drain)
    assert interrupted_everywhere(leave, leave)
    loop.run()
    assert loop.membership.leaving.is_set()
