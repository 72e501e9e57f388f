"""Supervises the queries of an app's sinks on one thread: starts them, starts failed ones again, stops them.

That thread alone changes their state, and it is this replica's member of the fleet, which says what the replica runs.
Other threads ask for a stop and wait, within bounds, until the thread has ended.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from penstock.clients.bounded_calls import CLOSE_S, end_within
from penstock.errors import SinkError
from penstock.spark_sink.progress.statistics import SinkState
from penstock.spark_sink.queries import restarts
from penstock.spark_sink.queries.fleet import Fleet
from penstock.spark_sink.queries.gate import Gate

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.spark_sink.progress.query_progress import QueryProgress

_log = logging.getLogger("penstock.spark_sink")

#: States of a query that runs or is to be started.
_GOING_ON = (SinkState.RUNNING, SinkState.WAITING, SinkState.STANDBY)
#: Seconds between two polls of the queries, and of a batch whose end is waited for.
_POLL_S, _IDLE_POLL_S = 0.2, 0.05
#: Seconds between two questions for the progress of a query.
_PROGRESS_S = 1.0
#: Seconds that a start waits for the group. A holder that finishes a batch first keeps it waiting longer; the queries
#: are started then when the group has answered.
_JOIN_S = 30.0
#: Seconds that Spark may take for the stop of a query: it waits for a function that does not call Spark.
_HALT_S = 10.0


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
        self._start = start
        self._allowed = allowed
        self.progress = progress
        self._clock = clock
        self._in_a_row = 0
        self._due = self._progress_due = 0.0
        #: Whether a batch was committed, in any of its starts.
        self._ever_committed = False

    @property
    def retry_in(self) -> float | None:
        """Seconds until it is started again, while it waits."""
        return max(0.0, self._due - self._clock()) if self.state is SinkState.WAITING else None

    def start_first(self) -> None:
        """Start it, or raise what keeps it from starting; a rival on its checkpoint is waited for."""
        try:
            self._run()
        except Exception as error:
            if not restarts.has_rival(error):
                raise
            self._failed(error)

    def _run(self) -> None:
        self.query, self.gate = self._start()
        self.state = SinkState.RUNNING

    def hold(self) -> None:
        """Start at the next `poll`: another replica had the sink until now."""
        self._in_a_row = 0
        self._due = self._clock()
        self.state = SinkState.WAITING

    def poll(self) -> None:
        """Look whether it runs, and start it again when that is due."""
        if self.state is SinkState.WAITING and self._clock() >= self._due:
            _log.info("the query %s is started", self.name)
            try:
                self._run()
            except Exception as error:  # noqa: BLE001 - whatever it is, it counts like a failure of the query
                self._failed(error)
        elif self.state is SinkState.RUNNING and self.query is not None:
            if not self.query.isActive:
                self._ended(self.query)
            elif self._clock() >= self._progress_due:
                self._progress_due = self._clock() + _PROGRESS_S
                self.progress.follow(self.query)

    def _ended(self, query: StreamingQuery) -> None:
        error = query.exception()
        self.progress.follow(query)
        if error is None:
            self.state = SinkState.ENDED
        else:
            cause = (self.gate and self.gate.failure) or error
            is_of_run = str(self.progress.run) == str(query.runId)
            self._failed(cause, has_committed=is_of_run and self.progress.batch_of_run is not None)

    def _failed(self, cause: BaseException, *, has_committed: bool = False) -> None:
        """Wait for the next start, or give up."""
        _log.debug("the query %s ended", self.name, exc_info=cause)
        former, self.last_error = self.last_error, restarts.summary_of(cause)
        self._ever_committed |= has_committed
        if restarts.has_rival(cause):
            # A former holder that was frozen ends it once or twice. Either may have committed the last batch.
            self.last_error = "another query writes to the same checkpoint"
            self._restart_or_give_up(None, "stop one of the two, or give each a checkpoint_location of its own")
            return
        if has_committed:
            self._in_a_row = 0
        if restarts.is_permanent(cause):
            self._give_up(cause, "another start would not fix it")
        elif not restarts.lacks_right(cause):
            times = f"{self._allowed} time{'' if self._allowed == 1 else 's'}"
            why = f"it was started again {times} without a batch committed, which is all that is allowed"
            self._restart_or_give_up(cause, why)
        elif not self._ever_committed:
            self._give_up(cause, "another start would not give it")
        else:
            is_repeated = former == self.last_error and not has_committed
            text = "the query %s ended: %s. It is tried again every %.0f s, and goes on once the right is given"
            level = logging.DEBUG if is_repeated else logging.WARNING
            _log.log(level, text, self.name, self.last_error, restarts.RIGHT_WAIT_S)
            self._wait(restarts.RIGHT_WAIT_S)

    def _restart_or_give_up(self, cause: BaseException | None, why: str) -> None:
        if self._in_a_row >= self._allowed:
            self._give_up(cause, why)
            return
        wait_s = restarts.wait_s(self._in_a_row)
        self._in_a_row += 1
        _log.warning("the query %s ended: %s; it is started again in %.1f s", self.name, self.last_error, wait_s)
        self._wait(wait_s)

    def _wait(self, wait_s: float) -> None:
        self.progress.restarted()
        self._due = self._clock() + wait_s
        self.state = SinkState.WAITING

    def _give_up(self, cause: BaseException | None, why: str) -> None:
        text = f"the query {self.name} ended: {self.last_error}; {why}"
        self.fail(f"{text}. What it stored stands, correct the cause and start again", cause)

    def fail(self, text: str, cause: BaseException | None) -> None:
        """Give it up: the app stops for it."""
        self.failure = _caused(text, cause)
        self.state = SinkState.FAILED

    def close(self) -> None:
        """Begin no further batch. Any thread may call it."""
        if self.gate is not None:
            self.gate.close()

    def is_idle(self) -> bool:
        """Return whether no batch is under way, the last one is committed, and none can begin. After `close`."""
        query, gate = self.query, self.gate
        if self.state is not SinkState.RUNNING or query is None or gate is None or not query.isActive:
            return True
        return gate.is_parked or not query.status["isTriggerActive"]

    def halt(self, state: SinkState) -> None:
        """End the query, in the middle of a batch if there is one, unless it has ended by itself; `state` follows."""
        query = self.query
        try:
            if self.state is SinkState.RUNNING and query is not None:
                if self.gate is not None:
                    self.gate.leave()
                end_within(_HALT_S, f"stop of the query {self.name}", query.stop)
                self.progress.follow(query)
        finally:
            if self.state in _GOING_ON:
                self.state = state


class Supervisor:
    """Supervises queries with one thread. Any thread may call its methods; each is for once, save `request_stop`."""

    def __init__(self, name: str, release_s: float) -> None:
        """Make it without queries; a batch may take `release_s` seconds when another replica gets its query."""
        self.supervised: tuple[SupervisedQuery, ...] = ()
        self._release_s = release_s
        # Plain fields: a signal handler sets them, and the thread it interrupts may hold any lock.
        self._is_stopping = False
        self._stop_by = math.inf
        # Written by the thread, read by others when it has begun or ended.
        self._refusal: Exception | None = None
        self._failure: SinkError | None = None
        self._is_finished = True
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"penstock-sinks-{name}", daemon=True)

    def supervise(self, queries: Sequence[SupervisedQuery], fleet: Fleet) -> None:
        """Start this replica's queries, or raise what keeps the first of them from starting; the others stand by."""
        self.supervised = tuple(queries)
        self._fleet = fleet
        fleet.on_release = self._release
        self._thread.start()
        self._has_begun.wait()
        if self._refusal is not None:
            raise self._refusal

    def _run(self) -> None:
        try:
            self._begin()
        except Exception as error:  # noqa: BLE001 - raised to whoever called `supervise`
            self._refusal = error
        self._has_begun.set()
        while not (self._is_stopping or self._failure or self._refusal):
            self._poll_fleet()
            for query in self.supervised:
                self._poll(query)
            time.sleep(_POLL_S)
        self._is_finished = self._end(self.supervised, SinkState.STOPPED)
        self._fleet.leave()

    def _begin(self) -> None:
        deadline = time.monotonic() + _JOIN_S
        while self._fleet.mine is None and not self._is_stopping and time.monotonic() < deadline:
            self._fleet.poll(_POLL_S)
        for query in self.supervised:
            if query.name in (self._fleet.mine or ()):
                query.start_first()
            else:
                _log.info("the query %s stands by: another replica of the app has it, or the group is late", query.name)

    def _poll_fleet(self) -> None:
        try:
            self._fleet.poll()
        except Exception as error:  # noqa: BLE001 - it is not known any more whose the queries are: all are stopped
            what = "the app cannot share its sinks out any more"
            self._failure = _caused(f"{what}: {restarts.summary_of(error)}; start it again", error)

    def _poll(self, query: SupervisedQuery) -> None:
        if query.state is SinkState.STANDBY and query.name in (self._fleet.mine or ()):
            query.hold()
        try:
            query.poll()
        except Exception as error:  # noqa: BLE001 - a JVM that ended shows in more than one way
            query.fail(
                f"Spark does not answer for the query {query.name}: {restarts.summary_of(error)}; its process has "
                "ended or its session was stopped: see its log, and start again",
                error,
            )

    def _release(self, names: Collection[str], is_lost: bool) -> None:
        """End queries that another replica is to run, behind the batch under way unless that may run them already."""
        released = [query for query in self.supervised if query.name in names]
        self._end(released, SinkState.STANDBY, time.monotonic() + (0.0 if is_lost else self._release_s))
        for query in released:
            _log.info("the query %s is given to another replica of the app", query.name)

    def _end(self, queries: Sequence[SupervisedQuery], state: SinkState, deadline: float = math.inf) -> bool:
        """Begin no batch of these queries, wait for those under way until the deadline, and end the queries."""
        for query in queries:
            query.close()
        while waiting := [query for query in queries if not _is_idle(query)]:
            if time.monotonic() >= min(deadline, self._stop_by):
                break
            time.sleep(_IDLE_POLL_S)
        for query in waiting:
            _log.warning("a batch of the query %s is interrupted; the next start does it again", query.name)
        for query in reversed(queries):
            try:
                query.halt(state)
            except Exception:  # noqa: BLE001 - the others are to be stopped, too
                _log.exception("Spark did not stop the query %s; it ends with Spark's process", query.name)
        return not waiting

    @property
    def ended(self) -> bool:
        """Whether nothing runs and nothing is to be started again."""
        return not any(query.state in _GOING_ON for query in self.supervised)

    def raise_failure(self) -> None:
        """Raise what the app stops for: the error of a query that failed and is not started again, if there is one."""
        for failure in (self._failure, *(query.failure for query in self.supervised)):
            if failure is not None:
                raise failure

    def request_stop(self, *, now: bool = False) -> None:
        """Ask for a stop, `now` without the batches under way, and do not wait for it; safe in a signal handler."""
        if now:
            self._stop_by = time.monotonic()
        self._is_stopping = True

    def stop(self, timeout: float) -> bool:
        """Let the batches under way be finished and committed, begin no other, and end the queries.

        Batches that take more than `timeout` seconds are interrupted, and done again at the next start. Returns whether
        none was.
        """
        if not self._thread.ident:
            return True
        self._stop_by = min(self._stop_by, time.monotonic() + timeout)
        self._is_stopping = True
        for query in self.supervised:
            query.close()
        # Beyond the batches: the stop of each query, a start under way, and leaving the group. A second signal shortens
        # the time for the batches.
        halts_s = _HALT_S * (len(self.supervised) + 1) + CLOSE_S
        while self._thread.is_alive() and time.monotonic() < self._stop_by + halts_s:
            self._thread.join(_IDLE_POLL_S)
        if self._thread.is_alive():
            _log.warning("the sinks have not ended in time: Spark does not answer; they end with this process")
        return self._is_finished and not self._thread.is_alive()


def _caused(text: str, cause: BaseException | None) -> SinkError:
    error = SinkError(text)
    error.__cause__ = cause
    return error


def _is_idle(query: SupervisedQuery) -> bool:
    """Return whether a query's batch need not be waited for: it is done, or Spark is gone and cannot answer."""
    try:
        return query.is_idle()
    except Exception:  # noqa: BLE001 - the same as in `Supervisor._poll`
        return True
