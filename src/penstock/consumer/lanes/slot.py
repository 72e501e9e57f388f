"""Execution slots: where handlers are called, and the data between them and the lane processor.

The messages of a slice are completed together, by the first of two threads: the lane's holder once the slice has ended,
or another thread that needs the progress while a handler takes its time (`complete_finished`). Both hold the slot's
lock, and both move `run.next` past the completed messages, so each message is completed once. The progress of a slice
costs the main path nothing: `record` is written for each message anyway, and all messages before it are done. The slot
shows its run only while a slice of it is being handled. The holder removes it under the lock.
"""

from __future__ import annotations

import threading
import time
from asyncio import Task
from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from penstock.consumer.assignments import Assignment, ConsumerLane, ConsumerRun, Fetch, Item
from penstock.consumer.handlers.call_guard import CallGuard
from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.results import DeferredCompletion, Result, Results
from penstock.consumer.handlers.route import Failed, Route
from penstock.consumer.latencies import BOUNDARIES_S, BUCKETS
from penstock.message import Message, Record


class Slice(list[Record]):
    """Consecutive messages of a run, to be handed over one after another.

    For each message, the executor sets the slot's `record`, and `Route.prepare` makes the handler's argument. Results
    go into `slot.results`, messages that the filter refuses into `slot.refused`. The slice goes on while handlers
    succeed and the assignment is active. A failure or a deferred completion ends it. The first message is handed over
    in any case.

    A slice of quick messages is short, judged by the slices before it, so a thread does not look at the clock in it. If
    handlers become slow in the middle of a slice, the poll thread cuts it. If the slot's `slice_size` is 1, messages
    are slow, and a look at the clock costs little in comparison: a message with results and the slot's deadline then
    end the slice.
    """

    __slots__ = ("assignment",)

    #: The assignment of all its messages. The creator sets it: an `__init__` here would double the cost of a slice.
    assignment: Assignment

    def cut(self) -> None:
        """End the slice after the message that is being handled. Any thread."""
        # One atomic step; a list iterator checks the length at each of its steps. The first message stays.
        del self[1:]


#: The argument of a handler, and the outcome of its call: None if the message is done.
Work = Message | list[Message]
Outcome = Failed | DeferredCompletion | Results | None
#: An outcome that ends a slice.
Unfinished = Failed | DeferredCompletion
#: Publishes results of items in a lane, and completes their messages after that.
Submit = Callable[[ConsumerLane, Sequence[Item], Sequence[Result]], None]

#: Planned seconds of a slice, judged by the slices before it; and its maximum of messages.
_SLICE_S = 0.001
_MAX_SLICE = 256
#: The most messages in a slice of slow ones: they take longer than the time slice of a thread.
MAX_SLOW_SLICE = 32
#: Quick messages per sample of the latencies: one slice counts for all.
_SAMPLE = 16


