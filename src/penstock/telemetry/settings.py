"""`Telemetry`: the user's settings for spans and metrics. Without it, telemetry is off and costs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from random import random

from opentelemetry import metrics, trace

from penstock import options as check
from penstock.errors import ConfigurationError
from penstock.telemetry.names import SCOPE


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Turns spans and metrics on, through OpenTelemetry.

    Do not combine it with another instrumentation of the Kafka client. Spans of such an instrumentation end with the
    fetch and cannot follow a message to its worker, and every message would be counted twice.

    Attributes:
        tracer_provider: receives spans; None: OpenTelemetry's global provider, even if it is set later.
        meter_provider: receives metrics; None: OpenTelemetry's global provider, even if it is set later.
        sample_ratio: fraction of the messages that get spans and are timed, from 0 to 1 (default: all). Messages whose
            sender was sampled always do, so that traces are complete. Other messages cost almost nothing; counts
            include all. It applies before the provider's own sampler.
        record_keys: whether spans contain the messages' keys. Keys often identify people, so the default is no.

    Raises:
        ConfigurationError: an argument has a wrong type, or `sample_ratio` is not from 0 to 1.
    """

    tracer_provider: trace.TracerProvider | None = None
    meter_provider: metrics.MeterProvider | None = None
    record_keys: bool = False
    sample_ratio: float = 1.0

    def __post_init__(self) -> None:
        for option, needed in (("tracer_provider", "get_tracer"), ("meter_provider", "get_meter")):
            given = getattr(self, option)
            if given is not None and not callable(getattr(given, needed, None)):
                raise ConfigurationError(
                    f"{option} must be an OpenTelemetry provider, but is a {type(given).__name__}; "
                    "leave it out to use the global one"
                )
        check.a_boolean("record_keys", self.record_keys)
        ratio = self.sample_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            raise ConfigurationError(f"sample_ratio must be from 0 to 1, but is {ratio!r}; 0.01 is one message of 100")

    def tracer(self) -> trace.Tracer:
        """Return penstock's tracer."""
        return trace.get_tracer(SCOPE, scope_version(), self.tracer_provider)

    def meter(self) -> metrics.Meter:
        """Return penstock's meter."""
        return metrics.get_meter(SCOPE, scope_version(), self.meter_provider)


def by_chance(ratio: float) -> bool:
    """Return True with this probability."""
    return random() < ratio  # noqa: S311 - it samples, and keeps no secret


def scope_version() -> str:
    """Return penstock's version for spans and metrics; empty if it runs from a plain folder."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return ""
