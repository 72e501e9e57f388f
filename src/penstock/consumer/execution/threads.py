"""Worker threads: each takes a ready lane, calls the handler for what the lane processor yields, and gives it back.

Handlers may raise what they like: it is a failure of that message. Anything else that raises in here is a defect of
penstock; it stops the consumer with that error rather than hold a lane for ever.

How many threads are woken matters more than how many there are. Python runs one thread at a time; where handlers
return in microseconds, each further thread that is awake only contends with the others. So while handlers are quick one
thread is kept awake and finds all the work; where they wait for something (by how long they take), as many are woken as
there are ready lanes. The poll thread sees threads that are stuck while lanes wait, and wakes others (`wake_idle`). A
thread that is awake needs no waking: it looks for a lane again after it has set `asleep`, and whoever makes a lane
ready reads `asleep` after that, so one of the two sees the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from queue import SimpleQueue
from typing import cast

from penstock.clients.cluster import Clock
from penstock.consumer.assignments import ConsumerLane, Fetch
from penstock.consumer.execution.lanes.lane_processor import LaneProcessor
from penstock.consumer.execution.one_core import core_for_workers, stay_on
from penstock.consumer.execution_slot import ExecutionSlot, Outcome, Slice
from penstock.consumer.handlers.deferred import DeferredCompletion
from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.route import Failed, failure_of
from penstock.errors import raised
from penstock.message import FetchedMessage, Message, Record, handler_thread
from penstock.routing import Scheduler

#: Seconds: a handler that takes longer, on the average, waits for something.
_QUICK_S = 50e-6
#: Seconds in one message while lanes wait after which a thread counts as stuck.
_STUCK_S = 0.001
#: Seconds after which a slice is cut: it was to take far less.
_CUT_S = 0.01
#: Seconds between two checks of a thread that ends.
_LOOK_S = 0.05
#: Seconds that a thread which is not in a handler may take to end.
_END_S = 1.0
#: The weight of the last lane in the average.
_LAST = 0.2

_WAKE = True
_END = False


class _LeftBehind:
    """A message was handled, and has left a context variable behind."""


_LEFT_BEHIND = _LeftBehind()


def call(slot: ExecutionSlot, work: object) -> Outcome:
    """Call a slot's handler, with context variables of its own, and return what came of it."""
    return Context().run(_call, slot, work)


def _call(slot: ExecutionSlot, work: object) -> Outcome:
    try:
        returned = slot.invoke(work)
        if returned is None or isinstance(returned, DeferredCompletion):
            return returned
        return slot.make_results(returned, work)
    except:  # noqa: E722 - see `raised`; whatever a handler raises is its message's failure
        return Failed(raised())


def call_each(slot: ExecutionSlot, records: Slice, now: Callable[[], float]) -> Outcome:
    """Call a slot's handler for each record of a slice, as far as they are done; return what came of the last.

    What one message leaves in context variables the next does not find, as with tasks. A context for each would cost a
    tenth of what an empty handler does. So they share an empty one, until one of them has left something in it.
    """
    left, outcome = iter(records), cast("Outcome | _LeftBehind", _LEFT_BEHIND)
    while isinstance(outcome, _LeftBehind):
        context = Context()
        outcome = context.run(_call_each, slot, records, left, now, context)
    return outcome


def _call_each(
    slot: ExecutionSlot, records: Slice, left: Iterator[Record], now: Callable[[], float], context: Context
) -> Outcome | _LeftBehind:
    invoke, prepare, assignment, is_slow = slot.invoke, slot.prepare, records.assignment, records.is_slow
    is_plain = prepare is Message
    message: Message | None
    try:
        for record in left:
            slot.record = record
            if is_plain:
                message = FetchedMessage()
                message._record = record  # noqa: SLF001 - see there
            else:
                message = prepare(record)
            if message is None:
                slot.refuse(record)
            # `call`, written out: it is most of what an empty handler costs.
            elif (returned := invoke(message)) is not None and (
                isinstance(returned, DeferredCompletion)
                or (returned := slot.make_results(returned, message)) is not None
            ):
                return returned
            if not assignment.active:
                return None
            if is_slow:
                slot.started = now()
                if slot.started >= records.deadline:
                    return None
            if context:
                return _LEFT_BEHIND
    except:  # noqa: E722 - see `raised`; whatever a handler raises is its message's failure
        return failure_of(raised())
    return None


def serve(lane: ConsumerLane, slot: ExecutionSlot, processor: LaneProcessor, now: Callable[[], float]) -> None:
    """Process a lane that the caller holds, with handlers called in this thread, and give it back."""
    processing = processor.process(lane, slot)
    send = processing.send
    outcome: Outcome = None
    try:
        while True:
            work = send(outcome)
            outcome = call_each(slot, work, now) if isinstance(work, Slice) else call(slot, work)
    except StopIteration:
        pass
    finally:
        slot.leave()
        processor.scheduler.give_back(lane)


