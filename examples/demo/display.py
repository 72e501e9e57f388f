"""What the user sees while the demo runs: bars on a terminal and plain lines elsewhere, and the page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.errors import ConfigurationError
from penstock.fleet import Address, Dashboard

#: Seconds between two plain lines.
_LINE_S = 5.0

#: Where the page is, where that is free.
_PORT = 8400


@dataclass(frozen=True, slots=True)
class Counts:
    """How far the demo is; `held` counts aircraft that wait for an undecided flight."""

    sent: int = 0
    published: int = 0
    handled: int = 0
    spark_rows: int | None = None
    pending: int = 0
    held: int = 0


#: Shows the newest counts.
Display = Callable[[Counts], None]


@contextmanager
def display(console: Console, *, flights: int, departed: int, spark: bool) -> Iterator[Display]:
    """Return a display for that console: live bars where it is a terminal, else a line now and then."""
    totals = {"sent": flights, "published": departed, "handled": departed}
    if spark:
        totals["in Spark's table"] = departed
    if not console.is_terminal:
        yield _lines(console, totals)
        return
    columns = (TextColumn("{task.description:<17}"), BarColumn(bar_width=40), MofNCompleteColumn())
    bars = Progress(*columns, TimeElapsedColumn(), TextColumn("{task.fields[note]}", style="dim"), console=console)
    tasks = {name: bars.add_task(name, total=total, note="") for name, total in totals.items()}

    def show(counts: Counts) -> None:
        notes = {"sent": f"aircraft held {counts.held:,}", "published": f"pending {counts.pending:,}"}
        for name, done in _done(counts).items():
            bars.update(tasks[name], completed=done, note=notes.get(name, ""))

    with bars:
        yield show


def _lines(console: Console, totals: Mapping[str, int]) -> Display:
    begun = time.monotonic()
    due = begun

    def show(counts: Counts) -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            due = now + _LINE_S
            done = ", ".join(f"{name} {count:,}/{totals[name]:,}" for name, count in _done(counts).items())
            line = f"{now - begun:5.0f} s  {done}, pending {counts.pending:,}, aircraft held {counts.held:,}"
            console.print(line, soft_wrap=True, highlight=False)

    return show


def _done(counts: Counts) -> dict[str, int]:
    done = {"sent": counts.sent, "published": counts.published, "handled": counts.handled}
    return done if counts.spark_rows is None else {**done, "in Spark's table": counts.spark_rows}


@contextmanager
def page(console: Console, bootstrap_servers: str, *, wanted: bool) -> Iterator[None]:
    """Serve the page where it is wanted and its packages are there, and say where, or what is missing."""
    if not wanted:
        yield
        return
    try:
        try:
            made = Dashboard(bootstrap_servers, Address("127.0.0.1", _PORT))
        except ConfigurationError:  # somebody has the port, or a package is missing: then this says so
            made = Dashboard(bootstrap_servers, Address("127.0.0.1", 0))
    except ConfigurationError as error:
        console.print(f"Without a page: {error}", soft_wrap=True)
        yield
        return
    with made:
        console.print(f"The page: http://{made.address}", soft_wrap=True)
        yield
