"""What Spark calls in a task: the consumer's engine over its rows, rows to publish and a report out.

A task has its rows to itself and in order, so there is no rebalance and nothing to commit, and nothing of Kafka is
connected; lanes, parked keys, batches and dead letters are the consumer's (`consumer/engine.py`). The task's thread
puts rows on lanes and serves the timers; one more thread calls plain handlers, on one lane of each group: a key waits
for its retry, the others go on. An event loop serves many lanes, where some handler is an `async def`.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pyarrow as pa

from penstock.clients.gc_pause import collection_put_off, imports_set_aside
from penstock.consumer.assignments import Assignment, Fetch, total_size_in_bytes
from penstock.consumer.engine import Engine
from penstock.consumer.handlers.environment import MiddlewareSpec, WorkerResource, enter_all
from penstock.consumer.handlers.functions import Context
from penstock.consumer.handlers.handler import Handler
from penstock.consumer.outbox.dead_letters import DeadLetterLimit
from penstock.consumer.run.executor import ThreadsAndTasks
from penstock.consumer.settings import ConsumerSettings
from penstock.errors import PenstockError, SinkError
from penstock.message import Record
from penstock.offsets import Tracker
from penstock.routing import Run
from penstock.spark_sink.sinks.handlers.results import OUTCOMES, BatchReport, ResultRows
from penstock.spark_sink.sinks.handlers.rows import stretches

_log = logging.getLogger("penstock.handler_sink")

#: Seconds between two looks of the task's thread at what others leave to it: few at first, for a task of some hundred
#: rows is done in a millisecond; in the end so many that it costs nothing, for Python gives a busy thread's lock to
#: another one no sooner.
_FIRST_LOOK_S, _LOOK_S = 0.0001, sys.getswitchinterval()
#: Lanes of `async def` handlers: to make them is most of what a task of a few rows costs.
_MOST_LANES = 2048
#: What comes of a message that fails a task, in words.
_ENDS = "the query ends and the batch comes again"


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Those settings of `HandlerSink` that tasks need; what they mean stands there."""

    handlers: Mapping[str, Handler]
    group: str = field(kw_only=True)
    middlewares: Sequence[MiddlewareSpec] = field(default=(), kw_only=True)
    lifespans: Sequence[Callable[[], Any]] = field(default=(), kw_only=True)
    resources: Sequence[WorkerResource[Any]] = field(default=(), kw_only=True)
    max_concurrency: int = field(default=1_000, kw_only=True)
    max_in_flight: int = field(default=10_000, kw_only=True)
    max_in_flight_bytes: int = field(default=128 * 1024 * 1024, kw_only=True)
    dead_letter_limit: DeadLetterLimit | None = field(default=None, kw_only=True)


