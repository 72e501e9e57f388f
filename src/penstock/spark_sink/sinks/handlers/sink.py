"""`HandlerSink`: a foreachBatch function that gives each message of a batch to the handler of its topic, on executors.

Rows are routed by lane (`spread`), as in the consumer: a lane's rows go to one task, in (topic, partition, offset)
order, and the task (`engine`) handles one message of a key after the other. So a key is in one task of a batch, and
batches follow one another: no two handlers of a key overlap (I1), and its offsets rise (I2). A task that is tried
again, or a batch after a restart, begins at its first row: handlers see messages at least once.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from pyspark.sql import DataFrame, Row
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BinaryType, DataType, IntegerType, LongType, StringType, StructType

from penstock import clients
from penstock import options as check
from penstock.clients.requests.granted_rights import require_rights
from penstock.clients.requests.topics import TopicSpec, ensure_topics, partition_counts
from penstock.clients.rights import MissingRightError, Operation, Right, principal_of, topic_right
from penstock.consumer import ConsumerSettings, DeadLetterLimit, Handler, MiddlewareSpec, WorkerResource
from penstock.consumer.handlers.environment.middleware import middlewares_of, wrap
from penstock.consumer.handlers.functions import name_of
from penstock.consumer.handlers.handler import Kind, require_own_topics
from penstock.consumer.polling.health.startup_checks import output_topics
from penstock.errors import ConfigurationError, SinkError
from penstock.options import ClientConfig
from penstock.spark_sink.errors import SchemaMismatchError, error_of, errors_in
from penstock.spark_sink.ledger.rules import LedgerEntry
from penstock.spark_sink.sinks.handlers import overlap
from penstock.spark_sink.sinks.handlers.checks import (
    refuse_what_cannot_be_kept,
    require_publishing,
    target_of,
)
from penstock.spark_sink.sinks.handlers.engine import TaskWork
from penstock.spark_sink.sinks.handlers.pickling import made_by, pack, require_packable, unpack
from penstock.spark_sink.sinks.handlers.publication import published, reports_of
from penstock.spark_sink.sinks.handlers.report import BatchReport, HandlerMetrics
from penstock.spark_sink.sinks.handlers.results import RESULT_SCHEMA, report_of
from penstock.spark_sink.sinks.handlers.rows import REQUIRED
from penstock.spark_sink.sinks.handlers.spread import spread
from penstock.spark_sink.sinks.handlers.task import handling
from penstock.spark_sink.sinks.kafka_ledger import LEDGER_TOPIC, Target, ledger_of, ledger_options, require_target
from penstock.spark_sink.sinks.kafka_publisher import begin_ledger
from penstock.spark_sink.sinks.planned_offsets import micro_batch
from penstock.spark_sink.sinks.sink import Origin, origin_of, stored_batches
from penstock.spark_sink.source.plan import TopicPartition
from penstock.telemetry import Telemetry
from penstock.telemetry.spans.batches import BatchSpans, is_within_span, link_senders

_log = logging.getLogger("penstock.handler_sink")

#: How long a dead letter may take to be acknowledged before its task fails, unless `config` says otherwise.
_LETTER_TIMEOUT_MS = 60_000

_TYPES: Mapping[str, type[DataType]] = {
    "topic": StringType,
    "partition": IntegerType,
    "offset": LongType,
    "key": BinaryType,
    "value": BinaryType,
}


@dataclass(slots=True)
class _ProcessState:
    """What a sink knows of this process; it is not pickled."""

    has_dead_letter_topics: bool = False
    metrics: HandlerMetrics | None = None
    last: BatchReport | None = None


@dataclass(frozen=True, slots=True)
class HandlerSink:
    """Calls handlers for the messages of micro-batches, on executors. Made by `App.handler_sink`, or by hand.

    Use it with `writeStream.foreachBatch(sink)` or `start_sink`, over frames with the columns of the source, `headers`
    included (`includeHeaders`). Handlers keep their order mode, retries, dead letters, filter, decoder and batch size;
    a batch goes when it is full or the task's rows end, so that `linger` has no effect. Messages are handled at least
    once: a task that fails or a batch after a restart comes again from its start. A machine that Spark has given up for
    lost and that runs on may handle messages which other tasks have by now. Can be pickled.

    What handlers return is published when all handlers of the batch are done. Of each message the results of one run of
    its handler become visible, all of them and once; those of a source partition in the order of their messages. Where
    a batch comes again, its handlers are called again, and the ledger leaves out what was published of it.

    Attributes:
        handlers: a handler for each topic, as made by `penstock.consumer.handler`.
        group: name in dead letters' headers and metrics.
        parallelism: tasks a batch is spread over; more than the cluster has cores wait for one another.
        bootstrap_servers: brokers to publish to; needed where a handler has dead letters or publishes.
        config: client settings by librdkafka's names, for that; never shown.
        middlewares: functions around every call, made again for each task.
        lifespans: generator functions that run around each task; one that raises fails the task.
        resources: what `App.worker_resource` made; closed at the end of each task.
        max_concurrency: `async def` handlers under way at once in a task.
        max_parked: messages of a task that may wait for a retry or behind one of their key; while so many do, the task
            takes none in.
        max_parked_bytes: bytes of values that may wait, likewise.
        dead_letter_limit: when a task fails rather than write one more dead letter, counted by task.
        headers: whether frames have the column `headers`; without it handlers and dead letters see none.
        telemetry: metrics and a span of each batch, on the driver; None for none.
        name: of the query, as `KafkaSink`'s; needed where a handler publishes. What handlers return is published under
            it, and dead letters too, each once for readers of committed messages.
        ledger_topic: topic of the ledger, made if it does not exist; many sinks may share it.
        atomic_batches: whether what a batch publishes is one transaction, as `KafkaSink`'s. It lets handlers with
            `batch=` return messages for their batch as a whole.
        overlap: `"refused"`: a batch fails where Spark's settings could let two handlers of one key run at once.
            `"allowed"`: it runs all the same; handlers must be idempotent then.

    Raises:
        ConfigurationError: an option is wrong, or a handler has one that cannot be kept on executors.
    """

    handlers: Mapping[str, Handler]
    group: str = field(kw_only=True)
    parallelism: int = field(kw_only=True)
    bootstrap_servers: str | None = field(default=None, kw_only=True)
    config: ClientConfig = field(default_factory=dict, repr=False, kw_only=True)
    middlewares: Sequence[MiddlewareSpec] = field(default=(), kw_only=True)
    lifespans: Sequence[Callable[[], Any]] = field(default=(), kw_only=True)
    resources: Sequence[WorkerResource[Any]] = field(default=(), kw_only=True)
    max_concurrency: int = field(default=1_000, kw_only=True)
    max_parked: int = field(default=1_000, kw_only=True)
    max_parked_bytes: int = field(default=32 * 1024 * 1024, kw_only=True)
    dead_letter_limit: DeadLetterLimit | None = field(default=None, kw_only=True)
    headers: bool = field(default=True, kw_only=True)
    telemetry: Telemetry | None = field(default=None, kw_only=True, repr=False)
    name: str | None = field(default=None, kw_only=True)
    ledger_topic: str = field(default=LEDGER_TOPIC, kw_only=True)
    atomic_batches: bool = field(default=False, kw_only=True)
    overlap: Literal["refused", "allowed"] = field(default="refused", kw_only=True)
    _process: _ProcessState = field(default_factory=_ProcessState, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the settings and that the handlers can be pickled."""
        check.not_empty("group", self.group)
        if self.overlap not in {"refused", "allowed"}:
            raise ConfigurationError(f"overlap must be 'refused' or 'allowed', but is {self.overlap!r}")
        if not self.handlers:
            raise ConfigurationError("there is no handler; give one for each topic of the query")
        for option in ("parallelism", "max_concurrency", "max_parked", "max_parked_bytes"):
            check.positive_int(option, getattr(self, option))
        object.__setattr__(self, "handlers", dict(self.handlers))
        for option in ("middlewares", "lifespans", "resources"):
            object.__setattr__(self, option, tuple(getattr(self, option)))
        middlewares_of(self.middlewares)
        for topic, handler in self.handlers.items():
            refuse_what_cannot_be_kept(topic, handler)
            wrap(handler, self.middlewares)
        require_own_topics(self.group, self.handlers)
        require_publishing(self.handlers, self.name, self.bootstrap_servers, self.ledger_topic)
        asynchronous = any(handler.kind is Kind.TASK for handler in self.handlers.values())
        if not asynchronous and any(map(inspect.isasyncgenfunction, self.lifespans)):
            raise ConfigurationError("an async lifespan needs an `async def` handler, whose event loop it runs on")
        if output_topics(self.group, self.handlers) and self.bootstrap_servers is None:
            raise ConfigurationError("a handler has dead letters; give bootstrap_servers, where they are written")
        self._target()
        self._require_picklable()

    def check(self, schema: StructType) -> None:
        """Check that frames of these columns can be handled; make the ledger and the dead-letter topics.

        Raises:
            SchemaMismatchError: a column is missing or has another type.
            BrokerConnectionError: no broker answered.
            MissingRightError: dead letters or results may not be written.
            TopicNotFoundError: a topic that a handler names with `to` does not exist.
            ConfigurationError: the ledger's topic cannot be used.
        """
        found = {column.name: column.dataType for column in schema.fields}
        missing = [name for name in REQUIRED if name not in found]
        if missing:
            raise SchemaMismatchError(
                f"the frame for the handlers of {self.group} lacks {', '.join(missing)}; give the sink the source's "
                "columns as they are"
            )
        for name, kind in _TYPES.items():
            if not isinstance(found[name], kind):
                raise SchemaMismatchError(
                    f"column {name} is {found[name].simpleString()}, but handlers need {kind().simpleString()}; "
                    "give the sink the source's columns as they are, and parse in a decoder or in the handler"
                )
        if self.headers and "headers" not in found:
            raise SchemaMismatchError(
                f"the frame for the handlers of {self.group} has no column headers, so that handlers and dead letters "
                "would see none; read with the option includeHeaders=true, or make the sink with headers=False"
            )
        self._ensure_dead_letter_topics()
        target = self._target()
        if target is not None:
            require_target(target, sorted(self._result_topics()))

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Handle one micro-batch.

        Where the batch fails or the query is stopped in the middle of it, this returns some seconds later, once no task
        of it handles anything any more: the batch that comes again finds no handler of a former one at work.

        Raises:
            SinkError: a message failed for good whose handler stops then, the frame is wrong, or results could not be
                published; the batch comes again.
            MissingRightError: dead letters or results may not be written; the batch comes again.
            ConfigurationError: a setting of Spark would have it handle a key twice at once.
        """
        if self.telemetry is None or is_within_span():
            self._handle(batch, batch_id)
            return
        with BatchSpans(self.telemetry, self.name or self.group).of(batch_id):
            self._handle(batch, batch_id)

    def _handle(self, batch: DataFrame, batch_id: int) -> None:
        target = self._target()
        origin = Origin() if target is None else origin_of(batch, target.name)
        if target is None or not stored_batches.has_any_of(self.ledger_key, origin):
            self.check(batch.schema)
        if self.overlap == "refused":
            overlap.refuse_double_runs(batch.sparkSession)
        kill_delay_s = overlap.seconds_until_killed(batch.sparkSession)
        rows = spread(batch, self.handlers, self.parallelism)
        tasks = rows.mapInArrow(handling(pack(self._work())), from_arrow_schema(RESULT_SCHEMA))
        if target is None:
            reports = [report_of(row.report) for row in self._collect(tasks.select("report"), batch_id, kill_delay_s)]
        else:
            what = micro_batch(batch, batch_id, origin, f"sink {target.name}", ledger_options(target.ledger))
            job = published(tasks, replace(target, batch=what), self.parallelism)
            with stored_batches.one_call(self.ledger_key, origin, what):
                reports = reports_of(batch_id, target.name, self._collect(job, batch_id, kill_delay_s))
        self._publish_report(BatchReport(batch_id=batch_id, tasks=reports, parallelism=self.parallelism))

    def _collect(self, job: DataFrame, batch_id: int, kill_delay_s: float) -> list[Row]:
        """Run Spark's job; where it fails, return when no task of it handles anything any more."""
        try:
            return job.collect()
        except Exception as error:
            found = [named for named in errors_in(str(error)) if isinstance(named, SinkError | MissingRightError)]
            if not (found and self.parallelism == 1):
                # Where there is one task and it reported its failure, none is left.
                time.sleep(kill_delay_s)
            if not found:
                raise
            # Not chained: what Spark says repeats it within two stacks, and what a handler raised may hold the message.
            raise error_of(type(found[-1]), f"batch {batch_id}: {found[-1]}") from None

    @property
    def ledger_entries(self) -> Callable[[str, Iterable[TopicPartition]], dict[TopicPartition, LedgerEntry]] | None:
        """Returns what the ledger has of some partitions; None where the sink has no ledger.

        The sink's own name counts. It raises:
            MissingRightError: the client may not read the ledger.
            SinkError: the ledger cannot be read.
            BrokerConnectionError: no broker answered.
        """
        target = self._target()
        return None if target is None else lambda _query, partitions: ledger_of(target, partitions)

    @property
    def begin_ledger(self) -> Callable[[str, Mapping[TopicPartition, LedgerEntry]], None] | None:
        """Writes where a query begins, in partitions that the ledger does not know; None where the sink has none."""
        target = self._target()
        return None if target is None else lambda _query, entries: begin_ledger(target, entries)

    @property
    def ledger_key(self) -> Hashable:
        """What tells its ledger from those of others in this process."""
        return self.bootstrap_servers, self.name, self.ledger_topic

    @property
    def last_report(self) -> BatchReport | None:
        """What the last batch came to, in the process that calls the sink; None before the first."""
        return self._process.last

    def _publish_report(self, report: BatchReport) -> None:
        process = self._process
        process.last = report
        _log.info("%s: %s", self.group, report)
        if self.telemetry is not None:
            if process.metrics is None:
                process.metrics = HandlerMetrics(self.telemetry, self.group)
            process.metrics.record(report)
            link_senders((sender for task in report.tasks for sender in task.senders), report.rows)

    def _work(self) -> TaskWork:
        return TaskWork(
            self.group,
            self.handlers,
            middlewares=self.middlewares,
            lifespans=self.lifespans,
            resources=self.resources,
            producer=self._producer_config(),
            dead_letter_limit=self.dead_letter_limit,
            max_parked=self.max_parked,
            max_parked_bytes=self.max_parked_bytes,
            max_concurrency=self.max_concurrency,
            publishes=self._target() is not None,
            whole=self.atomic_batches,
            notes_senders=self.telemetry is not None,
        )

    def _target(self) -> Target | None:
        """Return where results are published; None where the sink publishes nothing."""
        if self.name is None or self.bootstrap_servers is None:
            return None
        target = target_of(self.bootstrap_servers, self.config, self.name, self.ledger_topic)
        return replace(target, whole=self.atomic_batches)

    def _result_topics(self) -> set[str]:
        return {handler.to for handler in self.handlers.values() if handler.to is not None}

    def least_rights(self, _topics: Iterable[str]) -> list[Right]:
        """Return the rights that its client needs, save those on topics that an `Outgoing` names."""
        letters = sorted(output_topics(self.group, self.handlers))
        rights = [topic_right(operation, name) for name in letters for operation in (Operation.WRITE, Operation.CREATE)]
        target = self._target()
        if target is not None:
            rights += target.least_rights(self._result_topics())
        return list(dict.fromkeys(rights))

    def _ensure_dead_letter_topics(self) -> None:
        wanted = output_topics(self.group, self.handlers)
        if not wanted or self.bootstrap_servers is None or self._process.has_dead_letter_topics:
            return
        admin = clients.admin(self.bootstrap_servers, self.config)
        rights = [topic_right(Operation.WRITE, name) for name in sorted(wanted)]
        require_rights(admin, f"the dead letters of {self.group} cannot be written", rights, principal_of(self.config))
        counts = partition_counts(admin, self.bootstrap_servers)
        specs = [TopicSpec(name, max(counts.get(topic, 1) for topic in topics)) for name, topics in wanted.items()]
        ensure_topics(admin, self.bootstrap_servers, specs, principal=principal_of(self.config))
        self._process.has_dead_letter_topics = True

    def _producer_config(self) -> dict[str, Any]:
        if not output_topics(self.group, self.handlers):
            return {}
        config = ConsumerSettings(config=clients.portable(self.config)).producer_config()
        return {"message.timeout.ms": _LETTER_TIMEOUT_MS, **config, "bootstrap.servers": self.bootstrap_servers}

    def _require_picklable(self) -> None:
        for topic, handler in self.handlers.items():
            name = f"handler {handler.name} of {topic}"
            require_packable(f"the {name}", handler.function)
            for option in ("filter", "decoder", "key", "encoder", "retry"):
                require_packable(f"the option {option} of the {name}", getattr(handler, option))
        for kind, parts in (("middleware", self.middlewares), ("lifespan", self.lifespans)):
            for part in parts:
                require_packable(f"the {kind} {name_of(part)}", part)
        for resource in self.resources:
            require_packable(f"the worker_resource {made_by(resource).__qualname__}", resource)
        # All together: what only fails in company.
        require_packable(f"the handlers of {self.group}", self._work())

    def __reduce__(self) -> tuple[Callable[[bytes], HandlerSink], tuple[bytes]]:
        """Be pickled as a whole, so that a resource stays the one that its handlers use; telemetry stays here."""
        kept = {
            option.name: getattr(self, option.name)
            for option in fields(self)
            if option.init and option.name != "telemetry"
        }
        return _rebuilt, (pack(kept),)


def _rebuilt(packed: bytes) -> HandlerSink:
    return HandlerSink(**unpack(packed))
