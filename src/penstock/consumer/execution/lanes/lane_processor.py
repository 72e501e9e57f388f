"""The lane processor: what the holder of a lane does with it, step by step, whoever calls the handlers.

`LaneProcessor.process` is a generator. It yields what the handler in `slot.invoke` is to be given, is sent the outcome,
and returns how the lane is to be given back. A worker thread calls the handler, a task on the event loop awaits it, a
simulation does either when it likes: the rules are written once, here. So the generator itself never waits.

New messages that no limit holds are yielded by the `Slice`, for a step of a generator and a look at the clock cost as
much as a quick handler. How it is worked through stands there.

One generator at a time holds a lane (the scheduler guarantees it), so what it does to the lane's runs, parked keys and
throttled runs needs no lock. Revocation: the poll thread sets `assignment.active = False` and then reads every slot's
`fetch`; the holder sets `fetch` first and then reads `active`. Whichever comes second sees the other, so a handler
either is waited for or does not start. Offsets are completed before `fetch` is cleared, so who waited sees them done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from functools import partial

from penstock.clients.cluster import Clock
from penstock.consumer.assignments import Assignment, ConsumerLane, ConsumerRun, ConsumerThrottled, Fetch
from penstock.consumer.execution.lanes.admission import Admission
from penstock.consumer.execution.lanes.batch_processor import BatchProcessor
from penstock.consumer.execution.lanes.batches import available
from penstock.consumer.execution.lanes.parked_key_processor import ParkedKeyProcessor
from penstock.consumer.execution.lanes.throttling import Throttling
from penstock.consumer.execution_slot import (
    MOST_SLOW,
    SLICE_S,
    ExecutionSlot,
    LaneProcessing,
    LingerUntil,
    Outcome,
    Slice,
    Work,
    count_refused,
    place_of,
)
from penstock.consumer.failures.dead_letter_publisher import DeadLetterPublisher
from penstock.consumer.failures.parking import Parking
from penstock.consumer.failures.timers import Timers
from penstock.consumer.handlers.results import Results
from penstock.consumer.handlers.route import Failed, RateLimited, Route
from penstock.consumer.publishing.result_publisher import RefusedResults, ResultTaker
from penstock.message import Record
from penstock.routing import Scheduler


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
        results: ResultTaker,
        wake: Callable[[Sequence[int]], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._now = clock.monotonic
        self._run_seconds = run_seconds
        self.scheduler = scheduler
        self._timers = timers
        #: Has the lanes of these ready queues processed. Any thread.
        self.wake = wake
        self.fail = fail
        #: Whether batches that are not full are processed at once: set when the consumer drains. Any thread.
        self.draining = False
        #: What waits for tokens.
        self.throttling = Throttling(self.wake_key)
        self._parking = Parking(clock, timers=timers, publisher=publisher, wake_key=self.wake_key, fail=fail)
        #: Deferred completions that are out, with what they belong to. Any thread may read it.
        self.deferred = self._parking.deferred
        #: What is to be given up. Any thread.
        self.give_ups = self._parking.give_ups
        self._admission = Admission(self._parking)
        self._results = results
        self._batches = BatchProcessor(clock, self._admission, self._parking, results)
        self._parked_keys = ParkedKeyProcessor(
            clock, self._admission, self._parking, self.throttling, batches=self._batches, results=results
        )

    def give_back(self, lane: ConsumerLane, linger: LingerUntil | None) -> int | None:
        """Give a lane back as `process` returned; returns its ready queue when it is ready again."""
        if linger is None:
            return self.scheduler.give_back(lane)
        queue = self.scheduler.linger(lane, linger.appended)
        # Only now: what wakes it finds the lane free, or held by another who looks at it himself.
        linger.schedule_wake()
        return queue

    def wake_key(self, lane: ConsumerLane, key: Hashable) -> None:
        """Wake a parked key, or the runs that a token bucket throttles. Any thread."""
        self.wake(self.scheduler.wake(lane, key))

    def wake_lane(self, lane: ConsumerLane) -> None:
        """Wake a lane that lingers. Any thread."""
        self.wake(self.scheduler.ready((lane,)))

    def process(self, lane: ConsumerLane, slot: ExecutionSlot) -> LaneProcessing:  # noqa: C901, PLR0912, PLR0915 - the main path in one piece, for speed
        """Process a lane until it is empty, its work is of another kind, or the time slice is over."""
        now, runs, parked_keys = self._now, lane.runs, lane.parked
        slot.lane = lane
        time = began = now()
        deadline = began + self._run_seconds * slot.slices
        # A worker that owes time to runs takes those that it finds.
        if lane.due and lane.serves_due and not (slot.owed_s and runs and _of_kind(runs[0], slot)):
            goes_on = yield from self._process_woken(lane, slot, deadline)
            # Runs that waited meanwhile get as much time before what is woken next, in this lane and from this worker.
            time = now()
            lane.owed_s = slot.owed_s = time - began
            if not goes_on:
                return None
        entered = None
        while runs:
            run = runs[0]
            fetch = slot.fetch = run.owner
            assignment = fetch.assignment
            route = assignment.route
            if not assignment.active:
                runs.popleft()
                continue
            if route.kind is not slot.kind:
                return None
            if route is not entered:
                slot.enter(route)
                entered = route
            # Also where the limit was taken away since: what came first goes first.
            if lane.throttled and (throttled := lane.throttled.get(route.token_bucket)) is not None:
                throttled.runs.append(runs.popleft())
                continue
            began = time
            # Of what a filter refuses nothing is expected: it is asked before the message's key is looked for.
            if route.batch > 1 or route.gated or fetch.has_unkeyed or (route.filters and parked_keys):
                if route.batch > 1 and (linger := self._lingers(lane, run, route)) is not None:
                    # Its runs are not ready, so they are owed no time.
                    lane.owed_s = slot.owed_s = 0.0
                    return linger
                serve = self._batches.process if route.batch > 1 else self._process_gated
                if (yield from serve(lane, runs, route, slot, deadline)):
                    self.throttling.begin(lane, route.token_bucket)
                time = now()
                if slot.owed_s or lane.owed_s:
                    _repay(lane, slot, time - began)
                if time >= deadline:
                    return None
                continue
            # The main path, in this generator itself: delegating costs at each lane.
            records = run.records
            slot.run = run
            place = first = run.next
            while place < len(records):
                size = slot.slice_size
                stop = min(place + (size if size > 1 else MOST_SLOW), len(records))
                if parked_keys:
                    stop = self._next_parked(lane, run, place, stop)
                    if stop == place:
                        self._complete(run, first, place, slot)
                        item = (fetch, run.indexes[place], records[place])
                        self._parking.append(lane, self._admission.identity(item), item)
                        place = first = run.next = place + 1
                        continue
                slot.started, begun = time, place
                slot.record = records[place]
                taken = Slice(records[place:stop])
                taken.assignment, taken.deadline, taken.is_slow = assignment, deadline, size == 1
                slot.slice = taken
                outcome = yield taken
                record, before = slot.record, time
                time = now()
                # An outcome, a cut, a revocation or the deadline ends a slice before its last record.
                place = stop if record is records[stop - 1] else place_of(record, run, place) + 1
                # Slow ones go on as they are.
                took_s, count = time - before, place - begun
                if size > 1 or took_s < SLICE_S * count:
                    slot.note_duration(took_s, count, time)
                else:
                    slot.note_latency(took_s / count, time, count)
                if outcome is not None:
                    self._complete(run, first, place - 1, slot)
                    item = (fetch, run.indexes[place - 1], record)
                    if isinstance(outcome, Results):
                        self._results.submit(lane, (item,), outcome.messages)
                    else:
                        self._parking.park_unfinished(lane, self._admission.identity(item), item, outcome, slot)
                    # Before the next record is begun: see `ExecutionSlot.finished`.
                    first = run.next = place
                # What was parked now may be a key of what a filter is asked for first.
                if time >= deadline or not assignment.active or (parked_keys and route.filters):
                    break
            self._complete(run, first, place, slot)
            if place == len(records):
                runs.popleft()
            if slot.owed_s or lane.owed_s:
                _repay(lane, slot, time - began)
            if time >= deadline:
                return None
        return None

    def _process_woken(
        self, lane: ConsumerLane, slot: ExecutionSlot, deadline: float
    ) -> Generator[Work, Outcome, bool]:
        """Process what was woken in a lane. Returns False when the lane is to be given back."""
        while lane.due:
            owner = lane.due_owner()
            if owner is not None and owner.assignment.route.kind is not slot.kind:
                return False
            key = lane.due.pop(0)
            if isinstance(key, RefusedResults):
                self._park_refused(lane, key, slot)
                continue
            parked, throttled = lane.parked.get(key), lane.throttled.get(key)
            if parked is not None and self.give_ups and self._parking.give_up_if_asked(lane, key, parked):
                continue
            if parked is not None and not (yield from self._parked_keys.process(lane, key, parked, slot, deadline)):
                return False
            if throttled is not None and not (yield from self._process_throttled(lane, key, throttled, slot, deadline)):
                return False
        return True

    def _park_refused(self, lane: ConsumerLane, refused: RefusedResults, slot: ExecutionSlot) -> None:
        """Park a message whose results were refused, as one whose handler has failed."""
        item = fetch, _, _ = refused.item
        slot.fetch = fetch
        if not fetch.assignment.active:
            return
        key = self._admission.identity(item)
        if key in lane.parked:
            # Its own failure is met again when it is handed over: what it stands behind comes first.
            self._parking.append(lane, key, item)
            return
        self._parking.park_refused(lane, key, refused, slot)

    @staticmethod
    def _complete(run: ConsumerRun, first: int, stop: int, slot: ExecutionSlot) -> None:
        count = stop - first
        if not count:
            return
        fetch, indexes = run.owner, run.indexes
        fetch.assignment.tracker.complete(fetch.block, indexes if count == len(indexes) else indexes[first:stop])
        run.next = stop
        if run.refused:
            refused = count_refused(run, first, stop)
            count -= refused
            slot.filtered += refused
        slot.handled += count

    def _next_parked(self, lane: ConsumerLane, run: ConsumerRun, place: int, stop: int) -> int:
        """Return the place of the first message from `place` on whose key is parked, `stop` at most."""
        for at in range(place, stop):
            if self._admission.identity((run.owner, run.indexes[at], run.records[at])) in lane.parked:
                return at
        return stop

    def _process_throttled(
        self, lane: ConsumerLane, key: Hashable, throttled: ConsumerThrottled, slot: ExecutionSlot, deadline: float
    ) -> Generator[Work, Outcome, bool]:
        """Process throttled runs as far as tokens go. Returns False when the lane is to be given back."""
        self.throttling.drop_inactive(throttled)
        while throttled.runs:
            fetch = slot.fetch = throttled.runs[0].owner
            route = fetch.assignment.route
            if not fetch.assignment.active:
                throttled.runs.popleft()
                continue
            if self._now() >= deadline:
                lane.due.insert(0, key)
                return False
            slot.enter(route)
            serve = self._batches.process if route.batch > 1 else self._process_gated
            if (yield from serve(lane, throttled.runs, route, slot, deadline)):
                self.throttling.await_token(lane, route.token_bucket, throttled)
                return True
        # A waiter of the token bucket stays, though no runs are left: so a lane has one at most.
        if not throttled.awaits_token:
            del lane.throttled[key]
        return True

    def _process_gated(
        self, lane: ConsumerLane, runs: deque[ConsumerRun], route: Route, slot: ExecutionSlot, deadline: float
    ) -> Generator[Work, Outcome, bool]:
        """Process a run message by message, where each may have to wait: for a rate, or the time of a retry topic.

        Returns whether no token is left: the first of the runs is at a message that must wait for one.
        """
        run = runs[0]
        fetch, assignment = run.owner, run.owner.assignment
        while run.next < len(run.records):
            record = run.records[run.next]
            item = (fetch, run.indexes[run.next], record)
            now = self._now()
            if now >= deadline or not assignment.active:
                return False
            # Before what is asked first: a filter or a decoder may hang as a handler may.
            slot.started, slot.record = now, record
            key, message = self._admission.admit(lane, route, item, now, slot, arrival=run.arrival)
            if isinstance(message, RateLimited):
                return True
            run.next += 1
            if message is None:
                continue
            outcome = message if isinstance(message, Failed) else (yield message)
            done = self._now()
            slot.note_latency(done - now, done, 1)
            if outcome is None:
                self._admission.done((item,), slot)
            elif isinstance(outcome, Results):
                self._results.submit(lane, (item,), outcome.messages)
            else:
                self._parking.park_unfinished(lane, key, item, outcome, slot)
        runs.popleft()
        return False

    def _lingers(self, lane: ConsumerLane, run: ConsumerRun, route: Route) -> LingerUntil | None:
        """Return until when a lane's next batch should wait for more, or None where it should not."""
        appended = lane.appended
        until = run.owner.arrived + route.linger
        if (
            self._now() >= until
            or self.draining
            or available(lane.runs, run.owner.assignment, route.batch) >= route.batch
        ):
            return None
        return LingerUntil(appended, partial(self._linger, lane, until))

    def _linger(self, lane: ConsumerLane, until: float) -> None:
        """Have a lane woken when its batch has waited long enough."""
        self._timers.add(until, partial(self.wake_lane, lane))
        # A drain that began since `_lingers` found the lane held, and could not wake it.
        if self.draining:
            self.wake_lane(lane)

    def busy_with(self, slots: Iterable[ExecutionSlot], assignments: Sequence[Assignment]) -> list[str]:
        """Return the names of the slots and completions that hold a message of one of these assignments."""
        # `fetch` is read once: its owner clears it at any moment.
        busy = [slot.name for slot in slots if (fetch := slot.fetch) is not None and fetch.assignment in assignments]
        busy += ["a deferred completion" for fetch in list(self.deferred.values()) if fetch.assignment in assignments]
        if self._results.has_any_of(assignments):
            busy.append("results on their way")
        return busy


def _of_kind(run: ConsumerRun, slot: ExecutionSlot) -> bool:
    return run.owner.assignment.route.kind is slot.kind


def _repay(lane: ConsumerLane, slot: ExecutionSlot, seconds: float) -> None:
    lane.owed_s = max(0.0, lane.owed_s - seconds)
    slot.owed_s = max(0.0, slot.owed_s - seconds)
