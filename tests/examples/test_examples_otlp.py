"""The example of OTLP with a small collector on the loopback address, which keeps what it gets."""

from __future__ import annotations

import gzip
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from example_programs import Examples
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

pytestmark = pytest.mark.thorough

OFFSET = r"offset (\d+) of partition (\d+) trace_id="


class Collector(ThreadingHTTPServer):
    """Takes spans and metrics by OTLP over HTTP."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.traces: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []


class _Request(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path == "/v1/traces":
            self.server.traces.append(ExportTraceServiceRequest.FromString(body))
        else:
            assert self.path == "/v1/metrics"
            self.server.metrics.append(ExportMetricsServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_spans_metrics_and_log_lines_reach_a_collector_by_the_standard_variables(
    examples: Examples, collector: Collector
) -> None:
    examples.feed("alerts")
    variables = {
        "OTEL_SERVICE_NAME": "told by a variable",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
        "SAMPLE_RATIO": "1.0",
    }

    with examples.run("otlp:app", variables) as program:
        # A line for each message, and for one that a rebalance brings again: another.
        program.wait_for(lambda lines: len(set(re.findall(OFFSET, "\n".join(lines)))) == 80)
        assert program.stop() == 0

    resources = [one for request in collector.traces for one in request.resource_spans]
    spans = [span for one in resources for scope in one.scope_spans for span in scope.spans]
    handled = {(span.trace_id.hex(), span.span_id.hex()) for span in spans if span.name == "process alerts"}
    logged = set(re.findall(r"trace_id=(\w+) span_id=(\w+)", "\n".join(program.lines())))
    assert len(handled) >= 80
    assert logged == handled
    service = {a.value.string_value for one in resources for a in one.resource.attributes if a.key == "service.name"}
    assert service == {"told by a variable"}
    names = {
        metric.name
        for request in collector.metrics
        for one in request.resource_metrics
        for scope in one.scope_metrics
        for metric in scope.metrics
    }
    assert {"messaging.process.duration", "messaging.client.consumed.messages"} <= names
