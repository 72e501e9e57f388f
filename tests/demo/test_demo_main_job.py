"""The demo end to end on a few flights, on its own embedded broker: once kept, once broken on purpose."""

from __future__ import annotations

import io

import pytest
from demo.aircraft import Fleet
from demo.flights import Flight
from demo.main_job import run
from rich.console import Console

from penstock import Message

#: 12 aircraft; every 9th flight is cancelled, every 25th without an aircraft.
FLIGHTS = [
    Flight(number, f"N{number * 7 % 12}" if number % 25 else None, f"A{number % 4}", number % 5 - 2, number % 9 != 0)
    for number in range(300)
]


def run_and_print() -> tuple[int, str]:
    file = io.StringIO()
    code = run(FLIGHTS, Console(file=file, width=160), seed=1, spark=False, page=False, keep=False)
    return code, file.getvalue()


@pytest.mark.thorough
def test_a_few_flights_keep_every_promise() -> None:
    code, text = run_and_print()

    assert code == 0, text
    assert "Every promise was kept." in text
    assert "recorded, published 1x" in text


@pytest.mark.chaos
def test_a_message_handled_twice_turns_its_rows_red_and_the_exit_code_to_1(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Fleet.handle

    def handle_one_twice(fleet: Fleet, message: Message) -> None:
        handle(fleet, message)
        if Flight.from_json(message.value).sequence == FLIGHTS[-1].sequence:
            handle(fleet, message)

    monkeypatch.setattr(Fleet, "handle", handle_one_twice)

    code, text = run_and_print()

    assert code == 1, text
    red = [line for line in text.splitlines() if "BROKEN" in line and "│" in line]
    assert ["duplicates" in line for line in red].count(True) == 1, text
    assert "A promise was BROKEN: see the red rows." in text
