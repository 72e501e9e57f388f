from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.metrics.export import Gauge, Sum

from penstock.telemetry.consumer import ConsumerTelemetry
from penstock.telemetry.gauges import Kind
from penstock.telemetry.observed import METRICS
from telemetry_tools import Recorded, partition, reading

#: Each metric's values for `telemetry_tools.reading()`.
EXPECTED = {
    "penstock.lane.count": {(): 1024},
    "penstock.lane.ready": {(): 5},
    "penstock.worker.count": {(): 16},
    "penstock.worker.busy": {(): 9},
    "penstock.in_flight.messages": {(): 321},
    "penstock.in_flight.size": {(): 65_000},
    "penstock.partition.lag": {
        (("messaging.destination.name", "orders"), ("messaging.destination.partition.id", "0")): 11,
        (("messaging.destination.name", "orders"), ("messaging.destination.partition.id", "1")): 12,
    },
    "penstock.key.parked": {(): 3},
    "penstock.key.held": {(): 1},
    "penstock.handled_messages": {(): 16},
    "penstock.handler.failures": {(): 21},
    "penstock.handler.retries": {(): 17},
    "penstock.dead_letters": {(): 2},
    "penstock.dead_letter_failures": {(): 14},
    "penstock.handler.stalls": {(): 15},
    "penstock.handler.time_limits": {(): 31},
    "penstock.worker.abandoned": {(): 32},
    "penstock.handler.oldest": {(): 33.5},
    "penstock.dropped_messages": {(): 4},
    "penstock.pauses": {
        (("penstock.pause.reason", "byte limit"),): 6,
        (("penstock.pause.reason", "in-flight limit"),): 1,
    },
    "penstock.rebalanced_partitions": {
        (("penstock.rebalance.kind", "assigned"),): 8,
        (("penstock.rebalance.kind", "revoked"),): 7,
        (("penstock.rebalance.kind", "lost"),): 10,
    },
    "penstock.commits": {(("penstock.commit.outcome", "ok"),): 99, (("penstock.commit.outcome", "failed"),): 13},
}


def test_every_field_of_a_reading_is_shown_by_the_right_instrument(
    recorded: Recorded, consumer: ConsumerTelemetry
) -> None:
    consumer.observe(reading)

    shown = recorded.metrics()

    assert {metric.name for metric in METRICS} == set(EXPECTED) == set(shown)
    for metric in METRICS:
        found = shown[metric.name]
        points = list(found.data.data_points)
        assert all(point.attributes["messaging.consumer.group.name"] == "billing" for point in points)
        values = {
            frozenset(
                item for item in point.attributes.items() if item[0] != "messaging.consumer.group.name"
            ): point.value
            for point in points
        }
        assert values == {frozenset(labels): value for labels, value in EXPECTED[metric.name].items()}, metric.name
        assert (found.unit, found.description) == (metric.unit, metric.description)
        if metric.kind is Kind.GAUGE:
            assert isinstance(found.data, Gauge)
        else:
            assert isinstance(found.data, Sum)
            assert found.data.is_monotonic == (metric.kind is Kind.COUNTER)


def test_each_collection_takes_one_new_reading_for_all_metrics(recorded: Recorded, consumer: ConsumerTelemetry) -> None:
    taken: list[int] = []

    def read() -> SimpleNamespace:
        taken.append(1)
        return reading(in_flight=len(taken), commits=len(taken))

    consumer.observe(read)
    for number in (1, 2, 3):
        shown = recorded.metrics()

        assert len(taken) == number
        assert [point.value for point in shown["penstock.in_flight.messages"].data.data_points] == [number]
        assert number in [point.value for point in shown["penstock.commits"].data.data_points]


def test_a_closed_consumer_is_neither_observed_nor_held(recorded: Recorded, consumer: ConsumerTelemetry) -> None:
    class Engine:
        def read(self) -> SimpleNamespace:
            return reading()

    engine = Engine()
    consumer.observe(engine.read)
    assert recorded.points("penstock.lane.count")

    consumer.close()
    consumer.close()
    held = weakref.ref(engine)
    del engine
    gc.collect()

    assert recorded.points("penstock.lane.count") == []
    assert held() is None


def test_a_consumer_closed_while_it_is_read_does_not_wait_for_the_reader(
    recorded: Recorded, consumer: ConsumerTelemetry
) -> None:
    reading_now, go_on = threading.Event(), threading.Event()

    def read() -> SimpleNamespace:
        reading_now.set()
        assert go_on.wait(30)
        return reading()

    consumer.observe(read)
    collector = threading.Thread(target=recorded.metrics)
    collector.start()
    assert reading_now.wait(30)

    consumer.close()  # would stand still here, were it to wait

    go_on.set()
    collector.join(30)
    assert not collector.is_alive()
    assert recorded.points("penstock.lane.count") == []


def test_consumers_of_a_group_are_added_up_and_an_unreadable_one_hides_no_other(
    recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def fail() -> SimpleNamespace:
        asked.append(1)
        raise RuntimeError("a defect")

    reads: list[tuple[str, Callable[[], SimpleNamespace]]] = [
        ("broken", fail),
        ("a", lambda: reading(lanes=100, partitions=[partition(0, 5)])),
        ("a", lambda: reading(lanes=100, partitions=[partition(1, 6)])),
        ("b", lambda: reading(lanes=2, partitions=[])),
    ]
    for group, read in reads:
        ConsumerTelemetry(recorded.telemetry(), group).observe(read)

    with caplog.at_level(logging.ERROR, logger="penstock"):
        shown = recorded.metrics()

    lanes = shown["penstock.lane.count"].data.data_points
    assert {point.attributes["messaging.consumer.group.name"]: point.value for point in lanes} == {"a": 200, "b": 2}
    assert sorted(point.value for point in shown["penstock.partition.lag"].data.data_points) == [5, 6]
    assert asked == [1]
    assert len(caplog.records) == 1


_LATE_PROVIDERS = """
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from penstock.telemetry import Telemetry
from penstock.telemetry.consumer import ConsumerTelemetry
from telemetry_tools import Recorded, message, reading

early = ConsumerTelemetry(Telemetry(), "early")
early.observe(reading)
handle = early.processing.around(lambda given: given.offset)
assert handle(message(1)) == 1

recorded = Recorded()
trace.set_tracer_provider(recorded.tracer_provider)
metrics.set_meter_provider(recorded.meter_provider)
late = ConsumerTelemetry(Telemetry(), "late")
late.observe(reading)
named = ConsumerTelemetry(recorded.telemetry(), "named")
named.observe(reading)
assert handle(message(2)) == 2

shown = {point.attributes["messaging.consumer.group.name"] for point in recorded.points("penstock.lane.count")}
assert shown == {"early", "late", "named"}, shown
assert recorded.span("process orders").attributes["messaging.kafka.offset"] == 2
print("all seen")
"""


def test_global_providers_are_used_also_when_they_are_set_later() -> None:
    child = subprocess.run(
        [sys.executable, "-c", _LATE_PROVIDERS],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={"PYTHONPATH": ":".join(sys.path)},
    )

    assert child.stdout == "all seen\n", child.stderr
    assert child.stderr == ""
