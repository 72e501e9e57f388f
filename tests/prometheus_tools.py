"""What Prometheus would read of a process with a consumer, a coordinator and Spark queries: names and labels."""

from __future__ import annotations

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client.registry import CollectorRegistry

from penstock import App, Message, Telemetry, retry
from penstock.consumer import handler
from penstock.spark_sink.progress import SinkPartition, SinkState, SinkStatistics
from penstock.spark_sink.sinks.handlers.results import BatchReport
from penstock.spark_sink.sinks.handlers.sink import HandlerSink
from penstock.telemetry.observed import CoordinatorTelemetry
from penstock.telemetry.spark import SparkTelemetry
from penstock.testing import TestApp
from telemetry_tools import READING

_QUERY = SinkStatistics(
    name="orders", state=SinkState.RUNNING, rows=1, partitions=(SinkPartition("orders", 0, 1, 1),), restarts=1
)
_REPORT = BatchReport(rows=1, handled=1, failed=1, retried=1, tasks=1)


def scraped() -> dict[str, frozenset[str]]:
    """Return the names of all samples that Prometheus would read, with their labels.

    An app in memory handles, fails and gives up messages; a coordinator and queries are shown by readings of theirs.
    """
    registry = CollectorRegistry()
    provider = MeterProvider(
        [PrometheusMetricReader(registry=registry, scope_info_enabled=False)], shutdown_on_exit=False
    )
    telemetry = Telemetry(meter_provider=provider)
    app = App("orders", bootstrap_servers="in-memory:1", telemetry=telemetry)

    @app.handler("orders", on_failure="dead_letter", retry=retry(attempts=1))
    def handle(message: Message) -> None:
        if message.value == b"bad":
            raise ValueError

    coordinator = CoordinatorTelemetry(telemetry, "penstock", lambda: READING)
    query = SparkTelemetry(telemetry, "totals", lambda: _QUERY)
    query.batch({"triggerExecution": 1.0})
    sink = HandlerSink({"orders": handler(print)}, group="orders", parallelism=1, telemetry=telemetry)
    sink._publish_report(0, _REPORT)
    try:
        with TestApp(app) as running:
            running.send("orders", key=b"1", value=b"good")
            running.send("orders", key=b"2", value=b"bad")
            running.settle()
            running.advance(5)
            return {sample.name: frozenset(sample.labels) for family in registry.collect() for sample in family.samples}
    finally:
        coordinator.close()
        query.close()
