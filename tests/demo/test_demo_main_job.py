"""The demo end to end on a few flights, on its own embedded broker; and what it says of a broken promise."""

from __future__ import annotations

import io

import pytest
from demo.flights import Flight
from demo.verdict import Row
from rich.console import Console

from demo import main_job

#: 12 aircraft; every 9th flight is cancelled, every 25th without an aircraft.
FLIGHTS = [
    Flight(number, f"N{number * 7 % 12}" if number % 25 else None, f"A{number % 4}", number % 5 - 2, number % 9 != 0)
    for number in range(300)
]


def run_and_print() -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=160, color_system="standard", force_terminal=True)
    code = main_job.run(FLIGHTS, console, seed=1, spark=False, page=False, keep=False)
    return code, console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO was given above


@pytest.mark.thorough
def test_a_few_flights_keep_every_promise() -> None:
    code, text = run_and_print()

    assert code == 0, text
    assert "Every promise was kept." in text
    assert "recorded, published once" in text


def test_a_broken_promise_is_exit_code_1_and_printed_in_red_and_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row("duplicates", "0", "1"), Row("order violations", "0", "0")]
    monkeypatch.setattr(main_job, "_perform", lambda *_, **__: rows)

    code, text = run_and_print()

    assert code == 1
    assert "A promise was BROKEN: see the red rows." in text
    assert "Every promise was kept." not in text
    (red,) = [line for line in text.splitlines() if "BROKEN" in line and "│" in line]
    assert "duplicates" in red
    assert "\x1b[1;31m" in red
    assert not any("\x1b[1;31m" in line for line in text.splitlines() if "order violations" in line)
