"""The demo end to end on a small input, on its own embedded broker: once kept, once broken on purpose."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from demo.flights import Columns
from demo.main_job import DemoOptions, run
from rich.console import Console

COLUMNS = Columns(key="machine", order=("hour", "minute"), status="state", delay="waited", place="hall")
ROWS = 300


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """300 jobs of 12 machines: every 9th scrapped, every 25th without a machine."""
    lines = ["machine,hour,minute,state,waited,hall"]
    for number in range(ROWS):
        machine = "" if number % 25 == 0 else f"m{number * 7 % 12}"
        state = "" if number % 9 == 0 else "done"
        lines.append(f"{machine},{number // 60},{number % 60},{state},{number % 5 - 2},H{number % 4}")
    path = tmp_path / "jobs.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def run_and_print(options: DemoOptions) -> tuple[int, str]:
    file = io.StringIO()
    code = run(options, Console(file=file, width=160))
    return code, file.getvalue()


def broken(text: str) -> list[str]:
    return [line for line in text.splitlines() if "BROKEN" in line and "│" in line]


@pytest.mark.thorough
def test_a_small_input_of_the_user_keeps_every_promise(rows: Path) -> None:
    code, text = run_and_print(DemoOptions(input=rows, columns=COLUMNS, spark=False))

    assert code == 0, text
    assert broken(text) == []
    assert "Every promise was kept." in text
    assert "recorded, checked, published once" in text


@pytest.mark.chaos
def test_a_lost_message_turns_its_rows_red_and_the_exit_code_to_1(rows: Path) -> None:
    code, text = run_and_print(
        DemoOptions(input=rows, columns=COLUMNS, spark=False, ignored=frozenset({ROWS // 2 + 1}))
    )

    assert code == 1, text
    red = broken(text)
    assert len(red) == 2, text
    assert "handled + dead letters" in red[0]
    assert "aircraft in a wrong state" in red[1]
