"""Observable metrics of consumers, coordinators and queries, which come and go, on permanent instruments.

OpenTelemetry cannot unregister a callback, and its Python SDK ignores those of an instrument that is made a second time
(open-telemetry/opentelemetry-python issues 2454 and 4304). So the instruments of a provider are made once, and
consumers register and unregister with them.
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

#: The name of a consumer, coordinator or query, and the function that reads its statistics on the readers' threads.
_Member = tuple[str, Callable[[], Any]]


class Kind(Enum):
    """Kinds of instruments, by the method of a meter that makes them."""

    #: A value that only rises.
    COUNTER = "create_observable_counter"
    #: A value that rises and falls; values of several consumers may be added.
    UP_DOWN_COUNTER = "create_observable_up_down_counter"
    #: A value that cannot be added to others.
    GAUGE = "create_observable_gauge"


@dataclass(frozen=True, slots=True)
class ObservedMetric:
    """A metric that is read from statistics. Its unit is in UCUM; its description is for users of charts."""

    kind: Kind
    name: str
    unit: str
    #: A field of the statistics, or a function that returns the values with their attributes.
    read: str | Callable[[Any], Iterable[Point]]
    description: str

    def points(self, statistics: Any) -> Iterable[Point]:
        """Return its values with their attributes; empty if the field is None."""
        if callable(self.read):
            return self.read(statistics)
        value = getattr(statistics, self.read)
        return () if value is None else ((value, {}),)


class GaugeRegistry:
    """The observable instruments of one provider, and their members, which a label distinguishes. Thread-safe."""

    def __init__(self, meter: Meter, shown: Sequence[ObservedMetric], label: str) -> None:
        self._label = label
        self._lock = threading.Lock()
        # Replaced under the lock, never changed. A collection does not take the lock: otherwise the removal of a member
        # would wait for `read`, and `read` may wait for the removing thread.
        self._members: tuple[_Member, ...] = ()
        # The statistics of this collection, and the metrics asked for so far. Two readers that collect at once may mix
        # two moments, both valid.
        self._statistics: list[tuple[str, Any]] = []
        self._asked: set[str] = set()
        for metric in shown:
            make = getattr(meter, metric.kind.value)
            make(metric.name, [partial(self._observe, metric)], metric.unit, metric.description)

    def add(self, name: str, read: Callable[[], Any]) -> Callable[[], None]:
        """Add a member; return the function that removes it, which may be called more than once."""
        member = name, read
        with self._lock:
            self._members = (*self._members, member)

        def remove() -> None:
            with self._lock:
                self._members = tuple(other for other in self._members if other is not member)

        return remove

    def _observe(self, metric: ObservedMetric, _options: CallbackOptions) -> Iterable[Observation]:
        # A collection asks for each metric once, so the first repeated metric begins the next collection.
        if not self._asked or metric.name in self._asked:
            self._asked = set()
            self._statistics = list(_read_all(self._members))
        self._asked.add(metric.name)
        # A callback may return each set of attributes only once, and a process may have two consumers of one group.
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
        except Exception:  # noqa: BLE001 - a member that cannot be read must not hide the others' metrics
            _log.exception("the metrics of %s could not be read; they are missing this time", name)


#: The registries by label: of OpenTelemetry's global provider, present or future, and of other providers. They belong
#: to the process, as instruments do, and live as long as their provider.
_of_the_global: dict[str, GaugeRegistry] = {}
_of_others: WeakKeyDictionary[object, dict[str, GaugeRegistry]] = WeakKeyDictionary()
_registries_lock = threading.Lock()


def registry_of(telemetry: Telemetry, shown: Sequence[ObservedMetric], label: str) -> GaugeRegistry:
    """Return the registry of a meter provider for a label. A label always has the same metrics."""
    current = metrics.get_meter_provider()
    provider = telemetry.meter_provider or current
    with _registries_lock:
        # A provider that the user gave may have become the global one since.
        known = _of_others.get(provider, {})
        if provider is current and label not in known:
            # Instruments made before the application set its provider now belong to that one.
            known = _of_the_global
        elif provider is not current:
            known = _of_others.setdefault(provider, known)
        if label not in known:
            known[label] = GaugeRegistry(telemetry.meter(), shown, label)
        return known[label]
