"""`AppSinks`: the sinks of an app, from their start to their end, in one Spark session.

Spark is imported at the start, so that an app without sinks needs none of it.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import clients
from penstock.clients.requests.topics import require_topics
from penstock.clients.rights import MissingRightError, principal_of
from penstock.errors import ConfigurationError
from penstock.options import ClientConfig
from penstock.spark_sink.errors import SessionStoppedError
from penstock.spark_sink.monitoring.group_offsets import GroupOffsets
from penstock.spark_sink.monitoring.progress import SinkStatistics
from penstock.spark_sink.monitoring.progress_publisher import ProgressPublisher, Shown
from penstock.spark_sink.queries.fleet import Fleet
from penstock.spark_sink.queries.gate import BatchLeftError, Gate
from penstock.spark_sink.queries.restarts import Restarts
from penstock.spark_sink.queries.sink_specs import SinkSpec
from penstock.spark_sink.queries.starting_offsets import is_remembered, refuse_forgetful
from penstock.spark_sink.queries.supervised_query import Query, SupervisedQuery
from penstock.spark_sink.queries.supervisor import Supervisor
from penstock.spark_sink.sinks.sink import OfQuery
from penstock.spark_sink.source.session import is_classic, is_stopped, new_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.telemetry import Telemetry

_log = logging.getLogger("penstock.spark_sink")


class AppSinks:
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
        self._name = name
        self._specs = tuple(specs)
        self._bootstrap_servers = bootstrap_servers
        self._config = config
        self._telemetry = telemetry
        self._stop_timeout = stop_timeout
        self._supervisor: Supervisor | None = None
        self._fleet: Fleet | None = None
        self._publisher: ProgressPublisher | None = None
        #: What is undone when the queries have ended.
        self._ends = ExitStack()
        self._stop_asked = False

    def start(self) -> None:
        """Start the queries that this replica of the app has; where one fails, `stop` ends those before it.

        Raises the errors of `start_sink`, and `ConfigurationError` where PySpark or Java is missing.
        """
        from penstock.spark_sink import register  # says which extra brings PySpark

        admin = clients.admin(self._bootstrap_servers, self._config)
        topics = {topic for one in self._specs for topic in one.topics}
        require_topics(admin, self._bootstrap_servers, topics, principal=principal_of(self._config))
        fleet = self._fleet = Fleet(self._name, self._specs, self._bootstrap_servers, self._config, self._stop_timeout)
        self._ends.callback(fleet.leave)
        # Before the session: the group takes as long to answer as that takes to start.
        fleet.join()
        spark = self._session()
        register(spark)
        gated = is_classic(spark)
        publisher = self._publisher = ProgressPublisher(
            self._telemetry,
            groups={one.name: self._group(one.group, one.topics) for one in self._specs if one.group is not None},
            sinks={one.name: one.function for one in self._specs},
            only=tuple(one.name for one in self._specs),
        )
        self._ends.callback(publisher.close)
        if gated:
            self._listen(spark, publisher)
            self._ends.enter_context(_stops_are_no_errors())
        self._supervisor = Supervisor(
            self._name,
            [
                SupervisedQuery(
                    one.name,
                    partial(self._start_query, spark, one, self._checkpoint(spark, one), gated=gated),
                    restarts=Restarts(one.restarts, random.random),
                    clock=time.monotonic,
                    take_progress=publisher.take,
                    poll_progress=not gated,
                    restarted=partial(publisher.restarted, one.name),
                )
                for one in self._specs
            ],
            fleet=fleet,
            release_s=self._stop_timeout,
        )
        self._supervisor.start()
        if self._stop_asked:
            self._supervisor.request_stop()

    def _group(self, name: str, topics: Sequence[str]) -> GroupOffsets:
        group = GroupOffsets(name, bootstrap_servers=self._bootstrap_servers, config=self._config)
        group.warn_missing_rights(topics)
        return group

    def _session(self) -> SparkSession:
        """Return the process's session, or a new one that ends with the app."""
        from pyspark import SparkContext
        from pyspark.sql import SparkSession
        from pyspark.sql.utils import is_remote

        made = not is_remote() and SparkContext._active_spark_context is None  # noqa: SLF001 - no public question
        if made and not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
            raise ConfigurationError(
                f"the sinks of {self._name} need Java for Spark, and there is none: set JAVA_HOME to a Java of at "
                "least version 17, or install 'penstock[dev-broker]' and put "
                "os.environ.update(penstock.devbroker.spark_environment()) before the start; penstock run does so"
            )
        if not made:
            return SparkSession.builder.appName(self._name).getOrCreate()
        spark = new_session(self._name)
        self._at_end(spark.stop)
        return spark

    def _listen(self, spark: SparkSession, publisher: ProgressPublisher) -> None:
        from penstock.spark_sink.monitoring.progress_listener import PublisherListener

        listener = PublisherListener(publisher)
        spark.streams.addListener(listener)
        self._at_end(partial(spark.streams.removeListener, listener))

    def _at_end(self, end: Callable[[], object]) -> None:
        """Have something of Spark ended when the queries have; a Spark that is gone has ended it."""

        def end_it() -> None:
            try:
                end()
            except Exception:  # noqa: BLE001 - see above
                _log.debug("Spark was gone before the sinks of %s had ended", self._name, exc_info=True)

        self._ends.callback(end_it)

    def _checkpoint(self, spark: SparkSession, spec: SinkSpec) -> str | None:
        """Return where a query keeps its progress: over the app's restarts of it at least."""
        if is_remembered(spark, spec.checkpoint_location):
            return spec.checkpoint_location
        refuse_forgetful(spec.name, spec.function)
        folder = tempfile.mkdtemp(prefix="penstock-checkpoint-")
        self._ends.callback(shutil.rmtree, folder, ignore_errors=True)
        return Path(folder).as_uri()

    def _start_query(
        self, spark: SparkSession, spec: SinkSpec, checkpoint: str | None, *, gated: bool
    ) -> tuple[Query, Gate | None]:
        from penstock.spark_sink.queries.query import source_config, start_query

        if is_stopped(spark):
            raise SessionStoppedError(f"Spark's session was stopped under the query {spec.name}; start the app again")
        gate = Gate(self._traced(OfQuery(spec.function, spec.name), spec.name)) if gated else None
        query = start_query(
            spark, spec, self._bootstrap_servers, source_config(self._config), gate=gate, checkpoint_location=checkpoint
        )
        return query, gate

    def _traced(self, function: OfQuery, name: str) -> Callable[[DataFrame, int], None]:
        """Return the function of a query's batches within their spans, where the app has telemetry."""
        if self._telemetry is None:
            return function
        from penstock.telemetry.spans.batches import BatchSpans

        return BatchSpans(self._telemetry, name).around(function)

    @property
    def queries(self) -> list[StreamingQuery]:
        """Spark's queries, those that run now or ended last."""
        asked: Any = [one.query for one in self._supervised() if one.query is not None]
        return list(asked)

    def statistics(self) -> list[SinkStatistics]:
        """Return each sink at this moment, in the order of their declaration."""
        return [self._statistics(one) for one in self._supervised()]

    def _statistics(self, one: SupervisedQuery) -> SinkStatistics:
        shown = Shown() if self._publisher is None else self._publisher.shown(one.name)
        return SinkStatistics(
            name=one.name,
            state=one.state,
            batch_id=shown.batch_id,
            batches=shown.batches,
            rows=shown.rows,
            rows_per_s=shown.rows_per_s,
            batch_seconds=shown.batch_seconds,
            lag=sum(shown.lag.values()) if shown.lag else None,
            restarts=one.restarts,
            retry_in=one.retry_in,
            last_error=one.last_error,
            holder=None if self._fleet is None else self._fleet.holder(one.name),
            partitions=shown.partitions(),
        )

    @property
    def ended(self) -> bool:
        """Whether nothing runs and nothing is to be started again."""
        return self._supervisor is None or self._supervisor.ended

    def raise_failure(self) -> None:
        """Raise the `SinkError` that the app stops for, where a query failed and is not started again."""
        if self._supervisor is not None:
            self._supervisor.raise_failure()

    def request_stop(self, *, now: bool = False) -> None:
        """Ask for a stop, `now` without the batches under way, and do not wait for it; safe in a signal handler."""
        self._stop_asked = True
        if self._supervisor is not None:
            self._supervisor.request_stop(now=now)

    def stop(self, timeout: float | None = None, *, begun: float | None = None) -> bool:
        """Let the batches under way be finished and committed, begin no other, and end the queries.

        The batches may take `timeout` seconds, from `begun` on by the monotonic clock; the app's `stop_timeout` from
        now on when left out. Returns whether no batch was interrupted.
        """
        with self._ends:
            if self._supervisor is None:
                return True
            allowed = self._stop_timeout if timeout is None else timeout
            gone = 0.0 if begun is None else time.monotonic() - begun
            return self._supervisor.stop(max(0.0, allowed - gone))

    def _supervised(self) -> tuple[SupervisedQuery, ...]:
        return () if self._supervisor is None else self._supervisor.queries


@contextmanager
def _stops_are_no_errors() -> Iterator[None]:
    """Keep py4j from logging with its stack what is no error, a batch left to the next start, or is logged without."""

    def is_error(record: logging.LogRecord) -> bool:
        return record.exc_info is None or not isinstance(record.exc_info[1], BatchLeftError | MissingRightError)

    callbacks = logging.getLogger("py4j.clientserver")
    callbacks.addFilter(is_error)
    try:
        yield
    finally:
        callbacks.removeFilter(is_error)
