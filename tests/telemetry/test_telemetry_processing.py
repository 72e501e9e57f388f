from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
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


def test_a_message_is_handled_in_a_root_span_with_the_conventions_attributes_linked_to_its_producer(
    recorded: Recorded, consumer: ConsumerTelemetry
) -> None:
    tracer = recorded.tracer_provider.get_tracer("user")

    def call(given: Message) -> int:
        with tracer.start_as_current_span("query"):
            return given.offset + 1

    with tracer.start_as_current_span("around the worker"):
        before = context_api.get_current()
        headers = [traceparent(), ("tracestate", b"vendor=1")]
        answer = consumer.processing.around(call)(message(7, headers=headers))
        assert context_api.get_current() == before

    span = recorded.span("process orders")
    (link,), (point,) = span.links, recorded.points("messaging.process.duration")
    assert answer == 8
    assert (span.kind, span.parent, span.status.status_code) == (SpanKind.CONSUMER, None, StatusCode.UNSET)
    assert dict(span.attributes or {}) == {**PLACE, "messaging.kafka.offset": 7}
    assert span.context is not None
    assert trace.format_trace_id(span.context.trace_id) != TRACE
    assert trace.format_trace_id(link.context.trace_id) == TRACE
    assert trace.format_span_id(link.context.span_id) == SPAN
    assert link.context.is_remote
    assert link.context.trace_state["vendor"] == "1"
    assert recorded.span("query").parent == span.context
    assert [exemplar.span_id for exemplar in point.exemplars] == [span.context.span_id]


def test_a_context_the_handler_left_attached_does_not_reach_the_next_message(consumer: ConsumerTelemetry) -> None:
    seen: list[object] = []

    def careless(_: Message) -> None:
        seen.append(context_api.get_value("left"))
        context_api.attach(context_api.set_value("left", "behind"))

    handle = consumer.processing.around(careless)
    handle(message(1))
    handle(message(2))

    assert seen == [None, None]


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


@pytest.mark.parametrize("call", ["on_start", "on_end"])
def test_a_broken_span_processor_costs_no_message(caplog: pytest.LogCaptureFixture, call: str) -> None:
    processor = Mock(spec=SpanProcessor)
    broken = getattr(processor, call)
    broken.side_effect = RuntimeError("a defect of the processor")
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    consumer = ConsumerTelemetry(Telemetry(provider, MeterProvider([InMemoryMetricReader()])), "billing")
    handle = consumer.processing.around(lambda given: given.offset)

    with caplog.at_level(logging.WARNING, logger="penstock"):
        answers = [handle(message(offset)) for offset in range(3)]
        consumer.polled("orders", {0: 1}, 0.1)
        consumer.committed("orders", 1)
        headers = consumer.sending("dlq.orders", [("a", b"1")])

    assert answers == [0, 1, 2]
    assert headers[0] == ("a", b"1")
    assert broken.call_count == 6
    assert not trace.get_current_span().get_span_context().is_valid
    assert len([record for record in caplog.records if record.name.startswith("penstock")]) == 1
