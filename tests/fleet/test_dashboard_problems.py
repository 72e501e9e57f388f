"""Sentences that name causes: for each state of a partition, for silent members, and their sums."""

from __future__ import annotations

from typing import Any

import pytest
from scenes import alone, partition, report

from penstock.fleet.page.problems import Problem, problems_of
from penstock.fleet.page.snapshot import group_view
from penstock.fleet.reports.group_state import Group, Member
from penstock.places import age_text

HELD = {"blocking_offset": 17, "handler": "charge", "in_flight": 4}
IN_HANDLER = {"state": "in handler", "age": 9.0, "worker": "w"}
PARKED = {"state": "parked", "due_in": 8.5}
CALL = "in handler charge on w for"
BEHIND = "behind an earlier call of the same key, in charge on w for 61.0 s"


def problems_in(*partitions: dict[str, Any], **more: Any) -> list[Problem]:
    return problems_of(alone("shop", "one", partitions=partitions, **more))


@pytest.mark.parametrize(
    ("level", "sentence", "extra"),
    [
        ("warn", f"Offset 17, {CALL} 9.0 s, and has not returned. 3 messages taken in wait with it.", IN_HANDLER),
        ("bad", f"{CALL} 900.0 s, and has not", IN_HANDLER | {"age": 900.0}),
        ("warn", "for 9.0 s, over its time limit, 3 times, and has not", IN_HANDLER | {"over_time_limit": 3}),
        ("bad", f"Offset 17, queued {BEHIND}.", {"state": "behind a call", "age": 61.0, "detail": BEHIND}),
        ("warn", "parked (charge) after 1 failed try, next try in 8.5 s. Other keys go on.", PARKED | {"attempt": 1}),
        ("warn", "parked (charge) for 4.0 s, next try in 0.0 s.", {"state": "parked", "due_in": 0.0, "age": 4.0}),
        ("bad", "failed tries: fix it. 3 messages", {"state": "held", "attempt": 5, "detail": "fix it"}),
        ("bad", "A message was given up: dlq.o is gone.", {"state": "dead letter", "detail": "dlq.o is gone"}),
        ("warn", "for 20.0 s, and its completion has not come.", {"state": "put off", "age": 20.0}),
        ("warn", "It waits for a:1@3.", {"state": "behind its key", "detail": "it waits for a:1@3"}),
        ("note", "Offset 17, held by rate 5/s (charge).", {"state": "held by rate", "rate": 5.0}),
        ("warn", "No broker takes it.", {"state": "publishing", "detail": "no broker takes it", "age": 3.0}),
        ("note", "Paused: byte limit.", {"state": "queued", "paused": "byte limit"}),
        ("warn", "Paused: by the app since noon.", {"state": "queued", "paused": "by the app since noon"}),
        ("bad", "The topic does not exist.", {"state": "queued", "trouble": "the topic does not exist"}),
    ],
)
def test_a_cause_is_a_sentence(level: str, sentence: str, extra: dict[str, Any]) -> None:
    [problem] = problems_in(partition("orders", 3, **HELD, **extra))

    assert (problem.level, problem.topic, problem.partition, problem.offset) == (level, "orders", 3, 17)
    assert sentence in problem.text


@pytest.mark.parametrize("extra", [{"state": "publishing"}, PARKED | {"due_in": 0.0}, IN_HANDLER | {"age": 0.2}])
def test_what_moves_is_no_problem(extra: dict[str, Any]) -> None:
    assert problems_in(partition("orders", 3, **HELD, **extra)) == []


def test_a_cause_of_many_partitions_is_reported_once_with_their_number() -> None:
    [problem] = problems_in(*(partition("orders", n, trouble="no broker answers", lag=10) for n in range(200)))

    assert (problem.count, problem.waiting) == (200, 2_000)


def test_the_worst_come_first_and_a_parked_key_that_holds_a_watermark_is_reported_once() -> None:
    parked = [
        {"topic": "orders", "partition": 3, "offset": 17, "handler": "charge", "attempt": 2},
        {"topic": "orders", "partition": 3, "offset": 40, "handler": "charge", "attempt": 2, "due_in": 4.0},
    ]
    waits = partition("orders", 3, **HELD, state="parked", attempt=2, due_in=30.0)
    broken = partition("orders", 4, **HELD, state="held", attempt=2)

    assert [one.kind for one in problems_in(waits, broken, parked=parked)] == ["held", "parked", "keys"]


def test_a_silent_member_is_reported_and_nothing_else_of_it() -> None:
    stale = report("shop", "one", partitions=[partition("orders", 3, trouble="x")], commands=True)

    [problem] = problems_of(Group("shop", [Member(stale, 30.0, is_silent=True)]))
    both = [Member(stale, 30.0, is_silent=True, is_replaced=is_replaced) for is_replaced in (True, False)]
    commands = [member["commands"] for member in group_view(Group("shop", both))["members"]]

    assert commands == [True, False], "a replaced member gets no Stacks button"
    assert (problem.kind, problem.level) == ("silent", "bad")
    assert "it died, is stopped, or reaches no broker" in problem.text


def test_transactions_and_queries_are_reported() -> None:
    undecided = {"id": "a", "prefix": "penstock", "group": "checkout", "topics": "orders", "age": 50.0, "checks": 4}
    transactions = [undecided, {**undecided, "age": 1.0}, {**undecided, "age": 99.0, "decided": "COMMIT"}]
    coordinator = {"counts": {"pending": 3}, "waits": ["orders takes nothing"], "transactions": transactions}
    sinks = [{"name": "lake", "state": "failed", "last_error": "no space"}, {"name": "pg", "state": "running"}]

    waits, pending = sorted(problems_in(coordinator=coordinator), key=lambda problem: problem.age or 0.0)
    [failed] = problems_in(sinks=sinks)

    assert (failed.kind, failed.level) == ("sink", "bad")
    assert failed.text == "Its query failed: no space; it is not started again."
    assert waits.text == "Orders takes nothing."
    assert "has no decision after 50.0 s and 4 checks" in pending.text
    assert pending.count == 1


def test_durations_are_written_as_people_do() -> None:
    assert [age_text(one) for one in (-0.5, 0.4, 119.0, 9e3)] == ["-0.5 s", "0.4 s", "1 min 59 s", "2 h 30 min"]
