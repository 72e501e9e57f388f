"""The event loop of an app under test: it runs `async def` handlers while the test waits for the app to settle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextvars import Context
from typing import TypeVar, cast

from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.results import DeferredCompletion
from penstock.consumer.handlers.route import Failed, failure_of
from penstock.consumer.lanes.slot import Outcome
from penstock.errors import ConfigurationError, PenstockError, raised
from penstock.testing.stepped_engine import SteppedConsumer, SteppedWorker

ResultT = TypeVar("ResultT")

#: Real seconds to look for what handlers on the loop do, before others have their turn.
_POLL_S = 0.01


class TaskRunner:
    """Runs the tasks of a consumer on a private event loop, only within its calls.

    Without an end of a handler in `handler_timeout` real seconds it is taken to hang. `ConfigurationError` where an
    event loop runs in this thread already.
    """

    def __init__(self, consumer: SteppedConsumer, handler_timeout: float) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise ConfigurationError(
                "a TestApp with `async def` handlers runs an event loop of its own, but one runs in this thread "
                "already; use it in a plain test function"
            )
        self._consumer = consumer
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
            working = [worker for worker in self._consumer.workers if worker.work is not None]
            names = {assignment for worker in working for assignment in worker.assignments}
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
        consumer = self._consumer
        begun = False
        while len(self._tasks) < consumer.engine.settings.max_concurrency:
            tasks = [worker for worker in consumer.workers if worker.slot.kind is Kind.TASK]
            free = next((worker for worker in tasks if worker.lane is None), None)
            if free is None:
                consumer.resize(len(tasks) + 1, Kind.TASK)
                continue
            if not free.take():
                break
            begun = True
            self._start(free)
        return begun

    def _start(self, worker: SteppedWorker) -> None:
        """Let a task of its own handle what a worker is at: no message finds context variables of another."""
        if worker.work is not None:
            self._tasks.add(self._loop.create_task(self._serve(worker), context=Context()))

    async def _serve(self, worker: SteppedWorker) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        outcome: Outcome = None
        try:
            returned = await cast("Awaitable[object]", worker.slot.invoke(worker.work))
            if returned is not None and not isinstance(returned, DeferredCompletion):
                returned = worker.slot.make_results(returned, worker.work)
            outcome = returned
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            if isinstance(error, KeyboardInterrupt) or task.cancelling():
                raise
            outcome = Failed(error)
        except:  # noqa: E722 - see `raised`; whatever a handler raises is its message's failure
            outcome = failure_of(raised())
        worker.go_on(outcome)
        self._start(worker)

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
