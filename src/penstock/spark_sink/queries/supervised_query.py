"""`SupervisedQuery`: the query of one sink through all its starts, and when it is started again.

`AppSinks` has one thread for all queries of an app, which alone calls what changes a query's state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.clients.bounded_calls import end_within
from penstock.errors import SinkError
from penstock.spark_sink.progress.statistics import SinkState
from penstock.spark_sink.queries import restarts
from penstock.spark_sink.queries.gate import Gate
from penstock.spark_sink.queries.restarts import FailureKind

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.spark_sink.progress.query_progress import QueryProgress

_log = logging.getLogger("penstock.spark_sink")

#: Seconds between two questions for the progress of a query.
_PROGRESS_S = 1.0
#: Seconds that Spark may take for the stop of a query: it waits for a function that does not call Spark.
HALT_S = 10.0


class SupervisedQuery:
    """The query of one sink, through all its starts.

    `start` returns the query with its gate, or with none where the function runs in another process: there a stop
    interrupts the batch under way. At most `allowed` restarts come in a row without a committed batch in between.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], tuple[StreamingQuery, Gate | None]],
        *,
        allowed: int,
        progress: QueryProgress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        # Any thread reads these fields, each for itself.
        self.state = SinkState.STANDBY
        self.query: StreamingQuery | None = None
        self.gate: Gate | None = None
        self.last_error: str | None = None
        #: What the app stops for.
        self.failure: SinkError | None = None
        self.progress = progress
        self._start = start
        self._allowed = allowed
        self._clock = clock
        self._in_a_row = 0
        self._due = self._progress_due = 0.0
        #: Whether a batch was committed, in any of its starts.
        self._has_ever_committed = False

    @property
    def is_going_on(self) -> bool:
        """Whether it runs or is to be started."""
        return self.state in (SinkState.RUNNING, SinkState.WAITING, SinkState.STANDBY)

    @property
    def retry_in(self) -> float | None:
        """Seconds until it is started again, while it waits."""
        return max(0.0, self._due - self._clock()) if self.state is SinkState.WAITING else None

    def begin(self) -> None:
        """Start it, or raise what keeps it from starting."""
        self.query, self.gate = self._start()
        self.state = SinkState.RUNNING

    def poll(self, *, is_mine: bool = True) -> None:
        """Look whether it runs, and start it when that is due: after a failure, or when this replica gets the sink."""
        if self.state is SinkState.STANDBY and is_mine:
            self._in_a_row, self._due, self.state = 0, self._clock(), SinkState.WAITING
        if self.state is SinkState.RUNNING:
            self._look()
        elif self.state is SinkState.WAITING and self._clock() >= self._due:
            _log.info("the query %s is started", self.name)
            try:
                self.begin()
            except Exception as error:  # noqa: BLE001 - whatever it is, it counts like a failure of the query
                self._failed(error)

    def _look(self) -> None:
        query, now = self.query, self._clock()
        if query is None:
            return
        if query.isActive:
            if now >= self._progress_due:
                self._progress_due = now + _PROGRESS_S
                self.progress.follow(query)
            return
        error = query.exception()
        self.progress.follow(query)
        if error is None:
            self.state = SinkState.ENDED
        else:
            is_of_run = str(self.progress.run) == str(query.runId)
            has_committed = is_of_run and self.progress.batch_of_run is not None
            self._failed((self.gate and self.gate.failure) or error, has_committed=has_committed)

    def _failed(self, cause: BaseException, *, has_committed: bool = False) -> None:
        """Wait for the next start, or give up."""
        _log.debug("the query %s ended", self.name, exc_info=cause)
        kind, former, self.last_error = restarts.kind_of(cause), self.last_error, restarts.summary_of(cause)
        self._has_ever_committed |= has_committed
        if has_committed and kind is not FailureKind.RIVAL:  # the rival may have committed that batch
            self._in_a_row = 0
        if kind is FailureKind.PERMANENT:
            self._give_up(cause, "another start would not fix it")
        elif kind is FailureKind.MISSING_RIGHT and not self._has_ever_committed:
            self._give_up(cause, "another start would not give it")
        elif kind is FailureKind.MISSING_RIGHT:
            self._wait(restarts.RIGHT_WAIT_S, is_known=former == self.last_error and not has_committed)
        elif self._in_a_row >= self._allowed:
            times = f"{self._allowed} time{'' if self._allowed == 1 else 's'}"
            why = f"it was started again {times} without a batch committed, which is all that is allowed"
            self._give_up(None if kind is FailureKind.RIVAL else cause, why)
        else:
            wait_s = min(restarts.LONGEST_WAIT_S, restarts.FIRST_WAIT_S * 2.0**self._in_a_row)
            self._in_a_row += 1
            self._wait(wait_s)

    def _wait(self, wait_s: float, *, is_known: bool = False) -> None:
        if not is_known:
            _log.warning("the query %s ended: %s; it is started again in %.1f s", self.name, self.last_error, wait_s)
        self.progress.restarted()
        self._due = self._clock() + wait_s
        self.state = SinkState.WAITING

    def _give_up(self, cause: BaseException | None, why: str) -> None:
        text = f"the query {self.name} ended: {self.last_error}; {why}"
        self.fail(f"{text}. What it stored stands, correct the cause and start again", cause)

    def fail(self, text: str, cause: BaseException | None) -> None:
        """Give it up: the app stops for it."""
        self.failure = SinkError(text)
        self.failure.__cause__ = cause
        self.state = SinkState.FAILED

    def close(self) -> None:
        """Begin no further batch. Any thread may call it."""
        if self.gate is not None:
            self.gate.close()

    def is_idle(self) -> bool:
        """Return whether its batch need not be waited for: it is committed, or Spark is gone. After `close`."""
        query, gate = self.query, self.gate
        if self.state is not SinkState.RUNNING or query is None or gate is None:
            return True
        try:
            return not query.isActive or gate.is_parked or not query.status["isTriggerActive"]
        except Exception:  # noqa: BLE001 - a JVM that ended shows in more than one way
            return True

    def halt(self, state: SinkState) -> None:
        """End the query, in the middle of a batch if there is one, unless it has ended by itself; `state` follows."""
        query = self.query
        try:
            if self.state is SinkState.RUNNING and query is not None:
                if self.gate is not None:
                    self.gate.leave()
                end_within(HALT_S, f"stop of the query {self.name}", query.stop)
                self.progress.follow(query)
        except Exception:  # noqa: BLE001 - the others are to be stopped, too
            _log.exception("Spark did not stop the query %s; it ends with Spark's process", self.name)
        finally:
            if self.is_going_on:
                self.state = state
