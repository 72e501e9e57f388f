"""Executors: call the handlers of a consumer, on worker threads, an event loop, or both."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.route import Failed
from penstock.consumer.lanes.plan import LanePlan
from penstock.consumer.lanes.processor import LaneProcessor
from penstock.consumer.lanes.slot import ExecutionSlot, SeenCall
from penstock.consumer.run.event_loop import LoopLag, TaskPool
from penstock.consumer.run.threads import WorkerPool
from penstock.consumer.settings import ConsumerSettings
from penstock.errors import ConfigurationError

ResultT = TypeVar("ResultT")


class Executor:
    """Takes ready lanes from the scheduler and calls handlers for what `LaneProcessor.process` yields. Thread-safe.

    This base class calls none: tests and simulations drive the engine themselves.
    """

    #: All slots there ever were, so that no count falls.
    slots: Sequence[ExecutionSlot] = ()

    def wake(self, queues: Sequence[int]) -> None:
        """Serve ready lanes, given the ready queue of each lane that became ready."""

    def wake_idle(self) -> bool:
        """Wake idle workers if lanes wait and busy workers are stuck; return whether lanes wait and workers sleep.

        The poll thread calls it in each of its steps. It also cuts slices that take too long.
        """
        return False

    def room(self, _kind: Kind) -> int:
        """Return how many calls may run at once, in threads or in tasks."""
        return 0

    def interrupt(self, _seen: SeenCall) -> bool:
        """Raise `HandlerTimeLimitError` in a call, or cancel its task; return whether that is possible.

        On the poll thread, as `abandon`.
        """
        return False

    def abandon(self, _seen: SeenCall, _failure: Failed) -> bool:
        """Continue without a call that does not return, as if it had failed; return whether that is possible.

        `failure.call` is notified when the call returns.
        """
        return False

    def loop_lag(self) -> LoopLag:
        """Return the time since the event loop's last sign of life."""
        return LoopLag(0.0, None)


class ThreadsAndTasks(Executor):
    """The executor of a running consumer. Thread-safe. Without plain functions it has no worker threads."""

    def __init__(
        self,
        name: str,
        settings: ConsumerSettings,
        *,
        plan: LanePlan,
        processor: LaneProcessor,
        closing: Callable[[], None],
    ) -> None:
        self._name = name
        workers = settings.workers if plan.has_threads else 0
        self.threads = WorkerPool(name, workers, processor, closing, is_pinned=settings.pinned)
        self.tasks: TaskPool | None = None
        if plan.has_tasks:
            self.tasks = TaskPool(name, settings.max_concurrency, plan.task_queue, processor, closing)

    @property
    def slots(self) -> list[ExecutionSlot]:  # type: ignore[override] # it is never set
        """All slots, of threads and tasks."""
        return self.threads.slots if self.tasks is None else [*self.threads.slots, *self.tasks.slots]

    def room(self, kind: Kind) -> int:
        """Return how many calls may run at once, in threads or in tasks."""
        if kind is Kind.THREAD:
            return len(self.threads.workers)
        return 0 if self.tasks is None else self.tasks.limit

    def start(self) -> None:
        """Start the threads and the event loop."""
        self.threads.start()
        self.start_loop()

    def start_loop(self) -> None:
        """Start the event loop alone, if it does not run yet."""
        if self.tasks is not None and self.tasks.thread.ident is None:
            self.tasks.thread.start()

    def resize(self, workers: int | None, max_concurrency: int | None) -> None:
        """Change the number of threads and tasks. `ConfigurationError` if one cannot change: then neither does."""
        if workers is not None and self.threads.is_pinned:
            raise ConfigurationError(
                "the number of workers cannot change while lanes are pinned: each worker owns the keys of its lane; "
                "stop, and start with another number"
            )
        if workers is not None and not self.threads.workers:
            raise ConfigurationError(f"workers cannot change: no handler of {self._name} is a plain function")
        if max_concurrency is not None and self.tasks is None:
            raise ConfigurationError(f"max_concurrency cannot change: no handler of {self._name} is an `async def`")
        if workers is not None:
            self.threads.resize(workers)
        if max_concurrency is not None and self.tasks is not None:
            self.tasks.resize(max_concurrency)

    def wake(self, queues: Sequence[int]) -> None:
        """Serve ready lanes, given the ready queue of each lane that became ready."""
        if self.tasks is not None:
            self.tasks.wake([queue for queue in queues if queue == self.tasks.queue])
            queues = [queue for queue in queues if queue != self.tasks.queue]
        self.threads.wake(queues)

    def wake_idle(self) -> bool:
        """Wake idle threads if lanes wait and busy threads are stuck; return whether lanes wait and threads sleep."""
        return self.threads.wake_idle()

    def interrupt(self, seen: SeenCall) -> bool:
        """Interrupt a call in a thread, or cancel its task."""
        if seen.slot.task is None:
            return seen.slot.guard.interrupt(seen.holds, seen.slot.thread_id or 0)
        return self.tasks is not None and self.tasks.cancel(seen)

    def abandon(self, seen: SeenCall, failure: Failed) -> bool:
        """Abandon a call, with its thread or its task."""
        if seen.slot.task is None:
            return self.threads.abandon(seen, failure)
        return self.tasks is not None and self.tasks.abandon(seen, failure)

    def loop_lag(self) -> LoopLag:
        """Return the time since the event loop's last sign of life."""
        return super().loop_lag() if self.tasks is None else self.tasks.loop_lag()

    def run_async(self, awaitable: Awaitable[ResultT]) -> ResultT:
        """Run an awaitable on the event loop and return its result; `ConfigurationError` if there is no loop."""
        if self.tasks is None:
            if inspect.iscoroutine(awaitable):
                awaitable.close()
            raise ConfigurationError(
                "there is no event loop, because no handler is an `async def`; make it a plain function"
            )
        self.start_loop()
        return self.tasks.run_hook(awaitable)

    def stop(self, timeout: float) -> list[str]:
        """End threads and tasks; return the names of those still in a handler after `timeout` seconds."""
        stuck = [worker.slot.name for worker in self.threads.stop(timeout)]
        return stuck if self.tasks is None else stuck + self.tasks.end_handlers(timeout)

    def close(self) -> None:
        """End the event loop. It outlives `stop` for callers of `run_async`."""
        if self.tasks is not None:
            self.tasks.close()

    def has_thread(self, ident: int | None) -> bool:
        """Tell whether a thread, by its ident, is one of these."""
        threads = [worker.thread for worker in self.threads.workers]
        threads += [] if self.tasks is None else [self.tasks.thread]
        return any(thread.ident == ident for thread in threads)
