"""The verdict: what the demo promised against what it found, computed from the data and nothing else.

Pure: `Facts` are collected elsewhere, `verdict` compares them, `table` lays them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.table import Column, Table
from rich.text import Text

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class KilledSender:
    """The sending process that was killed between its local commit and its decision."""

    sequence: int
    #: How many processes ended by SIGKILL at that point.
    kills: int
    #: Whether its local transaction is in the `flights` table, under the killed transaction.
    recorded: bool
    #: Whether a check of that transaction was answered COMMIT.
    settled_by_check: bool
    published: int


@dataclass(frozen=True, slots=True)
class SparkFacts:
    """What stands in Spark's table: the sum of its flights, and aircraft whose totals differ from the loop's."""

    flights: int
    wrong_totals: int


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast it went, each per second of the time that part was at work."""

    transactions: float
    handled: float
    spark_rows: float | None


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything the verdict is computed from."""

    flights: int
    departed: int
    recorded: int
    #: Records of the topic, counted by a plain read_committed client.
    published: int
    folded: int
    #: Flights read back from the dead-letter topic.
    dead_letters: Sequence[int]
    poison: int
    poison_attempts: int
    #: How often its retry policy has it tried.
    poison_attempts_wanted: int
    #: Aircraft in a wrong state from the plain loop's.
    wrong_states: int
    aircraft: int
    #: Cancelled flights among the handled messages.
    cancelled_seen: int
    duplicates: int
    #: Flights handled out of their aircraft's order, or beside another one of it.
    order_violations: int
    #: Transactions the senders left to a check, as their schedule asks.
    left_unknown: int
    #: Transactions the checks settled, the killed sender's among them.
    settled_by_checks: int
    undecided: int
    killed: KilledSender
    spark: SparkFacts | None
    rates: Rates


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the verdict. `holds` is None where nothing was promised, as for a rate."""

    name: str
    wanted: str
    found: str
    holds: bool | None


def verdict(facts: Facts) -> list[Row]:
    """Return the lines of the verdict."""
    departed = facts.departed
    killed = facts.killed
    rows = [
        _equal("rows in the flights table", departed, facts.recorded),
        _equal("messages in the topic", departed, facts.published),
        _equal("handled + dead letters", departed, facts.folded + len(facts.dead_letters)),
    ]
    if facts.spark is not None:
        rows += [
            _equal("messages in Spark's table", departed, facts.spark.flights),
            _equal("aircraft with wrong totals in Spark", 0, facts.spark.wrong_totals),
        ]
    rows += [
        _equal("aircraft in a wrong state", 0, facts.wrong_states),
        _equal("cancelled flights seen", 0, facts.cancelled_seen),
        _equal("duplicates", 0, facts.duplicates),
        _equal("order violations", 0, facts.order_violations),
        Row(
            "dead letters",
            f"flight {facts.poison}",
            ", ".join(f"flight {sequence}" for sequence in facts.dead_letters) or "none",
            list(facts.dead_letters) == [facts.poison],
        ),
        _equal("tries of the planted flight", facts.poison_attempts_wanted, facts.poison_attempts),
        _equal("undecided transactions", 0, facts.undecided),
        Row(
            "transactions settled by checks",
            f"at least {facts.left_unknown + 1:,}",
            f"{facts.settled_by_checks:,}",
            facts.settled_by_checks > facts.left_unknown,
        ),
        _equal("senders killed before their decision", 1, killed.kills),
        Row(
            f"its flight {killed.sequence}",
            "recorded, checked, published once",
            ", ".join(
                [
                    "recorded" if killed.recorded else "not recorded",
                    "checked" if killed.settled_by_check else "not checked",
                    {0: "never published", 1: "published once"}.get(killed.published, f"published {killed.published}x"),
                ]
            ),
            killed.recorded and killed.settled_by_check and killed.published == 1,
        ),
        _rate("transactions sent", facts.rates.transactions),
        _rate("messages handled", facts.rates.handled),
    ]
    if facts.rates.spark_rows is not None:
        rows.append(_rate("rows through Spark", facts.rates.spark_rows))
    return rows


def kept(rows: Sequence[Row]) -> bool:
    """Tell whether every promise was kept."""
    return all(row.holds is not False for row in rows)


def differing(expected: Mapping[str, Value], found: Mapping[str, Value]) -> int:
    """Count the keys whose value differs, or that only one side has."""
    return sum(expected.get(key) != found.get(key) for key in expected.keys() | found.keys())


def table(facts: Facts, rows: Sequence[Row]) -> Table:
    """Lay the verdict out. A broken promise stands in red and says BROKEN, for terminals without colours."""
    title = f"{facts.flights:,} flights in the CSV, {facts.departed:,} departed, {facts.aircraft:,} aircraft"
    promised, found = Column("promised", justify="right"), Column("found", justify="right")
    laid_out = Table("", promised, found, "", title=title, title_justify="left")
    for row in rows:
        word, style = {True: ("kept", "green"), False: ("BROKEN", "bold red"), None: ("", "dim")}[row.holds]
        line_style = style if row.holds is not True else ""
        laid_out.add_row(row.name, row.wanted, row.found, Text(word, style=style), style=line_style)
    return laid_out


def _equal(name: str, wanted: int, found: int) -> Row:
    return Row(name, f"{wanted:,}", f"{found:,}", wanted == found)


def _rate(name: str, per_second: float) -> Row:
    return Row(name, "", f"{per_second:,.0f}/s", None)
