"""`Telemetry(sample_ratio=...)`: messages left out by chance, and messages sampled by their sender, never left out."""

from __future__ import annotations

import asyncio

import pytest

from penstock import Message, Telemetry
from penstock.telemetry import extract
from penstock.telemetry.consumer import ConsumerTelemetry
from penstock.telemetry.sending import SendSpans
from telemetry_tools import SPAN, Recorded, message, traceparent


@pytest.fixture
def left_out(recorded: Recorded) -> Telemetry:
    """Telemetry that chooses nothing by chance."""
    return Telemetry(recorded.tracer_provider, recorded.meter_provider, sample_ratio=0.0)


def test_only_messages_whose_sender_was_sampled_are_handled_within_a_span_and_timed(
    recorded: Recorded, left_out: Telemetry
) -> None:
    around = ConsumerTelemetry(left_out, "billing").processing.around
    headers = [[], [traceparent(flags="00")], [traceparent(flags="01")], [("traceparent", b"garbage-01")]]
    messages = [message(number, headers=given) for number, given in enumerate(headers)]

    async def bare(given: Message) -> tuple[str, int]:
        return "bare", given.offset

    async def within(given: Message) -> tuple[str, int]:
        return "within", given.offset

    plain = around(lambda given: ("bare", given.offset), within=lambda given: ("within", given.offset))
    tasks = around(bare, within=within, is_async=True)

    expected = [("bare", 0), ("bare", 1), ("within", 2), ("bare", 3)]
    assert [plain(given) for given in messages] == expected
    assert [asyncio.run(tasks(given)) for given in messages] == expected
    spans = recorded.spans("process orders")
    assert [(span.attributes or {})["messaging.kafka.offset"] for span in spans] == [2, 2]
    assert [f"{link.context.span_id:016x}" for span in spans for link in span.links] == [SPAN, SPAN]
    (timed,) = recorded.points("messaging.process.duration")
    assert timed.count == 2


def test_what_is_left_out_is_counted_all_the_same_and_keeps_its_headers(
    recorded: Recorded, left_out: Telemetry
) -> None:
    consumer, producer = ConsumerTelemetry(left_out, "billing"), SendSpans(left_out, "orders")

    consumer.polled("orders", {0: 7}, 0.1)
    headers = producer.sending("orders", [("a", b"1"), traceparent(flags="00")])

    assert recorded.spans() == []
    assert headers == [("a", b"1"), traceparent(flags="00")]
    assert [point.value for point in recorded.points("messaging.client.consumed.messages")] == [7]
    assert [point.value for point in recorded.points("messaging.client.sent.messages")] == [1]


def test_a_message_sent_within_a_sampled_trace_goes_on_with_it(recorded: Recorded, left_out: Telemetry) -> None:
    producer = SendSpans(left_out, "orders")

    with recorded.tracer_provider.get_tracer("user").start_as_current_span("an order") as outer:
        context = extract(producer.sending("orders", []))

    assert context is not None
    assert context.trace_id == outer.get_span_context().trace_id
    assert recorded.span("send orders").context.span_id == context.span_id
