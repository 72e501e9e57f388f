from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest
from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from penstock.message import Message
from penstock.telemetry import Telemetry
from penstock.telemetry.consumer import ConsumerTelemetry
from telemetry_tools import SPAN, TRACE, Recorded, message, traceparent

PLACE = {
    "messaging.system": "kafka",
    "messaging.operation.name": "process",
    "messaging.operation.type": "process",
    "messaging.destination.name": "orders",
    "messaging.destination.partition.id": "3",
    "messaging.consumer.group.name": "billing",
}


class HandlerError(Exception):
    pass


def test_a_message_is_handled_in_a_span_with_the_conventions_attributes(
    recorded: Recorded, consumer: ConsumerTelemetry
) -> None:
    handle = consumer.processing.around(lambda given: given.offset + 1)

    answer = handle(message(7))

    span = recorded.span("process orders")
    assert answer == 8
    assert span.kind is SpanKind.CONSUMER
    assert dict(span.attributes or {}) == {**PLACE, "messaging.kafka.offset": 7}
    assert span.status.status_code is StatusCode.UNSET


def test_the_span_is_a_root_linked_to_the_producer_whatever_is_current(
    recorded: Recorded, consumer: ConsumerTelemetry
) -> None:
    handle = consumer.processing.around(lambda _: None)

    with recorded.tracer_provider.get_tracer("user").start_as_current_span("around the worker"):
        handle(message(headers=[traceparent(), ("tracestate", b"vendor=1")]))

    span = recorded.span("process orders")
    (link,) = span.links
    assert span.parent is None
    assert trace.format_trace_id(link.context.trace_id) == TRACE
    assert trace.format_span_id(link.context.span_id) == SPAN
    assert link.context.is_remote
    assert link.context.trace_state["vendor"] == "1"
    assert span.context is not None
    assert trace.format_trace_id(span.context.trace_id) != TRACE


def test_spans_of_the_handler_are_children_and_the_context_is_left_afterwards(
    recorded: Recorded, consumer: ConsumerTelemetry
) -> None:
    tracer = recorded.tracer_provider.get_tracer("user")

    def call(_: Message) -> None:
        with tracer.start_as_current_span("query"):
            pass

    before = context_api.get_current()
    consumer.processing.around(call)(message())

    assert recorded.span("query").parent == recorded.span("process orders").context
    assert context_api.get_current() == before


def test_a_context_the_handler_left_attached_does_not_reach_the_next_message(consumer: ConsumerTelemetry) -> None:
    seen: list[object] = []

    def careless(_: Message) -> None:
        seen.append(context_api.get_value("left"))
        context_api.attach(context_api.set_value("left", "behind"))

    handle = consumer.processing.around(careless)
    handle(message(1))
    handle(message(2))

    assert seen == [None, None]


def test_keys_and_values_are_in_no_span_or_metric_by_default(recorded: Recorded, consumer: ConsumerTelemetry) -> None:
    def fail(given: Message) -> None:
        raise HandlerError(f"cannot book {given.key!r} {given.value!r}")

    with pytest.raises(HandlerError):
        consumer.processing.around(fail)(message(key=b"account-42", value=b"secret value"))

    told = recorded.span("process orders").to_json() + str(recorded.metrics())
    assert "HandlerError" in told
    assert "account-42" not in told
    assert "secret value" not in told


@pytest.mark.parametrize(
    ("key", "text"),
    [(b"account-42", "account-42"), (b"\xff\x00a", "\\xff\x00a"), (b"x" * 5000, "x" * 256), (None, None), (b"", "")],
)
def test_keys_are_recorded_when_asked_for(recorded: Recorded, key: bytes | None, text: str | None) -> None:
    consumer = ConsumerTelemetry(recorded.telemetry(record_keys=True), "billing")

    consumer.processing.around(lambda _: None)(message(key=key))

    assert (recorded.span("process orders").attributes or {}).get("messaging.kafka.message.key") == text


@pytest.mark.parametrize("error", [HandlerError("bad"), KeyError("k"), SystemExit(3)])
def test_an_exception_passes_through_unchanged_and_marks_the_span(
    recorded: Recorded, consumer: ConsumerTelemetry, error: BaseException
) -> None:
    cause = ValueError("cause")

    def fail(_: Message) -> None:
        raise error from cause

    with pytest.raises(type(error)) as caught:
        consumer.processing.around(fail)(message())

    span = recorded.span("process orders")
    (event,) = span.events
    name = type(error).__qualname__
    assert caught.value is error
    assert caught.value.__cause__ is cause
    assert caught.value.__context__ is None
    assert span.status.status_code is StatusCode.ERROR
    assert str((span.attributes or {})["error.type"]).rsplit(".", 1)[-1] == name
    assert event.name == "exception"
    assert "in fail" in str((event.attributes or {})["exception.stacktrace"])
    (point,) = recorded.points("messaging.process.duration")
    assert point.attributes["error.type"] == (span.attributes or {})["error.type"]
    assert not trace.get_current_span().get_span_context().is_valid


