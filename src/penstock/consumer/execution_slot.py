"""Execution slots: where handlers are called, and what passes between them and the lane processor."""

from __future__ import annotations

from asyncio import Task
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from operator import methodcaller

from penstock.consumer.assignments import ConsumerRun, Fetch
from penstock.consumer.handlers.deferred import DeferredCompletion
from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.route import Failed, Invoke
from penstock.message import Message, Record

#: What a handler is given, and what came of it: None when it is done.
Work = Message | list[Message]
Outcome = Failed | DeferredCompletion | None

_OFFSET_OF = methodcaller("offset")


def _nothing(_: object) -> None:
    raise AssertionError("the lane processor yields only after it has set what is to be called")


@dataclass(slots=True, eq=False, repr=False)
class ExecutionSlot:
    """Where handlers are called: a worker thread or a task. Its fields are written by it alone, read by any thread."""

    kind: Kind
    name: str
    #: Time slices that a lane has here.
    slices: int = 1
    #: What the message in the handler belongs to, or None between lanes.
    fetch: Fetch | None = field(default=None, init=False)
    #: The message in the handler (of a batch the first) and since when on the engine's clock; None between two.
    record: Record | None = field(default=None, init=False)
    started: float = field(default=0.0, init=False)
    batch_count: int = field(default=1, init=False)
    #: The run whose messages are handled one by one and completed together, until the lane is given back.
    run: ConsumerRun | None = field(default=None, init=False)
    #: What is called with what the lane processor yields.
    invoke: Invoke = field(default=_nothing, init=False)
    #: The thread, and for a task the task, that runs it: for a look at its stack.
    thread_id: int | None = field(default=None, init=False)
    task: Task[None] | None = field(default=None, init=False)
    #: Seconds that it gave to what was woken and owes to new messages: see `Scheduler.take`.
    owed_s: float = field(default=0.0, init=False)
    handled: int = field(default=0, init=False)
    failed: int = field(default=0, init=False)
    retried: int = field(default=0, init=False)
    dropped: int = field(default=0, init=False)
    filtered: int = field(default=0, init=False)

    def leave(self) -> None:
        """Note that the slot is between lanes."""
        self.record = self.fetch = self.run = None

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
        records, first = run.records, run.next
        # By offset, for they rise in a run. Never by equality: the client's records compare by all they hold.
        place = bisect_left(records, record.offset(), first, key=_OFFSET_OF)
        if place == len(records) or records[place] is not record:  # between two runs, or at a parked message
            return None
        return run, range(first, place)

    @property
    def handled_so_far(self) -> int:
        """Messages whose handler returned here, with those that are not completed yet. Any thread."""
        # In this order: what is completed in between counts neither way for a moment, and never twice.
        handled = self.handled
        finished = self.finished()
        return handled + (0 if finished is None else len(finished[1]))


def complete_finished(slots: Iterable[ExecutionSlot]) -> None:
    """Complete what is done of the runs under way: a handler that hangs must not hide its finished predecessors.

    Any thread. The lane processor completes these messages again at the end of their runs; the tracker knows.
    """
    for slot in slots:
        finished = slot.finished()
        if finished is not None and finished[1]:
            run, places = finished
            run.owner.assignment.tracker.complete_early(run.owner.block, run.indexes[places.start : places.stop])


@dataclass(frozen=True, slots=True)
class LingerUntil:
    """The lane has runs, but its batch is not full: it is not to be processed until it is woken."""

    #: `lane.appended` when that was decided.
    appended: int
    #: Called once the lane is given back: has it woken in time.
    schedule_wake: Callable[[], None]


LaneProcessing = Generator[Work, Outcome, LingerUntil | None]
