"""The app: folds the flights of each aircraft into a state in which order matters.

The same step, `AircraftState.depart`, serves a plain loop over the file. So what the loop and the app end with differs
only if the flights reached the app in another way than they stand in the file.
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

#: Seconds the handler takes: it stands for a call to another system.
_HANDLER_S = 0.002


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


def plain_states(flights: Iterable[Flight], poison: int) -> dict[str, AircraftState]:
    """Return the state of each aircraft after a plain loop over the schedule, without the poison flight."""
    states: dict[str, AircraftState] = {}
    for flight in flights:
        if flight.departed and flight.tail is not None and flight.sequence != poison:
            states.setdefault(flight.tail, AircraftState()).depart(flight)
    return states


class PoisonFlightError(ValueError):
    """The handler refuses the planted flight, every time."""


class Fleet:
    """The handler's state, and what the handler has seen.

    There is no lock around a state: the promise under test is that messages of one key are handled one at a time. A
    handler marks its aircraft busy, so a breach is counted rather than hidden. `setdefault` and `append` are one step
    each, whatever other threads do.
    """

    def __init__(self, poison: int) -> None:
        self._poison = poison
        self.states: dict[str, AircraftState] = {}
        #: The flights handled, in that order.
        self.handled: list[Flight] = []
        #: Sequences of flights that came before an earlier one, or while another was in its handler.
        self.out_of_order: list[int] = []

    def app(self, bootstrap_servers: str) -> App:
        """Return the app, not started."""
        app = App("fleet", bootstrap_servers=bootstrap_servers, workers=WORKERS, report=True)
        policy = retry(attempts=ATTEMPTS, wait=wait_fixed(_RETRY_WAIT_S))
        app.handler(TOPIC, order="key", retry=policy, on_failure="dead_letter")(self.handle)
        return app

    def handle(self, message: Message) -> None:
        """Fold one flight into the state of its aircraft. Called by many threads at once."""
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
