"""Lifespans of an app: what runs before it starts and after it has ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator

import pytest

from kafka_tools import produce
from penstock.app import App
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError, TopicNotFoundError
from penstock.message import Message
from waiting import wait_until

NewTopic = Callable[..., str]


def app_of(broker: DevBroker, name: str) -> App:
    return App(name, bootstrap_servers=broker.bootstrap_servers, workers=1, commit_interval=0.1)


def note(app: App, log: list[str], name: str) -> None:
    """Register a lifespan that writes its begin and its end down."""

    @app.lifespan
    def span() -> Iterator[None]:
        log.append(f"{name} begins")
        yield
        log.append(f"{name} ends")


def note_async(app: App, log: list[str], name: str) -> None:
    """Register the same as an `async def`, which notes its thread too."""

    @app.lifespan
    async def span() -> AsyncGenerator[None]:
        await asyncio.sleep(0)
        log.append(f"{name} begins on {threading.current_thread().name}")
        yield
        await asyncio.sleep(0)
        log.append(f"{name} ends on {threading.current_thread().name}")


def test_lifespans_begin_in_order_before_the_first_message_and_end_in_reverse_after_the_last(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"1")])
    log: list[str] = []
    app = app_of(broker, f"app-{topic}")
    note(app, log, "first")
    note_async(app, log, "second")
    note(app, log, "third")

    @app.handler(topic)
    async def handle(_message: Message) -> None:
        await asyncio.sleep(0)
        log.append("message")

    with app.start() as running:
        wait_until(lambda: "message" in log)
        running.stop()
        once = list(log)

    loop = f"penstock-loop-app-{topic}"
    assert once == [
        "first begins",
        f"second begins on {loop}",
        "third begins",
        "message",
        "third ends",
        f"second ends on {loop}",
        "first ends",
    ]
    # Leaving the block stopped it a second time, which changed nothing.
    assert log == once
    wait_until(lambda: loop not in {thread.name for thread in threading.enumerate()})


def test_a_lifespan_that_fails_keeps_the_app_from_starting_and_those_before_it_end(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"1")])
    log: list[str] = []
    app = app_of(broker, f"app-{topic}")
    note(app, log, "first")
    note_async(app, log, "second")

    @app.lifespan
    async def fails() -> AsyncGenerator[None]:
        await asyncio.sleep(0)
        raise ConnectionError("the database is away")
        yield

    note(app, log, "never")

    @app.handler(topic)
    async def handle(_message: Message) -> None:
        log.append("message")

    with pytest.raises(ConnectionError, match="the database is away"):
        app.start()

    assert [line.split(" on ")[0] for line in log] == ["first begins", "second begins", "second ends", "first ends"]
    loop = f"penstock-loop-app-{topic}"
    wait_until(lambda: not [one for one in threading.enumerate() if one.name == loop or topic in one.name])


def test_lifespans_end_where_the_consumer_cannot_start(broker: DevBroker) -> None:
    log: list[str] = []
    app = app_of(broker, "app-without-topic")
    note(app, log, "first")
    note_async(app, log, "second")

    @app.handler("there-is-no-such-topic")
    async def handle(_message: Message) -> None:
        """Never called."""

    with pytest.raises(TopicNotFoundError):
        app.start()

    assert [line.split(" on ")[0] for line in log] == ["first begins", "second begins", "second ends", "first ends"]


def test_what_kept_the_app_from_starting_is_told_also_where_a_lifespan_cannot_end(
    broker: DevBroker, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[str] = []
    app = app_of(broker, "app-that-cannot-end")
    note(app, log, "first")

    @app.lifespan
    def cannot_end() -> Iterator[None]:
        yield
        raise OSError("cannot end")

    @app.handler("there-is-no-such-topic")
    async def handle(_message: Message) -> None:
        """Never called."""

    with pytest.raises(TopicNotFoundError):
        app.start()

    assert log == ["first begins", "first ends"]
    assert "cannot end" in caplog.text


def test_a_lifespan_that_cannot_end_is_told_and_leaves_nothing_running(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    log: list[str] = []
    app = app_of(broker, f"app-{topic}")
    note_async(app, log, "first")

    @app.lifespan
    def cannot_end() -> Iterator[None]:
        yield
        raise OSError("cannot end")

    @app.handler(topic)
    async def handle(_message: Message) -> None:
        """Never called."""

    running = app.start()
    with pytest.raises(OSError, match="cannot end"):
        running.stop()

    assert len(log) == 2
    wait_until(lambda: not [one for one in threading.enumerate() if topic in one.name])


def test_an_async_lifespan_without_an_async_handler_is_refused_and_nothing_stays(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    log: list[str] = []
    app = app_of(broker, f"app-{topic}")
    note(app, log, "first")
    note_async(app, log, "second")
    app.handler(topic)(print)

    with pytest.raises(ConfigurationError, match="no handler is an `async def`"):
        app.start()

    assert log == ["first begins", "first ends"]


def test_what_is_no_generator_is_no_lifespan() -> None:
    app = App("app", bootstrap_servers="unused:1")

    with pytest.raises(ConfigurationError, match="lifespan takes a function with one `yield`"):
        app.lifespan(lambda: iter(()))  # type: ignore[arg-type] # that is what is tested
