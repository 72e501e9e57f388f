"""Supervises the queries of an app's sinks: starts failed ones again, and stops all behind a finished batch.

The life of each is in `supervised_query`; here are the thread, the order of starts and stops, and the time they have.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

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


class Supervisor:
    """Supervises the queries of an app's sinks with one thread. Its methods may be called from any thread.

    Queries start in the order given, and stop in the other. The clock counts seconds that only rise.
    """

    def __init__(
        self,
        name: str,
        queries: Sequence[SupervisedQuery],
        *,
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
        self._thread = threading.Thread(target=self._run, name=f"penstock-sinks-{name}", daemon=True)

    def start(self) -> None:
        """Start all queries and the thread, or raise the first failure; `stop` ends those that had started."""
        for one in self.queries:
            one.start()
            self._started.append(one)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            for one in self.queries:
                self._poll(one)
            self._wait(POLL_S)
        for one in self.queries:
            one.close()

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
        return all(one.state not in (SinkState.RUNNING, SinkState.WAITING) for one in self.queries)

    def raise_failure(self) -> None:
        """Raise what the app stops for: the error of a query that failed and is not started again, if there is one."""
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
        deadline = self._clock() + timeout
        self.request_stop()
        if self._thread.is_alive():
            self._thread.join(_HALT_S)
        for one in self._started:
            one.close()
        waiting = [one for one in self._started if not _answer(one.is_idle)]
        while waiting and not self._leave_now and self._clock() < deadline:
            self._wait(_IDLE_POLL_S)
            waiting = [one for one in waiting if not _answer(one.is_idle)]
        for one in waiting:
            _log.warning("a batch of the query %s is interrupted; the next start does it again", one.name)
        for one in reversed(self._started):
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
