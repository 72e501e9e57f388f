"""Supervised queries that are none, with reports as Spark makes them, a fleet, and a clock that the test moves."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

from penstock.spark_sink.progress import QueryProgress
from penstock.spark_sink.queries.app_sinks import AppSinks
from penstock.spark_sink.queries.supervise import Gate, SupervisedQuery
from penstock.spark_sink.source.plan import Offsets

FRAME: Any = object()
PHASES = {"addBatch": 1433, "latestOffset": 169, "triggerExecution": 1877}
IDLE = {"latestOffset": 3, "triggerExecution": 3}


def report(
    batch_id: int,
    *,
    run: str = "run-1",
    rows: int = 10,
    phases: Mapping[str, int] = PHASES,
    end: object = None,
    latest: object = None,
) -> Any:
    """Return a report with the used fields of a report of Spark 4.3."""
    source = SimpleNamespace(
        endOffset={"orders": {"0": 4, "1": 6}} if end is None else end,
        latestOffset={"orders": {"0": 8, "1": 12}} if latest is None else latest,
    )
    return SimpleNamespace(
        runId=run_id(run),
        batchId=batch_id,
        durationMs=dict(phases),
        sources=[source],
        numInputRows=rows,
        processedRowsPerSecond=5.3,
    )


def run_id(run: str) -> uuid.UUID:
    """Return Spark's id of a start of a query."""
    return uuid.uuid5(uuid.NAMESPACE_OID, run)


class FakeQuery:
    """A query that runs until the test ends it."""

    def __init__(self, run: str = "run-1") -> None:
        self.runId = str(run_id(run))
        self.isActive = True
        self.status = {"isTriggerActive": False}
        self.recentProgress: list[Any] = []
        self.error: BaseException | None = None
        self.stops = 0

    @property
    def lastProgress(self) -> Any:  # noqa: N802 - Spark's name
        return self.recentProgress[-1] if self.recentProgress else None

    def exception(self) -> BaseException | None:
        return self.error

    def stop(self) -> None:
        self.stops += 1
        self.isActive = False

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        self.isActive = False


class World:
    """One supervised query, its clock and its starts."""

    def __init__(self, *, restarts: int = 10, function: Callable[[Any, int], None] = lambda *_: None) -> None:
        self.now = 100.0
        self.started: list[FakeQuery] = []
        self.gates: list[Gate] = []
        self.refusals: list[Exception] = []
        self.progress = QueryProgress("orders")
        self._function = function
        start: Any = self._start
        self.supervised = SupervisedQuery(
            "orders", start, allowed=restarts, progress=self.progress, clock=lambda: self.now
        )

    def _start(self) -> tuple[FakeQuery, Gate]:
        if self.refusals:
            raise self.refusals.pop(0)
        self.started.append(FakeQuery(f"run-{len(self.started) + 1}"))
        self.gates.append(Gate(self._function))
        return self.started[-1], self.gates[-1]

    @property
    def query(self) -> FakeQuery:
        return self.started[-1]

    @property
    def restarts(self) -> int:
        return self.progress.statistics.restarts

    def commit(self, batch_id: int) -> None:
        """Have a batch done and committed."""
        self.gates[-1](FRAME, batch_id)
        self.query.recentProgress.append(report(batch_id, run=f"run-{len(self.started)}"))

    def fail(self, error: Exception) -> None:
        """End the query by an error, and have that seen."""
        self.query.end(error)
        self.supervised.poll()

    def wait_for_restart(self) -> float:
        """Move the clock to the next start and return how far that was."""
        waited = self.supervised.retry_in
        assert waited is not None
        self.now += waited - 0.001
        starts = len(self.started)
        self.supervised.poll()
        assert len(self.started) == starts, "it was started again before its time"
        self.now += 0.002
        self.supervised.poll()
        return waited


class FakeFleet:
    """A fleet that gives and takes the query when the test says so."""

    def __init__(self) -> None:
        self.mine: frozenset[str] | None = None
        self.on_release: Callable[[Collection[str], bool], None]
        self.has_left = False
        self.committed: Offsets = {}
        self.news: list[Callable[[], None]] = []

    def poll(self, _timeout_s: float = 0.0) -> None:
        self.mine = frozenset(["orders"]) if self.mine is None else self.mine
        while self.news:
            self.news.pop(0)()

    def take(self, *, is_lost: bool) -> None:
        """Give the query to another replica."""
        self.mine = frozenset()
        self.on_release(["orders"], is_lost)

    def commit(self, positions: Offsets) -> None:
        self.committed = positions

    def leave(self) -> None:
        self.has_left = True


def app_sinks(stop_timeout: float) -> AppSinks:
    """Return the sinks of an app, whose queries and fleet the test brings."""
    return AppSinks("test", [], bootstrap_servers="", config={}, telemetry=None, stop_timeout=stop_timeout)
