"""What Spark calls in a task: the consumer's lanes over its rows, rows to publish and a report out.

A task has its rows to itself and in order, so there is no rebalance and nothing to commit; every other rule of lanes,
parked keys and batches is the consumer's (`consumer/execution/lanes`). The task's thread fills the lanes and serves the
timers; one more thread calls plain handlers, on one lane of each group: a key waits for its retry, the others go on. An
event loop serves many lanes, where some handler is an `async def`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa

from penstock.clients.gc_pause import imports_set_aside
from penstock.consumer.assignments import Assignment, Fetch
from penstock.consumer.execution.lane_plan import LanePlan
from penstock.consumer.execution.lanes.lane_processor import LaneProcessor
from penstock.consumer.execution.threads_and_tasks import ThreadsAndTasks
from penstock.consumer.failures.dead_letters import DeadLetterLimit, DeadLetterLimits, DeadLetterPublisher
from penstock.consumer.failures.timers import Timers
from penstock.consumer.handlers.environment import MiddlewareSpec, WorkerResource, enter_all
from penstock.consumer.handlers.functions import ContextFactory
from penstock.consumer.handlers.handler import Handler, Kind
from penstock.consumer.handlers.route import Routes
from penstock.consumer.outbox.outbox import HandlerResults
from penstock.consumer.settings import ConsumerSettings
from penstock.errors import PenstockError, SinkError
from penstock.message import Record
from penstock.offsets import Block, Tracker
from penstock.routing import Run, Scheduler
from penstock.spark_sink.sinks.handlers.results import BatchReport, ResultRows
from penstock.spark_sink.sinks.handlers.rows import stretches

_log = logging.getLogger("penstock.handler_sink")

#: Rows on lanes, at least, before no more are put there.
_LEAST_WINDOW = 4096
#: Seconds between two looks of the task's thread at what others leave to it, as of the consumer's poll thread.
_LOOK_S = 0.05
#: Stands for the offsets of a fetch, which a task does not track.
_NO_OFFSETS = Block((0,), 0)
#: What comes of a message that fails a task, in words.
_ENDS = "the query ends and the batch comes again"


class Progress(Tracker):
    """Counts what is done of a task's rows, and what of them waits, for all topics together. Thread-safe."""

    def __init__(self) -> None:
        super().__init__(0)
        # Written by the task's thread.
        self.taken = 0
        #: Rows under way below which the task's thread is woken.
        self.low = 0
        # Guarded by the tracker's lock.
        self.done = self.waiting = self.waiting_bytes = 0
        #: Set when the task's thread has something to look at.
        self.changed = threading.Event()

    def complete(self, block: Block, indexes: Sequence[int]) -> None:  # noqa: ARG002 - as a tracker's
        """Count rows as done."""
        with self._lock:
            self.done += len(indexes)
        if self.under_way <= self.low:
            self.changed.set()

    def park(self, count: int, size_bytes: int) -> None:
        """Count rows as waiting; negative numbers take them back."""
        with self._lock:
            self.waiting += count
            self.waiting_bytes += size_bytes

    @property
    def under_way(self) -> int:
        """Rows on lanes or in handlers."""
        return self.taken - self.done - self.waiting


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Those settings of `HandlerSink` that tasks need; what they mean stands there."""

    handlers: Mapping[str, Handler]
    group: str = field(kw_only=True)
    middlewares: Sequence[MiddlewareSpec] = field(default=(), kw_only=True)
    lifespans: Sequence[Callable[[], Any]] = field(default=(), kw_only=True)
    resources: Sequence[WorkerResource[Any]] = field(default=(), kw_only=True)
    max_concurrency: int = field(default=1_000, kw_only=True)
    max_parked: int = field(default=1_000, kw_only=True)
    max_parked_bytes: int = field(default=32 * 1024 * 1024, kw_only=True)
    dead_letter_limit: DeadLetterLimit | None = field(default=None, kw_only=True)


class TaskEngine:
    """Handles the rows of one task. Its methods are for the task's thread.

    Args:
        work: what is done with them.
        stretches: the rows; each stretch is of one source partition, and its offsets rise.
        results: takes what handlers return, and dead letters.
    """

    def __init__(self, work: TaskSettings, stretches: Iterator[list[Record]], results: ResultRows) -> None:
        self._work = work
        self._stretches = stretches
        #: What is left of the stretch at hand; None once there are no more rows.
        self._stretch: list[Record] | None = []
        # Nothing is ever refused here: a batch that cannot be published fails as a whole.
        self._results = HandlerResults(results, lambda _lane, _refused: None)
        self._failure: BaseException | None = None
        self._arrival = 0
        #: Whether nothing was under way, or to come, at the last look.
        self._was_idle = False
        self._progress = Progress()
        self._timers = Timers()
        limits = DeadLetterLimits(work.dead_letter_limit, lambda: self._counts().handled, _ENDS)
        self._publisher = DeadLetterPublisher(work.group, time, self._timers, limits, results, fail=self._fail)
        settings = ConsumerSettings(workers=1, max_concurrency=work.max_concurrency)
        most = max(handler.batch for handler in work.handlers.values())
        #: More rows are put on lanes while fewer are on their way: enough for every lane of a handler to have a full
        #: batch.
        self._window = max(2 * work.max_concurrency, _LEAST_WINDOW, most)
        has_tasks = any(handler.kind is Kind.TASK for handler in work.handlers.values())
        plan = LanePlan(work.handlers.values(), settings, self._window // most if has_tasks else 1)
        self._scheduler: Scheduler[Fetch, Record] = Scheduler(plan.queues)
        self._processor = LaneProcessor(
            time,
            settings.run_seconds,
            scheduler=self._scheduler,
            timers=self._timers,
            publisher=self._publisher,
            results=self._results,
            wake=self._wake,
            fail=self._fail,
        )
        #: What calls handlers.
        self._executor = ThreadsAndTasks(
            work.group, settings, plan=plan, processor=self._processor, closing=self._close_resources
        )
        self._contexts = ContextFactory(work.group)
        routes = Routes(
            work.group,
            time,
            partial(plan.lanes_of, self._scheduler.lanes),
            middlewares=work.middlewares,
            contexts=self._contexts,
            telemetry=None,
        )
        #: One for all partitions of a topic, so that a batch may have messages of several.
        self._topics: dict[str, Assignment] = {}
        for topic, handler in work.handlers.items():
            routes.add(topic, handler)
            routes[topic].linger = math.inf  # a batch goes when it is full, or nothing more can join it
            self._topics[topic] = assignment = Assignment(topic, -1, routes[topic], start=0)
            assignment.tracker = self._progress

    def enter(self, around: ExitStack) -> None:
        """Begin the lifespans and what calls handlers; `around` ends both, as a consumer does."""
        executor = self._executor
        around.callback(executor.close)
        self._contexts.state = enter_all(self._work.lifespans, around, executor.run_async)
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
        self._progress.changed.clear()
        self._timers.serve(time.monotonic())
        return self._feed() or self._wait()

    def finish(self) -> BatchReport:
        """Return what became of the rows, once `run` and what `enter` began have ended; `SinkError` of some nothing."""
        counts = self._counts()
        if counts.rows != counts.done:
            raise SinkError(
                f"of {counts.rows} messages of a task {counts.done} are accounted for: a retry policy has no end, or "
                "this is a defect of penstock; the batch comes again"
            )
        return counts

    def _counts(self) -> BatchReport:
        slots = self._executor.slots
        return BatchReport(
            rows=self._progress.taken,
            handled=self._results.handled + sum(slot.handled for slot in slots),
            filtered=sum(slot.filtered for slot in slots),
            dead_letters=self._publisher.dead_letters,
            dropped=sum(slot.dropped for slot in slots),
            failed=sum(slot.failed for slot in slots),
            retried=sum(slot.retried for slot in slots),
            results=self._results.published,
            tasks=1,
        )

    def _feed(self) -> bool:
        """Put rows on lanes; returns whether there were any, and room for them."""
        progress = self._progress
        room = self._work.max_parked - progress.waiting
        if room <= 0 or progress.waiting_bytes >= self._work.max_parked_bytes or not self._has_rows():
            # Nothing more can join a batch now.
            self._serve_partial_batches()
            return False
        if progress.under_way >= self._window or self._stretch is None:
            if self._scheduler.idle:
                # All of that waits for more of its batch, which has no room.
                self._serve_partial_batches()
            return False
        records, self._stretch = self._stretch[:room], self._stretch[room:]
        self._processor.draining = False
        progress.taken += len(records)
        fetch = Fetch(self._topics[records[0].topic()], _NO_OFFSETS, time.monotonic())
        route = fetch.assignment.route
        fetch.ask_keys(records)
        lanes = route.lanes
        places = {0: list(range(len(records)))} if len(lanes) == 1 else _places(fetch, records)
        for number, indexes in places.items():
            taken = records if len(lanes) == 1 else [records[index] for index in indexes]
            lanes[number].runs.append(Run(fetch, self._arrival, taken, indexes))
        self._arrival += len(records)
        self._wake(self._scheduler.ready(lanes[number] for number in places))
        return True

    def _has_rows(self) -> bool:
        if self._stretch == []:
            self._stretch = next(self._stretches, None)
            self._progress.low = 0 if self._stretch is None else self._window // 2
        return self._stretch is not None

    def _serve_partial_batches(self) -> None:
        if not self._processor.draining:
            self._processor.drain()

    def _wait(self) -> bool:
        """Wait until there may be something to do; returns False where nothing is left that could bring it."""
        progress = self._progress
        if self._stretch is None and progress.done == progress.taken:
            return False
        due = self._timers.next_due() or math.inf
        is_at_work = self._processor.deferred or progress.under_way
        is_idle = math.isinf(due) and not is_at_work and self._scheduler.idle
        if is_idle and self._was_idle:
            # Twice: a lane that is given back looks idle before it is queued again.
            return False
        self._was_idle = is_idle
        progress.changed.wait(min(_LOOK_S, max(0.0, due - time.monotonic())))
        return True

    def _wake(self, queues: Sequence[int]) -> None:
        self._executor.wake(queues)

    def _fail(self, error: BaseException) -> None:
        """Handle nothing more. Any thread."""
        self._failure = self._failure or error
        for assignment in self._topics.values():
            assignment.active = False
        self._progress.changed.set()

    def _close_resources(self) -> None:
        for resource in self._work.resources:
            resource.close()


@dataclass(frozen=True, slots=True)
class HandlingTask:
    """Handles the rows of one Spark task; `publishes` says whether the sink may publish anything. Can be pickled."""

    work: TaskSettings
    publishes: bool

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield rows of `results`, of which the last has the task's report; nothing begins where there are no rows.

        Raises as `TaskEngine.run` and `TaskEngine.finish`.
        """
        given = iter(batches)
        first = next((batch for batch in given if batch.num_rows), None)
        if first is None:
            return
        results = ResultRows(publishes=self.publishes)
        engine = TaskEngine(self.work, stretches(chain((first,), given), self.work.handlers.keys()), results)
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
