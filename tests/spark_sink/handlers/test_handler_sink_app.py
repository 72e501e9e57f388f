"""`App.handler_sink`: the same decorated handlers, with the app's settings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.app import App
from penstock.consumer import CallNext, DeadLetterLimit
from penstock.errors import ConfigurationError
from penstock.message import Message
from penstock.testing import TestApp


def quiet(message: Message, call_next: CallNext) -> object:
    return call_next(message)


def app_of_two() -> App:
    app = App(
        "billing",
        bootstrap_servers="there:9092",
        max_in_flight=77,
        max_in_flight_bytes=4_000,
        max_concurrency=5,
        dead_letter_limit=DeadLetterLimit(consecutive=3),
        middlewares=[quiet],
    )

    @app.handler("orders", on_failure="dead_letter")
    def order(message: Message) -> None:
        pass

    @app.handler("payments")
    def payment(message: Message) -> None:
        pass

    @app.lifespan
    def span() -> Iterator[None]:
        yield

    @app.worker_resource
    def session() -> Iterator[None]:
        yield

    return app


def test_a_sink_of_an_app_has_its_handlers_limits_and_surroundings() -> None:
    app = app_of_two()

    sink = app.handler_sink(parallelism=8, overlap="allowed", name="billing")

    assert dict(sink.handlers) == dict(app.handlers)
    assert (sink.group, sink.parallelism, sink.bootstrap_servers) == ("billing", 8, "there:9092")
    assert sink.overlap == "allowed"
    assert (sink.max_in_flight, sink.max_in_flight_bytes, sink.max_concurrency) == (77, 4_000, 5)
    assert sink.dead_letter_limit.consecutive == 3
    assert [len(each) for each in (sink.middlewares, sink.lifespans, sink.resources)] == [1, 1, 1]


def test_what_spark_handles_the_apps_consumer_does_not() -> None:
    app = app_of_two()

    app.handler_sink("orders", parallelism=8, name="billing")

    assert list(app.consumer()._engine.handlers) == ["payments"]
    app.handler_sink("payments", parallelism=8)
    with pytest.raises(ConfigurationError, match="has no handler and no sink"):
        app.start()
    # What is tested is the handler, wherever it runs.
    with TestApp(app) as tested:
        tested.send("orders", b"x")
        tested.settle()
        assert tested.statistics().handled == 1


def test_a_topic_without_a_handler_is_named() -> None:
    with pytest.raises(ConfigurationError, match="app billing has no handler for refunds; register it"):
        app_of_two().handler_sink("orders", "refunds", parallelism=8)
    with pytest.raises(ConfigurationError, match="topic must name at least one topic"):
        App("empty", bootstrap_servers="there:9092").handler_sink(parallelism=1)
