"""Observable metrics of consumers and coordinators that come and go, on instruments that stay.

OpenTelemetry cannot unregister a callback, and its Python SDK ignores those of an instrument that is made a second time
(open-telemetry/opentelemetry-python issues 2454 and 4304). So the instruments of a provider are made once, and
consumers are registered with them and unregistered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from penstock.telemetry import names
from penstock.telemetry.settings import Telemetry

_log = logging.getLogger(__name__)

Point = tuple[float, Mapping[str, str]]

_Labels = frozenset[tuple[str, str]]


class Kind(Enum):
    """How an observed value adds up."""

    #: It only rises.
    COUNTER = "counter"
    #: It rises and falls, and the values of several consumers may be added.
    UP_DOWN_COUNTER = "up-down counter"
    #: It says something of one thing alone.
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class ObservedMetric:
    """A metric that is read from statistics; its unit is in UCUM, its description for whoever charts it."""

    kind: Kind
    name: str
    unit: str
    #: The name of a field of the statistics, or what reads the metric's values with their attributes.
    read: str | Callable[[Any], Iterable[Point]]
    description: str

    def points(self, statistics: Any) -> Iterable[Point]:
        """Return its values in statistics, with their attributes; none where the field is None."""
        if callable(self.read):
            return self.read(statistics)
        value = getattr(statistics, self.read)
        return () if value is None else ((value, {}),)


def by_partition(values: Mapping[tuple[str, int], int | None]) -> Iterable[Point]:
    """Return values by topic and partition with the attributes of OpenTelemetry's conventions; None has no point."""
    return [
        (value, {names.DESTINATION_NAME: topic, names.DESTINATION_PARTITION_ID: str(partition)})
        for (topic, partition), value in values.items()
        if value is not None
    ]


class Observed:
    """A consumer or coordinator until it is closed; read on the metric readers' threads, by one at a time."""

    def __init__(self, name: str, read: Callable[[], Any]) -> None:
        self.name = name
        # Guards what follows between collections. `close` does not take it: it would wait for `read`, and `read` may
        # wait for the thread that closes.
        self._lock = threading.Lock()
        self._read: Callable[[], Any] | None = read
        self._statistics: Any = None
        self._used_for: set[str] = set()

    def statistics_for(self, metric: str) -> Any:
        """Return the statistics of this collection for a metric, or None when there are none.

        A collection asks for each metric once, so the first that asks a second time begins the next collection. All
        values of a collection are then of one moment, and the consumer is read once for all.
        """
        with self._lock:
            read = self._read
            if read is None:
                return None
            if not self._used_for or metric in self._used_for:
                self._used_for = set()
                try:
                    self._statistics = read()
                except Exception:  # noqa: BLE001 - the next line says why
                    # `read` is the engine's: a consumer that cannot be read must not take the others' metrics along.
                    _log.exception("the metrics of %s could not be read; they are missing this time", self.name)
                    self._statistics = None
            self._used_for.add(metric)
            return self._statistics

    def close(self) -> None:
        """Release the consumer."""
        self._read = None


class GaugeRegistry:
    """The observable instruments of one provider, and their consumers, distinguished by a label. Thread-safe."""

    def __init__(self, metrics: Sequence[ObservedMetric], label: str) -> None:
        self._metrics = metrics
        self._label = label
        self._lock = threading.Lock()
        # Replaced under the lock, never changed: a collection goes through the one it found.
        self._observed: tuple[Observed, ...] = ()

    def make_instruments(self, meter: Meter) -> None:
        """Make the instruments; once for a meter."""
        makers = {
            Kind.COUNTER: meter.create_observable_counter,
            Kind.UP_DOWN_COUNTER: meter.create_observable_up_down_counter,
            Kind.GAUGE: meter.create_observable_gauge,
        }
        for metric in self._metrics:
            makers[metric.kind](metric.name, [partial(self._observe, metric)], metric.unit, metric.description)

    def add(self, observed: Observed) -> None:
        """Show a consumer."""
        with self._lock:
            self._observed = (*self._observed, observed)

    def remove(self, observed: Observed) -> None:
        """Show a consumer no more."""
        observed.close()
        with self._lock:
            self._observed = tuple(other for other in self._observed if other is not observed)

    def _observe(self, metric: ObservedMetric, _options: CallbackOptions) -> Iterable[Observation]:
        # A callback may give a set of attributes only once, and two consumers of a process may be of one group.
        values: dict[_Labels, float] = {}
        for observed in self._observed:
            statistics = observed.statistics_for(metric.name)
            if statistics is None:
                continue
            for value, attributes in metric.points(statistics):
                labels = frozenset({**attributes, self._label: observed.name}.items())
                values[labels] = values.get(labels, 0) + value
        return [Observation(value, dict(labels)) for labels, value in values.items()]


class _GlobalProvider:
    """Stands for OpenTelemetry's global provider, whichever it is or will be."""


_GLOBAL = _GlobalProvider()

#: The registries by provider and label. Of the process, as the instruments are: kept as long as the provider lives.
_registries: WeakKeyDictionary[object, dict[str, GaugeRegistry]] = WeakKeyDictionary()
_registries_lock = threading.Lock()


def registry_of(telemetry: Telemetry, shown: Sequence[ObservedMetric], label: str) -> GaugeRegistry:
    """Return the gauge registry of a meter provider for a label, whose metrics are always the same."""
    given, current = telemetry.meter_provider, metrics.get_meter_provider()
    is_global = given is None or given is current
    with _registries_lock:
        registry = _registries.get(current if given is None else given, {}).get(label)
        if registry is None and is_global:
            # Instruments that were made before the application set its provider went over to that one.
            registry = _registries.get(_GLOBAL, {}).get(label)
        if registry is None:
            registry = GaugeRegistry(shown, label)
            registry.make_instruments(telemetry.meter())
            _registries.setdefault(_GLOBAL if is_global else given, {})[label] = registry
    return registry