class Worker:
    """One worker thread."""

    def __init__(self, pool: WorkerPool, slot: ExecutionSlot, queue: int) -> None:
        self._pool = pool
        self.queue = queue
        self.slot = slot
        self.thread = threading.Thread(target=self._main, name=self.slot.name, daemon=True)
        self.tokens: SimpleQueue[bool] = SimpleQueue()
        #: Whether it waits, or is about to, for a token of its queue. Written by itself, and by who puts a token.
        self.asleep = True
        #: Whether it is to end after its lane.
        self.retired = False

    def _main(self) -> None:
        pool, slot = self._pool, self.slot
        slot.thread_id = threading.get_ident()
        handler_thread.group = pool.name
        if pool.core is not None:
            stay_on(pool.core)
        try:
            while self.tokens.get():
                while not self.retired:
                    lane = pool.scheduler.take(self.queue, slot.owed_s)
                    if lane is None:
                        self.asleep = True
                        # Again: a lane that became ready before that was written is seen by nobody else.
                        lane = pool.scheduler.take(self.queue, slot.owed_s)
                        if lane is None:
                            break
                        self.asleep = False
                    self._process(lane)
        except:  # noqa: E722 - see `raised`; a defect must stop the consumer, not one thread in silence
            pool.processor.fail(raised())
        finally:
            pool.closing()

    def _process(self, lane: ConsumerLane) -> None:
        slot, processor = self.slot, self._pool.processor
        before, begun = slot.handled, time.perf_counter()
        # Where the lane is ready again, this thread looks next, and finds it or one that is older.
        serve(lane, slot, processor, self._pool.now)
        self._pool.note_duration((time.perf_counter() - begun) / max(1, slot.handled - before))


class WorkerPool:
    """The worker threads of a consumer. Any thread may call anything."""

    def __init__(
        self,
        name: str,
        *,
        workers: int,
        pinned: bool,
        one_core: bool,
        clock: Clock,
        scheduler: Scheduler[Fetch, Record],
        processor: LaneProcessor,
        closing: Callable[[], None],
    ) -> None:
        self.name = name
        self.scheduler = scheduler
        self.processor = processor
        self._pinned = pinned
        #: The core on which all workers run, or None where the system chooses.
        self.core = core_for_workers() if one_core else None
        self.now = clock.monotonic
        self.closing = closing
        self._lock = threading.Lock()
        self._started = False
        #: Those that were too many; a later one takes the slot of one that has ended. Under the lock.
        self._retired: list[Worker] = []
        #: The slots of all threads there ever were, for one that ends may still be in its last handler, and no count
        #: may fall. It only grows, by `_grow`; any thread reads it, and sees a whole list.
        self.slots: list[ExecutionSlot] = []
        #: Seconds that a handler takes, about. Any worker writes; a lost update does no harm.
        self._typical_s = 1.0
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
            worker = Worker(self, slot, number if self._pinned else 0)
            self.workers = [*self.workers, worker]
            if self._started:
                worker.thread.start()
                worker.tokens.put(_WAKE)

    def start(self) -> None:
        """Start the threads."""
        self._started = True
        for worker in self.workers:
            worker.thread.start()

    def resize(self, count: int) -> None:
        """Have so many threads from now on; those that are too many end after the lane they are at."""
        with self._lock:
            if count > len(self.workers):
                self._grow(count - len(self.workers))
                return
            gone, self.workers = self.workers[count:], self.workers[:count]
            for worker in gone:
                worker.retired = True
                worker.tokens.put(_END)
            self._retired += gone
            # The lanes that they were woken for are for the others now.
            for worker in self.workers:
                self._wake(worker)

    def note_duration(self, seconds: float) -> None:
        """Note how long a message took, on the average of a lane."""
        self._typical_s += (seconds - self._typical_s) * _LAST

    def wake(self, queues: Sequence[int]) -> None:
        """Have ready lanes served, given the ready queue of each lane that became ready."""
        if self._pinned:
            for queue in queues:
                self._wake(self.workers[queue])
            return
        if not queues:
            return
        wanted = len(queues)
        if self._typical_s < _QUICK_S:
            if not all(worker.asleep for worker in self.workers):
                return
            wanted = 1
        self._wake_some(wanted)

    def wake_idle(self) -> bool:
        """Wake others where lanes wait and all who are awake are stuck. Returns whether lanes wait and some sleep.

        On the poll thread, at each of its steps; it cuts slices in which handlers have become slow, too.
        """
        slow_since = self.now() - _CUT_S
        for slot in self.slots:
            slot.cut_slice(slow_since)
        if self._pinned or not self.scheduler.waiting(0):
            return False
        workers = self.workers
        awake = [worker.slot for worker in workers if not worker.asleep]
        stuck_before = self.now() - _STUCK_S
        some_sleep = len(awake) < len(workers)
        if some_sleep and not any(slot.record is None or slot.started > stuck_before for slot in awake):
            # Twice as many each time: a thousand lanes are not a thousand blocked handlers yet.
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
            worker.tokens.put(_WAKE)

    def stop(self, timeout: float) -> list[Worker]:
        """End the threads; return those that are not back after `timeout` seconds, of users' code."""
        workers = self.workers
        for worker in workers:
            worker.retired = True
            worker.tokens.put(_END)
        deadline = time.monotonic() + timeout
        for worker in workers:
            while worker.thread.is_alive():
                left = deadline - time.monotonic()
                # One that is not in a handler ends as soon as it runs; unless it is in a filter or a resource that does
                # not return.
                if left <= (0 if worker.slot.record is not None else -_END_S):
                    break
                worker.thread.join(max(_LOOK_S, left))
        return [worker for worker in workers if worker.thread.is_alive()]
