"""Worker threads: each takes a ready lane, calls the handler for what the lane processor yields, and gives it back.

What handlers raise is a failure of their message. An exception of this module is a defect of penstock: it stops the
consumer, because otherwise it would hold a lane for ever.

The number of awake threads matters more than the number of threads. Python runs one thread at a time. If handlers
return in microseconds, each further awake thread only contends with the others. So while handlers are quick, one thread
stays awake and finds all the work. If handlers wait for something, judged by their duration, one thread is woken per
ready lane. The poll thread sees threads that are stuck while lanes wait, and wakes others (`wake_idle`).

An awake thread needs no wake-up. It sets `asleep` and then looks for a lane again. The code that makes a lane ready
does that first, and then reads `asleep`. So one of the two sees the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from penstock.consumer.assignments import ConsumerLane
from penstock.consumer.handlers.call_guard import AbandonedCall, CallAbandonedError
from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.route import Failed
from penstock.consumer.lanes.processor import LaneProcessor
from penstock.consumer.lanes.slot import ExecutionSlot, SeenCall
from penstock.consumer.run.handler_calls import Handover, serve
from penstock.errors import raised
from penstock.message import handler_thread

#: Part of a slice's millisecond. A handler that takes more on average waits for something.
_QUICK_SHARE = 0.05
#: Seconds in one message after which a thread counts as stuck, while lanes wait.
_STUCK_AFTER_S = 0.001
#: Seconds after which a slice is cut: it was planned to take far less.
_MAX_SLICE_S = 0.01
#: Seconds that a thread outside a handler may take to end.
_JOIN_S = 1.0
#: The weight of the last lane in the average.
_LAST_WEIGHT = 0.2


class Worker:
    """A worker: its slot, and the thread that serves it now."""

    def __init__(self, pool: WorkerPool, slot: ExecutionSlot, queue: int) -> None:
        self._pool = pool
        self.queue = queue
        self.slot = slot
        self.thread = threading.Thread(target=self._main, name=slot.name, daemon=True)
        #: Each entry wakes the thread once.
        self.wake_ups: SimpleQueue[None] = SimpleQueue()
        #: Whether it waits, or is about to wait, for a wake-up. Written by the thread, and by the sender of a wake-up.
        self.asleep = True
        #: Whether it must end after its lane.
        self.retired = False

    def retire(self) -> None:
        """End the thread after its current lane."""
        self.retired = True
        self.wake_ups.put(None)

    def take_over(self, lane: ConsumerLane, handover: Handover, call: AbandonedCall) -> None:
        """Continue the lane in a new thread. The old thread stays in its abandoned call."""
        self.slot.leave_to_abandoned_call()
        self.thread.name = call.worker
        self.asleep = False
        thread = threading.Thread(target=self._main, args=(lane, handover), name=self.slot.name, daemon=True)
        self.wake_ups.put(None)
        thread.start()
        # After the start: `_grow` reuses the slot of a retired worker whose thread is not alive.
        self.thread = thread

    def _main(self, taken: ConsumerLane | None = None, handover: Handover | None = None) -> None:
        pool, slot, scheduler = self._pool, self.slot, self._pool.scheduler
        slot.thread_id = threading.get_ident()
        handler_thread.group = pool.name
        try:
            if taken is not None:
                serve(taken, slot, pool.processor, handover)
            while not self.retired:
                self.wake_ups.get()
                while not self.retired:
                    lane = scheduler.take(self.queue, slot.owed_s)
                    if lane is None:
                        self.asleep = True
                        # Look again: only this thread sees a lane that became ready before that write.
                        lane = scheduler.take(self.queue, slot.owed_s)
                        if lane is None:
                            break
                        self.asleep = False
                    # If the lane is ready again, this thread finds it next, or an older one.
                    serve(lane, slot, pool.processor)
                    pool.note_pace(slot.slice_size)
        except CallAbandonedError as error:
            error.call.ended.set_result(None)
        except:  # noqa: E722 - see `raised`; a defect must stop the consumer, not one thread in silence
            pool.processor.fail(raised())
        finally:
            pool.closing()


class WorkerPool:
    """The worker threads of a consumer. Any thread may call any method."""

    def __init__(
        self,
        name: str,
        workers: int,
        processor: LaneProcessor,
        closing: Callable[[], None],
        *,
        is_pinned: bool = False,
    ) -> None:
        self.name = name
        self.scheduler = processor.scheduler
        self.processor = processor
        self.is_pinned = is_pinned
        self.closing = closing
        self._lock = threading.Lock()
        self._started = False
        #: Surplus workers. A later worker takes the slot of one that has ended. Under the lock.
        self._retired: list[Worker] = []
        #: The slots of all threads there ever were: an ending thread may be in its last handler, and no count may fall.
        #: Only `_grow` replaces the list, by a longer one; any thread reads it.
        self.slots: list[ExecutionSlot] = []
        # The part of a slice that a message takes, on average. Any worker writes it; a lost update does no harm.
        self._slow_share = 1.0
        self.workers: list[Worker] = []
        self._grow(workers)

    def _grow(self, count: int) -> None:
        for _ in range(count):
            number = len(self.slots)
            ended = next((slot for slot in self._retired if not slot.thread.is_alive()), None)
            if ended is None:
                slot = ExecutionSlot(Kind.THREAD, f"penstock-worker-{self.name}-{number}")
                self.slots = [*self.slots, slot]
            else:
                self._retired.remove(ended)
                slot = ended.slot
            worker = Worker(self, slot, number if self.is_pinned else 0)
            self.workers = [*self.workers, worker]
            if self._started:
                worker.thread.start()
                worker.wake_ups.put(None)

    def start(self) -> None:
        """Start the threads."""
        self._started = True
        for worker in self.workers:
            worker.thread.start()

    def resize(self, count: int) -> None:
        """Change the number of threads; surplus threads end after their current lane."""
        with self._lock:
            if count > len(self.workers):
                self._grow(count - len(self.workers))
                return
            surplus, self.workers = self.workers[count:], self.workers[:count]
            for worker in surplus:
                worker.retire()
            self._retired += surplus
            # The lanes of their wake-ups are for the other workers now.
            for worker in self.workers:
                self._wake(worker)

    def abandon(self, seen: SeenCall, failure: Failed) -> bool:
        """Abandon a call with its thread: a new thread goes on with this failure. On the poll thread.

        Returns whether the call was running.
        """
        slot = seen.slot
        # The thread is in the call, so it changes neither.
        lane, processing = slot.lane, slot.processing
        worker = next((worker for worker in (*self.workers, *self._retired) if worker.slot is slot), None)
        if worker is None or lane is None or processing is None or failure.call is None:
            return False
        hand_over = partial(worker.take_over, lane, (processing, failure), failure.call)
        return slot.guard.abandon(seen.holds, failure.call, hand_over)

    def note_pace(self, slice_size: int) -> None:
        """Note how many messages of a lane fit into a slice. It shows how long a message takes."""
        self._slow_share += (1 / slice_size - self._slow_share) * _LAST_WEIGHT

    def wake(self, queues: Sequence[int]) -> None:
        """Serve ready lanes, given the ready queue of each lane that became ready."""
        if self.is_pinned:
            for queue in queues:
                self._wake(self.workers[queue])
        elif self._slow_share >= _QUICK_SHARE:
            self._wake_some(len(queues))
        elif queues and all(worker.asleep for worker in self.workers):
            self._wake_some(1)

    def wake_idle(self) -> bool:
        """Wake threads if lanes wait and all awake threads are stuck; return whether lanes wait and threads sleep.

        The poll thread calls it in each of its steps. It also cuts slices in which handlers have become slow.
        """
        now = self.processor.now()
        for slot in self.slots:
            slot.cut_slice(now - _MAX_SLICE_S)
        if self.is_pinned or not self.scheduler.waiting(0):
            return False
        workers = self.workers
        awake = [worker.slot for worker in workers if not worker.asleep]
        some_sleep = len(awake) < len(workers)
        if some_sleep and not any(slot.record is None or slot.started > now - _STUCK_AFTER_S for slot in awake):
            # The number doubles each time: a thousand waiting lanes do not prove a thousand blocked handlers.
            self._wake_some(min(self.scheduler.waiting(0), max(1, len(awake))))
        return some_sleep

    def _wake_some(self, count: int) -> None:
        for worker in self.workers:
            if count <= 0:
                return
            if worker.asleep:
                self._wake(worker)
                count -= 1

    def _wake(self, worker: Worker) -> None:
        if worker.asleep:
            worker.asleep = False
            worker.wake_ups.put(None)

    def stop(self, timeout: float) -> list[Worker]:
        """End the threads; return those that have not ended after `timeout` seconds in users' code."""
        workers = [worker for worker in self.workers if worker.thread.is_alive()]
        for worker in workers:
            worker.retire()
        deadline = time.monotonic() + timeout
        for worker in workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))
            if worker.slot.record is None:
                # Outside a handler it ends as soon as it runs, unless a filter or a resource does not return.
                worker.thread.join(_JOIN_S)
        return [worker for worker in workers if worker.thread.is_alive()]
