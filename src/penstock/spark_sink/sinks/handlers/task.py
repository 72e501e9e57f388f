"""What Spark calls in a task on an executor: rows in, rows to publish and a report out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain

import pyarrow as pa
from pyspark import TaskContext

from penstock.clients.gc_pause import imports_set_aside
from penstock.consumer.handlers.options.ordering import Ordering
from penstock.errors import SinkError
from penstock.spark_sink.sinks.handlers.engine import TaskEngine, TaskWork
from penstock.spark_sink.sinks.handlers.pickling import unpack
from penstock.spark_sink.sinks.handlers.report import TaskReport
from penstock.spark_sink.sinks.handlers.results import ResultRows
from penstock.spark_sink.sinks.handlers.rows import TaskRows, lane_numbers


def run_task(work: TaskWork, batches: Iterator[pa.RecordBatch], task: int, attempt: int) -> Iterator[pa.RecordBatch]:
    """Handle the rows of a task, by its number; yields rows of `results`, of which the last has its report.

    `attempt` is how often the task had failed before. Raises as `TaskEngine.run` and `TaskEngine.finish`.
    """
    begun = time.monotonic()
    rows = TaskRows(batches, work.handlers.keys(), publishes=work.publishes, notes_senders=work.notes_senders)
    results = ResultRows(publishes=work.publishes, whole=work.atomic_batches)
    engine = TaskEngine(work, rows.stretches(), results)
    with ExitStack() as around:
        engine.enter(around)
        for _ in engine.run():
            yield from results.full()
    report = TaskReport(
        **asdict(engine.finish()),
        task=task,
        attempt=attempt,
        heaviest_lane=max(rows.lanes.values(), default=0),
        seconds=time.monotonic() - begun,
        senders=list(rows.senders),
    )
    yield from results.end(rows.last, report)


def handling(packed: bytes) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return what Spark calls in each task, given the packed `TaskWork`."""

    def handle(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        first = next((batch for batch in batches if batch.num_rows), None)
        if first is None:
            # No lifespan for nothing.
            return
        context = TaskContext.get()
        if context is None:
            raise SinkError("a handler sink's task was run outside of Spark; give the sink to foreachBatch")
        yield from run_task(unpack(packed), chain((first,), batches), context.partitionId(), context.attemptNumber())
        imports_set_aside("handling")

    return handle


def routing(packed: bytes, names: Sequence[str]) -> Callable[..., pa.Array]:
    """Return what Spark calls to find rows' lanes where a user's function gives the keys (else see `spread`).

    Given are the packed orders of the topics and the columns' names.
    """
    orderings: dict[str, Ordering] = {}

    def lanes(*columns: pa.Array) -> pa.Array:
        if not orderings:
            orderings.update(unpack(packed))
        return lane_numbers(orderings, dict(zip(names, columns, strict=True)))

    return lanes
