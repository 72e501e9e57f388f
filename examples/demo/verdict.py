"""The verdict: what the demo promised against what it found, computed from the data and nothing else. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.table import Column, Table
from rich.text import Text

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the verdict. `holds` is None where nothing was promised, as for a rate."""

    name: str
    wanted: str
    found: str
    holds: bool | None


def equal(name: str, wanted: int, found: int) -> Row:
    """Return the line of a count that must be exactly so."""
    return Row(name, f"{wanted:,}", f"{found:,}", wanted == found)


def rate(name: str, per_second: float) -> Row:
    """Return the line of a rate, which nobody promised."""
    return Row(name, "", f"{per_second:,.0f}/s", None)


def kept(rows: Sequence[Row]) -> bool:
    """Tell whether every promise was kept."""
    return all(row.holds is not False for row in rows)


def differing(expected: Mapping[str, Value], found: Mapping[str, Value]) -> int:
    """Count the keys whose value differs, or that only one side has."""
    return sum(expected.get(key) != found.get(key) for key in expected.keys() | found.keys())


def table(title: str, rows: Sequence[Row]) -> Table:
    """Lay the verdict out. A broken promise stands in red and says BROKEN, for terminals without colours."""
    promised, found = Column("promised", justify="right"), Column("found", justify="right")
    laid_out = Table("", promised, found, "", title=title, title_justify="left")
    for row in rows:
        word, style = {True: ("kept", "green"), False: ("BROKEN", "bold red"), None: ("", "dim")}[row.holds]
        line_style = style if row.holds is not True else ""
        laid_out.add_row(row.name, row.wanted, row.found, Text(word, style=style), style=line_style)
    return laid_out
