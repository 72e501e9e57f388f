"""`/metrics`: the process's metrics as Prometheus reads them, by OpenTelemetry's own exporter.

What was given no `Telemetry` reports metrics, and no spans, to a provider of this module's. Where it was given one, its
provider gets a further reader, so that what it exports elsewhere goes there as before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigurationError
from penstock.fleet.server import INSTALL

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

    from penstock.telemetry import Telemetry


class PrometheusMetrics:
    """Collects the metrics of a process. Made before its start, closed after its end.

    Args:
        report_to: has the process report to this `Telemetry`, unless it was given one, and returns where it reports.

    Raises:
        ConfigurationError: the exporter is not installed, or the process's meter provider takes no further reader.
    """

    def __init__(self, report_to: Callable[[Telemetry], Telemetry]) -> None:
        try:
            from opentelemetry.exporter.prometheus import PrometheusMetricReader
            from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
            from prometheus_client.registry import CollectorRegistry
        except ImportError as error:
            raise ConfigurationError(f"/metrics needs OpenTelemetry's exporter for Prometheus: {INSTALL}") from error
        # A registry of its own: the global one is the user's, who may serve it elsewhere.
        self._registry: CollectorRegistry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._provider = _provider_of(report_to)
        # One collection at a time: the exporter's collector is made for that.
        self._lock = threading.Lock()
        self._reader: Any = PrometheusMetricReader(registry=self._registry, scope_info_enabled=False)
        self._provider.add_metric_reader(self._reader)

    def text(self, accept: str) -> tuple[bytes, str]:
        """Collect, and return the metrics with their media type; as slow as the slowest of the callbacks."""
        from prometheus_client.exposition import choose_encoder

        encode, media_type = choose_encoder(accept)
        with self._lock:
            return encode(self._registry), media_type

    def close(self) -> None:
        """Collect no more."""
        self._provider.remove_metric_reader(self._reader)


def _provider_of(report_to: Callable[[Telemetry], Telemetry]) -> Any:
    """Return the meter provider that a process reports to; one of this module's where it was given none."""
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.trace import NoOpTracerProvider

    from penstock.telemetry import Telemetry

    own = MeterProvider(shutdown_on_exit=False)
    provider = report_to(Telemetry(NoOpTracerProvider(), own)).meter_provider
    if provider is None:
        provider = metrics.get_meter_provider()
        if not hasattr(provider, "add_metric_reader"):
            # The global provider was not set: what reports to it waits for one.
            metrics.set_meter_provider(own)
            provider = own
    if not hasattr(provider, "add_metric_reader"):
        raise ConfigurationError(
            f"/metrics cannot read the app's meter provider, a {type(provider).__name__}; give Telemetry one of "
            "opentelemetry.sdk.metrics, or leave it out"
        )
    return provider
