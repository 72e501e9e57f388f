"""Handles the rows of a Spark task with the consumer's engine. Returns rows to publish and a report.

A task gets its rows in order and shares them with no other task. So it needs no rebalance, no commit and no connection
to Kafka. Lanes, parked keys, batches and dead letters are the consumer's (`consumer/engine.py`). The task's thread puts
rows on lanes and serves the timers. One more thread calls plain handlers, on one lane of each group: a key that waits
for its retry does not block other keys. If there are `async def` handlers, an event loop serves many lanes.
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

#: Seconds between two polls of the task's thread, at first and at most. It begins short, because a task of some hundred
#: rows takes a millisecond. It ends at Python's switch interval, where it costs nothing: a busy thread does not give up
#: the interpreter lock earlier.
_FIRST_POLL_S, _MAX_POLL_S = 0.0001, sys.getswitchinterval()
#: Lanes of `async def` handlers: making them is most of the cost of a small task.
_MAX_LANES = 2048
#: The consequence of a message that fails a task, for error texts.
_ENDS = "the query ends and the batch comes again"


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """The settings of `HandlerSink` that tasks need; it explains them."""

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
    """Handles the rows of one task. Only the task's thread calls its methods.

    Args:
        work: the handlers and their settings.
        stretches: the rows, in lists of one source partition each.
        results: collects the results of handlers, and dead letters.
    """

    def __init__(self, work: TaskSettings, stretches: Iterator[list[Record]], results: ResultRows) -> None:
        self._work = work
        self._stretches = stretches
        #: Whether all rows are on lanes.
        self._all_read = False
        #: The first failure. Any thread writes it.
        self._failure: BaseException | None = None
        #: Whether nothing was running or due at the last poll.
        self._was_idle = False
        self._poll_s = _FIRST_POLL_S
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
            most_lanes=_MAX_LANES,
        )
        engine.dead_letter_publisher.limits.ends = _ENDS
        #: Calls the handlers.
        self._executor = engine.executor = ThreadsAndTasks(
            work.group, settings, plan=engine.lane_plan, processor=engine.processor, closing=self._close_resources
        )
        #: Maximum number of unfinished rows on lanes. A whole batch fits.
        self._max_unfinished = max(work.max_in_flight, *(handler.batch for handler in work.handlers.values()))
        #: Rows put on lanes so far. This is the next row's number; one tracker counts the rows of all topics.
        self._taken = 0
        self._tracker = Tracker(0)
        #: One for all partitions of a topic, so that a batch may mix their messages.
        self._topics: dict[str, Assignment] = {}
        for topic, route in engine.routes.items():
            route.linger = math.inf  # a batch starts when it is full, or no more messages can join it
            self._topics[topic] = assignment = Assignment(topic, -1, route, start=0)
            assignment.tracker = self._tracker

    def enter(self, stack: ExitStack) -> None:
        """Start the lifespans and the executor; `stack` ends both, in a consumer's order."""
        executor = self._executor
        stack.callback(executor.close)
        self._context.state = enter_all(self._work.lifespans, stack, executor.run_async)
        # Without a time limit: otherwise a handler could still run while Spark repeats the batch.
        stack.callback(executor.stop, threading.TIMEOUT_MAX)
        executor.start()

    def run(self) -> Iterator[None]:
        """Handle all rows; yields often, so that the caller can take results.

        Raises `SinkError` if a message failed for good and its handler stops then, or if too many were given up.
        """
        while self._failure is None and self._step():
            yield
        if self._failure is not None:
            raise _error_of_task(self._failure) from None  # its text may hold the message

    def _step(self) -> bool:
        """Do the next work, or wait for it. Return False if there is none."""
        self._engine.timers.serve(time.monotonic())
        return self._feed() or self._wait()

    def finish(self) -> BatchReport:
        """Return the report, after the end of `run` and of all that `enter` started; `SinkError` if rows are lost."""
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
        """Put rows on lanes. Return False if there are no more, or no room for them."""
        load, processor = self._tracker.load(), self._engine.processor
        if self._all_read or load.messages >= self._max_unfinished or load.bytes >= self._work.max_in_flight_bytes:
            return False
        records = next(self._stretches, None)
        if records is None:
            self._all_read = True
            return False
        processor.set_aside.draining, self._poll_s = False, _FIRST_POLL_S
        assignment = self._topics[records[0].topic()]
        first, self._taken = self._taken, self._taken + len(records)
        block = self._tracker.register(range(first, self._taken), total_size_in_bytes(records, assignment))
        fetch, lanes = Fetch(assignment, block, time.monotonic()), assignment.route.lanes
        fetch.ask_keys(records)
        indexes_by_lane = {0: list(range(len(records)))} if len(lanes) == 1 else _indexes_by_lane(fetch, records)
        for number, indexes in indexes_by_lane.items():
            taken = records if len(indexes_by_lane) == 1 else [records[index] for index in indexes]
            lanes[number].runs.append(Run(fetch, first, taken, indexes))
        processor.wake(self._engine.scheduler.ready(lanes[number] for number in indexes_by_lane))
        return True

    def _wait(self) -> bool:
        """Wait until there may be work. Return False if no more work can come."""
        engine, load = self._engine, self._tracker.load()
        # A released lane that still has work is queued again a moment later.
        is_idle = engine.scheduler.idle and not any(lane.runs or lane.due for lane in engine.scheduler.lanes)
        if (is_idle or self._all_read) and not engine.processor.set_aside.draining:
            engine.processor.drain()  # no more messages can join a batch now
            return True
        if self._all_read and not load.messages:
            return False
        due = engine.timers.next_due() or math.inf
        is_at_work = engine.processor.deferred or load.messages > load.parked
        was_idle, self._was_idle = self._was_idle, is_idle and math.isinf(due) and not is_at_work
        if self._was_idle and was_idle:
            # Twice, because the values above were not read at one moment.
            return False
        time.sleep(min(self._poll_s, max(0.0, due - time.monotonic())))
        self._poll_s = min(2 * self._poll_s, _MAX_POLL_S)
        return True

    def _fail(self, error: BaseException) -> None:
        """Stop all handling. Any thread may call it."""
        self._failure = self._failure or error
        for assignment in self._topics.values():
            assignment.active = False

    def _close_resources(self) -> None:
        for resource in self._work.resources:
            resource.close()


