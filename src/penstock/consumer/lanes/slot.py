"""Execution slots: where handlers are called, and what passes between them and the lane processor.

Messages are completed by the slice, by whoever comes first: the holder of the lane once the slice has ended, or another
thread that wants to know what is done while a handler of the slice takes its time (`complete_finished`). Both hold the
slot's lock, and both move `run.next` past what they complete, so each message is completed once. How far a slice has
come costs the main path nothing: `record` is written at each message anyway, and all before it in the run is done. The
run is shown in the slot only while a slice of it is under way; the holder takes it away under the lock.
"""

from __future__ import annotations

import threading
import time
from asyncio import Task
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.consumer.assignments import Assignment, ConsumerLane, ConsumerRun, Fetch, Item
from penstock.consumer.handlers.call_guard import CallGuard
from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.results import DeferredCompletion, Result, Results
from penstock.consumer.handlers.route import Failed, Invoke, MakeResults, Prepare, Route
from penstock.consumer.latencies import BOUNDARIES_S, BUCKETS
from penstock.message import Message, Record


class Slice(list[Record]):
    """Consecutive messages of a run, to be handed over one after another.

    Each is made the slot's `record`, then `slot.prepare` makes of it what the handler is given. What the handler
    returned is put into `slot.results`, what the filter refused into `slot.refused`. It goes on to the next while
    handlers are done and the assignment is active; a failure and a completion that is put off end it. An executor
    begins with the first in any case.

    A slice of quick messages takes a moment, by how long those before it took, so a thread does not look at the clock
    within; should handlers become slow in the middle of one, the poll thread cuts it. Where the slot's `slice_size` is
    1, messages are slow, and a look at the clock costs nothing in comparison: each with results ends the slice, and
    so does the slot's deadline.
    """

    __slots__ = ("assignment",)

    # Set by who makes the slice: an `__init__` here would cost as much as all else of it.
    #: What all of them belong to.
    assignment: Assignment

    def cut(self) -> None:
        """End the slice with the message that is being handled. Any thread."""
        # One step, and the iterator of a list looks at its length at each of its own. The first stays: it has begun.
        del self[1:]


#: What a handler is given, and what came of it: None when it is done.
Work = Message | list[Message]
Outcome = Failed | DeferredCompletion | Results | None
#: What ends a slice.
Unfinished = Failed | DeferredCompletion
#: Has results written, and then messages done: of a lane, for these items.
Submit = Callable[[ConsumerLane, Sequence[Item], Sequence[Result]], None]

#: Seconds that a slice may take, by how long those before it took, and the messages of one at most.
_SLICE_S = 0.001
_MOST = 256
#: Messages of a slice of slow ones at most: they take longer than a time slice of a thread.
MOST_SLOW = 32
#: Of so many quick messages, one slice's latencies are noted for all.
_SAMPLE = 16


def _nothing(*_: object) -> None:
    raise AssertionError("the lane processor yields only after it has set what is to be called")


