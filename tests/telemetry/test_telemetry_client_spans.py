from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.trace import NoOpTracerProvider, SpanKind, StatusCode

from penstock.telemetry import Telemetry, extract
from penstock.telemetry.consumer import ConsumerTelemetry
from telemetry_tools import TRACE, Recorded, message, traceparent

COMMON = {
    "messaging.system": "kafka",
    "messaging.destination.name": "orders",
    "messaging.consumer.group.name": "billing",
}
POLL = {**COMMON, "messaging.operation.name": "poll"}
COMMIT = {**COMMON, "messaging.operation.name": "commit", "messaging.operation.type": "settle"}


def test_a_fetch_is_one_span_for_a_topic_and_counts_its_messages_once(
    recorded: Recorded, consumer: ConsumerTelemetry
) -> None:
    consumer.polled("orders", {0: 300, 5: 200}, 0.25)
    consumer.processing.around(lambda _: None)(message())

    span = recorded.span("poll orders")
    assert span.kind is SpanKind.CLIENT
    assert span.parent is None
    assert dict(span.attributes or {}) == {
        **POLL,
        "messaging.operation.type": "receive",
        "messaging.batch.message_count": 500,
    }
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == pytest.approx(0.25e9, abs=1000)
    counts = {
        point.attributes["messaging.destination.partition.id"]: point
        for point in recorded.points("messaging.client.consumed.messages")
    }
    assert {partition: point.value for partition, point in counts.items()} == {"0": 300, "5": 200}
    assert counts["0"].attributes == {**POLL, "messaging.destination.partition.id": "0"}


def test_a_refused_commit_carries_kafkas_name_of_the_error(recorded: Recorded, consumer: ConsumerTelemetry) -> None:
    consumer.committed("orders", 1, "REBALANCE_IN_PROGRESS")

    span = recorded.span("commit orders")
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "REBALANCE_IN_PROGRESS"


def test_a_dead_letter_carries_the_context_of_its_own_span_which_is_linked_to_the_first_sender(
    recorded: Recorded, consumer: ConsumerTelemetry
) -> None:
    headers = consumer.sending("dlq.orders", [traceparent(), ("kept", b"\xff"), ("text", "t"), ("none", None)])

    span = recorded.span("send dlq.orders")
    context = extract(headers)
    assert span.kind is SpanKind.PRODUCER
    assert span.parent is None
    assert [trace.format_trace_id(link.context.trace_id) for link in span.links] == [TRACE]
    assert headers[:-1] == [("kept", b"\xff"), ("text", "t"), ("none", None)]
    assert context is not None
    assert span.context is not None
    assert (context.trace_id, context.span_id) == (span.context.trace_id, span.context.span_id)
    (point,) = recorded.points("messaging.client.sent.messages")
    assert point.value == 1
    assert point.attributes["messaging.destination.name"] == "dlq.orders"


def test_without_a_tracer_a_dead_letter_keeps_the_context_it_had() -> None:
    consumer = ConsumerTelemetry(Telemetry(NoOpTracerProvider(), NoOpMeterProvider()), "billing")

    assert consumer.sending("dlq.orders", [traceparent(), ("a", b"1")]) == [traceparent(), ("a", b"1")]