class TaskEngine:
    """Handles the rows of one task. Its methods are for the task's thread.

    Args:
        work: what is done with them.
        stretches: the rows; each stretch is of one source partition.
        results: takes what handlers return, and dead letters.
    """

    def __init__(self, work: TaskSettings, stretches: Iterator[list[Record]], results: ResultRows) -> None:
        self._work = work
        self._stretches = stretches
        #: Whether all rows were put on lanes.
        self._has_all = False
        #: Written by any thread, the first time.
        self._failure: BaseException | None = None
        #: Whether nothing was under way, or to come, at the last look.
        self._was_idle = False
        self._look_s = _FIRST_LOOK_S
        self._context = Context(group=work.group)
        settings = ConsumerSettings(
            workers=1,
            lanes_per_worker=1,
            max_concurrency=work.max_concurrency,
            dead_letter_limit=work.dead_letter_limit,
        )
        self._engine = engine = Engine(
            work.group,
            work.handlers,
            settings,
            time,
            work.middlewares,
            context=self._context,
            outbox=results,
            fail=self._fail,
            most_lanes=_MOST_LANES,
        )
        engine.dead_letter_publisher.limits.ends = _ENDS
        #: What calls handlers.
        self._executor = engine.executor = ThreadsAndTasks(
            work.group, settings, plan=engine.lane_plan, processor=engine.processor, closing=self._close_resources
        )
        #: More rows are put on lanes while fewer are not done; a batch has room among them.
        self._most = max(work.max_in_flight, *(handler.batch for handler in work.handlers.values()))
        #: Rows put on lanes so far: the next one's number, by which all topics' are tracked together.
        self._taken = 0
        self._tracker = Tracker(0)
        #: One for all partitions of a topic, so that a batch may have messages of several.
        self._topics: dict[str, Assignment] = {}
        for topic, route in engine.routes.items():
            route.linger = math.inf  # a batch goes when it is full, or nothing more can join it
            self._topics[topic] = assignment = Assignment(topic, -1, route, start=0)
            assignment.tracker = self._tracker

    def enter(self, around: ExitStack) -> None:
        """Begin the lifespans and what calls handlers; `around` ends both, as a consumer does."""
        executor = self._executor
        around.callback(executor.close)
        self._context.state = enter_all(self._work.lifespans, around, executor.run_async)
        # However long handlers take: the batch may come again.
        around.callback(executor.stop, threading.TIMEOUT_MAX)
        executor.start()

    def run(self) -> Iterator[None]:
        """Handle all rows; yields now and then, for the caller to take results.

        Raises `SinkError` where a message failed for good whose handler stops then, or one was given up too many.
        """
        while self._failure is None and self._step():
            yield
        if self._failure is not None:
            raise _error_of_task(self._failure) from None  # its text may hold the message

    def _step(self) -> bool:
        """Do what is next, or wait for it; returns whether there was something."""
        self._engine.timers.serve(time.monotonic())
        return self._feed() or self._wait()

    def finish(self) -> BatchReport:
        """Return what became of the rows, once `run` and what `enter` began have ended; `SinkError` of some nothing."""
        counts = self._engine.statistics(workers=1)
        outcomes = {outcome: getattr(counts, outcome) for outcome in OUTCOMES}
        report = BatchReport(rows=self._taken, results=counts.published, tasks=1, **outcomes)
        if report.rows != (done := report.handled + report.filtered + report.dead_letters + report.dropped):
            raise SinkError(
                f"of {report.rows} messages of a task {done} are accounted for: a retry policy has no end, or "
                "this is a defect of penstock; the batch comes again"
            )
        return report

    def _feed(self) -> bool:
        """Put rows on lanes; returns whether there were any, and room for them."""
        load, processor = self._tracker.load(), self._engine.processor
        if self._has_all or load.messages >= self._most or load.bytes >= self._work.max_in_flight_bytes:
            return False
        records = next(self._stretches, None)
        if records is None:
            self._has_all = True
            return False
        processor.set_aside.draining, self._look_s = False, _FIRST_LOOK_S
        assignment = self._topics[records[0].topic()]
        first, self._taken = self._taken, self._taken + len(records)
        block = self._tracker.register(range(first, self._taken), total_size_in_bytes(records, assignment))
        fetch, lanes = Fetch(assignment, block, time.monotonic()), assignment.route.lanes
        fetch.ask_keys(records)
        places = {0: list(range(len(records)))} if len(lanes) == 1 else _places(fetch, records)
        for number, indexes in places.items():
            taken = records if len(places) == 1 else [records[index] for index in indexes]
            lanes[number].runs.append(Run(fetch, first, taken, indexes))
        processor.wake(self._engine.scheduler.ready(lanes[number] for number in places))
        return True

    def _wait(self) -> bool:
        """Wait until there may be something to do; returns False where nothing is left that could bring it."""
        engine, load = self._engine, self._tracker.load()
        # A lane that was given back with something to do is queued again a moment later.
        is_idle = engine.scheduler.idle and not any(lane.runs or lane.due for lane in engine.scheduler.lanes)
        if (is_idle or self._has_all) and not engine.processor.set_aside.draining:
            engine.processor.drain()  # nothing more can join a batch now
            return True
        if self._has_all and not load.messages:
            return False
        due = engine.timers.next_due() or math.inf
        is_at_work = engine.processor.deferred or load.messages > load.parked
        was_idle, self._was_idle = self._was_idle, is_idle and math.isinf(due) and not is_at_work
        if self._was_idle and was_idle:
            # Twice: it was not one moment that the questions were answered in.
            return False
        time.sleep(min(self._look_s, max(0.0, due - time.monotonic())))
        self._look_s = min(2 * self._look_s, _LOOK_S)
        return True

    def _fail(self, error: BaseException) -> None:
        """Handle nothing more. Any thread."""
        self._failure = self._failure or error
        for assignment in self._topics.values():
            assignment.active = False

    def _close_resources(self) -> None:
        for resource in self._work.resources:
            resource.close()


def handle(work: TaskSettings, publishes: bool, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Handle the rows of one Spark task; `publishes` says whether the sink may publish anything.

    Yields rows of `results`, of which the last has the task's report; nothing begins where there are no rows. Raises as
    `TaskEngine.run` and `TaskEngine.finish`.
    """
    given = iter(batches)
    first = next((batch for batch in given if batch.num_rows), None)
    if first is None:
        return
    results = ResultRows(publishes=publishes)
    with collection_put_off():  # for the lanes: there may be thousands
        engine = TaskEngine(work, stretches(chain((first,), given), work.handlers.keys()), results)
    with ExitStack() as around:
        engine.enter(around)
        for _ in engine.run():
            yield from results.full()
    yield from results.end(engine.finish())
    imports_set_aside("handling")


def _places(fetch: Fetch, records: Sequence[Record]) -> dict[int, list[int]]:
    """Return which of the records go to which lane."""
    first, ordering = records[0], fetch.assignment.route.ordering
    places: defaultdict[int, list[int]] = defaultdict(list)
    for index, number in enumerate(ordering.lane_numbers(first.topic(), first.partition(), records, fetch.keys)):
        places[number].append(index)
    return places


def _error_of_task(error: BaseException) -> BaseException:
    """Return what a task raises; not chained, for Spark writes stacks of tasks into logs and events."""
    if not isinstance(error, PenstockError) or isinstance(error, SinkError):
        return error
    _log.debug("%s", error, exc_info=error.__cause__)
    return SinkError(str(error))
