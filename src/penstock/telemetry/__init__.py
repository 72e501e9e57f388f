"""OpenTelemetry names and instruments: spans and metrics of the engines, off until a `Telemetry` is given.

It loads OpenTelemetry's API (never its SDK), so an engine imports it only where the user gave a `Telemetry`. It needs
the extra `otel`.
"""

from penstock.errors import ConfigurationError

try:
    import opentelemetry.trace  # noqa: F401 - here, so that no module below has to ask whether it is installed
except ModuleNotFoundError as error:
    raise ConfigurationError("Telemetry needs OpenTelemetry; run: pip install 'penstock[otel]'") from error

from penstock.telemetry.consumer import ConsumerTelemetry
from penstock.telemetry.metrics.readings import Reading
from penstock.telemetry.metrics.transactions import CoordinatorReading, CoordinatorTelemetry
from penstock.telemetry.settings import Telemetry
from penstock.telemetry.spans.log_ids import TraceIds
from penstock.telemetry.spans.propagation import extract, inject
from penstock.telemetry.spans.publications import PublicationSpans
from penstock.telemetry.spans.sending import SendSpans

__all__ = [
    "ConsumerTelemetry",
    "CoordinatorReading",
    "CoordinatorTelemetry",
    "PublicationSpans",
    "Reading",
    "SendSpans",
    "Telemetry",
    "TraceIds",
    "extract",
    "inject",
]
