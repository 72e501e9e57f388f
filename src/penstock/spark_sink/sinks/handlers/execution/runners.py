"""Runners of a task: who calls the handlers for the calls that `KeyQueues` hands out, one by one or many at once.

Plain handlers run in the task's thread, one after the other. `async def` handlers run on an event loop that the task
has for itself, as many at once as `max_concurrency` says. Where a task has both kinds, plain ones run in a thread
beside the loop, one at a time, so that they keep no `async def` handler from going on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import cast

from penstock.consumer.handlers.deferred import DeferredCompletion
from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.results import ResultError
from penstock.consumer.handlers.route import Failed
from penstock.errors import SinkError, raised
from penstock.spark_sink.sinks.handlers.execution.key_queues import HandlerCall, KeyQueues, Outcome

Now = Callable[[], float]

#: Seconds that handlers which never wait for anything may keep the loop from all that do.
_ROUND_S = 0.01


def run(queues: KeyQueues, now: Now = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
    """Handle all messages of a task, one after the other.

    `now` counts seconds that only rise, `sleep` waits so many at least. Raises `SinkError` where a message failed for
    good whose handler stops then; the task must fail.
    """
    while True:
        at = _run_undisturbed(queues, now)
        call = queues.next(at)
        if call is not None:
            outcome = _called(call)
            queues.complete(call, outcome, now())
            continue
        due = queues.next_due()
        if due is None:
            return
        sleep(max(0.0, due - now()))


def _run_undisturbed(queues: KeyQueues, now: Now) -> float:
    """Handle rows as they come until there is more to do than that; return the time then."""
    at = now()
    for route, record, message in queues.undisturbed():
        outcome: Outcome = None
        try:
            returned = route.invoke(message)
        except:  # noqa: E722 - as in `_called`
            returned, outcome = None, Failed(raised())
        begun, at = at, now()
        if returned is not None or outcome is not None:
            call = queues.call_of(route, record, message, begun)
            queues.complete(call, outcome or outcome_of(returned, call), at)
            break
    return at


def _called(call: HandlerCall) -> Outcome:
    try:
        returned = call.route.invoke(call.work)
    except:  # noqa: E722 - see `raised`; whatever a handler raises is its message's failure
        return Failed(raised())
    return None if returned is None else outcome_of(returned, call)


def outcome_of(returned: object, call: HandlerCall) -> Outcome:
    """Return what came of a message whose handler returned something.

    Raises `SinkError` for a completion to come, for which no task can wait.
    """
    name = call.route.handler.name
    if isinstance(returned, DeferredCompletion):
        raise SinkError(
            f"{name} returned a DeferredCompletion, which cannot be put off on an executor: the task's process "
            "may end before it comes; return when the message is done, or make the handler an `async def`"
        )
    try:
        return call.route.make_results(returned, call.work)
    except:  # noqa: E722 - as in `_called`
        error = raised()
        # What cannot be a message now cannot be one at another try.
        return Failed(error, permanent=isinstance(error, ResultError))


class AsyncRunner:
    """Handles the messages of a task on the running event loop. Used once.

    At most `max_concurrency` calls are under way at once; `plain` runs plain handlers, one at a time.
    """

    def __init__(self, queues: KeyQueues, max_concurrency: int, plain: Executor, now: Now = time.monotonic) -> None:
        self._queues = queues
        self._limit = max_concurrency
        self._plain = plain
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._running = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due: float | None = None
        self._round_at = 0.0
        self._ended: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Handle all messages; raises as `run` of this module, and what was under way is cancelled then."""
        try:
            self._pump()
            await self._ended
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _pump(self) -> None:
        """Begin as much as may be; note when all is done."""
        try:
            while self._running < self._limit and not self._ended.done():
                call = self._queues.next(self._now())
                if call is None:
                    self._pause()
                    return
                self._running += 1
                task = self._loop.create_task(self._serve(call))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except BaseException as error:  # noqa: BLE001 - it is raised where `run` waits
            self._fail(error)

    def _pause(self) -> None:
        """Nothing can begin now: look again when something is due; a completed call asks for itself."""
        due = self._queues.next_due()
        if due is None:
            if self._running == 0:
                self._ended.set_result(None)
        elif due != self._timer_due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_due = due
            self._timer = self._loop.call_later(max(0.0, due - self._now()), self._on_time)

    def _on_time(self) -> None:
        self._timer_due = None
        self._pump()

    def _fail(self, error: BaseException) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)

    async def _serve(self, first: HandlerCall) -> None:
        """Handle one call after the other until none is ready."""
        call: HandlerCall | None = first
        try:
            while call is not None and not self._ended.done():
                self._queues.complete(call, await self._outcome(call), self._now())
                if (now := self._now()) >= self._round_at:
                    # An `await` that waits for nothing does not go through the loop.
                    self._round_at = now + _ROUND_S
                    await asyncio.sleep(0)
                call = self._queues.next(self._now())
                if call is not None and self._running < self._limit:
                    # One that ends may let several go on.
                    self._pump()
        except BaseException as error:  # noqa: BLE001 - it is raised where `run` waits
            self._fail(error)
        finally:
            self._running -= 1
            if not self._ended.done():
                self._pump()

    async def _outcome(self, call: HandlerCall) -> Outcome:
        route = call.route
        if route.kind is Kind.THREAD:
            return await self._loop.run_in_executor(self._plain, _called, call)
        try:
            returned = await cast("Awaitable[object]", route.invoke(call.work))
        except asyncio.CancelledError as error:
            if self._ended.done():
                raise
            # Raised by the handler itself, or by what it waits for: nobody cancelled this task.
            return Failed(error)
        except:  # noqa: E722 - see `raised`; whatever a handler raises is its message's failure
            return Failed(raised())
        return None if returned is None else outcome_of(returned, call)