@dataclass(slots=True, eq=False, repr=False)
class ExecutionSlot:
    """A place where handlers are called: a worker thread or a task. It alone writes the fields; any thread reads them.

    The exceptions are `handled` and `filtered`, which are written under the lock. A thread whose call is abandoned
    loses its slot to a successor, and keeps only its `guard`, `results` and `refused`.
    """

    kind: Kind
    name: str
    #: Time slices that a lane has here, and the time when the lane must be given back.
    slices: int = 1
    deadline: float = field(default=0.0, init=False)
    #: The most messages in the next slice of a run; 1 if messages are slow.
    slice_size: int = field(default=1, init=False)
    #: The current or last slice; and its run, which is None after the slice.
    slice: Slice | None = field(default=None, init=False)
    run: ConsumerRun | None = field(default=None, init=False)
    #: Of messages of that run, in their order: the results, and the offsets of messages that the filter refused.
    results: list[tuple[Record, Results]] = field(default_factory=list, init=False)
    refused: list[int] = field(default_factory=list, init=False)
    #: The lane that is processed here, and its generator; None between lanes.
    lane: ConsumerLane | None = field(default=None, init=False)
    processing: LaneProcessing | None = field(default=None, init=False)
    #: Interrupts the calls of a thread.
    guard: CallGuard = field(default_factory=CallGuard, init=False)
    #: The fetch of the message in the handler; None between lanes.
    fetch: Fetch | None = field(default=None, init=False)
    #: The fetches of all messages of a batch in the handler.
    fetches: Sequence[Fetch] = field(default=(), init=False)
    #: The message in the handler (the first of a batch), or None; and the start of the call on the engine's clock. In a
    #: slice of quick messages, the start of the first call.
    record: Record | None = field(default=None, init=False)
    started: float = field(default=0.0, init=False)
    #: The route whose handler is called. Set by the lane processor before it yields, as `submit`.
    route: Route = field(init=False)
    #: Publishes results of a slice's messages.
    submit: Submit = field(init=False)
    #: The engine's clock.
    now: Callable[[], float] = field(default=time.monotonic, init=False)
    #: The thread, and for a task the task: needed for its stack.
    thread_id: int | None = field(default=None, init=False)
    task: Task[None] | None = field(default=None, init=False)
    #: Seconds that it spent on woken keys and owes to new messages: see `Scheduler.take`.
    owed_s: float = field(default=0.0, init=False)
    handled: int = field(default=0, init=False)
    failed: int = field(default=0, init=False)
    retried: int = field(default=0, init=False)
    over_time_limit: int = field(default=0, init=False)
    dropped: int = field(default=0, init=False)
    filtered: int = field(default=0, init=False)
    #: Counts of messages by `BOUNDARIES_S`: time in the handler, and time since the fetch. Quick messages are sampled.
    handler_times: list[int] = field(default_factory=lambda: [0] * BUCKETS, init=False)
    done_times: list[int] = field(default_factory=lambda: [0] * BUCKETS, init=False)
    unsampled: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def leave(self) -> None:
        """Note that the slot is between lanes."""
        self.record = self.fetch = self.run = self.slice = self.lane = self.processing = None
        self.fetches = ()

    def is_at(self, assignments: Sequence[Assignment]) -> bool:
        """Tell whether it holds a message of these assignments. Any thread."""
        # Each field is read once: its owner may clear it at any moment.
        fetch, fetches = self.fetch, self.fetches
        if fetch is not None and fetch.assignment in assignments:
            return True
        return any(fetch.assignment in assignments for fetch in fetches)

    def note_slice(self, seconds: float, count: int, now: float) -> None:
        """Note the duration of `count` messages of a slice, which are just done."""
        # A slow pace is kept as it is.
        if self.slice_size > 1 or seconds < _SLICE_S * count:
            self.note_pace(seconds, count)
        self.unsampled += count
        if self.unsampled >= _SAMPLE or self.slice_size == 1:
            self.note_latency(seconds / count, now, count)

    def note_pace(self, seconds: float, count: int) -> None:
        """Choose the size of the next slice, from the duration of `count` messages."""
        size = min(2 * self.slice_size, _MAX_SLICE)
        if (fitting := _SLICE_S * count) < size * seconds:
            size = int(fitting / seconds) or 1
        self.slice_size = size

    def note_latency(self, call_s: float, now: float, count: int) -> None:
        """Count the latencies of `count` messages that are just done, and of those not sampled before.

        `call_s`: seconds of one handler call.
        """
        fetch = self.fetch
        if fetch is None:
            return
        weight, self.unsampled = max(count, self.unsampled), 0
        self.handler_times[bisect_left(BOUNDARIES_S, call_s)] += weight
        self.done_times[bisect_left(BOUNDARIES_S, now - fetch.arrived)] += weight

    def cut_slice(self, before: float) -> None:
        """End the current slice if it began before a time. Any thread."""
        under_way = self.slice
        if under_way is not None and len(under_way) > 1 and self.started < before:
            under_way.cut()

    def complete_finished(self) -> None:
        """Complete the messages of the current slice before the one in the handler. Any thread."""
        # Without the lock: all messages before this place are done, whatever is handled meanwhile.
        if (run := self.run) is not None and (place := self.place_in_run(run)) is not None:
            self.complete(run, place, is_over=False)

    def place_in_run(self, run: ConsumerRun) -> int | None:
        """Return the place in a run of the message in the handler; None if the message is not in the run."""
        # The slot may handle another run meanwhile, and this run again before it is completed.
        record = self.record
        return None if record is None else place_of(record, run, run.next)

    def leave_to_abandoned_call(self) -> None:
        """Leave `guard`, `results` and `refused` to the thread of an abandoned call; make new ones for later calls."""
        # Under the lock: results that are submitted at this moment must not be in the copy.
        with self._lock:
            self.guard, self.results, self.refused = CallGuard(), self.results.copy(), self.refused.copy()

    def complete(self, run: ConsumerRun, stop: int, *, is_over: bool) -> None:
        """Complete the messages of a run before the place `stop`, and submit their results.

        `is_over`: the lane's holder calls after the slice. Otherwise any thread may call.
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
                    # Later offsets are of messages that have just begun.
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
                # Last: if results cannot be published, a Spark task ends with the error, and `next` is unchanged.
                run.next = stop
            if is_over and self.results:
                # The message failed after it had results: its time limit came when its handler had returned.
                self.results.clear()

    def _submit_results(self, run: ConsumerRun, first: int, stop: int) -> list[int]:
        """Submit results of messages of a run; return the indexes of messages without results."""
        fetch, indexes, records, lane = run.owner, run.indexes, run.records, self.lane
        if lane is None:
            # The consumer ends and has just left the lane in the middle of a slice: messages with results are not done.
            return []
        done: list[int] = []
        at, count = first, 0
        for record, results in self.results:
            while at < stop and records[at] is not record:
                at += 1
            if at == stop:  # the message has just begun
                break
            self.submit(lane, ((fetch, indexes[at], record),), results.messages)
            done += indexes[first:at]
            first, count = at + 1, count + 1
        del self.results[:count]
        done += indexes[first:stop]
        return done


@dataclass(slots=True, eq=False, repr=False)
class SeenCall:
    """A running call that another thread has seen in a slot. `started` distinguishes two tries of a record."""

    slot: ExecutionSlot
    record: Record
    started: float
    #: When it was first seen, and when it was interrupted, on the engine's clock.
    since: float
    interrupted_at: float | None = None
    #: Seconds that it had taken at the last report; 0 before the first.
    reported_s: float = 0.0

    def holds(self) -> bool:
        """End the slice with the running call, and tell whether that is still this one. Any thread."""
        under_way = self.slot.slice
        if under_way is not None:
            under_way.cut()
        return self.slot.record is self.record and self.slot.started == self.started


def place_of(record: Record, run: ConsumerRun, first: int) -> int | None:
    """Return the place of a record in a run, from `first` on."""
    # By identity: the client's records compare all their content.
    records = run.records
    for place in range(first, len(records)):
        if records[place] is record:
            return place
    return None


#: The generator of a lane: it yields work for the handler and receives the outcome.
LaneProcessing = Generator[Work | Slice, Outcome, None]
