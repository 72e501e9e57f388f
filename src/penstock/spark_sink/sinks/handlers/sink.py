"""`HandlerSink`: a foreachBatch function that calls the handler of each message on executors.

Rows are routed by lane (`rows`), as in the consumer. A lane's rows go to one task, in order of (topic, partition,
offset), and the task (`engine`) handles the messages of a key one at a time. So a key is in one task of a batch, and
batches follow one another: no two handlers of a key overlap (I1), and its offsets rise (I2). A repeated task, and a
batch after a restart, begin at their first rows: messages are handled at least once.

Settings of Spark that would break I1 are refused. After a failure, a batch ends only when no task handles messages any
more. Spark reports the end of a job at once, but a task's Python process may still be in a handler. A thread of the
executor checks it every 2 seconds, waits `spark.python.task.killTimeout` for the task to end, and then kills the
process (`PythonRunner`'s `MonitorThread`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import Row as SparkRow
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from penstock import clients
from penstock import options as check
from penstock.clients.reading import without_membership
from penstock.clients.rights import MissingRightError
from penstock.consumer import Handler, OnFailure
from penstock.consumer.handlers.environment import middlewares_of, wrap
from penstock.consumer.handlers.handler import require_own_topics
from penstock.consumer.poll.topics import output_topics
from penstock.errors import ConfigurationError, SinkError
from penstock.options import ClientConfig
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.frames import require_columns, run_job
from penstock.spark_sink.sinks.handlers.engine import TaskSettings, handle
from penstock.spark_sink.sinks.handlers.results import OUTCOMES, BatchReport
from penstock.spark_sink.sinks.handlers.rows import spread
from penstock.spark_sink.sinks.kafka_ledger import LEDGER_TOPIC, Target, require_settings
from penstock.spark_sink.sinks.kafka_sink import PUBLISHED, PublishingSink, require_text_or_bytes
from penstock.telemetry import Telemetry
from penstock.telemetry.names import CONSUMER_GROUP_NAME
from penstock.telemetry.spark import count_messages

if TYPE_CHECKING:
    from opentelemetry.metrics import Counter

#: Seconds between two checks of the executor's thread, and seconds until its kill has taken effect.
_LOOK_S = 2.0
_GRACE_S = 2.0
_log = logging.getLogger("penstock.handler_sink")


def refuse_double_runs(spark: SparkSession) -> None:
    """Raise `ConfigurationError` for a setting with which two handlers of one key may run at once (I1).

    Speculation runs a slow task twice. If a task cannot fetch data of a lost executor, Spark repeats the stage while
    some of its tasks still run (SPARK-20163). With one attempt it fails the job and kills them (SPARK-50648), and the
    batch is repeated. Fetches from decommissioned executors count as attempts only if a setting says so.
    """

    def found(name: str, default: str) -> str:
        return str(spark.conf.get(name, default)).strip().lower()

    wanted = {"spark.speculation": ("false", "false")}
    if found("spark.master", "local").partition("[")[0] != "local":  # in the driver's own JVM no executor can be lost
        wanted["spark.stage.maxConsecutiveAttempts"] = ("4", "1")
        if found("spark.decommission.enabled", "false") == "true":
            wanted["spark.stage.ignoreDecommissionFetchFailure"] = ("true", "false")
    for name, (default, value) in wanted.items():
        if found(name, default) != value:
            raise ConfigurationError(
                f"{name} is {found(name, default)}: when a task is slow, or an executor is lost, Spark would run a "
                "part of a batch again while some of its tasks still run, and so two handlers of one key; start the "
                f"application with --conf {name}={value}, and the batch comes again as a whole; or give the sink "
                "overlap='allowed' if its handlers are idempotent"
            )


def seconds_until_killed(spark: SparkSession) -> float:
    """Return the seconds after which all processes of a cancelled task have ended."""
    text, context = str(spark.conf.get("spark.python.task.killTimeout", "2s")), cast("Any", spark.sparkContext)
    timeout_ms: int = context._jvm.org.apache.spark.network.util.JavaUtils.timeStringAsMs(text)  # noqa: SLF001 - PySpark has no public way to its JVM
    return _LOOK_S + timeout_ms / 1_000 + _GRACE_S


@dataclass(slots=True)
class _ProcessState:
    """A sink's state in this process; it is not pickled."""

    counter: Counter | None = None
    last: BatchReport | None = None


