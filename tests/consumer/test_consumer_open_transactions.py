"""An open transaction of somebody else holds a partition: that is told, and only then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from penstock.consumer.polling.health.open_transactions import OpenTransactions


class Asked:
    """Answers questions about readable ends; None until told."""

    def __init__(self) -> None:
        self.ends: Mapping[tuple[str, int], int] | Exception | None = None
        self.questions: list[Sequence[tuple[str, int]]] = []

    def __call__(self, places: Sequence[tuple[str, int]]) -> Any:
        self.questions.append(places)
        return self

    def answer(self) -> Any:
        if isinstance(self.ends, Exception):
            raise self.ends
        return self.ends


def assignment(position: int, end: int | None, **more: Any) -> Any:
    tracker = SimpleNamespace(position=position, in_flight=more.pop("in_flight", 0))
    known = {"topic": "orders", "partition": 3, "active": True, "known": True, "paused": None, "end": end}
    # A simple namespace cannot be a key.
    return type("One", (), {**known, **more, "tracker": tracker})()


def watching(*assignments: Any, committed_only: bool = True) -> tuple[OpenTransactions, Asked]:
    asked, table = Asked(), SimpleNamespace(all=lambda: list(assignments))
    settings: Any = SimpleNamespace(reads_committed_only=committed_only)
    return OpenTransactions(table, asked, settings), asked  # type: ignore[arg-type]


def test_a_partition_that_stands_before_an_open_transaction_says_so_until_it_moves() -> None:
    one = assignment(7, 12)
    watch, asked = watching(one)

    watch.check(0.0)
    assert asked.questions == []
    watch.check(2.0)
    asked.ends = {("orders", 3): 7}
    watch.check(2.1)

    assert "is open at offset 7" in (watch.trouble(one) or "")
    assert "--topic orders --partition 3" in (watch.trouble(one) or "")
    one.tracker.position = 9
    assert watch.trouble(one) is None


def test_one_of_which_no_position_is_known_says_so_where_something_cannot_be_read() -> None:
    waits, empty = assignment(0, 12, known=False), assignment(0, 12, known=False, partition=4)
    watch, asked = watching(waits, empty)
    watch.check(0.0)
    watch.check(2.0)
    asked.ends = {("orders", 3): 5, ("orders", 4): 12}
    watch.check(2.1)

    assert "is open at offset 5" in (watch.trouble(waits) or "")
    assert watch.trouble(empty) is None


def test_what_waits_for_something_else_is_asked_about_seldom() -> None:
    one = assignment(7, 12)
    watch, asked = watching(one)
    asked.ends = {("orders", 3): 12}
    for tenth in range(90):
        watch.check(tenth / 10)

    assert len(asked.questions) == 1
    assert watch.trouble(one) is None


def test_where_the_log_has_grown_it_is_asked_about_again_soon() -> None:
    # Nothing was ever read of it, for there was nothing; then somebody writes, and does not commit.
    one = assignment(0, 0, known=False)
    watch, asked = watching(one)
    asked.ends = {("orders", 3): 0}
    for tenth in range(30):
        watch.check(tenth / 10)
    empty = watch.trouble(one)
    one.end = 1
    for tenth in range(30, 60):
        watch.check(tenth / 10)

    assert empty is None
    assert "is open at offset 0" in (watch.trouble(one) or "")


def test_what_moves_is_paused_in_flight_or_read_uncommitted_is_not_asked_about() -> None:
    others = [assignment(7, 7), assignment(7, None), assignment(7, 12, in_flight=1), assignment(7, 12, paused="x")]
    watch, asked = watching(*others, assignment(7, 12, active=False))
    uncommitted, not_asked = watching(assignment(7, 12), committed_only=False)
    for now in (0.0, 2.0, 4.0):
        watch.check(now)
        uncommitted.check(now)

    assert asked.questions == not_asked.questions == []


def test_a_question_that_fails_tells_nothing_and_is_asked_again() -> None:
    one = assignment(7, 12)
    watch, asked = watching(one)
    asked.ends = KafkaException(KafkaError(KafkaError._TRANSPORT, "no broker"))
    for now in (0.0, 2.0, 4.0):
        watch.check(now)

    assert watch.trouble(one) is None
    assert asked.questions
