"""The executor of an app under test: calls handlers as a running app does, but in the caller's thread.

`run.handler_calls.serve` calls plain handlers, and `TaskPool` calls `async def` handlers. Two things differ here. Each
message is a call of its own, so that it has the whole time limit. The event loop runs only while the app settles.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import TypeVar, cast

from penstock.consumer.assignments import ConsumerLane
from penstock.consumer.engine import Engine
from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.route import Failed
from penstock.consumer.lanes.processor import LaneProcessor
from penstock.consumer.lanes.slot import ExecutionSlot, LaneProcessing, Outcome, Slice
from penstock.consumer.run.event_loop import TaskPool
from penstock.consumer.run.executor import Executor
from penstock.consumer.run.handler_calls import serve
from penstock.errors import ConfigurationError, PenstockError
from penstock.message import calling_handlers_of

ResultT = TypeVar("ResultT")

#: Real seconds to wait for handlers on the event loop, before the poll loop and plain handlers run again.
_POLL_S = 0.01
#: Real seconds for cancelled handlers to end.
_CANCEL_S = 0.5


class HandlerCalls(Executor):
    """Calls the handlers of a consumer, only in `work` and `run_tasks`. For one thread."""

    def __init__(self, engine: Engine, handler_timeout: float) -> None:
        self._engine = engine
        self._processor = OneByOne(engine.processor)
        count = engine.settings.workers if engine.lane_plan.has_threads else 0
        names = (f"penstock-test-worker-{engine.group}-{number}" for number in range(count))
        self._workers = [ExecutionSlot(Kind.THREAD, name) for name in names]
        self.tasks: SteppedTasks | None = None
        if engine.lane_plan.has_tasks:
            self.tasks = SteppedTasks(engine, self._processor, handler_timeout)

    @property
    def slots(self) -> list[ExecutionSlot]:  # type: ignore[override] # it is never set
        """The execution slots of all workers and tasks."""
        return self._workers if self.tasks is None else [*self._workers, *self.tasks.slots]

    def work(self) -> bool:
        """Call plain handlers until no lane is ready, then run tasks for a moment. Return whether any handler ran."""
        engine, worked = self._engine, False
        with calling_handlers_of(engine.group):
            for number, slot in enumerate(self._workers):
                queue = number if engine.settings.pinned else 0
                while (lane := engine.scheduler.take(queue, slot.owed_s)) is not None:
                    worked = True
                    serve(lane, slot, cast("LaneProcessor", self._processor))
        return self.run_tasks() or worked

    def run_tasks(self) -> bool:
        """Run the tasks of `async def` handlers for a moment. Return whether there are any."""
        with calling_handlers_of(self._engine.group):
            return self.tasks is not None and self.tasks.work()


class OneByOne:
    """An engine's lane processor that yields one message per slice; the next slice has the others."""

    def __init__(self, processor: LaneProcessor) -> None:
        self._processor = processor
        self.scheduler, self.fail = processor.scheduler, processor.fail

    def process(self, lane: ConsumerLane, slot: ExecutionSlot) -> LaneProcessing:
        """Process a lane. A `KeyboardInterrupt` in a handler is raised here, because it should end the test."""
        processing, outcome = self._processor.process(lane, slot), cast("Outcome", None)
        while True:
            try:
                work = processing.send(outcome)
            except StopIteration:
                return
            if isinstance(work, Slice):
                work.cut()
            with _time_limit(slot):
                outcome = yield work
            if isinstance(outcome, Failed) and isinstance(outcome.error, KeyboardInterrupt):
                raise outcome.error


@contextmanager
def _time_limit(slot: ExecutionSlot) -> Iterator[None]:
    """Interrupt a plain handler after its time limit. An `async def` handler has its own wrapper for that."""
    fetch = next(iter(slot.fetches), slot.fetch)
    limit = None if fetch is None or slot.kind is Kind.TASK else fetch.assignment.route.time_limit
    ended, thread_id = threading.Event(), threading.get_ident()

    def interrupt() -> None:
        # Again if the call has not begun yet: the machine may be busy.
        while not ended.wait(limit) and not slot.guard.interrupt(lambda: not ended.is_set(), thread_id):
            pass

    if limit is not None:
        threading.Thread(target=interrupt, name="penstock-test-time-limit", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class SteppedTasks(TaskPool):
    """The tasks of a consumer, on an event loop that runs only in calls of this class.

    If no handler makes progress for `handler_timeout` real seconds, they count as hanging. `ConfigurationError` if an
    event loop already runs in this thread.
    """

    def __init__(self, engine: Engine, processor: OneByOne, handler_timeout: float) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise ConfigurationError(
                "a TestApp with `async def` handlers runs an event loop of its own, but one runs in this thread "
                "already; use it in a plain test function"
            )
        limit, queue = engine.settings.max_concurrency, engine.lane_plan.task_queue
        super().__init__(engine.group, limit, queue, cast("LaneProcessor", processor), lambda: None)
        # As on the thread of a running app: handlers do not see the context variables of the test.
        self._context = Context()
        self._handler_timeout = handler_timeout
        # The messages in the handlers at the last progress of any handler, and the time of that progress.
        self._running: list[int] = []
        self._progress_at = 0.0

    def run_now(self, awaitable: Awaitable[ResultT]) -> ResultT:
        """Run an awaitable on the loop and return its result."""

        async def wait() -> ResultT:
            return await awaitable

        return self._loop.run_until_complete(wait())

    def work(self) -> bool:
        """Start tasks of ready lanes, run all tasks for a moment, and return whether there are any.

        `PenstockError` if they hang.
        """
        self._pump()
        if not self._tasks:
            self._running = []
            return False
        self._loop.run_until_complete(
            asyncio.wait(set(self._tasks), timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
        )
        # By identity: the client's records compare all their contents.
        running = [id(slot.record) for slot in self.slots]
        if running != self._running:
            self._running, self._progress_at = running, time.monotonic()
        elif self._tasks and time.monotonic() - self._progress_at > self._handler_timeout:
            fetches = [fetch for slot in self.slots for fetch in (slot.fetches or (slot.fetch,))]
            names = {str(fetch.assignment) for fetch in fetches if fetch is not None}
            count = len(self._tasks)
            self._abandon()
            raise PenstockError(
                f"{count} `async def` handlers have not ended within {self._handler_timeout:g} s, for messages of "
                f"{', '.join(sorted(names))}; their time is real: give the TestApp a longer handler_timeout=, or let "
                "them return a DeferredCompletion"
            )
        return True

    def _abandon(self) -> None:
        """Cancel the running handlers, so that the test can end, or go on without their lanes."""
        for slot in self.slots:
            # As abandoned tasks: they return no lane, so the hanging message does not start again.
            slot.task = None
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.wait(set(self._tasks), timeout=_CANCEL_S))

    def cancel_all(self) -> None:
        """Cancel the running handlers, and start no others."""
        # Before the loop runs again: after a `KeyboardInterrupt` it would first call the handler once more.
        self._ended = True
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(self._end(_CANCEL_S))

    def close(self) -> None:
        """Close the loop."""
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