def test_the_duration_is_measured_in_the_conventions_buckets(recorded: Recorded) -> None:
    now = [100.0]
    consumer = ConsumerTelemetry(recorded.telemetry(), "billing", clock=lambda: now[0])

    def work(given: Message) -> None:
        now[0] += given.offset / 1000

    handle = consumer.processing.around(work)
    for offset in (3, 30, 4000):
        handle(message(offset))

    metric = recorded.metrics()["messaging.process.duration"]
    (point,) = metric.data.data_points
    assert metric.unit == "s"
    assert point.explicit_bounds == (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
    assert point.bucket_counts == (1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0)
    assert point.sum == pytest.approx(4.033)
    assert point.attributes == {
        "messaging.system": "kafka",
        "messaging.operation.name": "process",
        "messaging.destination.name": "orders",
        "messaging.consumer.group.name": "billing",
    }


def test_a_measurement_points_to_its_span(recorded: Recorded, consumer: ConsumerTelemetry) -> None:
    consumer.processing.around(lambda _: None)(message())

    (point,) = recorded.points("messaging.process.duration")
    span = recorded.span("process orders")
    assert span.context is not None
    assert [one.trace_id for one in point.exemplars] == [span.context.trace_id]


def test_a_batch_is_one_span_with_a_link_for_each_distinct_context(
    recorded: Recorded, consumer: ConsumerTelemetry
) -> None:
    other = "1" * 32
    batch = [
        message(1, headers=[traceparent()]),
        message(2, headers=[traceparent()]),
        message(3),
        message(4, headers=[traceparent(other)]),
    ]

    total = consumer.processing.around(lambda messages: sum(one.offset for one in messages), batches=True)(batch)

    span = recorded.span("process orders")
    assert total == 10
    assert [trace.format_trace_id(link.context.trace_id) for link in span.links] == [TRACE, other]
    assert dict(span.attributes or {}) == {**PLACE, "messaging.batch.message_count": 4}
    (point,) = recorded.points("messaging.process.duration")
    assert point.count == 1


def test_two_tasks_at_once_do_not_mix_their_contexts(recorded: Recorded, consumer: ConsumerTelemetry) -> None:
    tracer = recorded.tracer_provider.get_tracer("user")

    async def main() -> list[int]:
        inside = {1: asyncio.Event(), 2: asyncio.Event()}

        async def work(given: Message) -> int:
            inside[given.offset].set()
            await inside[3 - given.offset].wait()
            with tracer.start_as_current_span(f"query {given.offset}"):
                await asyncio.sleep(0)
            return given.offset

        handle = consumer.processing.around(work, is_async=True)
        return list(await asyncio.wait_for(asyncio.gather(handle(message(1)), handle(message(2))), 30))

    assert asyncio.run(main()) == [1, 2]

    spans = {(span.attributes or {})["messaging.kafka.offset"]: span for span in recorded.spans("process orders")}
    for offset in (1, 2):
        assert recorded.span(f"query {offset}").parent == spans[offset].context
        assert spans[offset].parent is None


def test_a_cancelled_task_ends_its_span_and_stays_cancelled(recorded: Recorded, consumer: ConsumerTelemetry) -> None:
    async def main() -> bool:
        started = asyncio.Event()

        async def work(_: list[Message]) -> None:
            started.set()
            await asyncio.Event().wait()

        async def call() -> None:
            await consumer.processing.around(work, batches=True, is_async=True)([message(1), message(2)])

        task = asyncio.create_task(call())
        await asyncio.wait_for(started.wait(), 30)
        task.cancel()
        await asyncio.wait([task], timeout=30)
        return task.cancelled()

    assert asyncio.run(main())

    attributes = recorded.span("process orders").attributes or {}
    assert attributes["error.type"] == "asyncio.exceptions.CancelledError"
    assert attributes["messaging.batch.message_count"] == 2


def test_what_is_not_sampled_is_handled_and_measured_all_the_same() -> None:
    recorded = Recorded(ALWAYS_OFF)
    consumer = ConsumerTelemetry(recorded.telemetry(), "billing")
    seen: list[bool] = []

    consumer.processing.around(lambda _: seen.append(trace.get_current_span().get_span_context().trace_flags.sampled))(
        message()
    )

    (point,) = recorded.points("messaging.process.duration")
    assert seen == [False]
    assert recorded.spans() == []
    assert point.count == 1


def test_a_span_ends_where_its_time_cannot_be_recorded(
    recorded: Recorded, consumer: ConsumerTelemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(*_: object) -> None:
        raise RuntimeError("a defect of an exemplar reservoir")

    handle = consumer.processing.around(lambda given: given.offset)
    monkeypatch.setattr(consumer.processing, "_durations", SimpleNamespace(record=record))

    assert handle(message(7)) == 7

    assert [span.name for span in recorded.spans()] == ["process orders"]


class _BrokenProcessor(SpanProcessor):
    """A span processor of somebody else's that raises at one of its two calls."""

    def __init__(self, *, at_start: bool) -> None:
        self.at_start = at_start
        self.raised = 0

    def on_start(self, span: object, parent_context: object = None) -> None:  # noqa: ARG002 - the SDK's signature
        if self.at_start:
            self._break()

    def on_end(self, span: ReadableSpan) -> None:  # noqa: ARG002 - the SDK's signature
        if not self.at_start:
            self._break()

    def _break(self) -> None:
        self.raised += 1
        raise RuntimeError("a defect of the processor")


@pytest.mark.parametrize("at_start", [True, False])
def test_a_broken_span_processor_costs_no_message(caplog: pytest.LogCaptureFixture, at_start: bool) -> None:
    broken = _BrokenProcessor(at_start=at_start)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(broken)
    consumer = ConsumerTelemetry(Telemetry(provider, MeterProvider([InMemoryMetricReader()])), "billing")
    handle = consumer.processing.around(lambda given: given.offset)

    with caplog.at_level(logging.WARNING, logger="penstock"):
        answers = [handle(message(offset)) for offset in range(3)]
        consumer.polled("orders", {0: 1}, 0.1)
        consumer.committed("orders", 1)
        headers = consumer.sending("dlq.orders", [("a", b"1")])

    assert answers == [0, 1, 2]
    assert headers[0] == ("a", b"1")
    assert broken.raised == 6
    assert not trace.get_current_span().get_span_context().is_valid
    assert len([one for one in caplog.records if one.name.startswith("penstock")]) == 1
