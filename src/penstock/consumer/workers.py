"""Workers: threads that take a ready lane, run a time slice of its messages, and give it back.

A worker alone holds its lane (the scheduler sees to that), so what it does to the lane's queue and parked keys needs
no lock. Revocation: the poll thread sets `assignment.active = False` and then looks at every worker's `fetch`; a
worker sets `fetch` first and then looks at `active`. Whichever comes second sees the other, so a handler either is
waited for or does not start. A worker completes its offsets before it lets go of `fetch`, so who waited sees them.

Handlers may raise what they like: it is a failure of that message. Anything else that raises in here is a defect of
penstock; it stops the consumer with that error rather than leave a lane held for ever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from queue import SimpleQueue

from penstock.consumer.assignments import Assignment, ConsumerLane, ConsumerRun, Fetch
from penstock.consumer.dead_letters import DeadLetter, DeadLetterQueue
from penstock.consumer.retries import Timers, WakeKey
from penstock.consumer.settings import OnFailure
from penstock.errors import PenstockError
from penstock.message import Message, Record
from penstock.routing import ParkedKey, Scheduler

_log = logging.getLogger(__name__)

_READY = True
_END = False


class Worker:
    """One worker thread and its counters. All public fields are written by its thread alone, read by any."""

    def __init__(self, pool: WorkerPool, number: int, name: str) -> None:
        self._pool = pool
        self._slot = pool.scheduler.slot_of(number)
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)
        #: What the message in the handler belongs to, or None between lanes.
        self.fetch: Fetch | None = None
        #: The message in the handler, and since when on the monotonic clock.
        self.record: Record | None = None
        self.started = 0.0
        self.handled = 0
        self.failed = 0
        self.retried = 0
        self.dropped = 0

    def _main(self) -> None:
        tokens = self._pool.tokens[self._slot]
        scheduler = self._pool.scheduler
        try:
            while tokens.get():
                # A worker that is awake serves whatever is ready and sleeps when nothing is. So a token is needed
                # only to wake a sleeper: a lane that is queued after the last look here comes with its own.
                while (lane := scheduler.take(self._slot)) is not None:
                    try:
                        self._visit(lane)
                    finally:
                        self.record = self.fetch = None
                        scheduler.give_back(lane)
        except BaseException as error:  # noqa: BLE001 - a defect must stop the consumer, not one thread in silence
            self._pool.fail(error)

    def _visit(self, lane: ConsumerLane) -> None:
        """Serve a lane until it is empty or the time slice is over."""
        deadline = time.monotonic() + self._pool.run_seconds
        while lane.due:
            if not self._serve_parked(lane, lane.due.popleft(), deadline):
                return
        while lane.runs:
            run = lane.runs[0]
            in_time = self._serve_run(lane, run, deadline)
            if run.next == len(run.records):
                lane.runs.popleft()
            if not in_time:
                return

    def _serve_run(self, lane: ConsumerLane, run: ConsumerRun, deadline: float) -> bool:
        """Handle messages of a run, the main path. Returns False when the time slice is over."""
        fetch = self.fetch = run.owner
        assignment = fetch.assignment
        if not assignment.active:
            run.next = len(run.records)
            return True
        handle = assignment.handler.function
        records = run.records
        parked = lane.parked
        clock = time.monotonic
        place = first = run.next
        now = clock()
        while place < len(records):
            record = records[place]
            if parked and (key := assignment.ordering.identity(record)) in parked:
                self._complete(run, first, place)
                lane.behind(key, fetch, run.indexes[place : place + 1], (record,))
                place = first = place + 1
                continue
            self.started = now
            self.record = record
            try:
                handle(Message(record))
            except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its message's failure
                self._complete(run, first, place)
                self._park(lane, assignment, (fetch, run.indexes[place], record), error)
                first = place + 1
            place += 1
            now = clock()
            if now >= deadline or not assignment.active:
                break
        self._complete(run, first, place)
        run.next = place
        return now < deadline

    def _complete(self, run: ConsumerRun, first: int, stop: int) -> None:
        if stop > first:
            run.owner.assignment.tracker.complete(run.owner.block, run.indexes[first:stop])
            self.handled += stop - first

    def _serve_parked(self, lane: ConsumerLane, key: Hashable, deadline: float) -> bool:
        """Try the head of a parked key, and on success what waited behind it. Returns False when time is over."""
        parked = lane.parked[key]
        while parked.waiting:
            fetch, index, record = parked.waiting[0]
            self.fetch = fetch
            assignment = fetch.assignment
            if not assignment.active or parked.head_done:
                parked.next_head()
                continue
            now = time.monotonic()
            if now >= deadline:
                lane.due.appendleft(key)
                return False
            self.started = now
            self.record = record
            self.retried += parked.attempts > 0
            try:
                assignment.handler.function(Message(record))
            except BaseException as error:  # noqa: BLE001 - as in _serve_run
                self._failed(lane, key, parked, error)
                return True
            assignment.tracker.complete(fetch.block, (index,))
            self.handled += 1
            parked.next_head()
        del lane.parked[key]
        return True

    def _park(
        self, lane: ConsumerLane, assignment: Assignment, head: tuple[Fetch, int, Record], error: BaseException
    ) -> None:
        """Park the key of a message that failed for the first time."""
        key = assignment.ordering.identity(head[2])
        self._failed(lane, key, lane.park(key, head), error)

    def _failed(
        self, lane: ConsumerLane, key: Hashable, parked: ParkedKey[Fetch, Record], error: BaseException
    ) -> None:
        """Decide what becomes of the failed head of a parked key."""
        fetch, index, record = parked.waiting[0]
        assignment = fetch.assignment
        handler = assignment.handler
        self.failed += 1
        if parked.attempts == 0:
            parked.since = self.started
        parked.attempts += 1
        delay = handler.retry.delay_after(parked.attempts, parked.since, error)
        place = f"{assignment}@{record.offset()}"
        if delay is not None:
            _log.info("%s failed in %s, try %d; again in %.3f s", place, handler.name, parked.attempts, delay)
            self._pool.timers.add(time.monotonic() + delay, WakeKey(lane.number, key))
        elif handler.on_failure is OnFailure.DEAD_LETTER:
            self._pool.dead_letters.put(DeadLetter(fetch, index, record, error, parked, lane.number, key))
        elif handler.on_failure is OnFailure.DROP:
            _log.error(
                "%s was dropped: %s failed it %d times, last with %s",
                place,
                handler.name,
                parked.attempts,
                type(error).__name__,
            )
            assignment.tracker.complete(fetch.block, (index,))
            self.dropped += 1
            parked.head_done = True
            lane.due.append(key)
        else:
            failure = PenstockError(
                f"{handler.name} failed {place} {parked.attempts} times, last with {type(error).__name__}; "
                "the consumer stops and keeps the offset: mend the handler, or choose dead_letter=True or 'drop'"
            )
            failure.__cause__ = error
            self._pool.fail(failure)


class WorkerPool:
    """The worker threads of a consumer.

    Args:
        name: name of the consumer, for the threads' names.
        workers: how many threads.
        run_seconds: time slice of a visit.
        scheduler: where lanes come from.
        timers: where retries wait.
        dead_letters: where exhausted messages go.
        fail: called with an error that must stop the consumer.
    """

    def __init__(
        self,
        name: str,
        *,
        workers: int,
        run_seconds: float,
        scheduler: Scheduler[Fetch, Record],
        timers: Timers,
        dead_letters: DeadLetterQueue,
        fail: Callable[[BaseException], None],
    ) -> None:
        self.run_seconds = run_seconds
        self.scheduler = scheduler
        self.timers = timers
        self.dead_letters = dead_letters
        self.fail = fail
        #: One queue a slot: tokens that wake its workers, and one to end each.
        self.tokens: list[SimpleQueue[bool]] = [SimpleQueue() for _ in range(scheduler.slots)]
        self.workers = [Worker(self, number, f"penstock-worker-{name}-{number}") for number in range(workers)]

    def start(self) -> None:
        """Start the threads."""
        for worker in self.workers:
            worker.thread.start()

    def wake(self, slots: Sequence[int]) -> None:
        """Wake as many workers as there are ready lanes, given the lanes' slots, and no more than there are."""
        for slot in slots[: len(self.workers)]:
            self.tokens[slot].put(_READY)

    def busy_with(self, assignments: Sequence[Assignment]) -> list[Worker]:
        """Return the workers that hold a message of one of these assignments."""
        busy = []
        for worker in self.workers:
            fetch = worker.fetch
            if fetch is not None and fetch.assignment in assignments:
                busy.append(worker)
        return busy

    def stop(self, timeout: float) -> list[Worker]:
        """End the threads that are between messages; return those still in a handler after `timeout` seconds."""
        for number, _ in enumerate(self.workers):
            self.tokens[self.scheduler.slot_of(number)].put(_END)
        deadline = time.monotonic() + timeout
        for worker in self.workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))
        return [worker for worker in self.workers if worker.thread.is_alive()]


__all__ = ["Worker", "WorkerPool"]
