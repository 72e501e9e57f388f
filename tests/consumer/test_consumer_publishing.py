"""What handlers return is published, and then their messages are done: on a broker in memory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from publishing_apps import in_flight, written

import penstock
from penstock import Outgoing
from penstock.testing import TestApp, TestBroker
from support.consumers import app_of


@pytest.mark.parametrize(
    "returned",
    [
        lambda m: Outgoing("out", m.value, key=m.key),
        lambda m: [Outgoing("out", m.value, key=m.key)],
        lambda m: (Outgoing("out", m.value, m.key), None),
        lambda m: (Outgoing("out", value, m.key) for value in [m.value]),
    ],
    ids=["one", "list", "tuple", "generator"],
)
def test_what_a_handler_returns_is_published_in_the_order_of_its_key(returned: Any) -> None:
    app = app_of()
    app.handler("in")(returned)

    with TestApp(app, topics=["out"]) as test:
        for number in range(50):
            test.send("in", str(number), key=f"k{number % 5}")
        test.settle()
        out = written(test)
        assert in_flight(test) == 0
        assert (test.statistics().handled, test.statistics().published) == (50, 50)

    for key in range(5):
        assert [value for name, value in out if name == b"k%d" % key] == [b"%d" % n for n in range(key, 50, 5)]


def test_generator_functions_and_async_handlers_publish_too() -> None:
    app = app_of()

    @app.handler("plain", to="out")
    def several(message: penstock.Message) -> Iterator[bytes | Outgoing]:
        if message.value == b"v":
            yield b"1"
            yield Outgoing("out", "2", "text key", headers={"a": "b"})

    @app.handler("tasks")
    async def one(message: penstock.Message) -> Outgoing:
        return Outgoing("out", b"3", headers=[("a", None)])

    @app.handler("streams", to="out")
    async def stream(message: penstock.Message) -> AsyncIterator[bytes | Outgoing]:
        yield b"4"
        yield Outgoing("out", None, b"tombstone")

    with TestApp(app, topics=["out"]) as test:
        for topic in ("plain", "tasks", "streams"):
            test.send(topic, b"v", key=b"k")
        test.send("plain", b"yields nothing", key=b"k")
        test.settle()
        out = test.published("out")

    found = [(message.key, message.value, message.headers) for message in out]
    assert sorted(found, key=str) == sorted(
        [
            (b"k", b"1", ()),
            (b"text key", b"2", (("a", b"b"),)),
            (None, b"3", (("a", None),)),
            (b"k", b"4", ()),
            (b"tombstone", None, ()),
        ],
        key=str,
    )


def test_a_topic_named_with_to_takes_plain_values_with_the_key_of_the_message() -> None:
    app = app_of()

    @app.handler("in", to="out", encoder="json")
    def double(message: penstock.Message) -> object:
        number = int(message.value or b"0")
        return {"double": 2 * number} if number else None

    with TestApp(app) as test:
        for number in range(3):
            test.send("in", str(number), key=f"k{number}")
        test.settle()
        assert written(test) == [(b"k1", b'{"double":2}'), (b"k2", b'{"double":4}')]
        assert in_flight(test) == 0


@dataclass
class Model:
    """Has the method that identifies pydantic's models."""

    number: int

    def model_dump_json(self) -> str:
        return json.dumps({"number": self.number})


@dataclass
class Plain:
    """A dataclass, which JSON is made of."""

    number: int


@pytest.mark.parametrize(
    ("encoder", "value", "bytes_"),
    [
        (Model, Model(3), b'{"number": 3}'),
        (lambda number: b"%d" % number, 4, b"4"),
        (str, 5, b"5"),
        (Plain, Plain(6), b'{"number":6}'),
        (list[Plain], [Plain(7)], b'[{"number":7}]'),
        ("json", ["a", "é"], '["a","é"]'.encode()),
        ("json", b"as it is", b"as it is"),
        ("json", "text", b'"text"'),
        (None, bytearray(b"array"), b"array"),
    ],
)
def test_an_encoder_makes_bytes_of_what_is_no_bytes(encoder: Any, value: object, bytes_: bytes) -> None:
    app = app_of()
    app.handler("in", to="out", encoder=encoder)(lambda _: value)

    with TestApp(app) as test:
        test.send("in", b"v")
        test.settle()
        assert [message.value for message in test.published("out")] == [bytes_]


def test_a_message_is_committed_only_when_all_its_results_are_written() -> None:
    app, broker = app_of(commit_interval=0.1), TestBroker(0)

    @app.handler("in")
    def handle(message: penstock.Message) -> list[Outgoing]:
        return [Outgoing("out", b"%s %d" % (message.value, number)) for number in range(3)]

    with TestApp(app, broker, topics=["out"]) as test:
        # The second of its three results is acknowledged late.
        broker.delay_answer("produce", 5.0)
        test.send("in", b"a")
        test.settle()
        assert test.committed("in") in ({}, {0: 0})
        assert in_flight(test) == 1
        (why,) = test.explain()
        assert ": its output is being written to out" in str(why)
        test.advance(6)
        assert test.committed("in") == {0: 1}


def test_the_trace_of_a_handler_travels_with_what_it_returns() -> None:
    spans, tracing = InMemorySpanExporter(), TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(spans))
    app = app_of(telemetry=penstock.Telemetry(tracer_provider=tracing, meter_provider=MeterProvider()))
    app.handler("in", to="out")(lambda message: message.value)

    with TestApp(app) as test:
        test.send("in", b"v", key="k")
        test.settle()
        (out,) = test.published("out")

    by_name = {span.name: span for span in spans.get_finished_spans()}
    sent, processed = by_name["send out"], by_name["process in"]
    assert sent.parent is not None
    assert sent.parent.span_id == processed.context.span_id
    assert format(sent.context.span_id, "016x") in (out.header("traceparent") or b"").decode()


def test_batches_return_a_list_for_each_message_or_results_for_the_whole() -> None:
    app = app_of()

    @app.handler("each", batch=10, to="out", encoder="json")
    def each(batch: list[penstock.Message]) -> list[object]:
        return [None if message.value == b"1" else int(message.value or b"") for message in batch]

    @app.handler("lists", batch=10)
    def lists(batch: list[penstock.Message]) -> list[list[Outgoing] | Outgoing]:
        return [*([Outgoing("pairs", b"1"), Outgoing("pairs", b"2")] for _ in batch[1:]), Outgoing("pairs", b"3")]

    @app.handler("whole", batch=10)
    def whole(batch: list[penstock.Message]) -> Outgoing:
        return Outgoing("sums", b"%d" % sum(int(message.value or b"0") for message in batch))

    with TestApp(app, topics=["pairs", "sums"]) as test:
        for topic in ("each", "lists", "whole"):
            for number in range(4):
                test.send(topic, str(number), key="k")
        test.settle()
        assert written(test) == [(b"k", b"0"), (b"k", b"2"), (b"k", b"3")]
        assert len(written(test, "pairs")) == 7
        assert sum(int(value or b"0") for _, value in written(test, "sums")) == 6
        assert in_flight(test) == 0
