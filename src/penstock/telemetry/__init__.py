"""OpenTelemetry names and instruments: spans and metrics of the engines, off until a `Telemetry` is given.

It loads OpenTelemetry's API (never its SDK), so an engine imports it only where the user gave a `Telemetry`. It needs
the extra `otel`.
"""

from penstock.errors import ConfigurationError

try:
    import opentelemetry.trace  # noqa: F401 - here, so that no module below has to ask whether it is installed
except ModuleNotFoundError as error:
    raise ConfigurationError("Telemetry needs OpenTelemetry; run: pip install 'penstock[otel]'") from error

from penstock.telemetry.propagation import TraceIds, extract, inject
from penstock.telemetry.settings import Telemetry

__all__ = ["Telemetry", "TraceIds", "extract", "inject"]
