"""A task on an executor: rows in, handlers called within middlewares and lifespans, a report out."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import pyarrow as pa
from pyspark import TaskContext

from penstock import clients
from penstock.clients.cluster import ProducerClient
from penstock.clients.gc_pause import imports_set_aside
from penstock.consumer.execution.event_loop import new_event_loop
from penstock.consumer.handlers.context import ContextFactory
from penstock.consumer.handlers.environment.lifespan import enter_all
from penstock.consumer.handlers.environment.middleware import MiddlewareSpec, wrap
from penstock.consumer.handlers.environment.worker_resource import WorkerResource
from penstock.consumer.handlers.handler import Handler, Kind, orderings_of
from penstock.consumer.handlers.options.ordering import Ordering
from penstock.consumer.handlers.route import Route
from penstock.errors import SinkError
from penstock.spark_sink.sinks.handlers.execution import runners
from penstock.spark_sink.sinks.handlers.execution.dead_letters import DeadLetterSettings, TaskDeadLetters
from penstock.spark_sink.sinks.handlers.execution.key_queues import KeyQueues, refuse_results
from penstock.spark_sink.sinks.handlers.execution.report import TaskReport
from penstock.spark_sink.sinks.handlers.execution.rows import lane_numbers, records
from penstock.spark_sink.sinks.handlers.execution.senders import noting_senders
from penstock.spark_sink.sinks.handlers.pickling import unpack
from penstock.spark_sink.sinks.handlers.publishing.result_rows import ResultRows
from penstock.spark_sink.sinks.reports import report_schema

#: The columns of a task's report, as Spark declares them.
REPORT_DDL = (
    "task int, attempt int, rows bigint, handled bigint, filtered bigint, dead_letters bigint, dropped bigint, "
    "failed bigint, retried bigint, results bigint, heaviest_lane bigint, seconds double, senders array<string>"
)


@dataclass(frozen=True, slots=True)
class TaskWork:
    """What every task of a batch does, with the settings of `HandlerSink`. Picklable."""

    handlers: Mapping[str, Handler]
    middlewares: Sequence[MiddlewareSpec]
    lifespans: Sequence[Callable[[], Any]]
    resources: Sequence[WorkerResource[Any]]
    dead_letters: DeadLetterSettings
    max_parked: int
    max_parked_bytes: int
    max_concurrency: int
    notes_senders: bool = False

    def run(
        self, batches: Iterator[pa.RecordBatch], task: int, attempt: int, results: ResultRows | None = None
    ) -> TaskReport:
        """Handle the rows of a task, by its number; `attempt` is how often it had failed before.

        `results` takes what handlers return, and dead letters; without it no handler may return messages. Raises
        `SinkError` where a message failed for good whose handler stops then, or a dead letter was not written.
        """
        begun = time.monotonic()
        lanes: Counter[int] = Counter()
        orderings = orderings_of(self.handlers, 1)
        contexts = ContextFactory(self.dead_letters.group)
        routes = {
            topic: Route(one, orderings[topic], wrap(one, self.middlewares, contexts))
            for topic, one in self.handlers.items()
        }
        senders: dict[str, None] = {}
        if self.notes_senders:
            batches = noting_senders(batches, senders)
        publish = None if results is None else results.add_dead_letter
        dead_letters = TaskDeadLetters(self.dead_letters, lambda: queues.counts, _producer, publish)
        queues = KeyQueues(
            records(batches if results is None else results.note(batches), lanes, self.handlers.keys()),
            routes,
            dead_letters.put,
            max_parked=self.max_parked,
            max_parked_bytes=self.max_parked_bytes,
            take_results=refuse_results if results is None else results.take,
        )
        with ExitStack() as around:
            if any(one.kind is Kind.TASK for one in self.handlers.values()):
                self._run_on_loop(queues, around, contexts)
            else:
                self._enter(around, None, contexts)
                runners.run(queues)
            dead_letters.flush()
        counts = queues.counts
        if counts.rows != counts.done:
            raise SinkError(
                f"of {counts.rows} messages of task {task} {counts.done} are accounted for: a defect of penstock; the "
                "batch comes again, please report it"
            )
        return TaskReport(
            **asdict(counts),
            task=task,
            attempt=attempt,
            heaviest_lane=max(lanes.values(), default=0),
            seconds=time.monotonic() - begun,
            senders=list(senders),
        )

    def _run_on_loop(self, queues: KeyQueues, around: ExitStack, contexts: ContextFactory) -> None:
        runner = around.enter_context(asyncio.Runner(loop_factory=new_event_loop))
        self._enter(around, runner, contexts)
        plain = around.enter_context(ThreadPoolExecutor(1, thread_name_prefix="penstock-handler"))
        # Closed by the thread that has made them.
        around.callback(lambda: plain.submit(self._close_resources).result())

        async def drive() -> None:
            await runners.AsyncRunner(queues, self.max_concurrency, plain).run()

        runner.run(drive())

    def _enter(self, around: ExitStack, runner: asyncio.Runner | None, contexts: ContextFactory) -> None:
        """Begin the lifespans; they end in reverse order, after the resources that may need them are closed."""
        run_async = None if runner is None else partial(_run, runner)
        contexts.state = enter_all(self.lifespans, around, run_async)
        around.callback(self._close_resources)

    def _close_resources(self) -> None:
        for resource in self.resources:
            resource.close()


def _run(runner: asyncio.Runner, awaitable: Awaitable[Any]) -> object:
    async def wait() -> object:
        return await awaitable

    return runner.run(wait())


def _producer(config: dict[str, Any]) -> ProducerClient:
    return cast("ProducerClient", clients.producer(config["bootstrap.servers"], config))


def handling(
    packed: bytes, *, publishes: bool = False, whole: bool = False
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return what Spark calls in each task, given the packed `TaskWork`.

    The task gives its report; where the sink `publishes`, rows of `result_rows`, `whole` saying how.
    """

    def handle(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        first = next((batch for batch in batches if batch.num_rows), None)
        if first is None:
            # No lifespan for nothing.
            return
        work: TaskWork = unpack(packed)
        context = TaskContext.get()
        if context is None:
            raise SinkError("a handler sink's task was run outside of Spark; give the sink to foreachBatch")
        rows, place = chain((first,), batches), (context.partitionId(), context.attemptNumber())
        if publishes:
            with closing(ResultRows(whole=whole)) as results:
                yield from results.batches(work.run(rows, *place, results))
        else:
            yield pa.RecordBatch.from_pylist([asdict(work.run(rows, *place))], schema=report_schema(REPORT_DDL))
        imports_set_aside("handling")

    return handle


def routing(packed: bytes, names: Sequence[str]) -> Callable[..., pa.Array]:
    """Return what Spark calls to find rows' lanes where a user's function gives the keys (else see `lanes`).

    Given are the packed orders of the topics and the columns' names.
    """
    orderings: dict[str, Ordering] = {}

    def lanes(*columns: pa.Array) -> pa.Array:
        if not orderings:
            orderings.update(unpack(packed))
        return lane_numbers(orderings, dict(zip(names, columns, strict=True)))

    return lanes
