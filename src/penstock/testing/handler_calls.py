"""How the handlers of an app under test are called: plain ones in the caller's thread, `async def` ones on a loop.

The loop runs only while the test waits for the app to settle. Each message is a call of its own, so that it has the
whole time limit, and finds no context variables of another.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Coroutine
from contextvars import Context
from typing import TypeVar, cast

from penstock.consumer.assignments import ConsumerLane
from penstock.consumer.engine import Engine
from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.results import DeferredCompletion, Results
from penstock.consumer.handlers.route import Failed, failure_of
from penstock.consumer.lanes.processor import LaneProcessor
from penstock.consumer.lanes.slot import ExecutionSlot, Outcome, Slice, Work
from penstock.consumer.run.handler_calls import call
from penstock.errors import ConfigurationError, PenstockError, raised

ResultT = TypeVar("ResultT")

#: Real seconds to look for what handlers on the loop do, before others have their turn.
_POLL_S = 0.01


def serve(lane: ConsumerLane, slot: ExecutionSlot, processor: LaneProcessor) -> None:
    """Process a lane, as a worker thread does, and give it back."""
    processing, outcome = processor.process(lane, slot), cast("Outcome", None)
    try:
        while True:
            outcome = _call(slot, processing.send(outcome))
    except StopIteration:
        slot.leave()
        processor.scheduler.give_back(lane)


def _call(slot: ExecutionSlot, work: Work | Slice) -> Outcome:
    if isinstance(work, Slice):
        # Its first message alone, so that each has the whole time limit: the others are in the next slice.
        work.cut()
    fetch, ended, thread_id = next(iter(slot.fetches), slot.fetch), threading.Event(), threading.get_ident()
    limit = None if fetch is None else fetch.assignment.route.time_limit

    def interrupt() -> None:
        # Again where the call had not begun by then: the machine may be busy.
        while not ended.wait(limit) and not slot.guard.interrupt(lambda: not ended.is_set(), thread_id):
            pass

    if limit is not None:
        threading.Thread(target=interrupt, name="penstock-test-time-limit", daemon=True).start()
    try:
        outcome = call(slot, work)
    finally:
        ended.set()
    error = getattr(outcome, "error", None)
    if isinstance(error, KeyboardInterrupt):
        # Whoever runs the test wants it to end. On a real worker thread no such thing arrives.
        raise error
    return outcome


class TaskRunner:
    """Runs the tasks of a consumer on a private event loop, only within its calls.

    Without an end of a handler in `handler_timeout` real seconds it is taken to hang. `ConfigurationError` where an
    event loop runs in this thread already.
    """

    def __init__(self, engine: Engine, handler_timeout: float) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise ConfigurationError(
                "a TestApp with `async def` handlers runs an event loop of its own, but one runs in this thread "
                "already; use it in a plain test function"
            )
        self._engine = engine
        self._free: list[ExecutionSlot] = []
        self._handler_timeout = handler_timeout
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended_at = time.monotonic()

    def run(self, awaitable: Awaitable[ResultT]) -> ResultT:
        """Run something on the loop and return its result."""

        async def wait() -> ResultT:
            return await awaitable

        return self._loop.run_until_complete(wait())

    def work(self) -> bool:
        """Let tasks of ready lanes begin and all go on, and tell if there was one; `PenstockError` if one hangs."""
        if not self._tasks:
            self._ended_at = time.monotonic()
        begun = self._begin()
        if not self._tasks:
            return begun
        done, _ = self._loop.run_until_complete(
            asyncio.wait(self._tasks, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
        )
        for task in done:
            self._tasks.discard(task)
            self._ended_at = time.monotonic()
            task.result()
        if time.monotonic() - self._ended_at > self._handler_timeout:
            busy = [slot for slot in self._engine.executor.slots if slot.record is not None]
            fetches = [fetch for slot in busy for fetch in (slot.fetches or (slot.fetch,))]
            names = {fetch.assignment for fetch in fetches if fetch is not None}
            count = len(self._tasks)
            # So that the test can end.
            self.cancel()
            raise PenstockError(
                f"{count} `async def` handlers have not ended within {self._handler_timeout:g} s, for messages of "
                f"{', '.join(sorted(map(str, names)))}; their time is real: give the TestApp a longer "
                "handler_timeout=, or let them return a DeferredCompletion"
            )
        return True

    def _begin(self) -> bool:
        engine, begun = self._engine, False
        while len(self._tasks) < engine.settings.max_concurrency:
            slot = self._free.pop() if self._free else self._new_slot()
            lane = engine.scheduler.take(engine.lane_plan.task_queue, slot.owed_s)
            if lane is None:
                self._free.append(slot)
                break
            begun = True
            self._tasks.add(self._loop.create_task(self._serve(lane, slot)))
        return begun

    def _new_slot(self) -> ExecutionSlot:
        slots = self._engine.executor.slots
        slot = ExecutionSlot(Kind.TASK, f"penstock-test-task-{self._engine.group}-{len(slots)}")
        self._engine.executor.slots = [*slots, slot]
        return slot

    async def _serve(self, lane: ConsumerLane, slot: ExecutionSlot) -> None:
        """Process a lane, and give it back."""
        processing, outcome = self._engine.processor.process(lane, slot), cast("Outcome", None)
        try:
            while True:
                outcome = await self._handle(slot, processing.send(outcome))
        except StopIteration:
            # Not where it was cancelled: what hung would be begun again.
            slot.leave()
            self._engine.scheduler.give_back(lane)
            self._free.append(slot)

    async def _handle(self, slot: ExecutionSlot, work: Work | Slice) -> Outcome:
        record, given, outcome = None, cast("object", work), cast("Outcome", None)
        try:
            if isinstance(work, Slice):
                # Its first message alone: the others are in the next slice.
                work.cut()
                record = slot.record = work[0]
                given = slot.prepare(record)
                if given is None:
                    slot.refused.append(record.offset())
                    return None
            # In a task of its own: no message finds context variables of another.
            call = cast("Coroutine[object, object, object]", slot.invoke(given))
            returned = await self._loop.create_task(call, context=Context())
            if returned is not None and not isinstance(returned, DeferredCompletion):
                returned = slot.make_results(returned, given)
            outcome = returned
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            if isinstance(error, KeyboardInterrupt) or cast("asyncio.Task[None]", asyncio.current_task()).cancelling():
                raise
            outcome = Failed(error)
        except:  # noqa: E722 - see `raised`; whatever a handler raises is its message's failure
            outcome = failure_of(raised())
        if record is not None and isinstance(outcome, Results):
            slot.results.append((record, outcome))
            return None
        return outcome

    def cancel(self) -> None:
        """Cancel the handlers that are under way."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._tasks.clear()

    def close(self) -> None:
        """End the loop."""
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
