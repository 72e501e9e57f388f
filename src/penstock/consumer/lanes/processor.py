"""The lane processor: the steps of a lane's holder, independent of what calls the handlers.

`LaneProcessor.process` is a generator. It yields the work for the handler of `slot.route`, receives the outcome, and
returns when the lane must be given back. A worker thread calls the handler, a task on the event loop awaits it, and a
simulation does either at any time. So these rules exist once, and the generator itself never waits.

New messages without a limit are yielded and completed in slices, because a step of a generator and a look at the clock
cost as much as a quick handler. `Slice` in `penstock.consumer.lanes.slot` describes how a slice is handled.

The scheduler guarantees that one generator at a time holds a lane. So the lane's runs, parked keys and runs set aside
need no lock.

- Revocation: the poll thread sets `assignment.active = False` and then reads every slot's `fetch`, and `fetches` of a
  batch. The holder sets these first and then reads `active`. The later of the two sees the other's write. So a handler
  either is waited for or does not start. Offsets are completed before the slot is cleared, so a thread that waits for
  the slot then sees them done.
- Drain: the poll thread sets `draining` and then wakes all runs set aside. The holder sets runs aside first and then
  reads `draining`.
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
    MAX_SLOW_SLICE,
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

#: Wakes everything that waits in a lane.
_ALL = object()


class LaneProcessor:
    """Processes lanes, each for `run_seconds`. Thread-safe: the caller of a method about a lane holds it."""

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
        #: Serves the lanes of these ready queues. Any thread.
        self.wake = wake
        self.fail = fail
        self._parking = Parking(clock, timers=timers, publisher=publisher, wake=self.wake_waiter, fail=fail)
        #: Open deferred completions, each with the fetch of its message. Any thread may read it.
        self.deferred = self._parking.deferred
        #: Requests to give a message up. Any thread.
        self.give_ups = self._parking.give_ups
        self._submit = results.submit
        batches = Batches(clock, self._parking, results)
        #: Runs that wait for tokens, or for more of their batch.
        self.set_aside = SetAside(clock, timers, batches, wake=self.wake_waiter, one_partition=one_partition)
        self._parked_keys = ParkedKeys(clock, self._parking, self.set_aside, batches)

    def wake_waiter(self, waiter: ConsumerParked | ConsumerAside) -> None:
        """Wake a parked key or runs set aside. Any thread."""
        self.wake(self.scheduler.wake(waiter.lane, waiter))

    def drain(self) -> None:
        """Start to hand over batches that are not full. Any thread."""
        self.set_aside.draining = True
        self.wake_all(parked=False)

    def wake_all(self, *, parked: bool = True) -> None:
        """Wake everything that waits: dropped assignments are removed, and limits are checked again."""
        for lane in self.scheduler.lanes:
            if lane.aside or (parked and lane.parked):
                self.wake(self.scheduler.wake(lane, _ALL))

    def process(self, lane: ConsumerLane, slot: ExecutionSlot) -> LaneProcessing:  # noqa: C901, PLR0912, PLR0915 - the main path in one piece, for speed
        """Process a lane until it is empty or its time slice ends: `slot.deadline`, which the executor may shorten."""
        now, runs, parked_keys = self.now, lane.runs, lane.parked
        slot.lane, slot.submit, slot.now = lane, self._submit, now
        time = began = now()
        slot.deadline = began + self._run_seconds * slot.slices
        # A worker that owes time to runs serves runs if there are any.
        if lane.due and lane.serves_due and not (slot.owed_s and runs):
            goes_on = yield from self._process_woken(lane, slot)
            # Runs that waited get as much time before the next woken key, in this lane and from this worker.
            time = now()
            lane.owed_s = slot.owed_s = time - began
            if not goes_on or time >= slot.deadline:
                return
        while runs:
            for aside in self.set_aside.overtaken(lane) if lane.aside else ():
                if not (yield from self.set_aside.process(aside, slot)):
                    return
            run = runs[0]
            fetch = slot.fetch = run.owner
            assignment = fetch.assignment
            route = assignment.route
            if not assignment.active:
                runs.popleft()
                continue
            slot.route = route
            began = time
            # The filter comes before the message's key: a refused message may have no valid key. If a limit was just
            # removed, the earlier messages still go first.
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
            # The main path, inside this generator: delegating would cost at each lane.
            records = run.records
            place = run.next
            while place < len(records):
                size = slot.slice_size
                stop = min(place + (size if size > 1 else MAX_SLOW_SLICE), len(records))
                if parked_keys:
                    stop = self._next_parked(lane, run, place, stop)
                    if stop == place:
                        item = (fetch, run.indexes[place], records[place])
                        self._parking.append(parked_keys[key_of(item)], item)
                        place = run.next = place + 1
                        continue
                messages = Slice(records[place:stop])
                messages.assignment = assignment
                # `run` is set last: see `ExecutionSlot.complete_finished`.
                slot.started, slot.record, slot.slice, slot.run = time, messages[0], messages, run
                outcome = yield messages
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
                # A key may be parked now, and then the filter must be asked before the key.
                if time >= slot.deadline or not assignment.active or (parked_keys and route.filters):
                    break
            if place == len(records):
                runs.popleft()
            if slot.owed_s or lane.owed_s:
                _repay(lane, slot, time - began)
            if time >= slot.deadline:
                return

    def _process_woken(self, lane: ConsumerLane, slot: ExecutionSlot) -> Generator[Work, Outcome, bool]:
        """Process what was woken in a lane. Return False if the lane must be given back."""
        while lane.due:
            woken = lane.due.pop(0)
            if woken is _ALL:
                self.set_aside.drop_inactive(lane)
                lane.due += [*dict.fromkeys(lane.parked.values()), *lane.aside.values()]
            elif isinstance(woken, RefusedResults):
                self._park_refused(lane, woken, slot)
            elif isinstance(woken, ParkedKey):
                if self.give_ups and self._parking.give_up_if_requested(woken):
                    continue
                if not (yield from self._parked_keys.process(woken, slot)):
                    return False
            elif not (yield from self.set_aside.process(cast("ConsumerAside", woken), slot)):
                return False
        return True

    def _park_refused(self, lane: ConsumerLane, refused: RefusedResults, slot: ExecutionSlot) -> None:
        """Park a message whose results were refused, like a message whose handler failed."""
        item = fetch, _, _ = refused.item
        slot.fetch = fetch
        if not fetch.assignment.active:
            return
        key = key_of(item)
        if key in lane.parked:
            # Messages before it come first. It fails again when it is handed over.
            self._parking.append(lane.parked[key], item)
            return
        tries = refused.tries or Tries(0, self.now())
        self._parking.park_unfinished(lane, key, refused.item, failure_of(refused.error), slot, tries=tries)

    def _next_parked(self, lane: ConsumerLane, run: ConsumerRun, place: int, stop: int) -> int:
        """Return the place of the first message from `place` on whose key is parked, at most `stop`."""
        for at in range(place, stop):
            if key_of((run.owner, run.indexes[at], run.records[at])) in lane.parked:
                return at
        return stop

    def busy_with(self, slots: Iterable[ExecutionSlot], assignments: Sequence[Assignment]) -> list[str]:
        """Return the names of the slots and completions that hold a message of these assignments."""
        busy = [slot.name for slot in slots if slot.is_at(assignments)]
        busy += ["a deferred completion" for fetch in list(self.deferred.values()) if fetch.assignment in assignments]
        return busy


def _repay(lane: ConsumerLane, slot: ExecutionSlot, seconds: float) -> None:
    lane.owed_s = max(0.0, lane.owed_s - seconds)
    slot.owed_s = max(0.0, slot.owed_s - seconds)
