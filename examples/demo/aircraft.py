"""The app: reduces the flights of each aircraft to a state that depends on their order.

A plain loop over the file uses the same step, `AircraftState.depart`. So the results of the loop and of the app differ
only if the app did not receive the flights as they are in the file.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from tenacity import wait_fixed

from demo.airline import TOPIC
from demo.flights import Flight
from penstock import App, Message, retry

WORKERS = 16

#: Tries of a message before it is a dead letter.
ATTEMPTS = 3
_RETRY_WAIT_S = 0.05

#: Duration of the handler in seconds: it simulates a call to another system.
_HANDLER_S = 0.002


@dataclass(slots=True)
class AircraftState:
    """The state of one aircraft after some of its flights."""

    flights: int = 0
    last_place: str = ""
    #: Number of late departures in a row, up to the last flight.
    late_run: int = 0
    #: The longest such run so far.
    longest_late_run: int = 0
    last_sequence: int = -1
    #: Whether a handler is changing it.
    busy: bool = field(default=False, compare=False)

    def depart(self, flight: Flight) -> None:
        """Add the next flight. Another order of the same flights gives another state."""
        self.flights += 1
        self.last_place = flight.place
        self.late_run = self.late_run + 1 if flight.delay > 0 else 0
        self.longest_late_run = max(self.longest_late_run, self.late_run)
        self.last_sequence = flight.sequence


def plain_states(flights: Iterable[Flight], poison: int) -> dict[str, AircraftState]:
    """Return the states after a plain loop over the schedule, by aircraft, without the poison flight."""
    states: dict[str, AircraftState] = {}
    for flight in flights:
        if flight.departed and flight.tail is not None and flight.sequence != poison:
            states.setdefault(flight.tail, AircraftState()).depart(flight)
    return states


class PoisonFlightError(ValueError):
    """The handler refuses the poison flight at every try."""


class Fleet:
    """The handler with its state and its record of messages.

    A state has no lock: the demo tests the promise that messages of one key are handled one at a time. A handler marks
    its aircraft busy, so a breach is counted and not hidden. `setdefault` and `append` are atomic.
    """

    def __init__(self, poison: int) -> None:
        self._poison = poison
        self.states: dict[str, AircraftState] = {}
        #: The handled flights, in order.
        self.handled: list[Flight] = []
        #: Sequences of flights that were handled in the wrong order, or while another was in its handler.
        self.out_of_order: list[int] = []

    def app(self, bootstrap_servers: str) -> App:
        """Return the app, not started."""
        app = App("fleet", bootstrap_servers=bootstrap_servers, workers=WORKERS, report=True)
        policy = retry(attempts=ATTEMPTS, wait=wait_fixed(_RETRY_WAIT_S))
        app.handler(TOPIC, order="key", retry=policy, on_failure="dead_letter")(self.handle)
        return app

    def handle(self, message: Message) -> None:
        """Add one flight to the state of its aircraft. Many threads call it at the same time."""
        flight = Flight.from_json(message.value)
        if flight.sequence == self._poison:
            raise PoisonFlightError(f"flight {flight.sequence} of the schedule is the planted poison flight")
        if flight.tail is not None:
            state = self.states.setdefault(flight.tail, AircraftState())
            if state.busy or flight.sequence <= state.last_sequence:
                self.out_of_order.append(flight.sequence)
            state.busy = True
            time.sleep(_HANDLER_S)
            state.depart(flight)
            state.busy = False
        self.handled.append(flight)
