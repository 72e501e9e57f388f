"""The state in which order matters, folded twice: by a plain loop over the file and by the app's handler.

One step (`AircraftState.depart`) serves both, so that the two differ only in how the flights reached it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from demo.flights import Flight
from penstock.message import Message

#: Seconds the handler takes: it stands for a call to another system.
HANDLER_S = 0.002


@dataclass(slots=True)
class AircraftState:
    """What is known of one aircraft after some of its flights."""

    flights: int = 0
    last_place: str = ""
    #: How many departed late in a row, up to the last one.
    late_run: int = 0
    #: The longest such run so far.
    longest_late_run: int = 0
    last_sequence: int = -1
    #: Whether a handler is at work on it.
    busy: bool = field(default=False, compare=False)

    def depart(self, flight: Flight) -> None:
        """Take the next flight. Another order of the same flights gives another state."""
        self.flights += 1
        self.last_place = flight.place
        self.late_run = self.late_run + 1 if flight.delay > 0 else 0
        self.longest_late_run = max(self.longest_late_run, self.late_run)
        self.last_sequence = flight.sequence


#: What Spark's table must hold of one aircraft: how many departed flights, and their minutes of delay.
Totals = tuple[int, int]


def plain_states(flights: Iterable[Flight], poison: int) -> dict[str, AircraftState]:
    """Return the state of each aircraft after a plain loop over the schedule, without the poison flight."""
    states: dict[str, AircraftState] = {}
    for flight in flights:
        if flight.departed and flight.tail is not None and flight.sequence != poison:
            states.setdefault(flight.tail, AircraftState()).depart(flight)
    return states


def plain_totals(flights: Iterable[Flight]) -> dict[str, Totals]:
    """Return the totals of each aircraft; flights without one stand together under the empty name."""
    totals: dict[str, Totals] = {}
    for flight in flights:
        if flight.departed:
            count, delay = totals.get(flight.aircraft, (0, 0))
            totals[flight.aircraft] = count + 1, delay + flight.delay
    return totals


class PoisonFlightError(ValueError):
    """The handler refuses the planted flight, every time."""


class FlightFold:
    """The handler of the demo's app, and what it has seen.

    There is no lock around an aircraft's state: the promise under test is that messages of one key are handled one at a
    time, and each handler marks its aircraft busy, so a breach is counted rather than hidden. The counters are under
    `_lock`. Flights to be `ignored` are taken without being folded: a test that wants a red verdict gives some.
    """

    def __init__(self, poison: int, ignored: frozenset[int] = frozenset()) -> None:
        self._poison = poison
        self._ignored = ignored
        self._states: dict[str, AircraftState] = {}
        self._seen: set[int] = set()
        self._lock = threading.Lock()
        self.finished = 0
        self.folded = 0
        self.duplicates = 0
        self.cancelled_seen = 0
        self.order_violations = 0
        self.poison_attempts = 0

    def handle(self, message: Message) -> None:
        """Fold one flight into the state of its aircraft. Called by many threads at once."""
        flight = Flight.from_json(message.value or b"")
        if flight.sequence == self._poison:
            with self._lock:
                self.poison_attempts += 1
            raise PoisonFlightError(f"flight {flight.sequence} of the schedule is the planted poison flight")
        in_order = flight.tail is None or self._depart(flight.tail, flight)
        with self._lock:
            self.finished += 1
            if flight.sequence in self._ignored:
                return
            self.folded += 1
            self.duplicates += flight.sequence in self._seen
            self._seen.add(flight.sequence)
            self.cancelled_seen += not flight.departed
            self.order_violations += not in_order

    def states(self) -> dict[str, AircraftState]:
        """Return the state of each aircraft; call it when no handler runs any more."""
        return dict(self._states)

    def _depart(self, tail: str, flight: Flight) -> bool:
        # setdefault is one step under the interpreter's lock: two threads get the same aircraft.
        state = self._states.setdefault(tail, AircraftState())
        alone = not state.busy
        state.busy = True
        time.sleep(HANDLER_S)
        in_order = alone and flight.sequence > state.last_sequence
        if flight.sequence not in self._ignored:
            state.depart(flight)
        state.busy = False
        return in_order