@dataclass(frozen=True, slots=True)
class HandlerSink(TaskSettings, PublishingSink):
    """Calls handlers for the messages of micro-batches, on executors. Made by `App.handler_sink`, or directly.

    Use it with `writeStream.foreachBatch(sink)` or `start_sink`, for frames with the source's columns, including
    `headers` (`includeHeaders`). Handlers keep their order mode, retries, dead letters, filter, decoder and batch size.
    A handler's batch is complete when it is full or the task has no more rows, so `linger` has no effect. Messages are
    handled at least once: a failed task, or a batch after a restart, is repeated from its start. A machine that Spark
    gave up as lost but that still runs may handle messages that other tasks handle, too. A sink can be pickled.

    Results are published when all handlers of the batch are done. For each message, the results of one run of its
    handler become visible, all of them, once; those of a source partition in the order of their messages. If a batch is
    repeated, its handlers are called again, and the ledger leaves out results that were published.

    Attributes:
        handlers: a handler for each topic, made by `penstock.consumer.handler`.
        group: name in headers of dead letters and in metrics.
        parallelism: number of tasks of a batch; tasks beyond the cluster's cores wait.
        bootstrap_servers: brokers to publish to; required with a `name`.
        config: client settings for publishing, by librdkafka's names; never shown.
        middlewares: functions around every call, made again for each task.
        lifespans: generator functions that run around each task; if one raises, the task fails.
        resources: the resources of `App.worker_resource`; closed at the end of each task.
        max_concurrency: most `async def` handlers of a task that run at once.
        max_in_flight: most messages of a task that are not done, including those that wait for a retry.
        max_in_flight_bytes: most bytes of these messages.
        dead_letter_limit: a limit of messages that are given up, counted by task; a task fails instead of exceeding it.
        headers: whether frames have the column `headers`; without it, handlers and dead letters have no headers.
        telemetry: metrics of each batch, on the driver and on the span of an app's sink; None: none.
        name: name of the query, as for `KafkaSink`. Required if a handler publishes or has dead letters: both are
            published under it, each once for readers of committed messages.
        ledger_topic: topic of the ledger, created if it does not exist; many sinks may share it.
        overlap: `"refused"`: a batch fails if Spark's settings could let two handlers of one key run at once.
            `"allowed"`: it runs; handlers must be idempotent then.

    Raises:
        ConfigurationError: an option is wrong, or a handler has an option that does not work on executors.
    """

    parallelism: int = field(kw_only=True)
    bootstrap_servers: str | None = field(default=None, kw_only=True)
    config: ClientConfig = field(default_factory=dict, repr=False, kw_only=True)
    headers: bool = field(default=True, kw_only=True)
    telemetry: Telemetry | None = field(default=None, kw_only=True, repr=False)
    name: str | None = field(default=None, kw_only=True)
    ledger_topic: str = field(default=LEDGER_TOPIC, kw_only=True)
    overlap: Literal["refused", "allowed"] = field(default="refused", kw_only=True)
    _process: _ProcessState = field(default_factory=_ProcessState, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the settings and that the handlers can be pickled."""
        check.not_empty("group", self.group)
        check.one_of("overlap", self.overlap, "refused", "allowed")
        if not self.handlers:
            raise ConfigurationError("there is no handler; give one for each topic of the query")
        for option in ("parallelism", "max_concurrency", "max_in_flight", "max_in_flight_bytes"):
            check.positive_int(option, getattr(self, option))
        object.__setattr__(self, "handlers", dict(self.handlers))
        for option in ("middlewares", "lifespans", "resources"):
            object.__setattr__(self, option, tuple(getattr(self, option)))
        middlewares_of(self.middlewares)
        for topic, handler in self.handlers.items():
            self._check_handler(topic, handler)
        require_own_topics(self.group, self.handlers)
        if self.name is not None:
            if (target := self._target()) is None:
                raise ConfigurationError(f"the sink {self.name} publishes; give bootstrap_servers, where it does")
            require_settings("HandlerSink", target)
        self._require_picklable()

    def _check_handler(self, topic: str, handler: Handler) -> None:
        if not isinstance(handler, Handler):
            raise ConfigurationError(
                f"the handler of {topic} must be made by penstock.consumer.handler(...), but is a "
                f"{type(handler).__name__}"
            )
        name = f"the handler {handler.name} of {topic} has"
        # Options that tasks, which are many and short, cannot support.
        if handler.retry_delays:
            raise ConfigurationError(
                f"{name} retry_delays, but a query does not read retry topics; use retry=, or a consumer"
            )
        if handler.on_failure is OnFailure.HOLD:
            raise ConfigurationError(
                f"{name} on_failure='hold', but a batch ends only when all of its messages are done; use 'stop', "
                "'dead_letter' or 'drop', or a consumer"
            )
        if handler.rate is not None or handler.key_rate is not None:
            raise ConfigurationError(
                f"{name} a rate, which executors cannot share; bound a query by maxOffsetsPerTrigger and its trigger"
            )
        has_dead_letters = handler.on_failure is OnFailure.DEAD_LETTER
        if self.name is None and (handler.to is not None or has_dead_letters):
            what = "dead letters" if has_dead_letters else f"to={handler.to!r}"
            raise ConfigurationError(
                f"{name} {what}; give the HandlerSink name=..., under which it remembers what it has published, and "
                "bootstrap_servers"
            )
        if handler.to == self.ledger_topic:
            raise ConfigurationError(f"{name} to={handler.to!r}, the topic of the ledger; rename one")
        wrap(handler, self.middlewares)

    def _check_columns(self, schema: StructType) -> None:
        target = f"the handlers of {self.group}"
        require_columns(schema.names, target, ["key", "value"])
        require_text_or_bytes(schema, target, ["key", "value"])
        if self.headers and "headers" not in schema.names:
            raise SchemaMismatchError(
                f"the frame for {target} has no column headers, so that handlers and dead letters would see none; read "
                "with the option includeHeaders=true, or make the sink with headers=False"
            )

    def _topics(self) -> tuple[Collection[str], Mapping[str, Collection[str]]]:
        results = {handler.to for handler in self.handlers.values() if handler.to is not None}
        return results, output_topics(self.group, self.handlers)

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Handle one micro-batch.

        If the batch fails or the query is stopped in the middle of it, this returns some seconds later, when no task of
        it handles messages any more. So handlers of the repeated batch never overlap with earlier ones.

        Raises:
            SinkError: a message failed finally and its handler has `on_failure="stop"`, the frame is wrong, or results
                could not be published; the batch is repeated.
            MissingRightError: the permission to write dead letters or results is missing; the batch is repeated.
            ConfigurationError: with a setting of Spark, two handlers of one key could run at once.
        """
        if self.overlap == "refused":
            refuse_double_runs(batch.sparkSession)
        self._publish_report(batch_id, BatchReport.of_tasks(self._publish(batch, batch_id)))

    def _messages(self, batch: DataFrame) -> DataFrame:
        """Return the frame whose job handles a batch: results of its handlers and reports of its tasks."""
        rows = spread(batch, self.handlers, self.parallelism)
        return rows.mapInArrow(partial(handle, self, self.has_ledger), from_arrow_schema(PUBLISHED))

    def _run(self, job: DataFrame, before: str) -> list[SparkRow]:
        """Run a Spark job. After a failure, return only when no task of it handles messages any more."""
        kill_delay_s = seconds_until_killed(job.sparkSession)
        try:
            return run_job(job, before)
        except Exception as error:
            # If a single task reported its failure, no task is left.
            if self.parallelism > 1 or not isinstance(error, SinkError | MissingRightError):
                time.sleep(kill_delay_s)
            raise

    @property
    def last_report(self) -> BatchReport | None:
        """The report of the last batch, in the process that calls the sink; None before the first."""
        return self._process.last

    def _publish_report(self, batch_id: int, report: BatchReport) -> None:
        process = self._process
        process.last = report
        _log.info("%s: batch %d: %s", self.group, batch_id, report)
        if self.telemetry is not None:
            process.counter = process.counter or self.telemetry.meter().create_counter(
                "penstock.spark.handler.messages", "{message}", "What became of messages of handlers on executors."
            )
            for outcome in OUTCOMES:
                attributes = {CONSUMER_GROUP_NAME: self.group, "penstock.spark.handler.outcome": outcome}
                process.counter.add(getattr(report, outcome), attributes)
            count_messages(report.rows)

    def _target(self) -> Target | None:
        if self.name is None or self.bootstrap_servers is None:
            return None
        config = without_membership(clients.portable(self.config))
        config.pop("isolation.level", None)
        # As for an app's results: both engines send a key to the same partition.
        config = {"partitioner": "consistent_random", "compression.type": "zstd", **config}
        return Target(self.bootstrap_servers, config, self.name, self.ledger_topic)

    def _require_picklable(self) -> None:
        # First each handler, so that the error names it; then all together, with their surroundings.
        for topic, part in (*self.handlers.items(), ("", self)):
            try:
                cloudpickle.dumps(part)  # type: ignore[no-untyped-call] # it ships no types
            except Exception as error:
                name = f"the handler {part.name} of {topic}" if isinstance(part, Handler) else f"a task of {self.group}"
                raise ConfigurationError(
                    f"{name} cannot be sent to Spark's executors: {type(error).__name__}: {error}; it refers to "
                    "something that lives in this process only, such as a lock, a connection, a session or a "
                    "serializer: make that inside the handler, in a worker_resource or in a lifespan, or write a "
                    "function that uses it into a module that executors import, which travels by its name"
                ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the state of this process: telemetry, and the report of the last batch."""
        # Not `__getstate__`: up to 3.11.2 a frozen dataclass with slots replaces it.
        own: dict[str, Any] = {"telemetry": None, "_process": _ProcessState()}
        state = [own.get(option.name, getattr(self, option.name)) for option in fields(self)]
        return object.__new__, (type(self),), state
