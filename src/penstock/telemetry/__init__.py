"""Spans and metrics of the engines by OpenTelemetry, off until the user gives a `Telemetry`.

It loads OpenTelemetry's API, never its SDK. An engine imports it only if the user gives a `Telemetry`. It needs the
extra `otel`.
"""

from penstock.errors import ConfigurationError

try:
    import opentelemetry.trace  # noqa: F401 - checked here, so that the modules below can rely on it
except ModuleNotFoundError as error:
    raise ConfigurationError("Telemetry needs OpenTelemetry; run: pip install 'penstock[otel]'") from error

from penstock.telemetry.propagation import TraceIds, extract, inject
from penstock.telemetry.settings import Telemetry

__all__ = ["Telemetry", "TraceIds", "extract", "inject"]
