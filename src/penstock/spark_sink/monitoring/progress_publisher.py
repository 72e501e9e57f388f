"""Takes the reports of queries and shows them: as statistics, as metrics, as offsets of a group.

What may wait (the question for a sink's ledger, the offsets of a group) is done by a thread of its own, for Spark's
reports come on a thread that must not wait; only the latest report of a query counts there.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from penstock.errors import MessageFormatError
from penstock.spark_sink.monitoring.progress import QueryProgress, SinkPartition
from penstock.spark_sink.sinks.sink import has_ledger, ledger_positions, stored_batches
from penstock.spark_sink.source.plan import Offsets

if TYPE_CHECKING:
    from penstock.telemetry.metrics.spark import SparkReading, SparkTelemetry
    from penstock.telemetry.settings import Telemetry

_log = logging.getLogger("penstock.spark_sink")

#: Seconds that the last offsets of groups may take at the end.
_LAST_S = 10.0

#: Batches of which it is remembered that they were counted; Spark itself keeps the reports of 100.
_REMEMBERED = 256


def _ledger(sink: object, query: str, position: Offsets) -> Offsets:
    """Return a sink's ledger of some partitions: as its batches left it here, or else as it tells itself."""
    known = stored_batches.ends(getattr(sink, "ledger_key", None), getattr(sink, "name", None) or query)
    if position.keys() <= known.keys():
        return {part: known[part] for part in position}
    return ledger_positions(sink, query, position)


class Advancing(Protocol):
    """Takes the position of a query, as `GroupOffsets` does."""

    def advance(self, position: Offsets) -> object:
        """Write it where it lies ahead."""

    def close(self) -> None:
        """Let its connections go."""


@dataclass(slots=True)
class Shown:
    """What is known of one query, with the numbers of `SinkStatistics`. Written and read under the publisher's lock."""

    batch_id: int | None = None
    batches: int = 0
    rows: int = 0
    rows_per_s: float = 0.0
    batch_seconds: float = 0.0
    position: Offsets = field(default_factory=dict)
    lag: Offsets = field(default_factory=dict)
    ledger: Offsets = field(default_factory=dict)
    restarts: int = 0
    run_id: str = ""
    telemetry: SparkTelemetry | None = None
    #: The newest report of this start of the query, and the starts before it.
    _newest: int = -1
    _former: set[str] = field(default_factory=set)
    #: The last batches that were counted: a report may come twice, and behind a later one.
    _counted: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def take(self, progress: QueryProgress) -> bool:
        """Take a report; return whether it is of a batch that was not counted yet."""
        if progress.run_id != self.run_id and progress.run_id not in self._former:
            self._former.add(self.run_id)
            self.run_id, self._newest = progress.run_id, -1
        newest = progress.run_id == self.run_id and progress.batch_id >= self._newest
        if newest:
            self._newest = progress.batch_id
            if progress.ends:
                self.position, self.lag = dict(progress.ends), progress.lag
        batch = (progress.run_id, progress.batch_id)
        if not progress.executed or batch in self._counted:
            return False
        self._counted.append(batch)
        self.batches += 1
        self.rows += progress.rows
        if newest:
            self.batch_id = progress.batch_id
            self.rows_per_s = progress.rows_per_s
            self.batch_seconds = progress.seconds.get("triggerExecution", 0.0)
        return True

    def partitions(self) -> tuple[SinkPartition, ...]:
        """Return each partition with its position, lag and ledger."""
        return tuple(
            SinkPartition(*part, offset, self.lag.get(part), self.ledger.get(part))
            for part, offset in sorted(self.position.items())
        )


