"""Tasks: `async def` handlers on one event loop, as many at once as `max_concurrency` says, under the same order rules.

The loop runs on a thread of its own. All fields of the pool are that thread's, save where it says otherwise; others
reach it through `call_soon_threadsafe`. A task serves lane after lane until none is ready, and ends.

A task for each message would cost more than the message. So one serves many, as long as they leave nothing behind: once
a handler has changed a context variable, or was asked to cancel and went on, its task gives its lane back after that
message, in the middle of a run too, and ends: what is next is a new task's. Each handler finds the context variables
that the loop began with.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar, cast

from penstock.consumer.assignments import ConsumerLane
from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.results import DeferredCompletion, Results
from penstock.consumer.handlers.route import Failed, failure_of
from penstock.consumer.lanes.processor import LaneProcessor
from penstock.consumer.lanes.slot import ExecutionSlot, SeenCall, Slice
from penstock.consumer.run.executor import LoopLag
from penstock.consumer.run.handler_calls import Begun
from penstock.errors import StoppedError, raised
from penstock.message import handler_thread

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

#: Time slices of a thread that a task has with a lane. There are many more tasks than threads, so a lane that is ready
#: finds a free one sooner; and taking a lane costs more beside an `await` that costs little.
_SLICES = 5
#: Seconds the loop's thread may take to end; a handler that blocks the loop keeps it, and it is a daemon.
_JOIN_S = 5.0
#: Seconds the loop's thread may take where handlers did not end though they were cancelled: they keep it still.
_JOIN_STUCK_S = 0.1
#: Seconds that handlers may take to end when they are cancelled, at least, and when the loop ends.
_CANCEL_BUDGET_S = 0.5
#: What is gone through where there is no slice of records.
_ALONE = (None,)
#: Seconds that a loop which comes round takes for that.
_HAND_OVER_S = 0.2
#: Seconds that handlers which never wait for anything may keep the loop from all that do.
_LOOP_TURN_S = 0.01


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop: uvloop's where it is installed (the extra `uvloop`), for it takes half the time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class TaskPool:
    """The event loop of a consumer and its tasks."""

    def __init__(
        self,
        name: str,
        max_concurrency: int,
        queue: int,
        processor: LaneProcessor,
        closing: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._scheduler = processor.scheduler
        self._processor = processor
        self._closing = closing
        self._loop = new_event_loop()
        self.thread = threading.Thread(target=self._main, name=f"penstock-loop-{name}", daemon=True)
        #: How many tasks there may be. Any thread may write it through `resize`.
        self.limit = max_concurrency
        self._tasks: set[asyncio.Task[None]] = set()
        # Those that were abandoned and have not ended.
        self._left: set[asyncio.Task[None]] = set()
        self._pump_scheduled = False
        self._round_at = 0.0
        self._ended = False
        # Whether handlers did not end though they were cancelled. Written and read by who ends the pool.
        self._stuck = False
        self._name = name
        #: The context variables that every handler finds. Written before the first task is made.
        self._context = contextvars.copy_context()
        #: Slots of tasks: those in use and, for later tasks, those that are not. It only grows.
        self.slots: list[ExecutionSlot] = []
        self._free: list[ExecutionSlot] = []
        #: When the loop last came round; a loop that is blocked stays behind. Any thread reads it. Not by the loop's
        #: own time: uvloop's stands still while the loop is blocked.
        self.alive_at = time.monotonic()

    def loop_lag(self) -> LoopLag:
        """Return for how long the loop has not come round. Any thread."""
        lag = time.monotonic() - self.alive_at if self.thread.is_alive() else 0.0
        return LoopLag(lag, self.thread.ident)

    def wake(self, queues: Sequence[int]) -> None:
        """Have ready lanes served. Any thread."""
        # One call is enough for all that became ready before it runs. Set before it, cleared before lanes are taken.
        if queues and not self._pump_scheduled:
            self._pump_scheduled = True
            self._call(self._pump)

    def resize(self, max_concurrency: int) -> None:
        """Have at most so many handlers under way from now on; those too many end after the lane they are at."""
        self.limit = max_concurrency
        self._call(self._pump)

    def cancel(self, seen: SeenCall) -> bool:
        """Cancel the task of a call, where that goes on; return whether there is one. Any thread."""
        task = seen.slot.task

        def cancel() -> None:
            # On the loop's thread: where the record is still there, its task waits within the handler.
            if task is not None and task is seen.slot.task and seen.holds():
                task.cancel()

        self._call(cancel)
        return task is not None

    def abandon(self, seen: SeenCall, failure: Failed) -> bool:
        """Give a call up with its task: another goes on with this failure. On the poll thread.

        Returns whether the call was under way. What changes is the loop's, so that does it, and is waited for as long
        as it takes to come round. Nothing is done by a loop that is blocked: no other could go on there.
        """
        done: Future[bool] = Future()

        def hand_over() -> None:
            if done.set_running_or_notify_cancel():
                done.set_result(self._hand_over(seen, failure))

        if not self.thread.is_alive():
            return False
        self._call(hand_over)
        try:
            return done.result(_HAND_OVER_S)
        except TimeoutError:
            return not done.cancel() and done.result(_JOIN_S)

    def _hand_over(self, seen: SeenCall, failure: Failed) -> bool:
        slot = seen.slot
        # Where the record is still there, the task waits within the handler.
        if slot.task is None or slot.lane is None or slot.processing is None or not seen.holds():
            return False
        former, call = slot.task, failure.call
        self._tasks.discard(former)
        self._left.add(former)

        def ended(_: object) -> None:
            self._left.discard(former)
            if call is not None:
                call.ended.set_result(None)

        former.add_done_callback(ended)
        # It may outlive the loop, which has been said.
        former._log_destroy_pending = False  # type: ignore[attr-defined] # noqa: SLF001 - as `asyncio.gather` does
        self._begin(slot.lane, slot, (slot.processing, failure))
        return True

    def run(self, awaitable: Awaitable[ResultT]) -> Future[ResultT]:
        """Run something else on the loop. Any thread but the loop's."""

        async def wait() -> ResultT:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(wait(), self._loop)

    def run_hook(self, awaitable: Awaitable[ResultT]) -> ResultT:
        """Run a startup hook, or one of the end, and return its result. Any thread but the loop's.

        `StoppedError` where handlers that did not end keep the loop from coming to its end within seconds.
        """
        hook = self.run(awaitable)
        try:
            return hook.result(_JOIN_S if self._stuck else None)
        except TimeoutError:
            if hook.done():  # its own
                raise
            raise StoppedError(
                f"a lifespan of {self._name} did not end within {_JOIN_S:g} s: a handler keeps the event loop; have "
                "handlers await what they wait for"
            ) from None

    def _call(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed: the consumer has ended
            _log.debug("the event loop of %s has ended", self._name)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        handler_thread.group = self._name
        self._context = contextvars.copy_context()
        self._beat()
        try:
            self._loop.run_forever()
        except:  # noqa: E722 - see `raised`; a defect must stop the consumer, not one thread in silence
            self._processor.fail(raised())
        finally:
            try:
                # What outlived its cancelling; or all, where an error has ended the loop.
                self._loop.run_until_complete(self._end(_CANCEL_BUDGET_S))
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            finally:
                self._closing()
                self._loop.close()

    async def _end(self, budget_s: float | None = None) -> None:
        """Begin nothing more, cancel the handlers under way and wait for them."""
        self._ended = True
        for task in (*self._tasks, *self._left):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=budget_s)

    def _beat(self) -> None:
        self.alive_at = time.monotonic()
        self._loop.call_later(0.1, self._beat)

    def _pump(self) -> None:
        """Begin tasks for ready lanes, as many as may be."""
        self._pump_scheduled = False
        while len(self._tasks) < self.limit and not self._ended and self._scheduler.waiting(self._queue):
            slot = self._free.pop() if self._free else self._new_slot()
            lane = self._scheduler.take(self._queue, slot.owed_s)
            if lane is None:
                self._free.append(slot)
                return
            self._begin(lane, slot)

    def _begin(self, lane: ConsumerLane, slot: ExecutionSlot, begun: Begun | None = None) -> None:
        """Begin a task; with `begun` it goes on with what another one has begun, by an outcome of the call there."""
        task = self._loop.create_task(self._serve_lanes(lane, slot, begun), context=self._context.copy())
        # From then on what the slot has, and its lane, is this task's: one that was abandoned touches neither.
        slot.task = task
        self._tasks.add(task)
        task.add_done_callback(partial(self._finished, lane, slot, begun))

    def _new_slot(self) -> ExecutionSlot:
        slot = ExecutionSlot(Kind.TASK, f"penstock-task-{self._name}-{len(self.slots)}", _SLICES)
        slot.thread_id = threading.get_ident()
        self.slots.append(slot)
        return slot

    def _finished(self, lane: ConsumerLane, slot: ExecutionSlot, begun: Begun | None, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() and slot.task is task and slot not in self._free and not self._ended:
            # A handler cancelled it before it ran: it has neither processed its lane nor given it back.
            self._begin(lane, slot, begun)
            return
        if not task.cancelled() and (error := task.exception()) is not None:
            self._processor.fail(error)
        if not self._ended:
            # One that left something behind took no next lane.
            self._pump()

    async def _serve_lanes(self, lane: ConsumerLane | None, slot: ExecutionSlot, begun: Begun | None) -> None:  # noqa: C901, PLR0912, PLR0915 - in one piece: a call for each lane costs as much as the lane
        """Serve lane after lane until none is ready, or until a handler has left something behind."""
        take, give_back, start = self._scheduler.take, self._scheduler.give_back, self._processor.process
        clock, context, copied = time.monotonic, self._context, contextvars.copy_context
        # Here, too: an eager task, which a lifespan may have chosen, runs before `_begin` knows it.
        slot.task = task = cast("asyncio.Task[None]", asyncio.current_task())
        cancelling = task.cancelling
        is_tainted = False
        try:
            while lane is not None:
                processing, outcome = begun or (start(lane, slot), None)
                slot.processing, begun = processing, None
                send = processing.send
                try:
                    while True:
                        work = send(outcome)
                        outcome = None
                        records = work if isinstance(work, Slice) else None
                        for record in records or _ALONE:
                            try:
                                message: object = work
                                if record is not None:
                                    slot.record = record
                                    message = slot.prepare(record)
                                if message is None and record is not None:
                                    slot.refused.append(record.offset())
                                else:
                                    outcome = await slot.invoke(message)  # type: ignore[misc] # of a task: an `async def`
                                    if slot.task is not task:
                                        return
                                    if outcome is not None and not isinstance(outcome, DeferredCompletion):
                                        outcome = slot.make_results(outcome, message)
                            except asyncio.CancelledError as error:
                                if self._ended:
                                    raise
                                # Raised by the handler itself, or by what it waits for: nobody cancelled this task.
                                outcome = Failed(error)
                            except:  # noqa: E722 - see `raised`; a handler may raise what it likes
                                outcome = failure_of(raised())
                            if slot.task is not task:
                                return
                            # Equal contexts are one object inside as a rule, so this costs next to nothing.
                            if (copied() != context or cancelling()) and not self._ended:
                                # The lane is given back after this message, and what is next is a new task's.
                                is_tainted, slot.deadline = True, 0.0
                            if record is None or records is None:
                                break
                            if isinstance(outcome, Results):
                                slot.results.append((record, outcome))
                                outcome = None
                            if outcome is not None or len(records) == 1 or not records.assignment.active:
                                break
                            # Beside an `await` a look at the clock is nothing: there are too many slots for others to.
                            slot.started = clock()
                            if slot.started >= slot.deadline or (slot.results and slot.slice_size == 1):
                                break
                except StopIteration:
                    pass
                finally:
                    if slot.task is task:
                        slot.leave()
                        # The lane may be ready again: this task looks next, and finds it or one that is older.
                        give_back(lane)
                now = clock()
                if now >= self._round_at and not is_tainted:
                    # An `await` that waits for nothing does not go through the loop.
                    self._round_at = now + _LOOP_TURN_S
                    await asyncio.sleep(0)
                ends = is_tainted or self._ended or len(self._tasks) > self.limit
                lane = None if ends else take(self._queue, slot.owed_s)
        finally:
            if slot.task is task:
                self._free.append(slot)

    def end_handlers(self, timeout: float) -> list[str]:
        """Begin nothing more, cancel the handlers under way and wait for them; return their slots' names."""
        if not self.thread.is_alive():
            # Never begun, or ended: by `close`, or by what a handler's own task raised.
            return []
        under_way = [slot.name for slot in self.slots if slot.record is not None]
        try:
            self.run(self._end()).result(max(_CANCEL_BUDGET_S, timeout))
        except TimeoutError:
            self._stuck = True
            _log.warning("handlers on the event loop of %s do not end though they were cancelled", self._name)
        return under_way

    def close(self) -> None:
        """End the loop and its thread. May be called more than once."""
        if self.thread.ident is None:
            self._loop.close()
        elif self.thread.is_alive():
            self._call(self._loop.stop)
            self.thread.join(_JOIN_STUCK_S if self._stuck else _JOIN_S)
