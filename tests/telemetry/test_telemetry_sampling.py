"""`Telemetry(sample_ratio=...)`: what chance leaves out, and what the sender sampled, which it never does."""

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


def test_only_messages_whose_sender_was_sampled_are_traced_and_timed(recorded: Recorded, left_out: Telemetry) -> None:
    consumer = ConsumerTelemetry(left_out, "billing")
    handle = consumer.processing.around(lambda given: given.offset)
    headers = [[], [traceparent(flags="00")], [traceparent(flags="01")], [("traceparent", b"garbage-01")]]

    assert [handle(message(number, headers=given)) for number, given in enumerate(headers)] == [0, 1, 2, 3]

    processed = recorded.span("process orders")
    assert (processed.attributes or {})["messaging.kafka.offset"] == 2
    assert [f"{link.context.span_id:016x}" for link in processed.links] == [SPAN]
    (timed,) = recorded.points("messaging.process.duration")
    assert timed.count == 1


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


def test_what_is_left_out_is_handed_to_the_handler_itself_and_what_is_chosen_to_what_is_done_within_the_span(
    recorded: Recorded, left_out: Telemetry
) -> None:
    around = ConsumerTelemetry(left_out, "billing").processing.around
    within = around(lambda _: "bare", within=lambda _: "with results")

    async def bare(_given: Message) -> str:
        return "bare"

    async def with_results(_given: Message) -> str:
        return "with results"

    tasks = around(bare, within=with_results, is_async=True)
    sampled = message(1, headers=[traceparent()])

    assert [within(message(0)), within(sampled)] == ["bare", "with results"]
    assert [asyncio.run(tasks(message(0))), asyncio.run(tasks(sampled))] == ["bare", "with results"]
