"""`SupervisedQuery`: the query of one sink through all its starts, and what becomes of it after a failure.

`AppSinks` has one thread for all queries of an app, which alone calls what changes a query's state. Whether another
start helps is judged by the types of errors. Of an exception that crossed Spark's JVM only text is left: penstock's
types are read there (`spark_sink.errors`), Spark's by class and error condition. The words of a message decide nothing.

A stop closes the gate before the sink's function, so that the batch under way is finished and no other begun: Spark's
own stop interrupts a batch in its middle. Behind a closed gate the next batch waits until that stop has begun. It has
not begun itself, so Spark hands it over at the next start.
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

#: Seconds before the first restart, and at most before any; each wait is twice the one before.
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0

#: Seconds before another try of a query that lacks a permission, which somebody may give.
RIGHT_WAIT_S = 10.0

#: What another start would meet again, or must not be made for.
_PERMANENT = (
    ConfigurationError,
    DataLossError,
    MessageFormatError,
    SchemaMismatchError,
    SessionStoppedError,
    TopicNotFoundError,
)

#: The same of Spark's errors: their class, and its name in a stack of the JVM.
_SPARK_KIND = re.compile(r"(?:pyspark\.errors|org\.apache\.spark\.sql)\.[\w.]*(?:AnalysisException|ParseException)\b")

#: What Spark says where two queries write to one checkpoint: to the logs of its batches, or to its other files.
_RIVAL = re.compile(r"\[CONCURRENT_STREAM_LOG_UPDATE]|Multiple streaming queries are concurrently using")

#: What Spark writes behind the reason: the query's plan and offsets.
_PLAN = "=== Streaming Query ==="

#: The last line of a Python stack.
_KIND_AND_TEXT = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception|Warning)): (.+)$", re.MULTILINE)

#: Seconds between two questions of a batch behind the gate whether the stop has begun.
_STOP_POLL_S = 0.05
#: Seconds between two questions for the progress of a query.
_PROGRESS_S = 1.0
#: Seconds that Spark may take for the stop of a query: it waits for a function that does not call Spark.
HALT_S = 10.0


class FailureKind(Enum):
    """What another start of a failed query would meet."""

    #: Perhaps nothing: a neighbour was away.
    PASSING = auto()
    #: The same failure.
    PERMANENT = auto()
    #: The same failure, until somebody gives a permission.
    MISSING_RIGHT = auto()
    #: The other query that writes to its checkpoint, unless that has ended: a frozen replica's ends once or twice.
    RIVAL = auto()


def kind_of(failure: BaseException) -> FailureKind:
    """Return what another start would meet after a failure."""
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
    """Return a failure in one line: its kind and the first line of its text, without Spark's wrapping."""
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
    """Ends a query that is being stopped, at a batch which the next start does.

    Spark tells a stop from a failure by the words of an interrupted call, and its search overflows the stack of the
    JVM's thread where much text follows them (seen with 4.3.0: `StreamExecution`, PROXY_ERROR). So they stand here, at
    the end, and the text is short.
    """

    def __init__(self, batch_id: int) -> None:
        super().__init__(
            f"batch {batch_id} is left to the next start. py4j.protocol.Py4JJavaError: An error occurred while "
            "calling Thread.sleep: java.lang.InterruptedException"
        )


class Gate:
    """Calls a sink's function with each batch until it is closed. One for each start of a query.

    Spark's thread calls it; any thread may call the other methods. A batch that began while `close` was called is
    finished: Spark's trigger is active until then, and whoever stops the query waits for that.
    """

    def __init__(self, function: Callable[[DataFrame, int], None]) -> None:
        self._function = function
        #: What the function raised, as it was; Spark keeps the text only.
        self.failure: BaseException | None = None
        #: Whether a batch waits behind the closed gate: those before it are committed.
        self.is_parked = False
        self.is_closed = False
        #: The query, once it is to be stopped.
        self._stopping: StreamingQuery | None = None
        self._is_leaving = threading.Event()

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Give the function a batch, or keep the batch waiting behind the closed gate."""
        if self.is_closed:
            self._wait_for_stop()
            raise BatchLeftError(batch_id)
        try:
            self._function(batch, batch_id)
        except Exception as error:
            self.failure = error
            if self._is_leaving.is_set():
                # Spark's stop cancelled a job under the function: its text is long, see BatchLeftError.
                raise BatchLeftError(batch_id) from None
            raise

    def _wait_for_stop(self) -> None:
        """Wait until Spark's stop has begun: what ends the batch before that is a failure to Spark."""
        self.is_parked = True
        self._is_leaving.wait()
        with suppress(Exception):  # a Spark that is gone has ended the query
            while self._stopping is not None and self._stopping.isActive:
                time.sleep(_STOP_POLL_S)

    def close(self) -> None:
        """Let no further batch begin."""
        self.is_closed = True

    def leave(self, query: StreamingQuery) -> None:
        """Close it; Spark's stop of the query follows, and whatever ends a batch from now on is its effect."""
        self._stopping, self.is_closed = query, True
        self._is_leaving.set()


class SupervisedQuery:
    """The query of one sink, through all its starts.

    `start` returns the query and its gate. At most `allowed` restarts come in a row without a committed batch between.
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
        #: Spark's id of the last start.
        self._run = ""
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

    @property
    def positions(self) -> Offsets:
        """Where the run of it on this replica has read to, as far as Spark has reported that."""
        if self.state is SinkState.STANDBY or not self._is_reported:
            return {}
        return {(part.topic, part.partition): part.position for part in self.progress.statistics.partitions}

    @property
    def _is_reported(self) -> bool:
        return str(self.progress.run) == self._run

    def begin(self) -> None:
        """Start it, or raise what keeps it from starting."""
        self.query, self.gate = self._start()
        self._run = str(self.query.runId)
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
            has_committed = self._is_reported and self.progress.batch_of_run is not None
            self._failed((self.gate and self.gate.failure) or error, has_committed=has_committed)

    def _failed(self, cause: BaseException, *, has_committed: bool = False) -> None:
        """Wait for the next start, or give up."""
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
