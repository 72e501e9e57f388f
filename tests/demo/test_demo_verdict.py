"""The verdict: each fault that is planted in what was found breaks the rows that speak of it, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from demo.aircraft import Fleet
from demo.flights import Flight, plan
from demo.totals import plain_totals
from demo.verdict import Evidence, judge

from penstock import Message

FLIGHTS = [Flight(number, f"N{number % 3}", f"A{number % 4}", number % 5 - 2, number % 9 != 0) for number in range(60)]
PLAN = plan(FLIGHTS, seed=1)
DEPARTED = [flight for flight in FLIGHTS if flight.departed]


def seen(flights: list[Flight]) -> Fleet:
    """Return what the app makes of messages that come in this order."""
    fleet = Fleet(PLAN.poison)
    for flight in flights:
        message = Message.of(flight.to_json())
        if flight.sequence == PLAN.poison:
            with pytest.raises(ValueError, match="poison"):
                fleet.handle(message)
        else:
            fleet.handle(message)
    return fleet


def evidence(fleet: Fleet) -> Evidence:
    """Return what is found where everything is as promised."""
    return Evidence(
        recorded=[flight.sequence for flight in DEPARTED],
        published=DEPARTED,
        dead_letters=[flight for flight in FLIGHTS if flight.sequence == PLAN.poison],
        fleet=fleet,
        totals=plain_totals(FLIGHTS),
        pending=0,
    )


def broken(found: Evidence) -> list[str]:
    return [row.name for row in judge(FLIGHTS, PLAN, found) if not row.holds]


def test_what_is_found_as_promised_is_kept() -> None:
    assert broken(evidence(seen(DEPARTED))) == []


@pytest.mark.parametrize(
    ("order", "names"),
    [
        (lambda: DEPARTED[:-1], ["handled + dead letters", "aircraft in a wrong state"]),
        (
            lambda: [*DEPARTED, DEPARTED[-1]],
            ["handled + dead letters", "aircraft in a wrong state", "duplicates", "order violations"],
        ),
        (lambda: [*DEPARTED[3:], *DEPARTED[:3]], ["aircraft in a wrong state", "order violations"]),
        (lambda: FLIGHTS, ["handled + dead letters", "aircraft in a wrong state", "cancelled flights seen"]),
    ],
    ids=["lost", "doubled", "out of order", "cancelled"],
)
def test_what_reaches_the_app_otherwise_breaks_its_rows(order: Callable[[], list[Flight]], names: list[str]) -> None:
    assert broken(evidence(seen(order()))) == names


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"recorded": [PLAN.killed]}, ["rows in the flights table"]),
        ({"published": [*DEPARTED, DEPARTED[0]]}, ["messages in the topic"]),
        ({"dead_letters": []}, ["handled + dead letters", "dead letters"]),
        ({"totals": {}}, ["messages in Spark's table", "aircraft with wrong totals in Spark"]),
        ({"pending": 1}, ["undecided transactions"]),
        (
            {"published": [flight for flight in DEPARTED if flight.sequence != PLAN.killed]},
            ["messages in the topic", f"flight {PLAN.killed}, whose sender died"],
        ),
    ],
    ids=["not recorded", "doubled in Kafka", "no dead letter", "nothing in Spark", "undecided", "killed and lost"],
)
def test_what_stands_elsewhere_otherwise_breaks_its_rows(change: dict[str, object], names: list[str]) -> None:
    assert broken(replace(evidence(seen(DEPARTED)), **change)) == names  # type: ignore[arg-type]  # fields by name
