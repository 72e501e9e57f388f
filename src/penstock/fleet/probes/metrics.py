"""`/metrics`: the process's metrics for Prometheus, by OpenTelemetry's own exporter.

A process without a `Telemetry` reports metrics, and no spans, to a provider of this module. If it has one, its provider
gets an additional reader, so its other exports go on unchanged.
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
    """Collects the metrics of a process. Create it before the start of the process, and close it after its end.

    Args:
        report_to: sets the `Telemetry` of the process if it has none, and returns the one that it uses.

    Raises:
        ConfigurationError: the exporter is not installed, or the process's meter provider accepts no further reader.
    """

    def __init__(self, report_to: Callable[[Telemetry], Telemetry]) -> None:
        try:
            from opentelemetry.exporter.prometheus import PrometheusMetricReader
            from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
            from prometheus_client.registry import CollectorRegistry
        except ImportError as error:
            raise ConfigurationError(f"/metrics needs OpenTelemetry's exporter for Prometheus: {INSTALL}") from error
        # Its own registry: the global one belongs to the user, who may serve it elsewhere.
        self._registry: CollectorRegistry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._provider = _provider_of(report_to)
        # One collection at a time: the exporter's collector is not thread-safe.
        self._lock = threading.Lock()
        self._reader: Any = PrometheusMetricReader(registry=self._registry, scope_info_enabled=False)
        self._provider.add_metric_reader(self._reader)

    def text(self, accept: str) -> tuple[bytes, str]:
        """Collect and return the metrics, and their media type; it waits for all callbacks of the user."""
        from prometheus_client.exposition import choose_encoder

        encode, media_type = choose_encoder(accept)
        with self._lock:
            return encode(self._registry), media_type

    def close(self) -> None:
        """Remove the reader from the provider."""
        self._provider.remove_metric_reader(self._reader)


def _provider_of(report_to: Callable[[Telemetry], Telemetry]) -> Any:
    """Return the meter provider of a process; a provider of this module if it has none."""
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.trace import NoOpTracerProvider

    from penstock.telemetry import Telemetry

    own = MeterProvider(shutdown_on_exit=False)
    provider = report_to(Telemetry(NoOpTracerProvider(), own)).meter_provider
    if provider is None:
        provider = metrics.get_meter_provider()
        if not hasattr(provider, "add_metric_reader"):
            # No global provider is set: instruments wait for one.
            metrics.set_meter_provider(own)
            provider = own
    if not hasattr(provider, "add_metric_reader"):
        raise ConfigurationError(
            f"/metrics cannot read the app's meter provider, a {type(provider).__name__}; give Telemetry one of "
            "opentelemetry.sdk.metrics, or omit it"
        )
    return provider
