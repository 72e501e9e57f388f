"""What happens to which flight, fixed before anything is sent, and which flight a sender thread may send next.

The order of an aircraft's messages is the order of their decisions, and a flight left to a check is decided late: the
aircraft is held back until that flight is published. A cancelled flight is never published and holds nothing back.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from demo.flights import Flight
from penstock.errors import ConfigurationError

#: One flight in so many is left to a check.
UNKNOWN_EVERY = 50

#: Sending processes. The second goes on, and answers checks, while the first is dead.
SENDERS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """The chosen flights."""

    #: Sequence of the flight whose handler always fails.
    poison: int
    #: Sequence of the flight at which the first sender is killed.
    killed: int


def left_unknown(flight: Flight) -> bool:
    """Tell whether the sender leaves this flight's transaction to a check."""
    return flight.sequence % UNKNOWN_EVERY == UNKNOWN_EVERY - 1


def plan(flights: Sequence[Flight], seed: int) -> Plan:
    """Choose the poison flight by chance, and the killed sender's flight a third into its share.

    `ConfigurationError` where there are too few departed flights with a key to choose from.
    """
    departed = [flight for flight in flights if flight.departed and flight.tail is not None]
    of_first_sender = [flight for flight in departed if share_of(flight, SENDERS) == 0 and not left_unknown(flight)]
    if not of_first_sender:
        raise ConfigurationError(
            f"the input has {len(flights)} flights, {len(departed)} of them departed with a key, and none that the "
            "first sender would decide itself; give a file with more flights or other --key and --status columns"
        )
    killed = of_first_sender[len(of_first_sender) // 3].sequence
    others = [flight.sequence for flight in departed if flight.sequence != killed]
    if not others:
        raise ConfigurationError(
            "the input has only one departed flight with a key; the demo needs one to kill a sender at and "
            "another to plant as poison: give a file with more flights"
        )
    return Plan(poison=random.Random(seed).choice(others), killed=killed)  # noqa: S311 - a repeatable choice


def share_of(flight: Flight, shares: int) -> int:
    """Return the number of the share a flight belongs to, by its aircraft."""
    return zlib.crc32(flight.aircraft.encode()) % shares


class Share:
    """Flights of some aircraft, each aircraft's in schedule order. Used by one thread; `published` grows by others.

    What is in `recorded`, by aircraft the last flight that was sent before a restart, is not sent again; and as the
    decision of that flight may never have been sent, the aircraft waits until it is published.
    """

    def __init__(self, flights: Iterable[Flight], published: Container[int], recorded: Mapping[str, int]) -> None:
        queues: dict[str, deque[Flight]] = {}
        for flight in flights:
            if flight.sequence > recorded.get(flight.aircraft, -1):
                queues.setdefault(flight.aircraft, deque()).append(flight)
        self._queues = deque(queues.values())
        self._published = published
        self._waiting_for = {aircraft: recorded[aircraft] for aircraft in queues if aircraft in recorded}
        #: How many flights were not given out yet. An undecided last flight need not be waited for.
        self.left = sum(map(len, queues.values()))

    @property
    def held(self) -> int:
        """How many aircraft wait for an undecided flight."""
        return len(self._waiting_for)

    def hold(self, flight: Flight) -> None:
        """Keep the flights that follow this one back until it is published."""
        if any(queue[0].aircraft == flight.aircraft for queue in self._queues):
            self._waiting_for[flight.aircraft] = flight.sequence

    def take(self) -> Flight | None:
        """Return the next flight that may be sent, of each aircraft in turn, or None when all that are left wait."""
        for _ in range(len(self._queues)):
            queue = self._queues.popleft()
            aircraft = queue[0].aircraft
            if self._waiting_for.get(aircraft) in self._published:
                del self._waiting_for[aircraft]
            if aircraft in self._waiting_for:
                self._queues.append(queue)
                continue
            self.left -= 1
            flight = queue.popleft()
            if queue:
                self._queues.append(queue)
            return flight
        return None
