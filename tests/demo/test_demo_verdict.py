"""The verdict: green when all found is as promised, and red in words and colour where it is not."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from demo.aircraft import Fleet, PoisonFlightError
from demo.flights import Flight
from demo.plan import plan
from demo.totals import plain_totals
from demo.verdict import Evidence, judge, kept, table
from rich.console import Console

from penstock import Message

FLIGHTS = [Flight(number, f"N{number % 3}", f"A{number % 4}", number % 5 - 2, number % 9 != 0) for number in range(60)]
PLAN = plan(FLIGHTS, seed=1)
DEPARTED = [flight for flight in FLIGHTS if flight.departed]


def seen(flights: list[Flight]) -> Fleet:
    """Return the app's results for messages in this order."""
    fleet = Fleet(PLAN.poison)
    for flight in flights:
        message = Message.of(flight.to_json())
        if flight.sequence == PLAN.poison:
            with pytest.raises(PoisonFlightError):
                fleet.handle(message)
        else:
            fleet.handle(message)
    return fleet


def evidence(fleet: Fleet) -> Evidence:
    """Return the findings of a run in which every promise was kept."""
    return Evidence(
        recorded=[flight.sequence for flight in DEPARTED],
        published=DEPARTED,
        dead_letters=[flight for flight in FLIGHTS if flight.sequence == PLAN.poison],
        fleet=fleet,
        totals=plain_totals(FLIGHTS),
        pending=0,
        killed=True,
    )


def broken(found: Evidence) -> list[str]:
    return [row.name for row in judge(FLIGHTS, PLAN, found) if not row.holds]


def test_what_is_found_as_promised_is_kept() -> None:
    rows = judge(FLIGHTS, PLAN, evidence(seen(DEPARTED)))

    assert kept(rows)
    assert all(row.holds for row in rows)


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
        ({"killed": False}, ["senders killed before their decision"]),
        (
            {"published": [flight for flight in DEPARTED if flight.sequence != PLAN.killed]},
            ["messages in the topic", f"its flight {PLAN.killed}"],
        ),
    ],
    ids=str,
)
def test_what_stands_elsewhere_otherwise_breaks_its_rows(change: dict[str, object], names: list[str]) -> None:
    assert broken(replace(evidence(seen(DEPARTED)), **change)) == names  # type: ignore[arg-type]  # fields by name


def test_a_broken_promise_is_printed_in_red_and_in_words() -> None:
    console = Console(file=io.StringIO(), width=160, color_system="standard", force_terminal=True)
    console.print(table("title", judge(FLIGHTS, PLAN, replace(evidence(seen(DEPARTED)), pending=1))))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO was given above

    (red,) = [line for line in lines if "BROKEN" in line]
    assert "undecided transactions" in red
    assert "\x1b[1;31m" in red
    assert not any("\x1b[1;31m" in line for line in lines if "duplicates" in line)
