"""`AppSinks`: the sinks of an app, from their start to their end, in one Spark session.

Spark is imported at the start, so that an app without sinks needs none of it.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock import clients
from penstock.clients.reading import without_membership
from penstock.clients.requests.topics import require_topics
from penstock.clients.rights import MissingRightError, principal_of
from penstock.errors import ConfigurationError
from penstock.options import ClientConfig
from penstock.spark_sink.errors import SessionStoppedError
from penstock.spark_sink.progress.group_offsets import GroupOffsets
from penstock.spark_sink.progress.query_progress import QueryProgress
from penstock.spark_sink.progress.statistics import SinkStatistics
from penstock.spark_sink.queries.fleet import Fleet
from penstock.spark_sink.queries.gate import BatchLeftError, Gate
from penstock.spark_sink.queries.sink_specs import SinkSpec
from penstock.spark_sink.queries.supervisor import SupervisedQuery, Supervisor
from penstock.spark_sink.sinks.sink import OfQuery
from penstock.spark_sink.source.session import is_classic, is_stopped, new_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.telemetry import Telemetry


class AppSinks(Supervisor):
    """The sinks of one app. `start` once; everything else from any thread.

    Batches under way may take `stop_timeout` seconds at a stop that names no other time.
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
        super().__init__(name, stop_timeout)
        self._name = name
        self._specs = tuple(specs)
        self._bootstrap_servers = bootstrap_servers
        self._config = config
        self._telemetry = telemetry
        self._stop_timeout = stop_timeout
        #: What is undone when the queries have ended.
        self._ends = ExitStack()

    def start(self) -> None:
        """Start the queries that this replica of the app has; where one fails, `stop` ends those before it.

        Raises the errors of `start_sink`, and `ConfigurationError` where PySpark or Java is missing.
        """
        from penstock.spark_sink import register  # says which extra brings PySpark

        admin = clients.admin(self._bootstrap_servers, self._config)
        topics = {topic for spec in self._specs for topic in spec.topics}
        require_topics(admin, self._bootstrap_servers, topics, principal=principal_of(self._config))
        self._fleet = Fleet(self._name, self._specs, self._bootstrap_servers, self._config, self._stop_timeout)
        self._ends.callback(self._fleet.leave)
        # Before the session: the group takes as long to answer as that takes to start.
        self._fleet.join()
        spark = self._session()
        register(spark)
        if is_classic(spark):
            callbacks = logging.getLogger("py4j.clientserver")
            callbacks.addFilter(_is_error)
            self._ends.callback(callbacks.removeFilter, _is_error)
        self.supervise([self._supervised(spark, spec) for spec in self._specs], self._fleet)

    def _supervised(self, spark: SparkSession, spec: SinkSpec) -> SupervisedQuery:
        group = None
        if spec.group is not None:
            group = GroupOffsets(spec.group, bootstrap_servers=self._bootstrap_servers, config=self._config)
            self._ends.callback(group.close)
        progress = QueryProgress(spec.name, self._telemetry, group=group, sink=spec.function)
        self._ends.callback(progress.close)
        return SupervisedQuery(
            spec.name, partial(self._start_query, spark, spec), allowed=spec.restarts, progress=progress
        )

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

    def _start_query(self, spark: SparkSession, spec: SinkSpec) -> tuple[StreamingQuery, Gate | None]:
        from penstock.spark_sink.queries.query import start_query

        if is_stopped(spark):
            raise SessionStoppedError(f"Spark's session was stopped under the query {spec.name}; start the app again")
        function: Callable[[DataFrame, int], None] = OfQuery(spec.function, spec.name)
        if self._telemetry is not None:
            from penstock.telemetry.spans.batches import BatchSpans

            function = BatchSpans(self._telemetry, spec.name).around(function)
        gate = Gate(function) if is_classic(spark) else None
        # The source joins no group.
        config = without_membership(clients.portable(self._config))
        return start_query(spark, spec, self._bootstrap_servers, config, gate), gate

    @property
    def queries(self) -> list[StreamingQuery]:
        """Spark's queries, those that run now or ended last."""
        return [query.query for query in self.supervised if query.query is not None]

    def statistics(self) -> list[SinkStatistics]:
        """Return each sink at this moment, in the order of their declaration."""
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

    def stop(self, timeout: float | None = None, *, begun: float | None = None) -> bool:
        """Let the batches under way be finished and committed, begin no other, and end the queries.

        The batches may take `timeout` seconds, from `begun` on by the monotonic clock; the app's `stop_timeout` from
        now on when left out. Returns whether no batch was interrupted.
        """
        allowed = self._stop_timeout if timeout is None else timeout
        gone = 0.0 if begun is None else time.monotonic() - begun
        with self._ends:
            return super().stop(max(0.0, allowed - gone))


def _end_quietly(end: Callable[[], object]) -> None:
    """End something of Spark when the queries have ended; a Spark that is gone has ended it."""
    with suppress(Exception):
        end()


def _is_error(record: logging.LogRecord) -> bool:
    """Return whether py4j is to log an exception with its stack: a batch left to the next start is no error."""
    return record.exc_info is None or not isinstance(record.exc_info[1], BatchLeftError | MissingRightError)
