"""The span of a batch of a Spark query, around a function that needs no Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from penstock.telemetry import Telemetry
from penstock.telemetry.spark import count_messages, within_spans
from telemetry_tools import Recorded

ANY: Any = None


def test_a_batch_is_a_span_that_is_current_while_its_function_runs(recorded: Recorded) -> None:
    seen: list[tuple[int, bool]] = []

    def store(_batch: object, batch_id: int) -> None:
        seen.append((batch_id, get_current_span().is_recording()))

    within_spans(recorded.telemetry(), "store", store)(ANY, 7)

    assert seen == [(7, True)]
    assert not get_current_span().is_recording()
    span = recorded.span("process store")
    assert (span.kind, span.parent, span.status.status_code) == (SpanKind.CONSUMER, None, StatusCode.UNSET)
    assert dict(span.attributes or {}) == {
        "messaging.system": "kafka",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "penstock.spark.query": "store",
        "penstock.spark.batch.id": 7,
    }


def test_what_the_function_raises_passes_and_marks_the_span_by_its_type_alone(recorded: Recorded) -> None:
    def fail(_batch: object, _batch_id: int) -> None:
        raise ValueError("secret value")

    with pytest.raises(ValueError, match="secret value"):
        within_spans(recorded.telemetry(), "store", fail)(ANY, 7)

    span = recorded.span("process store")
    assert (span.attributes or {})["error.type"] == "ValueError"
    assert span.status.status_code is StatusCode.ERROR
    assert "secret" not in span.to_json()


def test_a_batch_notes_how_many_messages_it_had(recorded: Recorded) -> None:
    within_spans(recorded.telemetry(), "store", lambda _, __: count_messages(4))(ANY, 1)

    assert (recorded.span("process store").attributes or {})["messaging.batch.message_count"] == 4


def test_telemetry_that_fails_costs_no_batch(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []
    broken = Telemetry(cast("Any", SimpleNamespace(get_tracer=lambda *_, **__: None)))

    within_spans(broken, "store", lambda _, batch_id: seen.append(batch_id))(ANY, 7)

    assert seen == [7]
    assert "telemetry of consumer store failed" in caplog.text
