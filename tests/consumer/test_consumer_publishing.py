"""What handlers return is published, and then their messages are done: on a broker in memory."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import penstock
from penstock import Outgoing
from penstock.consumer.handlers.results import Result
from penstock.consumer.publishing.result_publisher import ResultPublisher
from penstock.errors import ConfigurationError, TopicNotFoundError
from penstock.testing import TestApp, TestBroker


def app_of(**options: Any) -> penstock.App:
    """An app that nobody's broker sees."""
    return penstock.App("app", bootstrap_servers="memory:0", **options)


def written(test: TestApp, topic: str = "out") -> list[tuple[bytes | None, bytes | None]]:
    return [(message.key, message.value) for message in test.published(topic)]


def in_flight(test: TestApp) -> int:
    return test.statistics().in_flight


@pytest.mark.parametrize(
    "returned",
    [
        lambda m: Outgoing("out", m.value, key=m.key),
        lambda m: [Outgoing("out", m.value, key=m.key)],
        lambda m: (Outgoing("out", m.value, m.key), None),
        lambda m: (Outgoing("out", one, m.key) for one in [m.value]),
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

    @app.handler("plain")
    def several(message: penstock.Message) -> Iterator[Outgoing]:
        yield Outgoing("out", b"1", message.key)
        yield Outgoing("out", "2", "text key", headers={"a": "b"})

    @app.handler("tasks")
    async def one(message: penstock.Message) -> Outgoing:
        return Outgoing("out", b"3", headers=[("a", None)])

    @app.handler("streams")
    async def stream(message: penstock.Message) -> AsyncIterator[Outgoing]:
        yield Outgoing("out", b"4")
        yield Outgoing("out", None, b"tombstone")

    with TestApp(app, topics=["out"]) as test:
        for topic in ("plain", "tasks", "streams"):
            test.send(topic, b"v", key=b"k")
        test.settle()
        out = test.published("out")

    found = [(message.key, message.value, message.headers) for message in out]
    assert sorted(found, key=str) == sorted(
        [
            (b"k", b"1", ()),
            (b"text key", b"2", (("a", b"b"),)),
            (None, b"3", (("a", None),)),
            (None, b"4", ()),
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
    """Has the method by which pydantic's models are known."""

    number: int

    def model_dump_json(self) -> str:
        return json.dumps({"number": self.number})


@pytest.mark.parametrize(
    ("encoder", "value", "bytes_"),
    [
        (Model, Model(3), b'{"number": 3}'),
        (lambda number: b"%d" % number, 4, b"4"),
        (str, 5, b"5"),
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


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (Outgoing("out", {"a": 1}), "a dict for out, not a value of bytes, text or None"),
        (Outgoing("out", b"v", 7), "an int for out, not a key of bytes, text or None"),  # type: ignore[arg-type] # wrong
        (Outgoing("", b"v"), "for the topic ''"),
        (Outgoing("out", b"v", partition=-1), "for partition -1 of out"),
        (Outgoing("out", b"v", headers=[("a", 1)]), "a list for out, not headers of text"),  # type: ignore[list-item] # wrong
        (Outgoing("out", b"v", headers=[("a",)]), "a list for out, not headers of pairs"),  # type: ignore[list-item] # wrong
        ([Outgoing("out", b"v"), b"plain"], "returned a bytes among its messages"),
    ],
)
def test_what_cannot_be_a_message_is_a_failure_that_is_not_tried_again(returned: object, what: str) -> None:
    app, tries = app_of(), list[None]()

    @app.handler("in", on_failure="dead_letter", retry=penstock.retry(attempts=9))
    def handle(_: penstock.Message) -> object:
        tries.append(None)
        return returned

    with TestApp(app, topics=["out"]) as test:
        test.send("in", b"payload")
        test.settle()
        (dead,) = test.dead_letters("in")
        assert test.published("out") == []

    said = dict(dead.headers)["__dlq.errors.message"] or b""
    assert what in said.decode()
    assert len(tries) == 1


def test_a_value_that_means_nothing_is_said_once_and_the_message_is_done(caplog: pytest.LogCaptureFixture) -> None:
    app = app_of()
    app.handler("in")(lambda _: 42)

    with TestApp(app) as test, caplog.at_level(logging.WARNING):
        for _ in range(5):
            test.send("in", b"v")
        test.settle()
        assert (test.statistics().handled, in_flight(test)) == (5, 0)

    said = [record.message for record in caplog.records if "is not published" in record.message]
    assert len(said) == 1
    assert "returned an int, which is not published: return penstock.Outgoing, name the topic with to=" in said[0]


def test_a_refused_result_is_a_failure_of_its_message_and_of_no_other() -> None:
    app, tries = app_of(), list[bytes | None]()

    @app.handler("in", retry=penstock.retry(attempts=3, wait=lambda _: 1.0), on_failure="dead_letter")
    def handle(message: penstock.Message) -> Outgoing:
        tries.append(message.value)
        return Outgoing("absent" if message.value == b"bad" else "out", message.value, message.key)

    with TestApp(app, topics=["out"]) as test:
        for value in ("1", "bad", "2", "3"):
            test.send("in", value, key="k")
        test.settle()
        test.advance(10)
        (dead,) = test.dead_letters("in")
        assert written(test) == [(b"k", b"1"), (b"k", b"2"), (b"k", b"3")]
        assert in_flight(test) == 0

    assert dead.value == b"bad"
    assert tries.count(b"bad") == 3
    assert b"absent does not take what a handler returned" in (dict(dead.headers)["__dlq.errors.message"] or b"")


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
        assert "is being written to out" in str(why)
        test.advance(6)
        assert test.committed("in") == {0: 1}


@pytest.mark.parametrize("is_async", [False, True])
def test_the_trace_of_a_handler_travels_with_what_it_returns(is_async: bool) -> None:
    spans, tracing = InMemorySpanExporter(), TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(spans))
    app = app_of(telemetry=penstock.Telemetry(tracer_provider=tracing, meter_provider=MeterProvider()))

    if is_async:

        @app.handler("in", to="out")
        async def later(message: penstock.Message) -> bytes | None:
            return message.value

    else:
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


def test_a_full_buffer_is_waited_for_in_the_order_of_the_messages() -> None:
    app, broker = app_of(), TestBroker(0)
    app.handler("in", to="out")(lambda message: message.value)

    with TestApp(app, broker) as test:
        broker.fail_by_chance("queue", KafkaError(0), 0.5)
        for number in range(30):
            test.send("in", str(number), key="k")
        test.settle()
        test.advance(1)
        assert [value for _, value in written(test)] == [b"%d" % number for number in range(30)]


def test_a_producer_that_failed_for_ever_is_replaced_and_nothing_is_missing() -> None:
    app, broker = app_of(), TestBroker(0)
    app.handler("in", to="out")(lambda message: message.value)

    with TestApp(app, broker) as test:
        test.send("in", b"before", key="k")
        test.settle()
        fatal = KafkaError(KafkaError._FENCED, "fenced", fatal=True)
        broker.fail("produce", fatal)
        for number in range(5):
            test.send("in", str(number), key="k")
        test.settle()
        test.advance(30)
        values = [value for _, value in written(test)]
        assert in_flight(test) == 0

    assert list(dict.fromkeys(values)) == [b"before", *(b"%d" % number for number in range(5))]


class FailingProducer:
    """Stands in for a `LastingProducer`."""

    def __init__(self) -> None:
        self.failure: KafkaError | None = None
        self.written: list[bytes] = []
        self._out: list[Any] = []

    def renew(self) -> bool:
        failure, self.failure = self.failure, None
        out, self._out = self._out, []
        for told in out:
            told(failure, None)
        return True

    def produce(self, _topic: str, value: bytes, _key: bytes, *, on_delivery: Any, **_more: object) -> None:
        if self.failure is not None:
            self.renew()
        self.written.append(value)
        self._out.append(on_delivery)

    def poll(self, _timeout: float) -> int:
        return 0


def test_what_a_producer_had_that_failed_for_ever_is_sent_before_what_came_later() -> None:
    fatal = KafkaError(KafkaError._FENCED, "fenced", fatal=True)
    producer = FailingProducer()
    publisher = ResultPublisher(lambda _lane, _refused: None)
    publisher._producer = cast("Any", producer)
    assignment = SimpleNamespace(active=True, tracker=SimpleNamespace(complete=lambda *_: None))
    fetch = SimpleNamespace(assignment=assignment, block=None)

    def submit(*values: bytes) -> None:
        results = [Result("out", value, b"k", [], -1) for value in values]
        publisher.submit(cast("Any", None), [cast("Any", (fetch, 0, None))], results)

    submit(b"1", b"2")
    publisher.serve()
    producer.failure = fatal
    submit(b"3")
    for _ in range(5):
        publisher.serve()

    assert producer.written == [b"1", b"2", b"1", b"2", b"3"]


def test_batches_return_a_list_for_each_message_or_results_for_the_whole() -> None:
    app = app_of()

    @app.handler("each", batch=10, to="out", encoder="json")
    def each(batch: list[penstock.Message]) -> list[object]:
        return [None if message.value == b"1" else int(message.value or b"") for message in batch]

    @app.handler("lists", batch=10)
    def lists(batch: list[penstock.Message]) -> list[list[Outgoing]]:
        return [[Outgoing("pairs", message.value), Outgoing("pairs", b"again")] for message in batch]

    @app.handler("whole", batch=10)
    def whole(batch: list[penstock.Message]) -> Outgoing:
        return Outgoing("sums", b"%d" % sum(int(message.value or b"0") for message in batch))

    with TestApp(app, topics=["pairs", "sums"]) as test:
        for topic in ("each", "lists", "whole"):
            for number in range(4):
                test.send(topic, str(number), key="k")
        test.settle()
        assert written(test) == [(b"k", b"0"), (b"k", b"2"), (b"k", b"3")]
        assert len(written(test, "pairs")) == 8
        assert sum(int(value or b"0") for _, value in written(test, "sums")) == 6
        assert in_flight(test) == 0


def test_a_batch_that_returns_too_few_plain_values_fails() -> None:
    app = app_of()
    app.handler("in", batch=4, to="out", on_failure="dead_letter")(lambda _: [b"too many"] * 9)

    with TestApp(app) as test:
        for number in range(4):
            test.send("in", str(number), key="k")
        test.settle()
        said = {dict(one.headers)["__dlq.errors.message"] for one in test.dead_letters("in")}
        assert test.published("out") == []

    assert all(b"return a list with a value for each of them" in (one or b"") for one in said)


def test_results_of_a_retried_message_come_once_it_succeeds_and_before_those_behind_it() -> None:
    app, failures = app_of(), [True, True]

    @app.handler("in", to="out", retry=penstock.retry(attempts=5, wait=lambda _: 1.0))
    def handle(message: penstock.Message) -> bytes | None:
        if message.value == b"0" and failures:
            failures.pop()
            raise ValueError
        return message.value

    with TestApp(app) as test:
        for number in range(3):
            test.send("in", str(number), key="k")
        test.settle()
        test.advance(5)
        assert [value for _, value in written(test)] == [b"0", b"1", b"2"]


def test_results_of_a_partition_that_is_taken_away_are_waited_for_and_not_repeated() -> None:
    broker = TestBroker(0)
    app = app_of()
    app.handler("in", to="out")(lambda message: message.value)
    other = app_of()
    other.handler("in", to="out")(lambda message: message.value)

    with TestApp(app, broker, partitions=2) as first:
        for number in range(40):
            first.send("in", str(number), key=f"k{number}")
        first.settle()
        with TestApp(other, broker, partitions=2) as second:
            for _ in range(20):
                first.advance(1)
                second.advance(1)
            for number in range(40, 80):
                second.send("in", str(number), key=f"k{number}")
            for _ in range(5):
                first.advance(1)
                second.advance(1)
            values = [value for _, value in written(second)]

    assert sorted(values, key=str) == sorted((b"%d" % number for number in range(80)), key=str)


def test_a_topic_named_with_to_that_is_absent_is_said_at_the_start() -> None:
    app = app_of()
    app.handler("in", to="out")(lambda message: message.value)
    test = TestApp(app)
    test._topics.pop("out")

    with pytest.raises(TopicNotFoundError, match="out"):
        test.start()


@pytest.mark.parametrize("encoder", ["yaml", 5])
def test_a_wrong_encoder_is_refused(encoder: Any) -> None:
    with pytest.raises(ConfigurationError, match="encoder must be"):
        app_of().handler("in", encoder=encoder)(print)


def test_a_handler_that_publishes_to_its_own_topic_is_refused() -> None:
    app = app_of()
    app.handler("in", to="in")(lambda message: message.value)

    with pytest.raises(ConfigurationError, match="consumes in and publishes to it"):
        app.consumer()
