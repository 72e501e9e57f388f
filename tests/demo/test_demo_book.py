"""The airline's table and the barrier between a local transaction and its check."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.demo.flights import Flight
from penstock.demo.senders.database import Answers, FlightBook, RefusedError

DEPARTED = Flight(3, "a", "BOS", 5, departed=True)
CANCELLED = Flight(4, "a", "MIA", 0, departed=False)


@pytest.fixture
def book(tmp_path: Path) -> Iterator[FlightBook]:
    with FlightBook(tmp_path / "airline.sqlite") as opened:
        yield opened


def test_a_departed_flight_is_in_the_table_and_a_cancelled_one_is_not(book: FlightBook) -> None:
    book.record(DEPARTED, "tx-1")
    book.record(CANCELLED, "tx-2")

    assert book.count() == 1
    assert book.transaction_of(3) == "tx-1"
    assert book.transaction_of(4) is None


def test_a_check_answers_from_the_table(book: FlightBook) -> None:
    book.record(DEPARTED, "tx-1")
    book.record(CANCELLED, "tx-2")

    answers = [book.answer("tx-1"), book.answer("tx-2"), book.answer("tx-1")]

    assert answers == [True, False, True]
    assert book.answers() == Answers(commit=1, rollback=1)
    assert book.answered("tx-1")
    assert not book.answered("tx-2")


def test_a_local_transaction_that_comes_after_its_check_is_refused(book: FlightBook) -> None:
    answer = book.answer("tx-1")

    with pytest.raises(RefusedError, match="flight 3 was rolled back by a check"):
        book.record(DEPARTED, "tx-1")

    assert not answer
    assert book.count() == 0
    book.record(DEPARTED, "tx-2")
    assert book.count() == 1


def test_a_second_process_sees_what_the_first_recorded(book: FlightBook, tmp_path: Path) -> None:
    book.record(DEPARTED, "tx-1")
    book.record(Flight(9, "a", "IAH", 0, departed=True), "tx-2")
    book.record(Flight(7, None, "IAH", 0, departed=True), "tx-3")

    with FlightBook(tmp_path / "airline.sqlite") as other:
        last, without_tail = other.last_recorded(), other.recorded_without_tail()

    assert last == {"a": 9}
    assert without_tail == {7}
