"""The verdict: green when every fact is right, and one red row for each fact that is wrong."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from penstock.demo.checks.verdict import Facts, KilledSender, Rates, SparkFacts, differing, kept, table, verdict

RIGHT = Facts(
    flights=1_000,
    departed=980,
    recorded=980,
    published=980,
    folded=979,
    dead_letters=[77],
    poison=77,
    poison_attempts=3,
    poison_attempts_wanted=3,
    wrong_states=0,
    aircraft=40,
    cancelled_seen=0,
    duplicates=0,
    order_violations=0,
    left_unknown=20,
    settled_by_checks=21,
    undecided=0,
    killed=KilledSender(sequence=300, kills=1, recorded=True, settled_by_check=True, published=1),
    spark=SparkFacts(flights=980, wrong_totals=0),
    rates=Rates(transactions=1500.0, handled=1400.0, spark_rows=900.0),
)

WRONG = {
    "rows in the flights table": replace(RIGHT, recorded=979),
    "messages in the topic": replace(RIGHT, published=981),
    "handled + dead letters": replace(RIGHT, folded=978),
    "messages in Spark's table": replace(RIGHT, spark=SparkFacts(flights=979, wrong_totals=0)),
    "aircraft with wrong totals in Spark": replace(RIGHT, spark=SparkFacts(flights=980, wrong_totals=1)),
    "aircraft in a wrong state": replace(RIGHT, wrong_states=1),
    "cancelled flights seen": replace(RIGHT, cancelled_seen=1),
    "duplicates": replace(RIGHT, duplicates=1),
    "order violations": replace(RIGHT, order_violations=1),
    "dead letters": replace(RIGHT, dead_letters=[78]),
    "tries of the planted flight": replace(RIGHT, poison_attempts=2),
    "undecided transactions": replace(RIGHT, undecided=1),
    "transactions settled by checks": replace(RIGHT, settled_by_checks=20),
    "senders killed before their decision": replace(RIGHT, killed=replace(RIGHT.killed, kills=0)),
}


def red(facts: Facts) -> list[str]:
    return [row.name for row in verdict(facts) if row.holds is False]


def printed(facts: Facts) -> str:
    console = Console(file=io.StringIO(), width=160, color_system="standard", force_terminal=True)
    console.print(table(facts, verdict(facts)))
    return console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO was given above


def test_right_facts_keep_every_promise() -> None:
    rows = verdict(RIGHT)

    assert kept(rows)
    assert red(RIGHT) == []


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_fact_turns_its_own_row_red_and_no_other(name: str) -> None:
    rows = verdict(WRONG[name])

    assert red(WRONG[name]) == [name]
    assert not kept(rows)


@pytest.mark.parametrize(
    "wrong", [{"recorded": False}, {"settled_by_check": False}, {"published": 0}, {"published": 2}]
)
def test_a_killed_senders_flight_that_was_not_settled_turns_red(wrong: dict[str, bool | int]) -> None:
    facts = replace(RIGHT, killed=replace(RIGHT.killed, **wrong))

    assert red(facts) == ["its flight 300"]


def test_a_dead_letter_too_many_is_red_even_where_the_sum_fits() -> None:
    facts = replace(RIGHT, folded=978, dead_letters=[77, 77])

    assert red(facts) == ["dead letters"]


def test_every_row_that_promises_something_has_a_wrong_fact_that_breaks_it() -> None:
    promised = {row.name for row in verdict(RIGHT) if row.holds is not None}

    assert promised == {*WRONG, "its flight 300"}


def test_without_spark_its_rows_are_left_out() -> None:
    facts = replace(RIGHT, spark=None, rates=replace(RIGHT.rates, spark_rows=None))

    names = [row.name for row in verdict(facts)]

    assert kept(verdict(facts))
    assert not [name for name in names if "Spark" in name]


def test_a_broken_promise_is_printed_in_red_and_in_words() -> None:
    right, wrong = printed(RIGHT), printed(WRONG["duplicates"])

    assert "BROKEN" not in right
    assert "\x1b[1;31m" not in right
    broken = next(line for line in wrong.splitlines() if "BROKEN" in line)
    assert "duplicates" in broken
    assert "\x1b[1;31m" in broken


def test_a_key_that_only_one_side_has_differs() -> None:
    assert differing({"a": 1, "b": 2}, {"a": 1, "b": 2}) == 0
    assert differing({"a": 1, "b": 2}, {"a": 1, "c": 2}) == 2
    assert differing({"a": 1}, {"a": 2}) == 1
