"""Runs the demo's coordinator, app and processes, shows their progress, and waits for conditions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from demo.aircraft import Fleet
from demo.airline import new_producer
from demo.parts import Part
from demo.totals import read_totals
from penstock import Coordinator, PenstockError

#: Short times for checks, so that the demo ends soon: the defaults are 6 and 30 seconds.
_TRANSACTION_TIMEOUT_S = 1.0
_CHECK_INTERVAL_S = 2.0
_CHECK_MAX = 50

#: Seconds without progress until a wait fails: Spark takes a minute to start on a busy machine.
STALLED_S = 120.0

_POLL_S = 0.1

#: The newest counts, by the name of their progress bar; `pending` has none.
Counts = Mapping[str, int]


class StalledError(PenstockError):
    """A wait made no progress for too long. The message names its condition."""


class Stage:
    """Coordinator, app and processes: a context manager for the main thread. It starts the first and ends all.

    `totals` names the progress bars and their final counts.
    """

    def __init__(self, servers: str, folder: Path, fleet: Fleet, console: Console, totals: Counts) -> None:
        self._servers, self._folder, self._fleet = servers, folder, fleet
        self._coordinator = Coordinator(
            bootstrap_servers=servers,
            transaction_timeout=_TRANSACTION_TIMEOUT_S,
            check_interval=_CHECK_INTERVAL_S,
            check_max=_CHECK_MAX,
        )
        self._parts: list[Part] = []
        self._stack = ExitStack()
        self._started_at = time.monotonic()
        columns = (TextColumn("{task.description:<17}"), BarColumn(bar_width=40), MofNCompleteColumn())
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console)
        self._bars = {name: self._progress.add_task(name, total=total) for name, total in totals.items()}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._coordinator)
            self._app = stack.enter_context(self._fleet.app(self._servers).start())
            # Answers checks while a sender is dead, and after both have sent everything and ended.
            stack.enter_context(new_producer(self._servers, self._folder))
            stack.enter_context(self._progress)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.__exit__(*raised)  # type: ignore[arg-type]  # the three values of the with statement

    def start(self, name: str, module: str, *arguments: str, ends_with: int = 0) -> Part:
        """Start a process. It must run until the end of the demo, or end with the code `ends_with`."""
        part = self._stack.enter_context(Part(name, self._folder, module, *arguments, ends_with=ends_with))
        self._parts.append(part)
        return part

    def counts(self) -> Counts:
        """Return the current counts."""
        transactions = self._coordinator.statistics()
        return {
            "sent": transactions.committed + transactions.rolled_back + transactions.pending,
            "pending": transactions.pending,
            "published": transactions.committed,
            "handled": len(self._fleet.handled) + self._app.statistics().dead_letters,
            "in Spark's table": sum(flights for flights, _ in read_totals(self._folder).values()),
        }

    def until(self, condition: Callable[[Counts], bool], what: str) -> None:
        """Wait until the condition is true, show the counts meanwhile, and print `what` then.

        `PartError` if a process failed, `StalledError` without progress, or the failure that stopped the app.
        """
        counts, moved_at = self.counts(), time.monotonic()
        while not condition(counts):
            for part in self._parts:
                part.require_no_failure()
            self._app.wait(0)
            if time.monotonic() > moved_at + STALLED_S:
                raise StalledError(f"nothing has moved for {STALLED_S:g} s while waiting until {what}: {counts}")
            time.sleep(_POLL_S)
            previous, counts = counts, self.counts()
            for name, bar in self._bars.items():
                self._progress.update(bar, completed=counts[name])
            if counts != previous:
                moved_at = time.monotonic()
        self._progress.console.print(
            f"{time.monotonic() - self._started_at:5.0f} s  {what}", soft_wrap=True, highlight=False
        )
