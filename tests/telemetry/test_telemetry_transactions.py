"""Metrics of a coordinator, and spans of a transactional producer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock import App
from penstock.devbroker import DevBroker
from penstock.telemetry.observed import TRANSACTION_METRICS, CoordinatorTelemetry
from penstock.telemetry.sending import PublicationSpans
from penstock.transactions import Coordinator, SqlStore, TransactionalProducer
from telemetry_tools import READING, TRACE, Recorded, traceparent
from waiting import wait_until


def values(recorded: Recorded) -> dict[str, dict[str, float]]:
    """Collect once and return values by metric and by the attributes that are not the prefix."""
    shown: dict[str, dict[str, float]] = {}
    for name, metric in recorded.metrics().items():
        for point in metric.data.data_points:
            labels = {k: v for k, v in (point.attributes or {}).items() if k != "penstock.transactions.prefix"}
            value: Any = point.value  # type: ignore[union-attr] # none of them is a histogram
            shown.setdefault(name.removeprefix("penstock.transactions."), {})[" ".join(map(str, labels.values()))] = (
                value
            )
    return shown


def test_every_number_of_a_coordinator_is_shown(recorded: Recorded) -> None:
    telemetry = CoordinatorTelemetry(recorded.telemetry(), "penstock", lambda: READING)

    assert values(recorded) == {
        "pending": {"": 1},
        "oldest_pending_age": {"": 2.5},
        "held": {"target": 3, "key": 4, "time": 5},
        "committed": {"": 6},
        "rolled_back": {"": 7},
        "discarded": {"": 8},
        "refused": {"": 9},
        "forged": {"": 10},
        "checks": {"": 11},
        "no_producer": {"": 12},
        "lost": {"": 13},
        # Each bound with those below it.
        "finished": {"0.1": 20, "1": 22, "+Inf": 23},
        "finish_time": {"": 14.5},
    }
    assert {metric.name for metric in TRANSACTION_METRICS} == set(recorded.metrics())
    telemetry.close()
    assert values(recorded) == {}


@pytest.mark.parametrize("kind", ["kafka", "sqlite"])
def test_one_trace_leads_from_the_sender_over_its_decision_and_its_publication_to_the_handler(
    broker: DevBroker, new_topic: Callable[..., str], recorded: Recorded, tmp_path: Path, kind: str
) -> None:
    topic, telemetry = new_topic(), recorded.telemetry()
    where: dict[str, Any] = {"bootstrap_servers": broker.bootstrap_servers, "prefix": f"store.{topic}"}
    if kind == "sqlite":
        where = {"store": SqlStore(f"sqlite:///{tmp_path}/store.db", **where)}
    app = App(topic, bootstrap_servers=broker.bootstrap_servers, telemetry=telemetry)
    handled = threading.Event()
    app.handler(topic)(lambda _: handled.set())
    tracer = recorded.tracer_provider.get_tracer("test")

    with (
        Coordinator(**where, telemetry=telemetry),
        TransactionalProducer("orders", **where, telemetry=telemetry) as producer,
        app.start(),
    ):
        with tracer.start_as_current_span("an order"):
            producer.send(topic, value=b"v")
            with suppress(ZeroDivisionError), producer.transaction(topic, value=b"rolled back"):
                raise ZeroDivisionError
        assert handled.wait(60)
        wait_until(lambda: recorded.spans(f"process {topic}") and recorded.spans(f"publish {topic}"))

    outer = recorded.span("an order")
    sent, undone = recorded.spans(f"send {topic}")
    settled, rolled_back = recorded.spans(f"settle {topic}")
    published, processed = recorded.span(f"publish {topic}"), recorded.span(f"process {topic}")
    for child in (settled, published):
        assert child.parent is not None
        assert child.parent.span_id == sent.context.span_id
    assert rolled_back.parent is not None
    assert rolled_back.parent.span_id == undone.context.span_id
    assert {one.context.trace_id for one in (sent, settled, published)} == {outer.context.trace_id}
    assert (processed.parent, [link.context.span_id for link in processed.links]) == (None, [sent.context.span_id])
    decisions = [(one.attributes or {})["penstock.transactions.decision"] for one in (settled, rolled_back)]
    assert decisions == ["COMMIT", "ROLLBACK"]
    assert (published.attributes or {})["messaging.operation.name"] == "publish"
    assert sent.start_time <= settled.start_time <= published.start_time <= processed.start_time


def test_a_transaction_is_a_span_of_the_code_that_enters_it_and_none_where_it_is_not_entered(
    recorded: Recorded, tmp_path: Path
) -> None:
    store = SqlStore(f"sqlite:///{tmp_path}/store.db", bootstrap_servers="127.0.0.1:1")
    tracer = recorded.tracer_provider.get_tracer("test")

    with TransactionalProducer("orders", store=store, telemetry=recorded.telemetry()) as producer:
        entered, _ = producer.transaction("t", value=b"v"), producer.transaction("t", value=b"not entered")
        with tracer.start_as_current_span("an order"), entered:
            pass

    sent, outer = recorded.span("send t"), recorded.span("an order")
    assert sent.parent is not None
    assert sent.parent.span_id == outer.context.span_id
    assert entered.message.headers[0][0] == "traceparent"


def test_what_was_not_committed_or_not_sampled_was_not_published(recorded: Recorded) -> None:
    spans = PublicationSpans(recorded.telemetry(), "penstock")
    spans.begin()
    spans.written("t", [traceparent()])
    spans.begin()
    spans.written("t", [traceparent(flags="00")])
    spans.written("t", [("traceparent", None), ("a", b"1")])
    spans.written("t", [("traceparent", b"00-garbage-01")])
    spans.written("second", [traceparent(flags="03")])

    spans.committed()
    spans.committed()

    (published,) = recorded.spans()
    assert published.name == "publish second"
    assert published.context.trace_id == int(TRACE, 16)
