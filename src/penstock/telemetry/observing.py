"""Observable metrics of consumers that come and go, on instruments that stay.

OpenTelemetry has no way to unregister a callback, and its Python SDK ignores the callbacks of an instrument that is
made a second time (open-telemetry/opentelemetry-python issues 2454 and 4304). A second consumer of a process would
never be observed, and a closed one would be for ever. So the instruments of a provider are made once, on a `Board`,
and consumers put themselves on the board and leave it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from weakref import WeakKeyDictionary

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from penstock.telemetry import names
from penstock.telemetry.readings import METRICS, Kind, ObservedMetric, Reading
from penstock.telemetry.settings import Telemetry

_log = logging.getLogger(__name__)

_Labels = frozenset[tuple[str, str]]


class Observed:
    """One consumer on a board, until it is closed.

    Args:
        group: the consumer group.
        read: takes a reading; called on the metric readers' threads, by one at a time.
    """

    def __init__(self, group: str, read: Callable[[], Reading]) -> None:
        self.group = group
        # Guards what follows between collections. `close` does not take it: it would wait for `read`, and `read` may
        # wait for the thread that closes.
        self._lock = threading.Lock()
        self._read: Callable[[], Reading] | None = read
        self._reading: Reading | None = None
        self._used_for: set[str] = set()

    def reading_for(self, metric: str) -> Reading | None:
        """Return the reading of this collection for a metric, or None when there is none.

        A collection asks for each metric once, so the first that asks a second time begins the next collection. All
        values of a collection are then of one moment, and the consumer is read once for all.
        """
        with self._lock:
            read = self._read
            if read is None:
                return None
            if not self._used_for or metric in self._used_for:
                self._used_for = set()
                self._reading = self._take(read)
            self._used_for.add(metric)
            return self._reading

    def _take(self, read: Callable[[], Reading]) -> Reading | None:
        try:
            return read()
        except Exception:  # noqa: BLE001 - `read` is the engine's; the reason is the next line
            # One consumer that cannot be read must not take the others' metrics along.
            _log.exception("the metrics of consumer %s could not be read; they are missing this time", self.group)
            return None

    def close(self) -> None:
        """Let go of the consumer."""
        self._read = None


class Board:
    """The observable instruments of one provider and the consumers they show. Thread-safe."""

    def __init__(self) -> None:
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
        for metric in METRICS:
            makers[metric.kind](metric.name, [partial(self._observe, metric)], metric.unit, metric.description)

    def add(self, observed: Observed) -> None:
        """Show a consumer."""
        with self._lock:
            self._observed = (*self._observed, observed)

    def remove(self, observed: Observed) -> None:
        """Show a consumer no more."""
        observed.close()
        with self._lock:
            self._observed = tuple(one for one in self._observed if one is not observed)

    def _observe(self, metric: ObservedMetric, _options: CallbackOptions) -> Iterable[Observation]:
        # A callback may give a set of attributes only once, and two consumers of a process may be of one group.
        values: dict[_Labels, int] = {}
        for observed in self._observed:
            reading = observed.reading_for(metric.name)
            if reading is None:
                continue
            for value, attributes in metric.points(reading):
                labels = frozenset({**attributes, names.CONSUMER_GROUP_NAME: observed.group}.items())
                values[labels] = values.get(labels, 0) + value
        return [Observation(value, dict(labels)) for labels, value in values.items()]


class _GlobalProvider:
    """Stands for OpenTelemetry's global provider, whichever it is or will be."""


_GLOBAL = _GlobalProvider()

#: The boards by provider. Of the process, as the instruments are: a provider keeps them as long as it lives.
_boards: WeakKeyDictionary[object, Board] = WeakKeyDictionary()
_boards_lock = threading.Lock()


def board_of(telemetry: Telemetry) -> Board:
    """Return the board of a meter provider, with its instruments made."""
    given, current = telemetry.meter_provider, metrics.get_meter_provider()
    is_global = given is None or given is current
    with _boards_lock:
        board = _boards.get(current if given is None else given)
        if board is None and is_global:
            # Instruments that were made before the application set its provider went over to that one.
            board = _boards.get(_GLOBAL)
        if board is None:
            board = Board()
            board.make_instruments(telemetry.meter())
            _boards[_GLOBAL if is_global else given] = board
    return board


__all__ = ["Board", "Observed", "board_of"]
