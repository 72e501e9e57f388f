"""Tasks: `async def` handlers on one event loop, at most `max_concurrency` at once, under the same order rules.

The loop has its own thread. That thread owns all fields of the pool, except where stated. Other threads reach it
through `call_soon_threadsafe`. A task serves lane after lane until none is ready, then ends.

A task per message would cost more than the message. So one task serves many messages, unless they leave something
behind: once a handler has changed a context variable, or has caught a cancellation, its task gives its lane back after
that message, even in the middle of a run, and ends. A new task takes the next message. Each handler sees the context
variables with which the loop began.
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
from typing import NamedTuple, TypeVar, cast

from penstock.consumer.assignments import ConsumerLane
from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.results import DeferredCompletion, Results
from penstock.consumer.handlers.route import Failed, failure_of
from penstock.consumer.lanes.processor import LaneProcessor
from penstock.consumer.lanes.slot import ExecutionSlot, SeenCall, Slice
from penstock.consumer.run.handler_calls import Handover
from penstock.errors import StoppedError, raised
from penstock.message import handler_thread

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

#: Time slices of a thread that a task has with a lane. There are many more tasks than threads, so a ready lane finds a
#: free one sooner; and taking a lane is expensive compared with a cheap `await`.
_SLICES = 5
#: Seconds the loop's thread may take to end. A handler that blocks the loop keeps the thread, which is a daemon.
_JOIN_S = 5.0
#: The same if cancelled handlers did not end: they still keep the thread.
_JOIN_STUCK_S = 0.1
#: Seconds that cancelled handlers may take to end: at least, at a stop; at most, when the loop ends.
_CANCEL_BUDGET_S = 0.5
#: The loop variable for work that is not a slice.
_NO_RECORD = (None,)
#: Seconds in which the loop hands a call over, unless it is blocked.
_HAND_OVER_S = 0.2
#: Seconds that handlers which never wait may delay the other handlers.
_LOOP_TURN_S = 0.01


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop: uvloop's if it is installed (the extra `uvloop`), which takes half the time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class LoopLag(NamedTuple):
    """Seconds since the last sign of life of an event loop, 0 without one; and its thread, needed for its stack."""

    seconds: float
    thread_id: int | None


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
        self.queue = queue
        self._scheduler = processor.scheduler
        self._processor = processor
        self._closing = closing
        self._loop = new_event_loop()
        self.thread = threading.Thread(target=self._main, name=f"penstock-loop-{name}", daemon=True)
        #: The maximum number of tasks. Any thread may change it through `resize`.
        self.limit = max_concurrency
        self._tasks: set[asyncio.Task[None]] = set()
        # Abandoned tasks that have not ended.
        self._abandoned: set[asyncio.Task[None]] = set()
        self._pump_scheduled = False
        self._yield_at = 0.0
        self._ended = False
        # Whether the loop is stopped by this pool. Written by the thread that ends the pool.
        self._closes = False
        # Whether handlers did not end after their cancellation. Used by the thread that ends the pool.
        self._stuck = False
        self._name = name
        #: The context variables of every handler. Written before the first task starts.
        self._context = contextvars.copy_context()
        #: Slots of tasks, used and free. The list only grows.
        self.slots: list[ExecutionSlot] = []
        self._free: list[ExecutionSlot] = []
        #: Last sign of life of the loop. Any thread reads it. Not by the loop's own clock: uvloop's stands still while
        #: the loop is blocked.
        self.alive_at = time.monotonic()

    def loop_lag(self) -> LoopLag:
        """Return the time since the loop's last sign of life. Any thread."""
        lag = time.monotonic() - self.alive_at if self.thread.is_alive() else 0.0
        return LoopLag(lag, self.thread.ident)

    def wake(self, queues: Sequence[int]) -> None:
        """Serve ready lanes. Any thread."""
        # One call is enough for all lanes that become ready before it runs. `_pump` clears the flag first.
        if queues and not self._pump_scheduled:
            self._pump_scheduled = True
            self._call(self._pump)

    def resize(self, max_concurrency: int) -> None:
        """Change the maximum number of tasks; surplus tasks end after their current lane."""
        self.limit = max_concurrency
        self._call(self._pump)

    def cancel(self, seen: SeenCall) -> bool:
        """Cancel the task of a call if the call is still running; return whether there is a task. Any thread."""
        task = seen.slot.task

        def cancel() -> None:
            # On the loop's thread: if the record is unchanged, the task waits within the handler.
            if task is not None and task is seen.slot.task and seen.holds():
                task.cancel()

        self._call(cancel)
        return task is not None

    def abandon(self, seen: SeenCall, failure: Failed) -> bool:
        """Abandon a call with its task: another task goes on with this failure. On the poll thread.

        Returns whether the call was running. The loop's thread does the change, within the time of a loop that is not
        blocked. On a blocked loop nothing is done, because no other task could go on there.
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
        # If the record is unchanged, the task waits within the handler.
        if slot.task is None or slot.lane is None or slot.processing is None or not seen.holds():
            return False
        former, call = slot.task, failure.call
        self._tasks.discard(former)
        self._abandoned.add(former)

        def ended(_: object) -> None:
            self._abandoned.discard(former)
            if call is not None:
                call.ended.set_result(None)

        former.add_done_callback(ended)
        # The task may outlive the loop. The watchdog has logged it already.
        former._log_destroy_pending = False  # type: ignore[attr-defined] # noqa: SLF001 - as `asyncio.gather` does
        self._begin(slot.lane, slot, (slot.processing, failure))
        return True

    def run_hook(self, awaitable: Awaitable[ResultT]) -> ResultT:
        """Run a hook of the start or the end and return its result. Any thread but the loop's.

        Raises `StoppedError` if stuck handlers keep the loop and the hook does not end within seconds.
        """

        async def wait() -> ResultT:
            return await awaitable

        hook = asyncio.run_coroutine_threadsafe(wait(), self._loop)
        try:
            return hook.result(_JOIN_S if self._stuck else None)
        except TimeoutError:
            if hook.done():  # the hook's own error
                raise
            raise StoppedError(
                f"a lifespan of {self._name} did not end within {_JOIN_S:g} s: a handler keeps the event loop; make "
                "handlers wait with `await`"
            ) from None
        finally:
            hook.cancel()  # no effect if it is done; otherwise its time is over, or a signal has interrupted the wait

    def _call(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed, the consumer has ended
            _log.debug("the event loop of %s has ended", self._name)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        handler_thread.group = self._name
        self._context = contextvars.copy_context()
        self._beat()
        try:
            while not self._closes:
                self._run_until_stopped()
        finally:
            try:
                # Handlers that outlived their cancellation, and the tasks that handlers have started.
                self._loop.run_until_complete(self._end(_CANCEL_BUDGET_S))
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            finally:
                self._closing()
                self._loop.close()

    def _run_until_stopped(self) -> None:
        """Run the loop until it is stopped. If not by this pool, stop the consumer, whose end needs the loop again."""
        try:
            self._loop.run_forever()
            if not self._closes:
                raise StoppedError(f"the event loop of {self._name} was stopped by a handler; remove its loop.stop()")
        except:  # noqa: E722 - see `raised`; a defect must stop the consumer, not one thread in silence
            self._processor.fail(raised())

    async def _end(self, budget_s: float | None = None) -> None:
        """Start no more tasks, cancel the running handlers and wait for them; with a budget, all tasks of the loop."""
        self._ended = True
        tasks = set(self._tasks) if budget_s is None else {*asyncio.all_tasks()} - {asyncio.current_task()}
        for task in tasks | self._abandoned:
            task.cancel()
        if tasks := tasks - self._abandoned:
            await asyncio.wait(tasks, timeout=budget_s)

    def _beat(self) -> None:
        self.alive_at = time.monotonic()
        self._loop.call_later(0.1, self._beat)

    def _pump(self) -> None:
        """Start tasks for ready lanes, up to the limit."""
        self._pump_scheduled = False
        while len(self._tasks) < self.limit and not self._ended and self._scheduler.waiting(self.queue):
            slot = self._free.pop() if self._free else self._new_slot()
            lane = self._scheduler.take(self.queue, slot.owed_s)
            if lane is None:
                self._free.append(slot)
                return
            self._begin(lane, slot)

    def _begin(self, lane: ConsumerLane, slot: ExecutionSlot, handover: Handover | None = None) -> None:
        """Start a task. With `handover` it continues the generator of an abandoned task, whose call has an outcome."""
        task = self._loop.create_task(self._serve_lanes(lane, slot, handover), context=self._context.copy())
        # From now on the slot and its lane belong to this task. An abandoned task touches neither.
        slot.task = task
        self._tasks.add(task)
        task.add_done_callback(partial(self._finished, lane, slot, handover))

    def _new_slot(self) -> ExecutionSlot:
        slot = ExecutionSlot(Kind.TASK, f"penstock-task-{self._name}-{len(self.slots)}", _SLICES)
        slot.thread_id = threading.get_ident()
        self.slots.append(slot)
        return slot

    def _finished(
        self, lane: ConsumerLane, slot: ExecutionSlot, handover: Handover | None, task: asyncio.Task[None]
    ) -> None:
        self._tasks.discard(task)
        if task.cancelled() and slot.task is task and slot not in self._free and not self._ended:
            # Another handler cancelled the task before it ran: the lane is neither processed nor given back.
            self._begin(lane, slot, handover)
            return
        if not task.cancelled() and (error := task.exception()) is not None:
            self._processor.fail(error)
        if not self._ended:
            # A task that left something behind took no next lane.
            self._pump()

    async def _serve_lanes(self, lane: ConsumerLane | None, slot: ExecutionSlot, handover: Handover | None) -> None:  # noqa: C901, PLR0912, PLR0915 - in one piece: a call for each lane costs as much as the lane
        """Serve lane after lane until none is ready, or until a handler has left something behind."""
        take, give_back, start = self._scheduler.take, self._scheduler.give_back, self._processor.process
        clock, context, copied = time.monotonic, self._context, contextvars.copy_context
        # Also here: an eager task, which a lifespan may have chosen, runs before `_begin` has its object.
        slot.task = task = cast("asyncio.Task[None]", asyncio.current_task())
        cancelling = task.cancelling
        is_tainted = False
        try:
            while lane is not None:
                processing, outcome = handover or (start(lane, slot), None)
                slot.processing, handover = processing, None
                send = processing.send
                try:
                    while True:
                        work = send(outcome)
                        outcome = None
                        records, route = work if isinstance(work, Slice) else None, slot.route
                        for record in records or _NO_RECORD:
                            try:
                                message: object = work
                                if record is not None:
                                    slot.record = record
                                    message = route.prepare(record)
                                if message is None and record is not None:
                                    slot.refused.append(record.offset())
                                else:
                                    outcome = await route.invoke(message)  # type: ignore[misc] # of a task: an `async def`
                                    if slot.task is not task:
                                        return
                                    if outcome is not None and not isinstance(outcome, DeferredCompletion):
                                        outcome = route.make_results(outcome, message)
                            except asyncio.CancelledError as error:
                                if self._ended:
                                    raise
                                # The handler raised it, or something that it awaits: the pool did not cancel this task.
                                outcome = Failed(error)
                            except:  # noqa: E722 - see `raised`; a handler may raise what it likes
                                outcome = failure_of(raised())
                            if slot.task is not task:
                                return
                            # Equal contexts usually are one object inside, so this is cheap.
                            if (copied() != context or cancelling()) and not self._ended:
                                # The lane is given back after this message; a new task takes the next one.
                                is_tainted, slot.deadline = True, 0.0
                            if record is None or records is None:
                                break
                            if isinstance(outcome, Results):
                                slot.results.append((record, outcome))
                                outcome = None
                            if outcome is not None or len(records) == 1 or not records.assignment.active:
                                break
                            # Cheap next to an `await`; and there are too many slots for the poll thread to watch them.
                            slot.started = clock()
                            if slot.started >= slot.deadline or (slot.results and slot.slice_size == 1):
                                break
                except StopIteration:
                    pass
                finally:
                    if slot.task is task:
                        slot.leave()
                        # If the lane is ready again, this task finds it next, or an older one.
                        give_back(lane)
                now = clock()
                if now >= self._yield_at and not is_tainted:
                    # An `await` that does not wait does not go through the loop.
                    self._yield_at = now + _LOOP_TURN_S
                    await asyncio.sleep(0)
                ends = is_tainted or self._ended or len(self._tasks) > self.limit
                lane = None if ends else take(self.queue, slot.owed_s)
        finally:
            if slot.task is task:
                self._free.append(slot)

    def end_handlers(self, timeout: float) -> list[str]:
        """Start no more tasks, cancel the running handlers and wait for them; return the names of their slots."""
        if not self.thread.is_alive():
            # Never started, or ended by `close`.
            return []
        under_way = [slot.name for slot in self.slots if slot.record is not None]
        try:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(max(_CANCEL_BUDGET_S, timeout))
        except TimeoutError:
            self._stuck = True
            _log.warning("handlers on the event loop of %s do not end though they were cancelled", self._name)
        return under_way

    def close(self) -> None:
        """End the loop and its thread. May be called more than once."""
        if self.thread.ident is None:
            self._loop.close()
        elif self.thread.is_alive():
            self._closes = True
            self._call(self._loop.stop)
            self.thread.join(_JOIN_STUCK_S if self._stuck else _JOIN_S)
