"""OpenTelemetry names and instruments: spans and metrics of the engines, off until a `Telemetry` is given.

It loads OpenTelemetry's API (never its SDK), so an engine imports it only where the user gave a `Telemetry`.
"""

from penstock.telemetry.consumer import ConsumerTelemetry
from penstock.telemetry.propagation import extract, inject
from penstock.telemetry.readings import Reading
from penstock.telemetry.settings import Telemetry
from penstock.telemetry.transactions import CoordinatorReading, CoordinatorTelemetry, SendSpans

__all__ = [
    "ConsumerTelemetry",
    "CoordinatorReading",
    "CoordinatorTelemetry",
    "Reading",
    "SendSpans",
    "Telemetry",
    "extract",
    "inject",
]
