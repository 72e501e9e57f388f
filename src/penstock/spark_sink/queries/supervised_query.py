"""The query of one sink through its life: it runs, fails, waits, is started again, and is stopped behind a batch.

Where another replica of the app has the sink it stands by; it may come and go any number of times.

It knows Spark's queries by the few methods it calls; the clock is given to it. When it is polled is `supervisor`'s.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from penstock.errors import PenstockError, SinkError
from penstock.spark_sink.monitoring.progress import QueryProgress, SinkState
from penstock.spark_sink.queries.gate import Gate
from penstock.spark_sink.queries.restarts import Restarts, has_rival, is_permanent, lacks_right, summary_of

_log = logging.getLogger("penstock.spark_sink")

#: Seconds between two questions for the progress of a query that nobody listens to.
_PROGRESS_S = 2.0


class Query(Protocol):
    """What is asked of Spark's `StreamingQuery`."""

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's name
        """Whether it runs."""

    @property
    def lastProgress(self) -> Any:  # noqa: N802 - Spark's name; its report, or None
        """Its last report, whose `json` is text."""

    def exception(self) -> BaseException | None:
        """Return what ended it."""

    def stop(self) -> None:
        """End it, in the middle of a batch too, and wait until it has ended."""


class SupervisedQuery:
    """The query of one sink, through all its restarts.

    `poll` is for the supervising thread; `state` and the like may be read by any, each for itself. `start` returns the
    query with its gate, or with none where the function runs elsewhere: there a stop interrupts the batch under way.
    `take_progress` is given Spark's report as text when the query has ended, and with `poll_progress` while it runs,
    because nobody listens to Spark's. `restarted` is called with the number of each restart.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], tuple[Query, Gate | None]],
        *,
        restarts: Restarts,
        clock: Callable[[], float],
        take_progress: Callable[[str], object] = lambda _: None,
        poll_progress: bool = False,
        restarted: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.name = name
        self.state = SinkState.RUNNING
        self.query: Query | None = None
        self.last_error: str | None = None
        #: What the app stops for.
        self.failure: PenstockError | None = None
        self._start = start
        self._restarts = restarts
        #: Counts the ends by a query on the same checkpoint since this replica has the sink. A former holder that was
        #: frozen makes one or two.
        self._rivals = Restarts(restarts.allowed, restarts.random)
        self._clock = clock
        self._take_progress = take_progress
        self._poll_progress = poll_progress
        self._restarted = restarted
        self._gate: Gate | None = None
        self._due = 0.0
        #: Whether a batch was committed, in any of its starts.
        self._ever_committed = False
        #: The missing right that was logged since the last batch.
        self._logged_right: str | None = None
        self._next_progress = 0.0
        #: Guards that a restart and a stop see one another.
        self._closing = threading.Lock()
        self._closed = False

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return self._restarts.total + self._rivals.total

    @property
    def retry_in(self) -> float | None:
        """Seconds until it is started again, while it waits."""
        return max(0.0, self._due - self._clock()) if self.state is SinkState.WAITING else None

    def start(self) -> None:
        """Start it, or raise what keeps it from starting."""
        self.query, self._gate = self._start()
        with self._closing:
            if not self._closed:
                self.state = SinkState.RUNNING
                return
        # The stop did not wait for this start.
        self.query.stop()

    def start_first(self) -> None:
        """Start it for the first time, or raise what keeps it from starting; a rival on its checkpoint is outlasted."""
        try:
            self.start()
        except Exception as error:
            if not has_rival(error):
                raise
            self._failed(error)

    def stand_by(self) -> None:
        """Wait until this replica has the sink: before the first start, or after `halt`."""
        with self._closing:
            self._closed = False
            if self.state in (SinkState.RUNNING, SinkState.STOPPED):
                self.state = SinkState.STANDBY

    def hold(self) -> None:
        """Start at the next `poll`: this replica has the sink."""
        if self.state is SinkState.STANDBY:
            self._restarts.committed()
            self._rivals.committed()
            self._due = self._clock()
            self.state = SinkState.WAITING

    def poll(self) -> None:
        """See whether it runs, and start it again when that is due."""
        if self.state is SinkState.WAITING and self._clock() >= self._due and not self._closed:
            self._start_again()
        elif self.state is SinkState.RUNNING and self.query is not None:
            if self.query.isActive:
                self._ask_progress(self.query)
            else:
                self._ended(self.query)

    def _ask_progress(self, query: Query) -> None:
        if self._poll_progress and self._clock() >= self._next_progress:
            self._next_progress = self._clock() + _PROGRESS_S
            self._report(query)

    def _start_again(self) -> None:
        _log.info("the query %s is started; restarts so far: %d", self.name, self.restarts)
        self._restarted(self.restarts)
        try:
            self.start()
        except Exception as error:  # noqa: BLE001 - whatever it is, it counts like a failure of the query
            self._failed(error)

    def _ended(self, query: Query) -> None:
        error = query.exception()
        self._report(query)
        if error is None:
            self.state = SinkState.ENDED
            return
        if self._has_committed(query):
            self._restarts.committed()
            self._ever_committed, self._logged_right = True, None
        self._failed((self._gate.failure if self._gate is not None else None) or error)

    def _failed(self, cause: BaseException) -> None:
        self.last_error = summary_of(cause)
        _log.debug("the query %s ended", self.name, exc_info=cause)
        if self._closed:
            self.state = SinkState.STOPPED
            return
        if has_rival(cause):
            self.last_error = "another query writes to the same checkpoint"
            self._wait(self._rivals, None, "stop one of the two, or give each a checkpoint_location of its own")
            return
        if is_permanent(cause):
            self._give_up(cause, "another start would not mend it")
            return
        if lacks_right(cause):
            self._wait_for_right(cause)
            return
        allowed = self._restarts.allowed
        times = f"{allowed} time{'' if allowed == 1 else 's'}"
        why = f"it was started again {times} without a batch committed, which is all that is allowed"
        self._wait(self._restarts, cause, why)

    def _wait(self, restarts: Restarts, cause: BaseException | None, why: str) -> None:
        """Be started again, or give up with `why` where that is not allowed any more."""
        wait_s = restarts.next_wait_s()
        if wait_s is None:
            self._give_up(cause, why)
            return
        self._due = self._clock() + wait_s
        self.state = SinkState.WAITING
        _log.warning("the query %s ended: %s; it is started again in %.1f s", self.name, self.last_error, wait_s)

    def _wait_for_right(self, cause: BaseException) -> None:
        """Be started again until somebody gives the right that was taken away; one that was never there ends the app.

        It is logged once, however often it is tried.
        """
        if not self._ever_committed:
            self._give_up(cause, "another start would not give it")
            return
        wait_s = self._restarts.wait_for_right_s()
        self._due = self._clock() + wait_s
        self.state = SinkState.WAITING
        level = logging.DEBUG if self._logged_right == self.last_error else logging.WARNING
        self._logged_right = self.last_error
        text = "the query %s ended: %s. It is tried again every %.0f s, and goes on once the right is given"
        _log.log(level, text, self.name, self.last_error, wait_s)

    def _give_up(self, cause: BaseException | None, why: str) -> None:
        text = f"the query {self.name} ended: {self.last_error}; {why}"
        self.fail(SinkError(f"{text}. What it stored stands, correct the cause and start again"), cause)

    def fail(self, failure: PenstockError, cause: BaseException | None) -> None:
        """Give it up."""
        failure.__cause__ = cause
        self.failure = failure
        self.state = SinkState.FAILED

    def close(self) -> None:
        """Begin no further batch and no further restart."""
        with self._closing:
            self._closed = True
            if self.state in (SinkState.WAITING, SinkState.STANDBY):
                self.state = SinkState.STOPPED
        if self._gate is not None:
            self._gate.close()

    def is_idle(self) -> bool:
        """Tell whether no batch is under way, the last one is committed, and none can begin. After `close`."""
        query, gate = self.query, self._gate
        if self.state is not SinkState.RUNNING or query is None or gate is None or not query.isActive:
            return True
        return gate.under_way is None and (gate.done is None or self._is_committed(query, gate.done))

    def halt(self) -> None:
        """End the query, in the middle of a batch if there is one. After `close`."""
        query = self.query
        if self.state is not SinkState.RUNNING or query is None:
            return
        if self._gate is not None:
            self._gate.leave()
        query.stop()
        self._report(query)
        if query is self.query and self.state is SinkState.RUNNING:
            self.state = SinkState.STOPPED

    def _has_committed(self, query: Query) -> bool:
        gate = self._gate
        if gate is None:
            progress = _progress(query)
            return progress is not None and progress.executed
        return gate.committed is not None or (gate.done is not None and self._is_committed(query, gate.done))

    def _is_committed(self, query: Query, batch_id: int) -> bool:
        gate = self._gate
        if gate is not None and gate.committed is not None and gate.committed >= batch_id:
            return True
        progress = _progress(query)
        if progress is None:
            return False
        return progress.batch_id > batch_id or (progress.batch_id == batch_id and progress.executed)

    def _report(self, query: Query) -> None:
        report = query.lastProgress
        if report is not None:
            self._take_progress(report.json)


def _progress(query: Query) -> QueryProgress | None:
    report = query.lastProgress
    return None if report is None else QueryProgress.parse(report.json)