class ProgressPublisher:
    """Takes reports from any thread and shows them until it is closed. It never raises for a report.

    By a query's name, `groups` take its position and `sinks` that have a ledger are asked for it after a batch. Queries
    of `only` are shown from the beginning, and no others; None stands for all that report.
    """

    def __init__(
        self,
        telemetry: Telemetry | None = None,
        *,
        groups: Mapping[str, Advancing] | None = None,
        sinks: Mapping[str, object] | None = None,
        only: tuple[str, ...] | None = None,
    ) -> None:
        self._telemetry = telemetry
        self._groups = dict(groups or {})
        self._ledgers: dict[str, Callable[[Offsets], Offsets]] = {}
        for name, sink in (sinks or {}).items():
            if has_ledger(sink):
                self._ledgers[name] = partial(_ledger, sink, name)
        self._only = only
        #: Guards all that follows; the thread waits on it for work.
        self._changed = threading.Condition()
        self._shown: dict[str, Shown] = {}
        self._pending: dict[str, Offsets] = {}
        self._closed = False
        self._thread: threading.Thread | None = None
        self._warned: set[str] = set()
        #: Guards the making of metrics. Not the lock above: a metric reader that holds the SDK's waits for that one.
        self._making = threading.Lock()
        for name in only or ():
            self._telemetry_of(name, self._shown.setdefault(name, Shown()))

    def take(self, text: str) -> None:
        """Take a report in Spark's JSON."""
        try:
            progress = QueryProgress.parse(text)
        except MessageFormatError as error:
            self._warn("progress", f"{error}; its metrics stand still")
            return
        name = progress.name
        if self._only is not None and name not in self._only:
            return
        with self._changed:
            if self._closed:
                return
            shown = self._shown.setdefault(name, Shown())
            fresh = shown.take(progress)
            if fresh and (name in self._groups or name in self._ledgers):
                self._pending[name] = dict(shown.position)
                self._start_thread()
                self._changed.notify()
        telemetry = self._telemetry_of(name, shown)
        if fresh and telemetry is not None:
            telemetry.batch(progress.seconds)

    def restarted(self, name: str, restarts: int) -> None:
        """Take how often a query was started again."""
        with self._changed:
            self._shown.setdefault(name, Shown()).restarts = restarts

    def forget(self, run_id: str) -> None:
        """Show a query no more, by Spark's id of a start of it that ended."""
        with self._changed:
            gone = [name for name, shown in self._shown.items() if shown.run_id == run_id]
            ended = [self._shown.pop(name) for name in gone]
        for shown in ended:
            if shown.telemetry is not None:
                shown.telemetry.close()

    def shown(self, name: str) -> Shown:
        """Return a copy of what is known of a query; empty where it has not reported."""
        with self._changed:
            return replace(self._shown.get(name) or Shown())

    def close(self) -> None:
        """Write the last offsets, and show nothing any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(_LAST_S)
        if thread is None or not thread.is_alive():
            for group in self._groups.values():
                group.close()
        with self._making:
            for shown in self._shown.values():
                if shown.telemetry is not None:
                    shown.telemetry.close()

    def _telemetry_of(self, name: str, shown: Shown) -> SparkTelemetry | None:
        if self._telemetry is None:
            return None
        with self._making:
            if shown.telemetry is None:
                from penstock.telemetry.metrics.spark import SparkTelemetry

                shown.telemetry = SparkTelemetry(self._telemetry, name, partial(self._reading, shown))
            return shown.telemetry

    def _reading(self, shown: Shown) -> SparkReading:
        from penstock.telemetry.metrics.spark import SparkReading

        with self._changed:
            return SparkReading(
                rows=shown.rows,
                rows_per_s=shown.rows_per_s,
                lag=dict(shown.lag),
                ledger=dict(shown.ledger),
                restarts=shown.restarts,
            )

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="penstock-progress", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._closed:
                    self._changed.wait()
                if not self._pending:
                    return
                name, position = self._pending.popitem()
            self._advance(name, position)
            self._ask_ledger(name, position)

    def _advance(self, name: str, position: Offsets) -> None:
        group = self._groups.get(name)
        if group is None:
            return
        try:
            group.advance(position)
        except Exception as error:  # noqa: BLE001 - onlookers' offsets are no reason to end the thread
            self._warn(f"group {name}", f"the position of the query {name} was not written to its group: {error!r}")

    def _ask_ledger(self, name: str, position: Offsets) -> None:
        ask = self._ledgers.get(name)
        if ask is None:
            return
        try:
            ledger = ask(position)
        except Exception as error:  # noqa: BLE001 - somebody's sink; the metric is missing, the query goes on
            self._warn(
                f"ledger {name}",
                f"the sink of the query {name} did not tell its ledger: {type(error).__name__}; the metric "
                "penstock.spark.ledger.position stands still",
            )
            return
        with self._changed:
            self._shown.setdefault(name, Shown()).ledger = ledger

    def _warn(self, kind: str, what: str) -> None:
        level = logging.DEBUG if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        _log.log(level, "%s", what)
