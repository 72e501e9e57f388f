"""The lane processor: what the holder of a lane does with it, step by step, whoever calls the handlers.

`LaneProcessor.process` is a generator. It yields what the handler in `slot.invoke` is to be given, is sent the outcome,
and returns when the lane is to be given back. A worker thread calls the handler, a task on the event loop awaits it, a
simulation does either when it likes: the rules are written once, here. So the generator itself never waits.

New messages that no limit holds are yielded by the `Slice`, and completed by the slice, for a step of a generator and a
look at the clock cost as much as a quick handler. How it is worked through stands there, in
`penstock.consumer.lanes.slot`.

One generator at a time holds a lane (the scheduler guarantees it), so what it does to the lane's runs, parked keys and
runs that were set aside needs no lock. Revocation: the poll thread sets `assignment.active = False` and then reads
every slot's `fetch`, and `fetches` of a batch; the holder sets these first and then reads `active`. Whichever comes
second sees the other, so a handler either is waited for or does not start. Offsets are completed before these are
cleared, so who waited sees them done. Drain: the poll thread sets `draining` and then wakes all that is set aside; the
holder sets runs aside first and then reads `draining`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import cast

from penstock.clients.cluster import Clock
from penstock.consumer.assignments import Assignment, ConsumerAside, ConsumerLane, ConsumerParked, ConsumerRun, Fetch
from penstock.consumer.handlers.route import failure_of
from penstock.consumer.lanes.batches import Batches
from penstock.consumer.lanes.parked_keys import ParkedKeys
from penstock.consumer.lanes.parking import Parking, key_of
from penstock.consumer.lanes.set_aside import SetAside
from penstock.consumer.lanes.slot import (
    MOST_SLOW,
    ExecutionSlot,
    LaneProcessing,
    Outcome,
    Slice,
    Unfinished,
    Work,
    place_of,
)
from penstock.consumer.outbox.dead_letters import DeadLetterPublisher
from penstock.consumer.outbox.outbox import HandlerResults, RefusedResults, Tries
from penstock.consumer.timers import Timers
from penstock.message import Record
from penstock.routing import ParkedKey, Scheduler

#: Wakes all that waits in a lane.
_ALL = object()


class LaneProcessor:
    """Processes lanes, each for a slice of `run_seconds`. Thread-safe: each call is for a lane that is held."""

    def __init__(
        self,
        clock: Clock,
        run_seconds: float,
        *,
        scheduler: Scheduler[Fetch, Record],
        timers: Timers,
        publisher: DeadLetterPublisher,
        results: HandlerResults,
        wake: Callable[[Sequence[int]], None],
        fail: Callable[[BaseException], None],
        one_partition: bool = False,
    ) -> None:
        self.now = clock.monotonic
        self._run_seconds = run_seconds
        self.scheduler = scheduler
        #: Has the lanes of these ready queues processed. Any thread.
        self.wake = wake
        self.fail = fail
        self._parking = Parking(clock, timers=timers, publisher=publisher, wake=self.wake_waiter, fail=fail)
        #: Deferred completions that are out, with what they belong to. Any thread may read it.
        self.deferred = self._parking.deferred
        #: What is to be given up. Any thread.
        self.give_ups = self._parking.give_ups
        self._submit = results.submit
        batches = Batches(clock, self._parking, results)
        #: What waits for tokens, or for more of its batch.
        self.set_aside = SetAside(clock, timers, batches, wake=self.wake_waiter, one_partition=one_partition)
        self._parked_keys = ParkedKeys(clock, self._parking, self.set_aside, batches)

    def wake_waiter(self, waiter: ConsumerParked | ConsumerAside) -> None:
        """Wake a parked key, or runs that were set aside. Any thread."""
        self.wake(self.scheduler.wake(waiter.lane, waiter))

    def drain(self) -> None:
        """Have batches that are not full handed over at once from now on. Any thread."""
        self.set_aside.draining = True
        self.wake_all(parked=False)

    def wake_all(self, *, parked: bool = True) -> None:
        """Wake what waits in lanes: what is of dropped assignments goes, what waits for a limit asks again."""
        for lane in self.scheduler.lanes:
            if lane.aside or (parked and lane.parked):
                self.wake(self.scheduler.wake(lane, _ALL))

    def process(self, lane: ConsumerLane, slot: ExecutionSlot) -> LaneProcessing:  # noqa: C901, PLR0912, PLR0915 - the main path in one piece, for speed
        """Process a lane until it is empty, or the time slice is over: `slot.deadline`, which its executor may cut."""
        now, runs, parked_keys = self.now, lane.runs, lane.parked
        slot.lane, slot.submit, slot.now = lane, self._submit, now
        time = began = now()
        slot.deadline = began + self._run_seconds * slot.slices
        # A worker that owes time to runs takes those that it finds.
        if lane.due and lane.serves_due and not (slot.owed_s and runs):
            goes_on = yield from self._process_woken(lane, slot)
            # Runs that waited meanwhile get as much time before what is woken next, in this lane and from this worker.
            time = now()
            lane.owed_s = slot.owed_s = time - began
            if not goes_on or time >= slot.deadline:
                return
        entered = None
        while runs:
            for aside in self.set_aside.overtaken(lane) if lane.aside else ():
                entered = None
                if not (yield from self.set_aside.process(aside, slot)):
                    return
            run = runs[0]
            fetch = slot.fetch = run.owner
            assignment = fetch.assignment
            route = assignment.route
            if not assignment.active:
                runs.popleft()
                continue
            if route is not entered:
                slot.enter(route)
                entered = route
            began = time
            # Of what a filter refuses nothing is expected: it is asked before the message's key is looked for. Where a
            # limit was taken away since, what came first goes first.
            if (
                route.batch > 1
                or route.gated
                or fetch.has_unkeyed
                or (route.filters and parked_keys)
                or (lane.aside and route.token_bucket in lane.aside)
            ):
                aside = self.set_aside.put(lane)
                goes_on = aside.awaits_token or (yield from self.set_aside.process(aside, slot))
                time = now()
                if slot.owed_s or lane.owed_s:
                    _repay(lane, slot, time - began)
                if not goes_on or time >= slot.deadline:
                    return
                continue
            # The main path, in this generator itself: delegating costs at each lane.
            records = run.records
            place = run.next
            while place < len(records):
                size = slot.slice_size
                stop = min(place + (size if size > 1 else MOST_SLOW), len(records))
                if parked_keys:
                    stop = self._next_parked(lane, run, place, stop)
                    if stop == place:
                        item = (fetch, run.indexes[place], records[place])
                        self._parking.append(parked_keys[key_of(item)], item)
                        place = run.next = place + 1
                        continue
                taken = Slice(records[place:stop])
                taken.assignment = assignment
                # The run last: see `ExecutionSlot.complete_finished`.
                slot.started, slot.record, slot.slice, slot.run = time, taken[0], taken, run
                outcome = yield taken
                record, before, first = slot.record, time, place
                time = now()
                # An outcome, a cut, a revocation or the deadline ends a slice before its last record.
                place = stop if record is records[stop - 1] else 1 + cast("int", place_of(record, run, first))
                slot.note_slice(time - before, place - first, time)
                slot.complete(run, place if outcome is None else place - 1, is_over=True)
                if outcome is not None:
                    item, unfinished = (fetch, run.indexes[place - 1], record), cast("Unfinished", outcome)
                    self._parking.park_unfinished(lane, key_of(item), item, unfinished, slot)
                    run.next = place
                # What was parked now may be a key of what a filter is asked for first.
                if time >= slot.deadline or not assignment.active or (parked_keys and route.filters):
                    break
            if place == len(records):
                runs.popleft()
            if slot.owed_s or lane.owed_s:
                _repay(lane, slot, time - began)
            if time >= slot.deadline:
                return

    def _process_woken(self, lane: ConsumerLane, slot: ExecutionSlot) -> Generator[Work, Outcome, bool]:
        """Process what was woken in a lane. Returns False when the lane is to be given back."""
        while lane.due:
            woken = lane.due.pop(0)
            if woken is _ALL:
                self.set_aside.drop_inactive(lane)
                lane.due += [*dict.fromkeys(lane.parked.values()), *lane.aside.values()]
            elif isinstance(woken, RefusedResults):
                self._park_refused(lane, woken, slot)
            elif isinstance(woken, ParkedKey):
                if self.give_ups and self._parking.give_up_if_asked(woken):
                    continue
                if not (yield from self._parked_keys.process(woken, slot)):
                    return False
            elif not (yield from self.set_aside.process(cast("ConsumerAside", woken), slot)):
                return False
        return True

    def _park_refused(self, lane: ConsumerLane, refused: RefusedResults, slot: ExecutionSlot) -> None:
        """Park a message whose results were refused, as one whose handler has failed."""
        item = fetch, _, _ = refused.item
        slot.fetch = fetch
        if not fetch.assignment.active:
            return
        key = key_of(item)
        if key in lane.parked:
            # Its own failure is met again when it is handed over: what it stands behind comes first.
            self._parking.append(lane.parked[key], item)
            return
        tries = refused.tries or Tries(0, self.now())
        self._parking.park_unfinished(lane, key, refused.item, failure_of(refused.error), slot, tries=tries)

    def _next_parked(self, lane: ConsumerLane, run: ConsumerRun, place: int, stop: int) -> int:
        """Return the place of the first message from `place` on whose key is parked, `stop` at most."""
        for at in range(place, stop):
            if key_of((run.owner, run.indexes[at], run.records[at])) in lane.parked:
                return at
        return stop

    def busy_with(self, slots: Iterable[ExecutionSlot], assignments: Sequence[Assignment]) -> list[str]:
        """Return the names of the slots and completions that hold a message of one of these assignments."""
        busy = [slot.name for slot in slots if slot.is_at(assignments)]
        busy += ["a deferred completion" for fetch in list(self.deferred.values()) if fetch.assignment in assignments]
        return busy


def _repay(lane: ConsumerLane, slot: ExecutionSlot, seconds: float) -> None:
    lane.owed_s = max(0.0, lane.owed_s - seconds)
    slot.owed_s = max(0.0, slot.owed_s - seconds)
