"""Lifespans of an app: the code that runs before its start and after its end."""

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
from penstock.testing import TestApp
from support.consumers import NewTopic, app_of
from waiting import wait_until


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


def cannot_end() -> Iterator[None]:
    yield
    raise OSError("cannot end")


async def cannot_begin() -> AsyncGenerator[None]:
    await asyncio.sleep(0)
    raise ConnectionError("the database is away")
    yield


def test_lifespans_begin_in_order_before_the_first_message_and_end_in_reverse_after_the_last(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic, log = new_topic(), list[str]()
    produce(broker.bootstrap_servers, topic, [(b"k", b"1")])
    app = App(f"app-{topic}", bootstrap_servers=broker.bootstrap_servers, workers=1, commit_interval=0.1)
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


@pytest.mark.parametrize(
    ("failing", "error"),
    [
        ([cannot_begin], ConnectionError),
        ([], TopicNotFoundError),
        # What kept it from starting is logged, also where a lifespan cannot end.
        ([cannot_end], TopicNotFoundError),
    ],
    ids=["a lifespan fails", "the consumer cannot start", "and a lifespan cannot end"],
)
def test_where_an_app_cannot_start_the_lifespans_that_began_end_and_nothing_stays(
    broker: DevBroker,
    new_name: Callable[..., str],
    failing: list[Callable[[], Iterator[None]]],
    error: type[Exception],
    caplog: pytest.LogCaptureFixture,
) -> None:
    name, log = new_name("app"), list[str]()
    app = App(name, bootstrap_servers=broker.bootstrap_servers)
    note(app, log, "first")
    note_async(app, log, "second")
    for span in failing:
        app.lifespan(span)
    note(app, log, "third")

    @app.handler(f"{name}-absent")
    async def handle(_message: Message) -> None:
        """Never called."""

    with pytest.raises(error):
        app.start()

    begun = ["first begins", "second begins", *(["third begins"] if error is TopicNotFoundError else [])]
    ended = [line.replace("begins", "ends") for line in reversed(begun)]
    assert [line.split(" on ")[0] for line in log] == [*begun, *ended]
    assert ("cannot end" in caplog.text) == (cannot_end in failing)
    wait_until(lambda: not [thread for thread in threading.enumerate() if name in thread.name])


def test_a_lifespan_that_cannot_end_is_reported_and_the_others_end() -> None:
    app, log = app_of(), list[str]()
    note(app, log, "first")
    app.lifespan(cannot_end)
    app.handler("t")(print)

    test = TestApp(app).start()
    with pytest.raises(OSError, match="cannot end"):
        test.stop()

    assert log == ["first begins", "first ends"]


def test_an_async_lifespan_without_an_async_handler_is_refused_and_nothing_stays(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic, log = new_topic(), list[str]()
    app = App(f"app-{topic}", bootstrap_servers=broker.bootstrap_servers)
    note(app, log, "first")
    note_async(app, log, "second")
    app.handler(topic)(print)

    with pytest.raises(ConfigurationError, match="no handler is an `async def`"):
        app.start()

    assert log == ["first begins", "first ends"]
