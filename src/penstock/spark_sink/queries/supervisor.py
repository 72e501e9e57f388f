"""Supervises the queries of an app's sinks: starts failed ones again, and stops all behind a finished batch.

The life of each is in `supervised_query`; here are the thread, the order of starts and stops, and the time they have.
Which of them are this replica's says the `fleet`, on the same thread: what it takes away is stopped before others may
have it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from penstock.errors import SinkError
from penstock.spark_sink.monitoring.progress import SinkState
from penstock.spark_sink.queries.restarts import summary_of
from penstock.spark_sink.queries.supervised_query import SupervisedQuery

_log = logging.getLogger("penstock.spark_sink")

#: Seconds between two polls of the queries.
POLL_S = 0.2
#: Seconds between two polls for the end of a batch.
_IDLE_POLL_S = 0.05
#: Seconds that Spark may take for the stop of a query, and a restart under way for its end.
_HALT_S = 10.0
#: Seconds that a start waits for the group. A holder that finishes a batch first keeps it waiting longer; the queries
#: are started then when the group has answered.
_JOIN_S = 30.0
#: Seconds of one look at the group meanwhile.
_JOIN_POLL_S = 0.1


class Shares(Protocol):
    """Says which queries are this replica's, as `fleet.Fleet` does."""

    has_joined: bool

    def hand_over_to(
        self, given: Callable[[Collection[str]], None], taken: Callable[[Collection[str], bool], None]
    ) -> None:
        """Have queries that come and go handed to these functions, by `poll`."""

    def poll(self, timeout_s: float = ..., /) -> None:
        """Take part, waiting so long for news."""

    def leave(self) -> None:
        """Give all to others."""


class Supervisor:
    """Supervises the queries of an app's sinks with one thread. Its methods may be called from any thread.

    Queries start in the order given, and stop in the other. The clock counts seconds that only rise. Without a fleet
    all queries are this replica's. A batch may take `release_s` seconds when the fleet takes its query away.
    """

    def __init__(
        self,
        name: str,
        queries: Sequence[SupervisedQuery],
        *,
        fleet: Shares | None = None,
        release_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.queries = tuple(queries)
        self._clock = clock
        self._wait = wait
        # Plain fields: a signal handler sets them, and the thread it interrupts may hold any lock.
        self._stopping = False
        self._leave_now = False
        self._started: list[SupervisedQuery] = []
        self._fleet = fleet
        self._failure: SinkError | None = None
        self._release_s = release_s
        if fleet is not None:
            fleet.hand_over_to(self._given, self._taken)
        self._thread = threading.Thread(target=self._run, name=f"penstock-sinks-{name}", daemon=True)

    def start(self) -> None:
        """Start this replica's queries and the thread, or raise the first failure; `stop` ends what had started."""
        if self._fleet is not None:
            for one in self.queries:
                one.stand_by()
            deadline = self._clock() + _JOIN_S
            while not (self._fleet.has_joined or self._stopping) and self._clock() < deadline:
                self._fleet.poll(_JOIN_POLL_S)
        for one in self.queries:
            if one.state is SinkState.STANDBY:
                _log.info("the query %s stands by: another replica of the app has it, or the group is late", one.name)
            else:
                one.start_first()
            self._started.append(one)
        self._thread.start()

    def _given(self, names: Collection[str]) -> None:
        for one in self.queries:
            if one.name in names:
                one.hold()

    def _taken(self, names: Collection[str], is_lost: bool) -> None:
        """End queries that another replica is to run, behind the batch under way unless that may run them already."""
        taken = [one for one in self.queries if one.name in names]
        self._end(taken, self._clock() + (0.0 if is_lost else self._release_s))
        for one in taken:
            one.stand_by()
            _log.info("the query %s is given to another replica of the app", one.name)

    def _run(self) -> None:
        while not (self._stopping or self._failure):
            self._poll_fleet()
            for one in self.queries:
                self._poll(one)
            self._wait(POLL_S)
        for one in self.queries:
            one.close()

    def _poll_fleet(self) -> None:
        if self._fleet is None:
            return
        try:
            self._fleet.poll()
        except Exception as error:  # noqa: BLE001 - whose the queries are is not known any more, so that all are stopped
            self._failure = SinkError(
                f"the app cannot share its sinks out any more: {summary_of(error)}; start it again"
            )
            self._failure.__cause__ = error

    def _poll(self, one: SupervisedQuery) -> None:
        try:
            one.poll()
        except Exception as error:  # noqa: BLE001 - a JVM that ended shows in more than one way
            failure = SinkError(
                f"Spark does not answer for the query {one.name}: {summary_of(error)}; its process has ended or its "
                "session was stopped: see its log, and start again"
            )
            one.fail(failure, error)

    @property
    def ended(self) -> bool:
        """Whether nothing runs and nothing is to be started again."""
        return not any(one.state in (SinkState.RUNNING, SinkState.WAITING, SinkState.STANDBY) for one in self.queries)

    def raise_failure(self) -> None:
        """Raise what the app stops for: the error of a query that failed and is not started again, if there is one."""
        if self._failure is not None:
            raise self._failure
        for one in self.queries:
            if one.failure is not None:
                raise one.failure

    def request_stop(self, *, now: bool = False) -> None:
        """Ask for a stop, `now` without the batches under way, and do not wait for it; safe in a signal handler."""
        self._leave_now = self._leave_now or now
        self._stopping = True

    def stop(self, timeout: float) -> bool:
        """Let the batches under way be finished and committed, begin no other, and end the queries.

        Batches that take more than `timeout` seconds are interrupted, and done again at the next start. Returns whether
        none was.
        """
        begun = self._clock()
        deadline = begun + timeout
        self.request_stop()
        for one in self._started:
            one.close()
        # The thread may be about to start a query, or to give one away.
        while self._thread.is_alive() and self._clock() - begun < (
            _HALT_S if self._leave_now else max(timeout, _HALT_S)
        ):
            self._thread.join(_IDLE_POLL_S)
        finished = self._end(self._started, deadline)
        if self._fleet is not None and not self._thread.is_alive():
            self._fleet.leave()
        return finished

    def _end(self, queries: Sequence[SupervisedQuery], deadline: float) -> bool:
        """Begin no batch of these queries, wait for those under way until the deadline, and end the queries."""
        for one in queries:
            one.close()
        waiting = [one for one in queries if not _answer(one.is_idle)]
        while waiting and not self._leave_now and self._clock() < deadline:
            self._wait(_IDLE_POLL_S)
            waiting = [one for one in waiting if not _answer(one.is_idle)]
        for one in waiting:
            _log.warning("a batch of the query %s is interrupted; the next start does it again", one.name)
        for one in reversed(queries):
            self._halt(one)
        return not waiting

    def _halt(self, one: SupervisedQuery) -> None:
        # Spark's stop waits for the function, which cannot be interrupted while it does not call Spark.
        thread = threading.Thread(target=_halt, args=(one,), name=f"penstock-halt-{one.name}", daemon=True)
        thread.start()
        thread.join(_HALT_S)
        if thread.is_alive():
            _log.warning("the function of the query %s goes on; its batch ends with this process", one.name)


def _halt(one: SupervisedQuery) -> None:
    try:
        one.halt()
    except Exception:  # noqa: BLE001 - a thread's last word; there is nobody to raise it to
        _log.exception("Spark did not stop the query %s; it ends with Spark's process", one.name)


def _answer(question: Callable[[], bool]) -> bool:
    """Return the answer; what a Spark that is gone cannot answer is not waited for."""
    try:
        return question()
    except Exception:  # noqa: BLE001 - the same as in `Supervisor._poll`
        return True
