"""What happens to which flight, fixed before anything is sent, and which flight a sender thread may send next.

The order of an aircraft's messages is the order of their decisions, and a flight left to a check is decided late: the
aircraft is held back until that flight is published. A cancelled flight is never published and holds nothing back.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Container, Iterable, Sequence
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
    """Return the number of the share a flight belongs to: by its aircraft, or by its number without one."""
    return (flight.sequence if flight.key is None else zlib.crc32(flight.key)) % shares


class Share:
    """Flights of some aircraft, given out in schedule order. Used by one thread; reads `published` of another.

    `waiting_for` names aircraft that wait from the start, each for a flight, as after a restart.
    """

    def __init__(
        self, flights: Iterable[Flight], published: Container[int], waiting_for: dict[str, int] | None = None
    ) -> None:
        self._coming = deque(flights)
        self._published = published
        self._held: dict[str, deque[Flight]] = {tail: deque() for tail in waiting_for or {}}
        self._waiting_for = dict(waiting_for or {})
        self._released: deque[Flight] = deque()

    @property
    def held(self) -> int:
        """How many aircraft wait for an undecided flight."""
        return len(self._waiting_for)

    @property
    def left(self) -> int:
        """How many flights were not given out yet. Exact on the share's own thread, nearly so on another."""
        return len(self._coming) + len(self._released) + sum(map(len, list(self._held.values())))

    @property
    def finished(self) -> bool:
        """Whether every flight was given out. An undecided last flight need not be waited for."""
        return self.left == 0

    def hold(self, flight: Flight) -> None:
        """Keep the flights that follow this one back until it is published."""
        if flight.tail is not None:
            self._waiting_for[flight.tail] = flight.sequence
            followers = [later for later in self._released if later.tail == flight.tail]
            self._held[flight.tail] = deque(followers)
            if followers:
                self._released = deque(later for later in self._released if later.tail != flight.tail)

    def take(self) -> Flight | None:
        """Return the next flight that may be sent, or None when all that are left wait."""
        self._release()
        if self._released:
            return self._released.popleft()
        while self._coming:
            flight = self._coming.popleft()
            if flight.tail not in self._waiting_for:
                return flight
            self._held[flight.tail or ""].append(flight)
        return None

    def _release(self) -> None:
        for tail in [tail for tail, sequence in self._waiting_for.items() if sequence in self._published]:
            del self._waiting_for[tail]
            self._released.extend(self._held.pop(tail))
