"""`SupervisedQuery`: the query of one sink through all its starts, and its restarts after failures.

`AppSinks` has one thread for all queries of an app, which alone changes their states. The types of errors decide
whether another start helps. Of an exception that crossed Spark's JVM only text is left: penstock's types are parsed
there (`spark_sink.errors`), Spark's by class and error condition. The words of a message decide nothing.

A stop closes the gate in front of the sink's function, so that the batch under way is finished and no other begins;
Spark's own stop would interrupt it. The next batch waits behind the closed gate until Spark's stop begins. It has not
begun, so Spark repeats it at the next start.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from typing import TYPE_CHECKING

from penstock.clients.bounded_calls import end_within
from penstock.clients.rights import MissingRightError
from penstock.errors import ConfigurationError, MessageFormatError, SinkError, TopicNotFoundError, causes
from penstock.spark_sink.errors import DataLossError, SchemaMismatchError, SessionStoppedError, errors_in
from penstock.spark_sink.progress import SinkState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.spark_sink.progress import QueryProgress
    from penstock.spark_sink.source.plan import Offsets

_log = logging.getLogger("penstock.spark_sink")

#: Seconds before the first restart, and most seconds before any; each wait is twice the previous one.
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0

#: Seconds before another try of a query that lacks a permission.
RIGHT_WAIT_S = 10.0

#: Errors that another start would meet again, or that forbid another start.
_PERMANENT = (
    ConfigurationError,
    DataLossError,
    MessageFormatError,
    SchemaMismatchError,
    SessionStoppedError,
    TopicNotFoundError,
)

#: The same for Spark's errors: class names in a stack of the JVM.
_SPARK_KIND = re.compile(r"(?:pyspark\.errors|org\.apache\.spark\.sql)\.[\w.]*(?:AnalysisException|ParseException)\b")

#: Spark's texts when two queries write to one checkpoint: to the logs of its batches, or to other files.
_RIVAL = re.compile(r"\[CONCURRENT_STREAM_LOG_UPDATE]|Multiple streaming queries are concurrently using")

#: Begin of the part after the reason: the query's plan and offsets.
_PLAN = "=== Streaming Query ==="

#: The last line of a Python stack.
_KIND_AND_TEXT = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception|Warning)): (.+)$", re.MULTILINE)

#: Seconds between two checks, by a batch behind the gate, whether the stop has begun.
_STOP_POLL_S = 0.05
#: Seconds between two reads of a query's progress.
_PROGRESS_S = 1.0
#: Seconds for Spark to stop a query: it waits for a function that does not call Spark.
HALT_S = 10.0


class FailureKind(Enum):
    """Kinds of failures, by what another start would meet."""

    #: Transient: a neighbour was unreachable.
    PASSING = auto()
    #: The same failure again.
    PERMANENT = auto()
    #: The same failure, until an administrator gives the permission.
    MISSING_RIGHT = auto()
    #: Another query writes to its checkpoint, for example of a frozen replica, which ends after one or two tries.
    RIVAL = auto()


def kind_of(failure: BaseException) -> FailureKind:
    """Return the kind of a failure."""
    found = [*causes(failure)]
    found += [error for cause in found for error in errors_in(str(cause))]
    if any(_RIVAL.search(str(cause)) for cause in found):
        return FailureKind.RIVAL
    if any(isinstance(cause, _PERMANENT) or _SPARK_KIND.search(f"{type(cause).__mro__} {cause}") for cause in found):
        return FailureKind.PERMANENT
    if any(isinstance(cause, MissingRightError) for cause in found):
        return FailureKind.MISSING_RIGHT
    return FailureKind.PASSING


def summary_of(failure: BaseException) -> str:
    """Return a failure in one line: its type and the first line of its text, without Spark's wrapping."""
    if kind_of(failure) is FailureKind.RIVAL:
        return "another query writes to the same checkpoint: stop one, or give each a checkpoint_location of its own"
    text = str(failure).split(_PLAN, 1)[0].strip()
    within = _KIND_AND_TEXT.findall(text)
    if "\n" in text and within:
        kind, line = within[-1]
    else:
        kind, line = type(failure).__name__, text.splitlines()[0] if text else "no text"
    return f"{kind}: {line.strip()}"


class BatchLeftError(Exception):
    """Ends a query that is being stopped, at a batch that the next start repeats.

    Spark distinguishes a stop from a failure by the words of an interrupted call. Its search overflows the stack of the
    JVM's thread if a long text follows them (seen with 4.3.0: `StreamExecution`, PROXY_ERROR). So these words are at
    the end here, and the text is short.
    """

    def __init__(self, batch_id: int) -> None:
        super().__init__(
            f"batch {batch_id} is left to the next start. py4j.protocol.Py4JJavaError: An error occurred while "
            "calling Thread.sleep: java.lang.InterruptedException"
        )