@dataclass(slots=True, eq=False, repr=False)
class ExecutionSlot:
    """Where handlers are called: a worker thread or a task. Its fields are written by it alone, read by any thread.

    Save `handled` and `filtered`, which are written under the lock. A thread whose call is abandoned loses its slot to
    its successor, and with it `guard`, `results` and `refused`.
    """

    kind: Kind
    name: str
    #: Time slices that a lane has here, and when the lane is to be given back.
    slices: int = 1
    deadline: float = field(default=0.0, init=False)
    #: How many messages the next slice of a run has at most; 1 where they are slow.
    slice_size: int = field(default=1, init=False)
    #: The slice under way, or the last one; and its run, which is None when the slice has ended.
    slice: Slice | None = field(default=None, init=False)
    run: ConsumerRun | None = field(default=None, init=False)
    #: Of messages of that run, in their order: the results of those that have some, and the offsets of those that the
    #: filter refused.
    results: list[tuple[Record, Results]] = field(default_factory=list, init=False)
    refused: list[int] = field(default_factory=list, init=False)
    #: The lane that is processed here, and what processes it; None between lanes.
    lane: ConsumerLane | None = field(default=None, init=False)
    processing: LaneProcessing | None = field(default=None, init=False)
    #: Interrupts the calls of a thread.
    guard: CallGuard = field(default_factory=CallGuard, init=False)
    #: What the message in the handler belongs to, or None between lanes.
    fetch: Fetch | None = field(default=None, init=False)
    #: Of a batch in the handler, all that its messages belong to.
    fetches: Sequence[Fetch] = field(default=(), init=False)
    #: The message in the handler (of a batch the first) and since when on the engine's clock; None between two. Of a
    #: slice of quick messages, since when its first was.
    record: Record | None = field(default=None, init=False)
    started: float = field(default=0.0, init=False)
    #: What is called with what the lane processor yields, and then with what that returned.
    invoke: Invoke = field(default=_nothing, init=False)
    #: Makes what is handed over of a record; None of one that the filter refuses.
    prepare: Prepare = field(default=Message, init=False)
    make_results: MakeResults = field(default=_nothing, init=False)
    #: Takes the results of messages of a slice.
    submit: Submit = field(default=_nothing, init=False)
    #: The engine's clock.
    now: Callable[[], float] = field(default=time.monotonic, init=False)
    #: The thread, and for a task the task, that runs it: for a look at its stack.
    thread_id: int | None = field(default=None, init=False)
    task: Task[None] | None = field(default=None, init=False)
    #: Seconds that it gave to what was woken and owes to new messages: see `Scheduler.take`.
    owed_s: float = field(default=0.0, init=False)
    handled: int = field(default=0, init=False)
    failed: int = field(default=0, init=False)
    retried: int = field(default=0, init=False)
    over_time_limit: int = field(default=0, init=False)
    dropped: int = field(default=0, init=False)
    filtered: int = field(default=0, init=False)
    #: Messages by `BOUNDARIES_S`: of the time in the handler, and of that since they were fetched; quick ones sampled.
    handler_times: list[int] = field(default_factory=lambda: [0] * BUCKETS, init=False)
    done_times: list[int] = field(default_factory=lambda: [0] * BUCKETS, init=False)
    unsampled: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def enter(self, route: Route) -> None:
        """Call what a route calls from now on."""
        self.invoke, self.make_results, self.prepare = route.invoke, route.make_results, route.prepare

    def leave(self) -> None:
        """Note that the slot is between lanes."""
        self.record = self.fetch = self.run = self.slice = self.lane = self.processing = None
        self.fetches = ()

    def is_at(self, assignments: Sequence[Assignment]) -> bool:
        """Tell whether it holds a message of one of these. Any thread."""
        # Each is read once: its owner clears it at any moment.
        fetch, fetches = self.fetch, self.fetches
        if fetch is not None and fetch.assignment in assignments:
            return True
        return any(fetch.assignment in assignments for fetch in fetches)

    def note_slice(self, seconds: float, count: int, now: float) -> None:
        """Note how long so many messages of a slice took, which are just done."""
        # Slow ones go on as they are.
        if self.slice_size > 1 or seconds < _SLICE_S * count:
            self.note_pace(seconds, count)
        self.unsampled += count
        if self.unsampled >= _SAMPLE or self.slice_size == 1:
            self.note_latency(seconds / count, now, count)

    def note_pace(self, seconds: float, count: int) -> None:
        """Choose how many messages the next slice has, by how long so many took."""
        size = min(2 * self.slice_size, _MOST)
        if (fitting := _SLICE_S * count) < size * seconds:
            size = int(fitting / seconds) or 1
        self.slice_size = size

    def note_latency(self, call_s: float, now: float, count: int) -> None:
        """Count so many messages, which are just done, with those not counted yet, by how long they took.

        A call of the handler took `call_s`.
        """
        fetch = self.fetch
        if fetch is None:
            return
        weight, self.unsampled = max(count, self.unsampled), 0
        self.handler_times[bisect_left(BOUNDARIES_S, call_s)] += weight
        self.done_times[bisect_left(BOUNDARIES_S, now - fetch.arrived)] += weight

    def cut_slice(self, before: float) -> None:
        """End the slice under way if it began before that. Any thread."""
        under_way = self.slice
        if under_way is not None and len(under_way) > 1 and self.started < before:
            under_way.cut()

    def complete_finished(self) -> None:
        """Complete the messages of the slice under way before the one that is in the handler. Any thread."""
        # Without the lock: whatever is handled meanwhile, all before this place is done.
        if (run := self.run) is not None and (place := self.place_in_run(run)) is not None:
            self.complete(run, place, is_over=False)

    def place_in_run(self, run: ConsumerRun) -> int | None:
        """Return the place in a run of the message of a slice that is in the handler; None where it is of another."""
        # Of this run alone: the slot may be at another one meanwhile, and back at this one before it is completed.
        record = self.record
        return None if record is None else place_of(record, run, run.next)

    def leave_to_abandoned_call(self) -> None:
        """Leave to the thread of a call what it has in hand until that ends: the slot's next calls are another's."""
        # Under the lock: what is submitted at this moment must not be in the copy.
        with self._lock:
            self.guard, self.results, self.refused = CallGuard(), self.results.copy(), self.refused.copy()

    def complete(self, run: ConsumerRun, stop: int, *, is_over: bool) -> None:
        """Complete the messages of a run before a place, and submit their results.

        `is_over`: by the holder of the lane, up to the first message that the slice has left. Otherwise any thread.
        """
        with self._lock:
            if is_over:
                self.run = None
            elif self.run is not run:
                return
            first = run.next
            if first < stop:
                fetch, indexes, refused = run.owner, run.indexes, 0
                if self.refused:
                    # Some may be of messages that are just begun.
                    end = run.records[stop].offset() if stop < len(indexes) else self.refused[-1] + 1
                    refused = bisect_left(self.refused, end)
                    del self.refused[:refused]
                if self.results:
                    done = self._submit_results(run, first, stop)
                else:
                    done = indexes if stop - first == len(indexes) else indexes[first:stop]
                if done:
                    fetch.assignment.tracker.complete(fetch.block, done)
                    self.handled += len(done) - refused
                    self.filtered += refused
                # Last: what a task of Spark may not publish ends it, and its run is where it was.
                run.next = stop
            if is_over and self.results:
                # Of a message that failed all the same: its time limit came when its handler had returned.
                self.results.clear()

    def _submit_results(self, run: ConsumerRun, first: int, stop: int) -> list[int]:
        """Submit results of messages of a run; return the indexes of those without any."""
        fetch, indexes, records, lane = run.owner, run.indexes, run.records, self.lane
        if lane is None:
            # It is left at this moment, in the middle of a slice, for the consumer ends: what has results is not done.
            return []
        done: list[int] = []
        at, count = first, 0
        for record, results in self.results:
            while at < stop and records[at] is not record:
                at += 1
            if at == stop:  # of messages that are just begun
                break
            self.submit(lane, ((fetch, indexes[at], record),), results.messages)
            done += indexes[first:at]
            first, count = at + 1, count + 1
        del self.results[:count]
        done += indexes[first:stop]
        return done


