"""Execution slots: where handlers are called, and what passes between them and the lane processor."""

from __future__ import annotations

from asyncio import Task
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from operator import methodcaller

from penstock.consumer.assignments import Assignment, ConsumerLane, ConsumerRun, Fetch
from penstock.consumer.handlers.call_guard import CallGuard
from penstock.consumer.handlers.deferred import DeferredCompletion
from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.results import Results
from penstock.consumer.handlers.route import Failed, Invoke, MakeResults, Prepare, Route, failure_of
from penstock.errors import raised
from penstock.message import Message, Record
from penstock.reports.latencies import BOUNDARIES_S, BUCKETS


class Slice(list[Record]):
    """Consecutive messages of a run, to be handed over one after another.

    Each is made the slot's `record`, then `slot.prepare` makes of it what the handler is given. It goes on to the next
    while handlers are done and the assignment is active; an outcome ends it. `slot.record` says what was taken,
    so an executor begins with the first in any case.

    A thread looks at the clock only where handlers are slow. Else a slice takes a moment, by how long those before it
    took; should handlers become slow in the middle of one, the poll thread cuts it.
    """

    __slots__ = ("assignment", "deadline", "is_slow")

    # Set by who makes the slice: an `__init__` here would cost as much as all else of it.
    #: What all of them belong to.
    assignment: Assignment
    #: When the lane is to be given back. Whoever looks at the clock after a message goes no further from then on.
    deadline: float
    #: Whether each message is expected to take long, so that a look at the clock after it costs nothing beside it.
    is_slow: bool

    def cut(self) -> None:
        """End the slice with the message that is being handled. Any thread."""
        # One step, and the iterator of a list looks at its length at each of its own. The first stays: it has begun.
        del self[1:]


#: What a handler is given, and what came of it: None when it is done.
Work = Message | list[Message]
Outcome = Failed | DeferredCompletion | Results | None

_OFFSET_OF = methodcaller("offset")


