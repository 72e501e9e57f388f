"""`AppSinks`: starts, supervises and ends the sinks of an app, in one Spark session.

Spark is imported at the start, so that an app without sinks does not need it.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock import clients
from penstock.clients.bounded_calls import CLOSE_S
from penstock.clients.reading import without_membership
from penstock.clients.rights import MissingRightError
from penstock.clients.topics import require_topics
from penstock.errors import ConfigurationError, SinkError
from penstock.options import ClientConfig
from penstock.spark_sink.errors import SessionStoppedError
from penstock.spark_sink.progress import QueryProgress, SinkState, SinkStatistics
from penstock.spark_sink.queries.fleet import Fleet
from penstock.spark_sink.queries.sink_specs import SinkSpec
from penstock.spark_sink.queries.supervise import HALT_S, BatchLeftError, Gate, SupervisedQuery, summary_of
from penstock.spark_sink.source.plan import Offsets
from penstock.spark_sink.source.session import is_stopped, new_session, require_classic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.telemetry import Telemetry

_log = logging.getLogger("penstock.spark_sink")

#: Seconds between two polls of the queries, and between two polls for the end of a batch.
_POLL_S, _IDLE_POLL_S = 0.2, 0.05
#: Seconds that a start waits for the group. If another replica finishes a batch first, the group answers later, and the
#: queries start then.
_JOIN_S = 30.0


class AppSinks:
    """The sinks of one app. Call `start` once; call the rest from any thread.

    After the first queries have started, one thread starts others, restarts failed ones and ends them. It alone changes
    their states. It also serves this replica's membership, which decides what the replica runs. Other threads request a
    stop and wait, within bounds, until that thread has ended. Batches under way get `stop_timeout` seconds, at a stop
    without its own time-out and when another replica takes over.
    """

    def __init__(
        self,
        name: str,
        specs: Sequence[SinkSpec],
        *,
        bootstrap_servers: str,
        config: ClientConfig,
        telemetry: Telemetry | None,
        stop_timeout: float,
    ) -> None:
        self._name = name
        self._specs = tuple(specs)
        self._bootstrap_servers = bootstrap_servers
        self._config = config
        self._telemetry = telemetry
        self._stop_timeout = stop_timeout
        self.supervised: tuple[SupervisedQuery, ...] = ()
        #: Cleanup after the queries have ended.
        self._ends = ExitStack()
        # Plain fields: a signal handler sets them, and the interrupted thread may hold any lock.
        self._is_stopping = False
        self._stop_by = math.inf
        # Written by the thread; read by others after it has ended.
        self._failure: SinkError | None = None
        self._is_finished = True
        self._thread = threading.Thread(target=self._run, name=f"penstock-sinks-{name}", daemon=True)

    def start(self) -> None:
        """Start the queries of this replica. If one fails, `stop` ends those before it.

        Raises the errors of `start_sink`, and `ConfigurationError` if PySpark or Java is missing.
        """
        from penstock.spark_sink import register  # its error names the extra that installs PySpark

        admin = clients.admin(self._bootstrap_servers, self._config)
        require_topics(admin, {topic for spec in self._specs for topic in spec.topics})
        fleet = Fleet(self._name, self._specs, self._bootstrap_servers, self._config, self._stop_timeout)
        self._ends.callback(fleet.leave)
        # Before the session: the group's answer takes as long as the session's start.
        fleet.join()
        spark = self._session()
        require_classic(spark)
        register(spark)
        callbacks = logging.getLogger("py4j.clientserver")
        callbacks.addFilter(_is_error)
        self._ends.callback(callbacks.removeFilter, _is_error)
        self.supervise([self._supervised(spark, spec) for spec in self._specs], fleet)

    def _supervised(self, spark: SparkSession, spec: SinkSpec) -> SupervisedQuery:
        progress = QueryProgress(spec.name, self._telemetry)
        self._ends.callback(progress.close)
        start = partial(self._start_query, spark, spec)
        return SupervisedQuery(spec.name, start, allowed=spec.restarts, progress=progress)

    def _session(self) -> SparkSession:
        """Return the process's session, or a new one that ends with the app."""
        from pyspark import SparkContext
        from pyspark.sql import SparkSession
        from pyspark.sql.utils import is_remote

        if is_remote() or SparkContext._active_spark_context is not None:  # noqa: SLF001 - no public question
            return SparkSession.builder.appName(self._name).getOrCreate()
        if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
            raise ConfigurationError(
                f"the sinks of {self._name} need Java for Spark, and there is none: set JAVA_HOME to a Java of at "
                "least version 17, or install 'penstock[dev-broker]' and put "
                "os.environ.update(penstock.devbroker.spark_environment()) before the start; penstock run does so"
            )
        spark = new_session(self._name)
        self._ends.callback(_end_quietly, spark.stop)
        return spark

    def _start_query(self, spark: SparkSession, spec: SinkSpec) -> tuple[StreamingQuery, Gate]:
        from penstock.spark_sink.queries.start import start_query

        if is_stopped(spark):
            raise SessionStoppedError(f"Spark's session was stopped under the query {spec.name}; start the app again")
        function = spec.function
        if self._telemetry is not None:
            from penstock.telemetry.spark import within_spans

            function = within_spans(self._telemetry, spec.name, function)
        gate = Gate(function)
        # The source joins no group.
        config = without_membership(clients.portable(self._config))
        return start_query(spark, spec, self._bootstrap_servers, config, gate), gate

    def supervise(self, queries: Sequence[SupervisedQuery], fleet: Fleet) -> None:
        """Start this replica's queries, or raise the error of the first that cannot start. Other queries stand by."""
        self.supervised = tuple(queries)
        self._fleet = fleet
        fleet.on_release = self._release
        try:
            self._begin()
        except BaseException:
            self._end(self.supervised, SinkState.STOPPED, time.monotonic() + self._stop_timeout)
            fleet.leave()
            raise
        self._thread.start()

    def _begin(self) -> None:
        deadline = time.monotonic() + _JOIN_S
        while self._fleet.mine is None and time.monotonic() < deadline:
            self._fleet.poll(_POLL_S)
        for query in self.supervised:
            if query.name in (self._fleet.mine or ()):
                query.begin()
            else:
                _log.info("the query %s stands by: another replica of the app has it, or the group is late", query.name)

    def _run(self) -> None:
        while not (self._is_stopping or self._failure):
            self._poll()
            time.sleep(_POLL_S)
        self._is_finished = self._end(self.supervised, SinkState.STOPPED)
        self._show_positions()
        self._fleet.leave()

    def _poll(self) -> None:
        try:
            self._fleet.poll()
        except Exception as error:  # noqa: BLE001 - it is not known any more whose the queries are: all are stopped
            what = "the app cannot share its sinks out any more"
            self._failure = SinkError(f"{what}: {summary_of(error)}; start it again")
            self._failure.__cause__ = error
            return
        for query in self.supervised:
            try:
                query.poll(is_mine=query.name in (self._fleet.mine or ()))
            except Exception as error:  # noqa: BLE001 - a JVM that ended shows in more than one way
                query.fail(
                    f"Spark does not answer for the query {query.name}: {summary_of(error)}; its process has "
                    "ended or its session was stopped: see its log, and start again",
                    error,
                )
        self._show_positions()

    def _show_positions(self) -> None:
        """Commit the positions of the queries to the group. If several read a partition, the lowest counts."""
        positions: Offsets = {}
        for query in self.supervised:
            for part, offset in query.positions.items():
                positions[part] = min(offset, positions.get(part, offset))
        self._fleet.commit(positions)

    def _release(self, names: Collection[str], is_lost: bool) -> None:
        """End queries that another replica takes over, after the batch under way unless it may run them already."""
        released = [query for query in self.supervised if query.name in names]
        self._end(released, SinkState.STANDBY, time.monotonic() + (0.0 if is_lost else self._stop_timeout))
        for query in released:
            _log.info("the query %s is given to another replica of the app", query.name)

    def _end(self, queries: Sequence[SupervisedQuery], state: SinkState, deadline: float = math.inf) -> bool:
        """Begin no further batch of these queries, wait until the deadline for those under way, end the queries."""
        for query in queries:
            query.close()
        while waiting := [query for query in queries if not query.is_idle()]:
            if time.monotonic() >= min(deadline, self._stop_by):
                break
            time.sleep(_IDLE_POLL_S)
        for query in waiting:
            _log.warning("a batch of the query %s is interrupted; the next start does it again", query.name)
        for query in reversed(queries):
            query.halt(state)
        return not waiting

    @property
    def queries(self) -> list[StreamingQuery]:
        """The Spark query of each sink: the one that runs now, or ran last."""
        return [query.query for query in self.supervised if query.query is not None]

    def statistics(self) -> list[SinkStatistics]:
        """Return a snapshot of each sink, in order of declaration."""
        return [
            replace(
                query.progress.statistics,
                state=query.state,
                retry_in=query.retry_in,
                last_error=query.last_error,
                holder=self._fleet.holder(query.name),
            )
            for query in self.supervised
        ]

    @property
    def ended(self) -> bool:
        """Whether no query runs or will be restarted."""
        return not any(query.is_going_on for query in self.supervised)

    def raise_failure(self) -> None:
        """Raise the error that stops the app, if there is one: of a failed query without further restarts."""
        for failure in (self._failure, *(query.failure for query in self.supervised)):
            if failure is not None:
                raise failure

    def request_stop(self, *, now: bool = False) -> None:
        """Request a stop and return at once; `now`: do not wait for batches under way. Safe in a signal handler."""
        if now:
            self._stop_by = time.monotonic()
        self._is_stopping = True

    def stop(self, timeout: float | None = None, *, begun: float | None = None) -> bool:
        """Wait until the batches under way are committed, begin no other, and end the queries.

        The batches get `timeout` seconds from the monotonic time `begun`; default: the app's `stop_timeout` from now.
        Batches that take longer are interrupted, and repeated at the next start. Returns whether none was interrupted.
        """
        allowed_s = self._stop_timeout if timeout is None else timeout
        with self._ends:
            if not self._thread.ident:
                return True
            self._stop_by = min(self._stop_by, (time.monotonic() if begun is None else begun) + allowed_s)
            self._is_stopping = True
            for query in self.supervised:
                query.close()
            # After the batches: the stop of each query, a start under way, and leaving the group. A second signal
            # shortens the time of the batches.
            halts_s = HALT_S * (len(self.supervised) + 1) + CLOSE_S
            while self._thread.is_alive() and time.monotonic() < self._stop_by + halts_s:
                self._thread.join(_IDLE_POLL_S)
            if self._thread.is_alive():
                _log.warning("the sinks have not ended in time: Spark does not answer; they end with this process")
            return self._is_finished and not self._thread.is_alive()


def _end_quietly(end: Callable[[], object]) -> None:
    """Clean up in Spark after the queries have ended. If Spark is gone, there is nothing to do."""
    with suppress(Exception):
        end()


def _is_error(record: logging.LogRecord) -> bool:
    """Return whether py4j may log an exception with its stack: a batch left to the next start is no error."""
    return record.exc_info is None or not isinstance(record.exc_info[1], BatchLeftError | MissingRightError)