def handle(work: TaskSettings, publishes: bool, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Handle the rows of one Spark task; `publishes` says whether the sink may publish messages.

    Yields rows of `PUBLISHED`; the last one has the task's report. A task without rows starts and yields nothing.
    Raises the errors of `TaskEngine.run` and `TaskEngine.finish`.
    """
    remaining = iter(batches)
    first = next((batch for batch in remaining if batch.num_rows), None)
    if first is None:
        return
    results = ResultRows(publishes=publishes)
    with collection_put_off():  # because there may be thousands of lanes
        engine = TaskEngine(work, stretches(chain((first,), remaining), work.handlers.keys()), results)
    with ExitStack() as stack:
        engine.enter(stack)
        for _ in engine.run():
            yield from results.full()
    yield from results.end(engine.finish())
    imports_set_aside("handling")


def _indexes_by_lane(fetch: Fetch, records: Sequence[Record]) -> dict[int, list[int]]:
    """Return the indexes of the records by lane."""
    first, ordering = records[0], fetch.assignment.route.ordering
    indexes_by_lane: defaultdict[int, list[int]] = defaultdict(list)
    for index, number in enumerate(ordering.lane_numbers(first.topic(), first.partition(), records, fetch.keys)):
        indexes_by_lane[number].append(index)
    return indexes_by_lane


def _error_of_task(error: BaseException) -> BaseException:
    """Return the error that a task raises. It is not chained: Spark writes stacks of tasks into logs and events."""
    if not isinstance(error, PenstockError) or isinstance(error, SinkError):
        return error
    _log.debug("%s", error, exc_info=error.__cause__)
    return SinkError(str(error))
