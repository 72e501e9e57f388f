"""The verdict: compares the promises with the contents of topics and databases after the end of the demo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition
from rich.table import Column, Table
from rich.text import Text

from demo.aircraft import Fleet, plain_states
from demo.flights import Flight
from demo.plan import Plan
from demo.totals import Totals, plain_totals
from penstock import PenstockError

Value = TypeVar("Value")

#: Seconds for any answer of the broker.
_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the verdict. `holds` is None if there was no promise, as for a rate."""

    name: str
    promised: str
    found: str
    holds: bool | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """The findings."""

    #: Sequences of the flights in the airline's table.
    recorded: Sequence[int]
    #: The messages of the topic and of its dead-letter topic.
    published: Sequence[Flight]
    dead_letters: Sequence[Flight]
    #: The app's handler.
    fleet: Fleet
    #: Spark's table; None if Spark did not run.
    totals: Mapping[str, Totals] | None
    #: Transactions that the coordinator has not settled.
    pending: int
    #: Whether the first sender died by SIGKILL.
    killed: bool


def read_topic(bootstrap_servers: str, topic: str) -> list[Flight]:
    """Return every committed message of a topic up to its end, read by a plain client without penstock."""
    settings = {
        "bootstrap.servers": bootstrap_servers,
        "group.id": "penstock-demo-reader",  # the client requires a name; nothing is committed with it
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
    }
    with closing(Consumer(settings)) as consumer:
        partitions = consumer.list_topics(topic, _ANSWER_S).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
        flights: list[Flight] = []
        at_end: set[int | None] = set()
        while len(at_end) < len(partitions):
            message = consumer.poll(_ANSWER_S)
            if message is None:
                raise PenstockError(f"topic {topic} was not read to its end; look at the broker's log")
            error = message.error()
            if error is None:
                flights.append(Flight.from_json(message.value()))
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its public name
                at_end.add(message.partition())
            else:
                raise PenstockError(f"topic {topic} cannot be read: {error.str()}; look at the broker's log")
        return flights


def judge(flights: Sequence[Flight], plan: Plan, evidence: Evidence) -> list[Row]:
    """Compare the findings with the flights in the file."""
    departed = sum(flight.departed for flight in flights)
    handled, states, totals = evidence.fleet.handled, evidence.fleet.states, evidence.totals
    rows = [
        _equal("rows in the flights table", departed, len(evidence.recorded)),
        _equal("messages in the topic", departed, len(evidence.published)),
        _equal("handled + dead letters", departed, len(handled) + len(evidence.dead_letters)),
    ]
    if totals is not None:
        rows.append(_equal("messages in Spark's table", departed, sum(count for count, _ in totals.values())))
        rows.append(_equal("aircraft with wrong totals in Spark", 0, _differing(plain_totals(flights), totals)))
    recorded = "recorded" if plan.killed in evidence.recorded else "not recorded"
    times = sum(flight.sequence == plan.killed for flight in evidence.published)
    return [
        *rows,
        _equal("aircraft in a wrong state", 0, _differing(plain_states(flights, plan.poison), states)),
        _equal("cancelled flights seen", 0, sum(not flight.departed for flight in handled)),
        _equal("duplicates", 0, len(handled) - len({flight.sequence for flight in handled})),
        _equal("order violations", 0, len(evidence.fleet.out_of_order)),
        _same("dead letters", _named([plan.poison]), _named([flight.sequence for flight in evidence.dead_letters])),
        _equal("undecided transactions", 0, evidence.pending),
        _equal("senders killed before their decision", 1, int(evidence.killed)),
        _same(f"its flight {plan.killed}", "recorded, published 1x", f"{recorded}, published {times}x"),
    ]


def rate(name: str, count: int, seconds: float) -> Row:
    """Return the line of a rate, which is no promise."""
    return Row(name, "", f"{count / seconds:,.0f}/s", None)


def kept(rows: Sequence[Row]) -> bool:
    """Return whether every promise was kept."""
    return all(row.holds is not False for row in rows)


def table(title: str, rows: Sequence[Row]) -> Table:
    """Return the verdict as a table. A broken promise is red and marked BROKEN, for terminals without colours."""
    promised, found = Column("promised", justify="right"), Column("found", justify="right")
    result = Table("", promised, found, "", title=title, title_justify="left")
    for row in rows:
        word, style = {True: ("kept", "green"), False: ("BROKEN", "bold red"), None: ("", "dim")}[row.holds]
        line_style = style if row.holds is not True else ""
        result.add_row(row.name, row.promised, row.found, Text(word, style=style), style=line_style)
    return result


def _same(name: str, promised: str, found: str) -> Row:
    return Row(name, promised, found, promised == found)


def _equal(name: str, promised: int, found: int) -> Row:
    return _same(name, f"{promised:,}", f"{found:,}")


def _named(sequences: Sequence[int]) -> str:
    return ", ".join(f"flight {sequence}" for sequence in sequences) or "none"


def _differing(expected: Mapping[str, Value], found: Mapping[str, Value]) -> int:
    """Count the keys whose values differ, or that only one side has."""
    return sum(expected.get(key) != found.get(key) for key in expected.keys() | found.keys())
