"""Spans, metrics and log lines with ids, sent to an OpenTelemetry collector by its standard variables.

pip install 'penstock[otel]' opentelemetry-exporter-otlp-proto-http
export OTEL_SERVICE_NAME=alerts
export OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318      # a collector, or any server of its protocol
python examples/feed.py alerts
penstock run otlp:app                                         # in the folder examples

OTEL_METRIC_EXPORT_INTERVAL, OTEL_BSP_SCHEDULE_DELAY, OTEL_RESOURCE_ATTRIBUTES and the others are read, too.
"""

import logging
import os
from collections.abc import Iterator

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

import penstock
from penstock.telemetry import TraceIds

lines = logging.StreamHandler()
lines.addFilter(TraceIds())
lines.setFormatter(logging.Formatter("%(message)s trace_id=%(trace_id)s span_id=%(span_id)s"))
log = logging.getLogger("alerts")
log.addHandler(lines)
log.propagate = False  # otherwise the root logger's handler prints each line again
log.setLevel(logging.INFO)

spans = TracerProvider()
spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
metrics = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())])
app = penstock.App(
    "alerts",
    bootstrap_servers=os.environ["PENSTOCK_BOOTSTRAP_SERVERS"],
    # One message of a hundred, and each message that its sender has sampled; 1.0 is all.
    telemetry=penstock.Telemetry(spans, metrics, sample_ratio=float(os.environ.get("SAMPLE_RATIO", "0.01"))),
)


@app.lifespan
def telemetry() -> Iterator[None]:
    """Send the remaining spans and metrics when the app ends."""
    yield
    spans.shutdown()
    metrics.shutdown()


@app.handler("alerts")
def show(alert: penstock.Message) -> None:
    """Log a line with the ids of the message's span."""
    log.info("offset %d of partition %d", alert.offset, alert.partition)
