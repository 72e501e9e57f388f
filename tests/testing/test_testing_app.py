"""TestApp: an app in the caller's thread, on a clock that stands until it is moved."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar

import pytest

import penstock
from penstock.errors import ConfigurationError, PenstockError, StoppedError
from penstock.testing import TestApp
from support.consumers import app_of, every


def test_messages_are_handled_in_the_order_of_their_keys_in_this_thread() -> None:
    app, seen, threads = app_of(), [], set()

    @app.handler("t")
    def handle(message: penstock.Message) -> None:
        seen.append((message.key, message.value))
        threads.add(threading.get_ident())

    with TestApp(app, partitions=3) as test:
        for number in range(20):
            test.send("t", str(number), key=f"k{number % 4}")
        before = list(seen)
        test.settle()

    assert before == []
    assert sorted(seen) == sorted((b"k%d" % (number % 4), b"%d" % number) for number in range(20))
    for key in range(4):
        mine = [int(value) for name, value in seen if name == b"k%d" % key]
        assert mine == sorted(mine)
    assert threads == {threading.get_ident()}


TENANT: ContextVar[str] = ContextVar("tenant", default="nobody")


def test_a_context_variable_that_one_message_sets_on_the_loop_is_not_seen_by_the_next() -> None:
    app, seen = app_of(), list[str]()

    @app.handler("t")
    async def handle(_: penstock.Message) -> None:
        seen.append(TENANT.get())
        TENANT.set("somebody")

    with TestApp(app) as test:
        for number in range(5):
            test.send("t", str(number), key="k")
        test.settle()

    assert seen == ["nobody"] * 5
    assert TENANT.get() == "nobody"


def test_time_stands_while_an_app_settles_and_moves_only_when_it_is_moved() -> None:
    app, times = app_of(), []

    @app.handler("t", retry=every(10), on_failure="dead_letter")
    def fail(message: penstock.Message) -> None:
        times.append(test.clock.monotonic() - begun)
        raise ValueError

    with TestApp(app) as test:
        begun = test.clock.monotonic()
        test.send("t", "x")
        test.settle()
        settled = test.clock.monotonic()
        test.advance(3600)
        after = test.clock.monotonic()

    assert settled == begun
    assert after == begun + 3600
    assert times == pytest.approx([0, 10, 20])


def test_commits_go_by_the_clock_and_a_stop_drains_by_it_and_makes_the_last() -> None:
    app, seen = app_of(commit_interval=5.0, stop_timeout=30.0), list[bytes | None]()

    @app.handler("t", retry=every(5), on_failure="dead_letter")
    def handle(message: penstock.Message) -> None:
        seen.append(message.value)
        if seen.count(b"later") == 1:
            raise ValueError

    with TestApp(app) as test:
        test.settle()
        test.send("t", "x")
        test.settle()
        at_once = test.committed("t")
        test.advance(6)
        in_time = test.committed("t")
        test.send("t", "later")
        test.settle()
        assert test.stop()

    assert seen == [b"x", b"later", b"later"]
    assert (at_once, in_time, test.committed("t")) == ({}, {0: 1}, {0: 2})


def test_async_handlers_run_at_once_on_a_loop_of_their_own() -> None:
    app, seen = app_of(), []
    together = asyncio.Event()

    @app.handler("t")
    async def handle(message: penstock.Message) -> None:
        seen.append(message.value)
        if len(seen) == 2:
            together.set()
        await together.wait()
        await asyncio.sleep(0.01)

    with TestApp(app) as test:
        test.send("t", "1", key="a")
        test.send("t", "2", key="b")
        test.settle()

        assert seen == [b"1", b"2"]
        assert test.statistics().handled == 2


def test_an_async_handler_that_does_not_end_is_named_and_the_others_go_on() -> None:
    app, begun = app_of(), list[bytes | None]()

    @app.handler("t")
    async def handle(message: penstock.Message) -> None:
        begun.append(message.value)
        if message.value == b"hang":
            await asyncio.Event().wait()

    with TestApp(app, handler_timeout=0.05) as test:
        test.send("t", "hang", key="a")

        with pytest.raises(PenstockError, match=r"have not ended within 0.05 s, for messages of t:0"):
            test.settle()
        test.send("t", "other", key="b")
        test.settle()
        assert "in handler" in str(test.explain()[0])

    assert begun == [b"hang", b"other"]


def test_an_async_app_inside_a_running_loop_is_refused() -> None:
    app = app_of()

    @app.handler("t")
    async def handle(message: penstock.Message) -> None: ...

    async def inside() -> None:
        with pytest.raises(ConfigurationError, match="in a plain test function"), TestApp(app):
            pass

    asyncio.run(inside())


def test_a_crash_repeats_what_was_not_committed_and_a_restart_does_not() -> None:
    app, seen = app_of(), []
    app.handler("t")(lambda message: seen.append(message.value))

    with TestApp(app) as test:
        test.settle()
        test.send("t", "1")
        test.settle()
        test.restart()
        test.settle()
        after_restart = list(seen)
        test.send("t", "2")
        test.settle()
        test.crash()
        with pytest.raises(StoppedError):
            test.settle()
        test.restart()
        test.settle()

    assert after_restart == [b"1"]
    assert seen == [b"1", b"2", b"2"]


def test_lifespans_and_worker_resources_are_those_of_the_app() -> None:
    app, events = app_of(), list[str]()

    @app.lifespan
    def outer() -> Iterator[None]:
        events.append("up")
        yield
        events.append("down")

    @app.lifespan
    async def inner() -> AsyncIterator[None]:
        await asyncio.sleep(0)
        events.append("async up")
        yield
        events.append("async down")

    @app.worker_resource
    def session() -> Iterator[str]:
        events.append("open")
        yield "session"
        events.append("close")

    @app.handler("t")
    def handle(message: penstock.Message) -> None:
        events.append(session.get())

    @app.handler("a")
    async def handle_async(message: penstock.Message) -> None: ...

    with TestApp(app) as test:
        test.send("t", "x")
        test.settle()

    assert events == ["up", "async up", "open", "session", "close", "async down", "down"]


def test_an_app_that_feeds_itself_does_not_come_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.testing.app._MAX_TURNS", 50)
    app = app_of()
    app.handler("t")(lambda _: test.send("t", "again"))

    with TestApp(app) as test:
        test.send("t", "x")
        with pytest.raises(PenstockError, match="did not come to rest"):
            test.settle()
        test.crash()


def test_what_cannot_be_tested_is_reported() -> None:
    app = app_of()
    with pytest.raises(ConfigurationError, match="sinks are run by Spark and not here"):
        TestApp(app)
    app.handler("t")(lambda _: None)

    with TestApp(app) as test:
        with pytest.raises(ConfigurationError, match="does not consume other; name one of t"):
            test.dead_letters("other")
        with pytest.raises(ValueError, match="does not go back, and has no end"):
            test.advance(float("inf"))
        with pytest.raises(StoppedError, match="runs already"):
            test.start()


@pytest.mark.parametrize("is_async", [False, True])
def test_an_interrupt_in_a_handler_ends_the_test(is_async: bool) -> None:
    app = app_of()

    def interrupted(message: penstock.Message) -> None:
        raise KeyboardInterrupt

    async def interrupted_async(message: penstock.Message) -> None:
        raise KeyboardInterrupt

    app.handler("t", on_failure="dead_letter")(interrupted_async if is_async else interrupted)

    with TestApp(app) as test:
        test.send("t", "x")
        with pytest.raises(KeyboardInterrupt):
            test.settle()
        test.crash()
