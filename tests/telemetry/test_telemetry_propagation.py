from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import App
from penstock.message import Message
from penstock.telemetry import TraceIds, extract, inject
from penstock.telemetry.consumer import ConsumerTelemetry
from penstock.telemetry.propagation import context_of
from penstock.testing import TestApp
from telemetry_tools import SPAN, TRACE, Recorded, message, traceparent

GOOD = f"00-{TRACE}-{SPAN}-01".encode()


@pytest.mark.parametrize(
    "content",
    [None, b"", b"\xff\xfe\x00", GOOD[:-1], b"00-" + b"0" * 32 + b"-" + SPAN.encode() + b"-01", GOOD.ljust(100_000)],
)
def test_a_malformed_traceparent_counts_as_absent(content: bytes | None) -> None:
    assert extract([("traceparent", content)]) is None


@pytest.mark.parametrize("content", [GOOD, b" " + GOOD + b"\t", b"cc" + GOOD[2:], b"cc" + GOOD[2:] + b"-later"])
def test_a_sound_traceparent_is_read_also_of_later_versions(content: bytes) -> None:
    context = extract([("traceparent", content)])

    assert context is not None
    assert (context.trace_id, context.span_id, context.trace_flags) == (int(TRACE, 16), int(SPAN, 16), 1)
    assert context.is_remote


@pytest.mark.parametrize(
    "state",
    [b"\xff=1", b"no equals", b"a=1,a=2", b"A=1", b",".join(b"k%d=1" % n for n in range(33)), b"a=" + b"1" * 9000],
)
def test_a_malformed_tracestate_is_dropped_without_its_parent_and_without_a_word_in_the_log(
    state: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        context = extract([traceparent(), ("tracestate", state)])

    assert context is not None
    assert len(context.trace_state) == 0
    assert caplog.records == []


ANY_CONTENT = st.one_of(
    st.none(),
    st.binary(max_size=200),
    st.text(max_size=80),
    # Near misses: the form with some bytes changed.
    st.builds(
        lambda at, byte: GOOD[:at] + bytes([byte]) + GOOD[at + 1 :], st.integers(0, len(GOOD)), st.integers(0, 255)
    ),
    st.from_regex(r"\A[a-z@/]{0,5}=?[ -~]{0,9}(,[a-z]=[0-9])*\Z").map(str.encode),
)


@given(
    st.lists(
        st.tuples(st.sampled_from(["traceparent", "tracestate", "Traceparent", ""]) | st.text(max_size=5), ANY_CONTENT)
    )
)
def test_no_headers_whatever_raise(headers: list[tuple[str, str | bytes | None]]) -> None:
    context = extract(headers)

    assert context is None or context.is_valid


class _UnreadableRecord:
    """A record as the client gives it when a header's name is not UTF-8."""

    def headers(self) -> None:
        b"\xff".decode()


def test_headers_that_the_client_cannot_decode_are_no_context() -> None:
    assert context_of(Message(_UnreadableRecord())) is None  # type: ignore[arg-type] # nothing but headers is asked for


def test_forged_headers_reach_the_handler_and_cost_only_the_link(
    recorded: Recorded, consumer: ConsumerTelemetry
) -> None:
    handle = consumer.processing.around(lambda given: given.offset)

    assert handle(message(5, headers=[("traceparent", b"\xff\xfe"), ("tracestate", b"\x00")])) == 5

    assert recorded.span("process orders").links == ()


def test_injecting_takes_the_place_of_a_received_context(recorded: Recorded) -> None:
    headers = [traceparent(), ("a", b"1"), ("tracestate", b"old=1"), ("a", None)]

    with recorded.tracer_provider.get_tracer("user").start_as_current_span("order") as span:
        injected = inject(headers)

    assert injected[:2] == [("a", b"1"), ("a", None)]
    assert [name for name, _ in injected] == ["a", "a", "traceparent"]
    context = extract(injected)
    assert context is not None
    assert context.span_id == span.get_span_context().span_id


def test_what_a_handler_logs_carries_the_ids_of_its_message_s_span(
    recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    log, ids = logging.getLogger("a.users.log"), TraceIds()
    app = App("orders", bootstrap_servers="in-memory:1", telemetry=recorded.telemetry())
    app.handler("orders")(lambda _: log.warning("in the handler"))
    caplog.handler.addFilter(ids)

    with TestApp(app) as running:
        running.send("orders", value=b"v")
        running.settle()
    log.warning("outside")
    caplog.handler.removeFilter(ids)

    span = recorded.span("process orders").context
    within, outside = ((it.trace_id, it.span_id) for it in caplog.records if it.name == log.name)  # type: ignore[attr-defined] # the filter sets them
    assert within == (f"{span.trace_id:032x}", f"{span.span_id:016x}")
    assert outside == ("", "")