@dataclass(slots=True, eq=False, repr=False)
class SeenCall:
    """A call that another thread saw under way in a slot: `started` distinguishes two tries of a record."""

    slot: ExecutionSlot
    record: Record
    started: float
    #: When it was first seen, and when it was interrupted, on the engine's clock.
    since: float
    interrupted_at: float | None = None
    #: How many seconds it had taken when it was last reported; 0 where it was not.
    reported_s: float = 0.0

    def holds(self) -> bool:
        """End the slice with the call that is under way, and tell whether that is still this one. Any thread."""
        under_way = self.slot.slice
        if under_way is not None:
            under_way.cut()
        return self.slot.record is self.record and self.slot.started == self.started


def place_of(record: Record, run: ConsumerRun, first: int) -> int | None:
    """Return the place of a record in a run, from `first` on."""
    # Never by equality: the client's records compare by all they hold.
    records = run.records
    for place in range(first, len(records)):
        if records[place] is record:
            return place
    return None


def complete_finished(slots: Iterable[ExecutionSlot]) -> None:
    """Complete what is done of the slices under way: a handler that hangs must not hide its finished predecessors.

    Any thread.
    """
    for slot in slots:
        if slot.run is not None:
            slot.complete_finished()


#: Steps of the lane processor: it yields what is to be handled, and is sent what came of it.
LaneProcessing = Generator[Work | Slice, Outcome, None]
