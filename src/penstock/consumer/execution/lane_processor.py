"""A visit: what the holder of a lane does with it, step by step, whoever calls the handlers.

`Desk.visit` is a generator. It yields what is to be given to the handler in `station.invoke`, is sent what came of it,
and returns how the lane is to be given back. A worker thread calls the handler, a task on the event loop awaits it, a
simulation does either when it likes: the rules are written once, here. So the generator itself never waits.

A visit alone holds its lane (the scheduler sees to that), so what it does to the lane's queue, parked keys and held
runs needs no lock. Revocation: the poll thread sets `assignment.active = False` and then looks at every station's
`fetch`; a visit sets `fetch` first and then looks at `active`. Whichever comes second sees the other, so a handler
either is waited for or does not start. Offsets are completed before `fetch` is let go of, so who waited sees them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from functools import partial

from penstock.clients.cluster import Clock
from penstock.consumer.assignments import Assignment, ConsumerHeld, ConsumerLane, ConsumerRun, Fetch
from penstock.consumer.execution.admission import Admission
from penstock.consumer.execution.batch_calls import BatchCalls
from penstock.consumer.execution.batches import available
from penstock.consumer.execution.parked_calls import ParkedCalls
from penstock.consumer.execution.throttling import Holding
from penstock.consumer.execution_slot import Outcome, Rest, Station, Visit, Work
from penstock.consumer.failures.dead_letter_publisher import Outbox
from penstock.consumer.failures.parking import Parking
from penstock.consumer.failures.timers import Timers
from penstock.consumer.handlers.route import Failed, Full, Route
from penstock.message import Message, Record
from penstock.routing import Scheduler


class Desk:
    """Serves lanes. Thread-safe: each visit works on the lane it holds.

    Args:
        clock: the engine's clock.
        run_seconds: a visit's time slice.
        scheduler: the lanes.
        timers: where retries wait.
        outbox: where exhausted messages go.
        wake: called with the slots of lanes that became ready.
        fail: called with an error that must stop the consumer.
    """

    def __init__(
        self,
        clock: Clock,
        run_seconds: float,
        *,
        scheduler: Scheduler[Fetch, Record],
        timers: Timers,
        outbox: Outbox,
        wake: Callable[[Sequence[int]], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._now = clock.monotonic
        self._run_seconds = run_seconds
        self._scheduler = scheduler
        self._timers = timers
        #: Has the ready lanes of these slots served. Any thread.
        self.wake = wake
        self.fail = fail
        #: Whether batches that are not full are served at once: set when the consumer drains. Any thread.
        self.hurry = False
        #: What waits for a rate.
        self.holding = Holding(self.wake_key)
        self._parking = Parking(clock, timers=timers, outbox=outbox, wake_key=self.wake_key, fail=fail)
        #: Completions that are out, with what they belong to. Any thread may look.
        self.deferred = self._parking.deferred
        self._admission = Admission(self._parking)
        self._batches = BatchCalls(clock, self._admission, self._parking)
        self._parked = ParkedCalls(clock, self._admission, self._parking, self.holding, self._batches)

    def give_back(self, lane: ConsumerLane, rest: Rest | None) -> int | None:
        """Give a lane back as its visit said; returns its slot when it is ready again."""
        if rest is None:
            return self._scheduler.give_back(lane)
        slot = self._scheduler.rest(lane, rest.appended)
        # Only now: what brings it back finds the lane free, or held by one who asks for himself.
        rest.after()
        return slot

    def wake_key(self, lane: ConsumerLane, key: Hashable) -> None:
        """Have a parked key, or the runs that a meter holds, looked at. Any thread."""
        self.wake(self._scheduler.wake(lane, key))

    def wake_lane(self, lane: ConsumerLane) -> None:
        """Have a lane at rest looked at. Any thread."""
        self.wake(self._scheduler.ready((lane,)))

    def visit(self, lane: ConsumerLane, station: Station) -> Visit:  # noqa: C901, PLR0912, PLR0915 - the main path in one piece, for speed
        """Serve a lane until it is empty, its work is of another kind, or the time slice is over."""
        began = self._now()
        deadline = began + self._run_seconds * station.slices
        # A worker that owes runs their time takes them where it finds them.
        if lane.due and lane.serves_due and not (station.owes and lane.runs and _of_kind(lane.runs[0], station)):
            goes_on = yield from self._serve_due(lane, station, deadline)
            # Runs that waited meanwhile get as much before the next turn of what is woken, here and of this worker.
            lane.owes = station.owes = self._now() - began
            if not goes_on:
                return None
        while lane.runs:
            run = lane.runs[0]
            fetch = station.fetch = run.owner
            assignment = fetch.assignment
            route = assignment.route
            if not assignment.active:
                lane.runs.popleft()
                continue
            if route.kind is not station.kind:
                return None
            station.invoke = route.invoke
            # Also where the limit was taken away since: what came first goes first.
            if lane.held and (held := lane.held.get(route.meter)) is not None:
                held.runs.append(lane.runs.popleft())
                continue
            if route.gated or route.batch > 1:
                if route.batch > 1 and (rest := self._lingers(lane, run, route)) is not None:
                    # They are not ready to be served, so what was woken is.
                    lane.owes = station.owes = 0.0
                    return rest
                began = self._now()
                serve = self._batches.serve if route.batch > 1 else self._serve_gated
                if (yield from serve(lane, lane.runs, route, station, deadline)):
                    self.holding.begin(lane, route.meter)
                time = self._now()
                if station.owes or lane.owes:
                    _repay(lane, station, time - began)
                if time >= deadline:
                    return None
                continue
            # The main path, in this generator itself: delegating costs at each message.
            now = self._now
            identity = route.ordering.identity
            records = run.records
            parked_keys = lane.parked
            station.run = run
            place = first = run.next
            time = began = now()
            while place < len(records):
                record = records[place]
                if parked_keys and (key := identity(record)) in parked_keys:
                    self._complete(run, first, place, station)
                    self._parking.behind(lane, key, (fetch, run.indexes[place], record))
                    place = first = run.next = place + 1
                    continue
                station.started = time
                station.record = record
                outcome = yield Message(record)
                place += 1
                if outcome is not None:
                    self._complete(run, first, place - 1, station)
                    item = (fetch, run.indexes[place - 1], record)
                    self._parking.set_aside(lane, identity(record), item, outcome, station)
                    # Before the next record is begun: see `Station.finished`.
                    first = run.next = place
                time = now()
                if time >= deadline or not assignment.active:
                    break
            self._complete(run, first, place, station)
            if place == len(records):
                lane.runs.popleft()
            if station.owes or lane.owes:
                _repay(lane, station, time - began)
            if time >= deadline:
                return None
        return None

    def _serve_due(self, lane: ConsumerLane, station: Station, deadline: float) -> Generator[Work, Outcome, bool]:
        """Serve what was woken in a lane. Returns False when the visit is over."""
        while lane.due:
            owner = lane.due_owner()
            if owner is not None and owner.assignment.route.kind is not station.kind:
                return False
            key = lane.due.pop(0)
            parked, held = lane.parked.get(key), lane.held.get(key)
            if parked is not None and not (yield from self._parked.serve(lane, key, parked, station, deadline)):
                return False
            if held is not None and not (yield from self._serve_held(lane, key, held, station, deadline)):
                return False
        return True

    def _complete(self, run: ConsumerRun, first: int, stop: int, station: Station) -> None:
        if stop > first:
            run.owner.assignment.tracker.complete(run.owner.block, run.indexes[first:stop])
            run.next = stop
            station.handled += stop - first

    def _serve_held(
        self, lane: ConsumerLane, key: Hashable, held: ConsumerHeld, station: Station, deadline: float
    ) -> Generator[Work, Outcome, bool]:
        """Serve runs that waited for their handler's rate, as far as it goes. Returns False when the visit is over."""
        self.holding.sweep(held)
        while held.runs:
            fetch = station.fetch = held.runs[0].owner
            route = fetch.assignment.route
            if not fetch.assignment.active:
                held.runs.popleft()
                continue
            if self._now() >= deadline:
                lane.due.insert(0, key)
                return False
            station.invoke = route.invoke
            serve = self._batches.serve if route.batch > 1 else self._serve_gated
            if (yield from serve(lane, held.runs, route, station, deadline)):
                self.holding.line_up(lane, route.meter, held)
                return True
        # Those that stand in the line stay, though there are none: so a lane stands there once.
        if not held.asked:
            del lane.held[key]
        return True

    def _serve_gated(
        self, lane: ConsumerLane, runs: deque[ConsumerRun], route: Route, station: Station, deadline: float
    ) -> Generator[Work, Outcome, bool]:
        """Serve a run whose handler has a filter, a decoder, a key function or a rate: message by message.

        Returns whether the rate is used up: the first of the runs is at a message that must wait.
        """
        run = runs[0]
        fetch, assignment = run.owner, run.owner.assignment
        station.batch_count = 1
        while run.next < len(run.records):
            record = run.records[run.next]
            item = (fetch, run.indexes[run.next], record)
            now = self._now()
            if now >= deadline or not assignment.active:
                return False
            key, message = self._admission.ask(lane, route, item, now, station, arrival=run.arrival)
            if isinstance(message, Full):
                return True
            run.next += 1
            if message is None:
                continue
            station.started, station.record = now, record
            outcome = message if isinstance(message, Failed) else (yield message)
            if outcome is None:
                self._admission.done((item,), station)
            else:
                self._parking.set_aside(lane, key, item, outcome, station)
        runs.popleft()
        return False

    def _lingers(self, lane: ConsumerLane, run: ConsumerRun, route: Route) -> Rest | None:
        """Tell whether a lane's next batch should wait for more."""
        appended = lane.appended
        until = run.owner.arrived + route.linger
        if self._now() >= until or self.hurry or available(lane.runs, run.owner.assignment, route.batch) >= route.batch:
            return None
        return Rest(appended, partial(self._linger, lane, until))

    def _linger(self, lane: ConsumerLane, until: float) -> None:
        """Bring a lane back that was given back to wait for a full batch."""
        self._timers.add(until, partial(self.wake_lane, lane))
        # A drain that began since the look found the lane held, and could not wake it.
        if self.hurry:
            self.wake_lane(lane)

    def busy_with(self, stations: Iterable[Station], assignments: Sequence[Assignment]) -> list[str]:
        """Return the names of the stations and completions that hold a message of one of these assignments."""
        busy = []
        for station in stations:
            fetch = station.fetch
            if fetch is not None and fetch.assignment in assignments:
                busy.append(station.name)
        busy += ["a deferred completion" for fetch in list(self.deferred.values()) if fetch.assignment in assignments]
        return busy


def _of_kind(run: ConsumerRun, station: Station) -> bool:
    return run.owner.assignment.route.kind is station.kind


def _repay(lane: ConsumerLane, station: Station, seconds: float) -> None:
    lane.owes = max(0.0, lane.owes - seconds)
    station.owes = max(0.0, station.owes - seconds)


__all__ = ["Desk"]
