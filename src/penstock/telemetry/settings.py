"""`Telemetry`: what a user says about spans and metrics. Without one, telemetry is off and costs nothing."""

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

    Do not combine it with another instrumentation of the Kafka client: that one's spans end with the fetch and cannot
    follow a message to its worker, and every message would be counted twice.

    Attributes:
        tracer_provider: where spans go; None means OpenTelemetry's global provider, also when it is set later.
        meter_provider: where metrics go; None means OpenTelemetry's global provider, also when it is set later.
        sample_ratio: part of the messages that get spans and whose time is measured, from 0 to 1 (default: all), beside
            those whose sender was sampled, which always do, so that a trace is whole. What is left out costs next to
            nothing; counts are of all messages nevertheless. It comes before the provider's own sampler.
        record_keys: whether spans carry the messages' keys. Keys often name people, so they are left out by default.

    Raises:
        ConfigurationError: a provider is not one, `record_keys` no boolean, or `sample_ratio` not from 0 to 1.
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
    """Return whether chance chooses one, of which this part is to be chosen."""
    return random() < ratio  # noqa: S311 - it samples, and keeps no secret


def scope_version() -> str:
    """Return the version that spans and metrics carry; empty when penstock runs from a plain folder."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return ""
