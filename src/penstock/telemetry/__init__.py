"""OpenTelemetry names and instruments: spans and metrics of the engines, off until a `Telemetry` is given.

It loads OpenTelemetry's API (never its SDK), so an engine imports it only where the user gave a `Telemetry`.
"""

from penstock.telemetry.consumer import ConsumerTelemetry
from penstock.telemetry.log_ids import TraceIds
from penstock.telemetry.propagation import extract, inject
from penstock.telemetry.publications import PublicationSpans
from penstock.telemetry.readings import Reading
from penstock.telemetry.sending import SendSpans
from penstock.telemetry.settings import Telemetry
from penstock.telemetry.transactions import CoordinatorReading, CoordinatorTelemetry

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
