"""Observable metrics of consumers, coordinators and queries that come and go, on instruments that stay.

OpenTelemetry cannot unregister a callback, and its Python SDK ignores those of an instrument that is made a second time
(open-telemetry/opentelemetry-python issues 2454 and 4304). So the instruments of a provider are made once, and
consumers are registered with them and unregistered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from penstock.telemetry.settings import Telemetry

_log = logging.getLogger(__name__)

Point = tuple[float, Mapping[str, str]]

#: The name of a consumer, coordinator or query, and what reads its statistics, on the metric readers' threads.
_Member = tuple[str, Callable[[], Any]]


class Kind(Enum):
    """How an observed value adds up, by the method of a meter that makes its instrument."""

    #: It only rises.
    COUNTER = "create_observable_counter"
    #: It rises and falls, and the values of several consumers may be added.
    UP_DOWN_COUNTER = "create_observable_up_down_counter"
    #: It says something of one thing alone.
    GAUGE = "create_observable_gauge"


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


class GaugeRegistry:
    """The observable instruments of one provider, and their members, distinguished by a label. Thread-safe."""

    def __init__(self, meter: Meter, shown: Sequence[ObservedMetric], label: str) -> None:
        self._label = label
        self._lock = threading.Lock()
        # Replaced under the lock, never changed. A collection does not take it: a member that is removed would wait for
        # `read`, and `read` may wait for the thread that removes it.
        self._members: tuple[_Member, ...] = ()
        # What the members said in this collection, and which metrics were asked for since. Two readers that collect at
        # once may mix two moments, each of which is true.
        self._statistics: list[tuple[str, Any]] = []
        self._asked: set[str] = set()
        for metric in shown:
            make = getattr(meter, metric.kind.value)
            make(metric.name, [partial(self._observe, metric)], metric.unit, metric.description)

    def add(self, name: str, read: Callable[[], Any]) -> Callable[[], None]:
        """Show a member; return the function that shows it no more, which may be called more than once."""
        member = name, read
        with self._lock:
            self._members = (*self._members, member)

        def remove() -> None:
            with self._lock:
                self._members = tuple(other for other in self._members if other is not member)

        return remove

    def _observe(self, metric: ObservedMetric, _options: CallbackOptions) -> Iterable[Observation]:
        # A collection asks for each metric once, so the first that asks a second time begins the next collection.
        if not self._asked or metric.name in self._asked:
            self._asked = set()
            self._statistics = list(_read_all(self._members))
        self._asked.add(metric.name)
        # A callback may give a set of attributes only once, and two consumers of a process may be of one group.
        values: dict[frozenset[tuple[str, str]], float] = {}
        for name, statistics in self._statistics:
            for value, attributes in metric.points(statistics):
                labels = frozenset({**attributes, self._label: name}.items())
                values[labels] = values.get(labels, 0) + value
        return [Observation(value, dict(labels)) for labels, value in values.items()]


def _read_all(members: Iterable[_Member]) -> Iterator[tuple[str, Any]]:
    for name, read in members:
        try:
            yield name, read()
        except Exception:  # noqa: BLE001 - one that cannot be read must not take the others' metrics along
            _log.exception("the metrics of %s could not be read; they are missing this time", name)


#: The registries by label: of OpenTelemetry's global provider, whichever it is or will be, and of others. Of the
#: process, as the instruments are: kept as long as the provider lives.
_of_the_global: dict[str, GaugeRegistry] = {}
_of_others: WeakKeyDictionary[object, dict[str, GaugeRegistry]] = WeakKeyDictionary()
_registries_lock = threading.Lock()


def registry_of(telemetry: Telemetry, shown: Sequence[ObservedMetric], label: str) -> GaugeRegistry:
    """Return the gauge registry of a meter provider for a label, whose metrics are always the same."""
    current = metrics.get_meter_provider()
    provider = telemetry.meter_provider or current
    with _registries_lock:
        # One that was given by name may have become the global one since.
        known = _of_others.get(provider, {})
        if provider is current and label not in known:
            # Instruments that were made before the application set its provider went over to that one.
            known = _of_the_global
        elif provider is not current:
            known = _of_others.setdefault(provider, known)
        if label not in known:
            known[label] = GaugeRegistry(telemetry.meter(), shown, label)
        return known[label]