class Gate:
    """Calls a sink's function with each batch until it is closed. Each start of a query has its own gate.

    Spark's thread calls it; any thread may call the other methods. A batch that begins while `close` is called is
    finished: Spark's trigger is active until then, and the thread that stops the query waits for it.
    """

    def __init__(self, function: Callable[[DataFrame, int], None]) -> None:
        self._function = function
        #: The exception of the function itself; Spark keeps only its text.
        self.failure: BaseException | None = None
        #: Whether a batch waits behind the closed gate: then all earlier ones are committed.
        self.is_parked = False
        self.is_closed = False
        #: The query that is being stopped.
        self._stopping: StreamingQuery | None = None
        self._is_leaving = threading.Event()

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Call the function with a batch, or hold the batch behind the closed gate."""
        if self.is_closed:
            self._wait_for_stop()
            raise BatchLeftError(batch_id)
        try:
            self._function(batch, batch_id)
        except Exception as error:
            self.failure = error
            if self._is_leaving.is_set():
                # Spark's stop cancelled a job of the function, with a long text: see BatchLeftError.
                raise BatchLeftError(batch_id) from None
            raise

    def _wait_for_stop(self) -> None:
        """Wait until Spark's stop has begun: for Spark, a batch that ends before that has failed."""
        self.is_parked = True
        self._is_leaving.wait()
        with suppress(Exception):  # if Spark is gone, the query has ended
            while self._stopping is not None and self._stopping.isActive:
                time.sleep(_STOP_POLL_S)

    def close(self) -> None:
        """Close the gate: no further batch begins."""
        self.is_closed = True

    def leave(self, query: StreamingQuery) -> None:
        """Close it before Spark's stop of the query: from now on, the stop is the cause of a batch's end."""
        self._stopping, self.is_closed = query, True
        self._is_leaving.set()


class SupervisedQuery:
    """The query of one sink, through all its starts.

    `start` returns the query and its gate. `allowed` is the number of restarts in a row without a committed batch.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], tuple[StreamingQuery, Gate]],
        *,
        allowed: int,
        progress: QueryProgress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        # Any thread reads these fields, one at a time.
        self.state = SinkState.STANDBY
        self.query: StreamingQuery | None = None
        self.gate: Gate | None = None
        self.last_error: str | None = None
        #: The error that stops the app.
        self.failure: SinkError | None = None
        self.progress = progress
        self._start = start
        self._allowed = allowed
        self._clock = clock
        self._in_a_row = 0
        self._due = self._progress_due = 0.0
        #: Spark's id of the last run.
        self._run = ""
        #: Whether a batch was committed in any run.
        self._has_ever_committed = False

    @property
    def is_going_on(self) -> bool:
        """Whether it runs or will be started."""
        return self.state in (SinkState.RUNNING, SinkState.WAITING, SinkState.STANDBY)

    @property
    def retry_in(self) -> float | None:
        """Seconds until its restart, while it waits."""
        return max(0.0, self._due - self._clock()) if self.state is SinkState.WAITING else None

    @property
    def positions(self) -> Offsets:
        """The positions of the run on this replica, as far as Spark has reported them."""
        if self.state is SinkState.STANDBY or not self._is_reported:
            return {}
        return {(part.topic, part.partition): part.position for part in self.progress.statistics.partitions}

    @property
    def _is_reported(self) -> bool:
        return str(self.progress.run) == self._run

    def begin(self) -> None:
        """Start it, or raise the error that prevents the start."""
        self.query, self.gate = self._start()
        self._run = str(self.query.runId)
        self.state = SinkState.RUNNING

    def poll(self, *, is_mine: bool = True) -> None:
        """Check the query, and start it when due: after a failure, or when this replica gets the sink."""
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
            has_committed = self._is_reported and self.progress.batch_of_run is not None
            self._failed((self.gate and self.gate.failure) or error, has_committed=has_committed)

    def _failed(self, cause: BaseException, *, has_committed: bool = False) -> None:
        """Plan the next start, or give up."""
        _log.debug("the query %s ended", self.name, exc_info=cause)
        kind, former, self.last_error = kind_of(cause), self.last_error, summary_of(cause)
        self._has_ever_committed |= has_committed
        if has_committed and kind is not FailureKind.RIVAL:  # the rival may have committed that batch
            self._in_a_row = 0
        if kind is FailureKind.PERMANENT or (kind is FailureKind.MISSING_RIGHT and not self._has_ever_committed):
            self._give_up(cause, "another start would not fix it")
        elif kind is FailureKind.MISSING_RIGHT:
            self._wait(RIGHT_WAIT_S, is_known=former == self.last_error and not has_committed)
        elif self._in_a_row >= self._allowed:
            why = f"it was started again without a batch committed as often as restarts={self._allowed} allows"
            self._give_up(None if kind is FailureKind.RIVAL else cause, why)
        else:
            wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0**self._in_a_row)
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
        """Give the query up: the app stops because of it."""
        self.failure = SinkError(text)
        self.failure.__cause__ = cause
        self.state = SinkState.FAILED

    def close(self) -> None:
        """Begin no further batch. Any thread."""
        if self.gate is not None:
            self.gate.close()

    def is_idle(self) -> bool:
        """Return whether no batch needs to be waited for: it is committed, or Spark is gone. Call it after `close`."""
        query, gate = self.query, self.gate
        if self.state is not SinkState.RUNNING or query is None or gate is None:
            return True
        try:
            return not query.isActive or gate.is_parked or not query.status["isTriggerActive"]
        except Exception:  # noqa: BLE001 - a JVM that ended shows in more than one way
            return True

    def halt(self, state: SinkState) -> None:
        """End the query, even in the middle of a batch, unless it has ended by itself; then set `state`."""
        query, gate = self.query, self.gate
        try:
            if query is not None and gate is not None:
                gate.leave(query)
            if self.state is SinkState.RUNNING and query is not None:
                end_within(HALT_S, f"stop of the query {self.name}", query.stop)
                self.progress.follow(query)
        except Exception:  # noqa: BLE001 - the others are to be stopped, too
            _log.exception("Spark did not stop the query %s; it ends with Spark's process", self.name)
        finally:
            if self.is_going_on:
                self.state = state