#: Seconds that a slice of quick messages may take, by how long those before it took; and the messages of one at most.
SLICE_S = 0.001
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

    A thread whose call is abandoned loses its slot to its successor, and `guard` with it.
    """

    kind: Kind
    name: str
    #: Time slices that a lane has here.
    slices: int = 1
    #: How many messages the next slice of a run has at most; of 1 at most, it has all and is a slow one.
    slice_size: int = field(default=1, init=False)
    #: The slice under way, or the last one.
    slice: Slice | None = field(default=None, init=False)
    #: The lane that is processed here, and of a thread what processes it; None between lanes.
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
    #: The run whose messages are handled one by one and completed together, until the lane is given back.
    run: ConsumerRun | None = field(default=None, init=False)
    #: What is called with what the lane processor yields, and then with what that returned.
    invoke: Invoke = field(default=_nothing, init=False)
    #: Makes what is handed over of a record; None of one that the filter refuses.
    prepare: Prepare = field(default=Message, init=False)
    make_results: MakeResults = field(default=_nothing, init=False)
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

    def refuse(self, record: Record) -> None:
        """Note that the filter refuses a record of the run under way, before the next is begun."""
        run = self.run
        if run is None:
            return
        if run.refused is None:
            run.refused = [record.offset()]
        else:
            run.refused.append(record.offset())

    def note_duration(self, seconds: float, count: int, now: float) -> None:
        """Note how long so many messages took, which are just done, to choose how many the next slice has."""
        fitting = _MOST if seconds <= 0.0 else int(SLICE_S * count / seconds)
        self.slice_size = max(1, min(fitting, 2 * self.slice_size, _MOST))
        self.unsampled += count
        if self.unsampled >= _SAMPLE:
            self.note_latency(seconds / count, now, count)

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

    def finished(self) -> tuple[ConsumerRun, range] | None:
        """Return the run under way here and the places of it that are done but not completed yet. Any thread.

        It costs the main path nothing: `record` is written at each message anyway. While it is a record of the run, all
        between `run.next` and that record is done, for the lane processor moves `run.next` past what it parks, or
        completes, before it goes on to another record. `run.next` is read last and only rises: a reader may miss what
        is done, and never takes for done what is not.
        """
        record = self.record
        run = self.run
        if record is None or run is None:
            return None
        first = run.next
        place = place_of(record, run, first)
        if place == len(run.records) or run.records[place] is not record:  # between two runs, or at a parked message
            return None
        return run, range(first, place)

    @property
    def handled_so_far(self) -> int:
        """Messages whose handler returned here, with those that are not completed yet. Any thread."""
        # In this order: what is completed in between counts neither way for a moment, and never twice.
        handled = self.handled
        finished = self.finished()
        if finished is None:
            return handled
        run, places = finished
        return handled + len(places) - count_refused(run, places.start, places.stop)

    @property
    def filtered_so_far(self) -> int:
        """Messages that the filter refused here, with those that are not completed yet. Any thread."""
        filtered = self.filtered
        finished = self.finished()
        return filtered + (0 if finished is None else count_refused(finished[0], finished[1].start, finished[1].stop))


@dataclass(frozen=True, slots=True)
class SeenCall:
    """A call that another thread saw under way in a slot: `started` tells two tries of a record apart."""

    slot: ExecutionSlot
    record: Record = field(repr=False)
    started: float

    def holds(self) -> bool:
        """End the slice with the call that is under way, and tell whether that is still this one. Any thread."""
        under_way = self.slot.slice
        if under_way is not None:
            under_way.cut()
            # Its thread looks at the clock after the call; so it ends the slice, and writes no time to the slot.
            under_way.deadline = 0.0
        return self.slot.record is self.record and self.slot.started == self.started


def place_of(record: Record, run: ConsumerRun, first: int) -> int:
    """Return the place of a record in a run, from `first` on. One that is not there has the place it would have."""
    # By offset, for they rise in a run. Never by equality: the client's records compare by all they hold.
    return bisect_left(run.records, record.offset(), first, key=_OFFSET_OF)


def count_refused(run: ConsumerRun, first: int, stop: int) -> int:
    """Return how many messages of a run, by their places, the filter refused. Any thread, once they are behind it."""
    refused = run.refused
    if not refused or first == stop:
        return 0
    end = bisect_right(refused, run.records[stop - 1].offset())
    return end - bisect_left(refused, run.records[first].offset(), 0, end)


def complete_finished(slots: Iterable[ExecutionSlot]) -> None:
    """Complete what is done of the runs under way: a handler that hangs must not hide its finished predecessors.

    Any thread. The lane processor completes these messages again at the end of their runs; the tracker knows.
    """
    for slot in slots:
        finished = slot.finished()
        if finished is not None and finished[1]:
            run, places = finished
            run.owner.assignment.tracker.complete_early(run.owner.block, run.indexes[places.start : places.stop])


LaneProcessing = Generator[Work | Slice, Outcome, None]
#: The same, message by message.
SteppedProcessing = Generator[Work, Outcome, None]


def message_by_message(processing: LaneProcessing, slot: ExecutionSlot, now: Callable[[], float]) -> SteppedProcessing:
    """Yield what the lane processor yields, the messages of a slice one at a time: for who takes steps."""
    outcome: Outcome = None
    while True:
        try:
            work = processing.send(outcome)
        except StopIteration:
            return
        if not isinstance(work, Slice):
            outcome = yield work
            continue
        for record in work:
            slot.record = record
            try:
                message = slot.prepare(record)
            except:  # noqa: E722 - see `raised`; the user's code: it is this message's failure
                outcome = failure_of(raised())
                break
            outcome = None
            if message is None:
                slot.refuse(record)
            else:
                outcome = yield message
            if outcome is not None or not work.assignment.active:
                break
            slot.started = now()
            if slot.started >= work.deadline:
                break
