"""What is shown while the demo runs."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from penstock.demo.display import Counts, display

COUNTS = Counts(sent=1200, published=1100, handled=1000, spark_rows=900, pending=12, held=3)


def shown(*, terminal: bool, counts: Counts, times: int = 2) -> str:
    file = io.StringIO()
    console = Console(file=file, width=140, force_terminal=terminal)
    with display(console, flights=2000, departed=1900, spark=counts.spark_rows is not None) as panel:
        for _ in range(times):
            panel.show(counts)
    return file.getvalue()


def test_a_terminal_gets_bars() -> None:
    text = shown(terminal=True, counts=COUNTS)

    for expected in ("1200/2000", "1100/1900", "1000/1900", "900/1900", "12 pending", "3 aircraft wait for a check"):
        assert expected in text


def test_a_file_gets_a_plain_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.0, 104.9, 105.1, 110.0])
    monkeypatch.setattr("penstock.demo.display.time", SimpleNamespace(monotonic=lambda: next(times)))
    line = (
        " s  sent 1,200/2,000, published 1,100/1,900, handled 1,000, in Spark's table 900, pending 12, "
        "aircraft held 3\n"
    )

    text = shown(terminal=False, counts=COUNTS, times=4)

    assert text == f"    0{line}    5{line}"


def test_without_spark_nothing_is_said_of_it() -> None:
    counts = Counts(sent=1)

    assert "Spark" not in shown(terminal=False, counts=counts)
    assert "Spark" not in shown(terminal=True, counts=counts)
