"""What the user sees while the demo runs: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

#: Seconds between two plain lines.
_LINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Counts:
    """How far the demo is; `held` counts aircraft that wait for an undecided flight."""

    sent: int = 0
    published: int = 0
    handled: int = 0
    spark_rows: int | None = None
    pending: int = 0
    held: int = 0


class Display(Protocol):
    """Shows counts."""

    def show(self, counts: Counts) -> None:
        """Show the newest counts."""


@contextmanager
def display(console: Console, *, flights: int, departed: int, spark: bool) -> Iterator[Display]:
    """Return a display for that console: live bars where it is a terminal, else a line now and then."""
    if not console.is_terminal:
        yield _Lines(console, flights, departed)
        return
    bars = Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
        console=console,
    )
    with bars:
        yield _Bars(bars, flights, departed, spark=spark)


class _Bars:
    def __init__(self, bars: Progress, flights: int, departed: int, *, spark: bool) -> None:
        self._bars = bars
        self._sent = self._add("transactions sent", flights)
        self._published = self._add("messages published", departed)
        self._handled = self._add("messages handled", departed)
        self._spark = self._add("rows in Spark's table", departed) if spark else None

    def show(self, counts: Counts) -> None:
        held = f"{counts.held} aircraft wait for a check" if counts.held else ""
        pending = f"{counts.pending} pending" if counts.pending else ""
        self._bars.update(self._sent, completed=counts.sent, note=held)
        self._bars.update(self._published, completed=counts.published, note=pending)
        self._bars.update(self._handled, completed=counts.handled)
        if self._spark is not None:
            self._bars.update(self._spark, completed=counts.spark_rows or 0)

    def _add(self, name: str, total: int) -> TaskID:
        return self._bars.add_task(name, total=total, note="")


class _Lines:
    def __init__(self, console: Console, flights: int, departed: int) -> None:
        self._console = console
        self._flights = flights
        self._departed = departed
        self._begun = time.monotonic()
        self._next = 0.0

    def show(self, counts: Counts) -> None:
        elapsed = time.monotonic() - self._begun
        if elapsed < self._next:
            return
        self._next = elapsed + _LINE_S
        spark = "" if counts.spark_rows is None else f", in Spark's table {counts.spark_rows:,}"
        self._console.print(
            f"{elapsed:5.0f} s  sent {counts.sent:,}/{self._flights:,}, published {counts.published:,}"
            f"/{self._departed:,}, handled {counts.handled:,}{spark}, pending {counts.pending:,}, "
            f"aircraft held {counts.held:,}",
            soft_wrap=True,
            highlight=False,
        )
