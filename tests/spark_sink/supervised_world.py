"""Supervised queries that are none, and a clock that the test moves."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.spark_sink.queries.gate import Gate
from penstock.spark_sink.queries.restarts import (
    Restarts,
)
from penstock.spark_sink.queries.supervised_query import SupervisedQuery

FRAME: Any = object()


@dataclass
class Report:
    """What Spark's report is to those that ask for its text."""

    batch_id: int
    executed: bool = True

    @property
    def json(self) -> str:
        phases = {"addBatch": 100, "triggerExecution": 250} if self.executed else {"latestOffset": 3}
        return json.dumps({"id": "i", "runId": "r", "name": "q", "batchId": self.batch_id, "durationMs": phases})


class FakeQuery:
    """A query that runs until the test ends it."""

    def __init__(self) -> None:
        self.isActive = True
        self.lastProgress: Report | None = None
        self.error: BaseException | None = None
        self.stops = 0

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
        self.reports: list[str] = []
        self._function = function
        self.one = SupervisedQuery(
            "orders",
            self._start,
            restarts=Restarts(restarts, lambda: 0.0),
            clock=lambda: self.now,
            take_progress=self.reports.append,
        )

    def _start(self) -> tuple[FakeQuery, Gate]:
        if self.refusals:
            raise self.refusals.pop(0)
        self.started.append(FakeQuery())
        self.gates.append(Gate(self._function, park=woken))
        return self.started[-1], self.gates[-1]

    @property
    def query(self) -> FakeQuery:
        return self.started[-1]

    def wait_for_restart(self) -> float:
        """Move the clock to the next start and return how far that was."""
        waited = self.one.retry_in
        assert waited is not None
        self.now += waited - 0.001
        starts = len(self.started)
        self.one.poll()
        assert len(self.started) == starts, "it was started again before its time"
        self.now += 0.002
        self.one.poll()
        return waited


def woken(_batch: object, _milliseconds: int) -> None:
    raise InterruptedError
