"""The plan, fixed before anything is sent: which sender sends a flight, who decides it, and where a sender dies."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from demo.flights import Flight
from penstock.errors import ConfigurationError

#: One of so many flights is left to a check.
UNKNOWN_EVERY = 50

#: Sending processes. While the first is dead, the second goes on and answers checks.
SENDERS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """The chosen flights."""

    #: Sequence of the flight whose handler always fails.
    poison: int
    #: Sequence of the flight at which the first sender dies.
    killed: int


def left_unknown(flight: Flight) -> bool:
    """Return whether the sender leaves this flight's transaction to a check."""
    return flight.sequence % UNKNOWN_EVERY == UNKNOWN_EVERY - 1


def share_of(flight: Flight, shares: int) -> int:
    """Return the number of a flight's share, by its aircraft."""
    return zlib.crc32((flight.tail or "").encode()) % shares


def plan(flights: Sequence[Flight], seed: int) -> Plan:
    """Choose the poison flight at random. The killed sender's flight is at a third of its share.

    `ConfigurationError` if there are too few departed flights with a key.
    """
    departed = [flight for flight in flights if flight.departed and flight.tail is not None]
    of_first_sender = [flight for flight in departed if share_of(flight, SENDERS) == 0 and not left_unknown(flight)]
    if not of_first_sender or len(departed) == 1:
        raise ConfigurationError(
            f"the input has {len(flights)} flights; {len(departed)} departed and have a key, and the first sender "
            f"decides {len(of_first_sender)} of these. The demo needs one of those to kill the sender, and another "
            "departed one as poison; give a file with more flights, or other --key and --status columns"
        )
    killed = of_first_sender[len(of_first_sender) // 3].sequence
    others = [flight.sequence for flight in departed if flight.sequence != killed]
    return Plan(poison=random.Random(seed).choice(others), killed=killed)  # noqa: S311 - a repeatable choice
