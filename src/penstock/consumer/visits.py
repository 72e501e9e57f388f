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
from collections.abc import Callable, Container, Generator, Hashable, Iterable, Sequence
from functools import partial
from itertools import groupby

from penstock.cluster import Clock
from penstock.consumer.assignments import (
    Assignment,
    ConsumerHeld,
    ConsumerLane,
    ConsumerParked,
    ConsumerRun,
    Fetch,
    Item,
)
from penstock.consumer.batches import available, failures, not_for_batches
from penstock.consumer.deferred import DeferredCompletion
from penstock.consumer.holding import Holding
from penstock.consumer.outbox import Outbox
from penstock.consumer.parking import HANDLED, NotDue, Parking
from penstock.consumer.retries import Timers
from penstock.consumer.routes import Answer, Failed, Full, Route
from penstock.consumer.stations import Outcome, Rest, Station, Visit, Work
from penstock.errors import PenstockError
from penstock.message import Message, Record
from penstock.routing import DONE, KeyState, Scheduler

#: A message must wait for those of its key that are in the batch being gathered.
_LATER = Full()


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

    def visit(self, lane: ConsumerLane, station: Station) -> Visit:  # noqa: C901, PLR0911, PLR0912, PLR0915 - the main path in one piece, for speed
        """Serve a lane until it is empty, its work is of another kind, or the time slice is over."""
        deadline = self._now() + self._run_seconds * station.slices
        while lane.due:
            owner = lane.due_owner()
            if owner is not None and owner.assignment.route.kind is not station.kind:
                return None
            key = lane.due.pop(0)
            parked, held = lane.parked.get(key), lane.held.get(key)
            if parked is not None and not (yield from self._serve_parked(lane, key, parked, station, deadline)):
                return None
            if held is not None and not (yield from self._serve_held(lane, key, held, station, deadline)):
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
                    return rest
                serve = self._serve_batch if route.batch > 1 else self._serve_gated
                if (yield from serve(lane, lane.runs, route, station, deadline)):
                    self.holding.begin(lane, route.meter)
                if self._now() >= deadline:
                    return None
                continue
            # The main path, in this generator itself: delegating costs at each message.
            now = self._now
            identity = route.ordering.identity
            records = run.records
            parked_keys = lane.parked
            station.run = run
            place = first = run.next
            time = now()
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
            run.next = place
            if place == len(records):
                lane.runs.popleft()
            if time >= deadline:
                return None
        return None

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
            serve = self._serve_batch if route.batch > 1 else self._serve_gated
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
            key, message = self._ask(lane, route, item, now, station, arrival=run.arrival)
            if isinstance(message, Full):
                return True
            run.next += 1
            if message is None:
                continue
            station.started, station.record = now, record
            outcome = message if isinstance(message, Failed) else (yield message)
            if outcome is None:
                self._done((item,), station)
            else:
                self._parking.set_aside(lane, key, item, outcome, station)
        runs.popleft()
        return False

    def _ask(  # noqa: PLR0911 - one for each way that a message can go
        self,
        lane: ConsumerLane,
        route: Route,
        item: Item,
        now: float,
        station: Station,
        *,
        arrival: int,
        gathered: Container[Hashable] = (),
    ) -> tuple[Hashable, Message | Failed | Full | None]:
        """Return a message's identity, and what to hand over; None when it was seen to: refused, or made to wait.

        `arrival` is that of the run. A key of those `gathered` is not parked: should its messages in the batch fail,
        they come before this one.
        """
        record = item[2]
        # Before its key is asked: of what the filter refuses nothing is expected.
        passes = route.screen(record)
        if not passes:
            self._filtered(item, station)
            return None, None
        try:
            key = route.ordering.identity(record)
        except PenstockError as error:
            return (record.topic(), record.partition(), record.offset()), Failed(error, permanent=True)
        if route.not_before is not None and (at := route.not_before(record)) > now:
            alone = NotDue(key, (record.topic(), record.partition(), record.offset()))
            self._parking.park(lane, alone, item).due_at = at
            self._parking.wake_at(at, lane, alone)
            return alone, None
        if key in lane.parked:
            self._parking.behind(lane, key, item)
            return key, None
        answer = passes if isinstance(passes, Failed) else route.admit(key, record, now, arrival + item[1])
        if isinstance(answer, (Failed, float)) and key in gathered:
            return key, _LATER
        if isinstance(answer, float):
            self._parking.park(lane, key, item).due_at = answer
            self._parking.wake_at(answer, lane, key)
            return key, None
        return key, answer

    def _lingers(self, lane: ConsumerLane, run: ConsumerRun, route: Route) -> Rest | None:
        """Tell whether a lane's next batch should wait for more."""
        appended = lane.appended
        until = run.owner.arrived + route.linger
        if self._now() >= until or self.hurry or available(lane.runs, run.owner.assignment, route.batch) >= route.batch:
            return None
        return Rest(appended, partial(self._linger, lane, until))

    def _serve_batch(
        self, lane: ConsumerLane, runs: deque[ConsumerRun], route: Route, station: Station, _deadline: float
    ) -> Generator[Work, Outcome, bool]:
        """Gather a batch of one assignment's messages and serve it. Returns whether the rate is used up."""
        assignment = runs[0].owner.assignment
        now = self._now()
        station.started = now
        batch: list[tuple[Hashable, Item, Message]] = []
        gathered: set[Hashable] = set()
        full = over = False
        while runs and len(batch) < route.batch and not over:
            run = runs[0]
            if run.owner.assignment is not assignment:
                break
            while run.next < len(run.records) and len(batch) < route.batch:
                item = (run.owner, run.indexes[run.next], run.records[run.next])
                key, message = self._ask(lane, route, item, now, station, arrival=run.arrival, gathered=gathered)
                if isinstance(message, Full):
                    full, over = message is not _LATER, True
                    break
                run.next += 1
                if isinstance(message, Failed):
                    self._parking.set_aside(lane, key, item, message, station)
                elif message is not None:
                    batch.append((key, item, message))
                    gathered.add(key)
            if run.next == len(run.records):
                runs.popleft()
        if batch:
            station.record, station.batch_count = batch[0][1][2], len(batch)
            outcome = yield [message for _, _, message in batch]
            self._settle_batch(lane, [(key, item) for key, item, _ in batch], outcome, station)
        return full

    def _linger(self, lane: ConsumerLane, until: float) -> None:
        """Bring a lane back that was given back to wait for a full batch."""
        self._timers.add(until, partial(self.wake_lane, lane))
        # A drain that began since the look found the lane held, and could not wake it.
        if self.hurry:
            self.wake_lane(lane)

    def _settle_batch(
        self, lane: ConsumerLane, batch: Sequence[tuple[Hashable, Item]], outcome: Outcome, station: Station
    ) -> None:
        """Complete what is done of a batch; of each key, set aside the first that failed with all behind it."""
        if isinstance(outcome, DeferredCompletion):
            outcome = not_for_batches()
        if outcome is None:
            self._done([item for _, item in batch], station)
            return
        failed = failures(outcome, len(batch))
        done = []
        for place, (key, item) in enumerate(batch):
            if key in lane.parked:
                self._parking.behind(lane, key, item)
            elif place in failed:
                self._parking.set_aside(lane, key, item, failed[place], station)
            else:
                done.append(item)
        self._done(done, station)

    def _serve_parked(  # noqa: C901, PLR0911, PLR0912, PLR0915 - one step for each state of a parked key's head
        self, lane: ConsumerLane, key: Hashable, parked: ConsumerParked, station: Station, deadline: float
    ) -> Generator[Work, Outcome, bool]:
        """Try the head of a parked key, and on success what waits behind it. Returns False when the visit is over."""
        while parked.waiting:
            item = fetch, _, record = parked.waiting[0]
            station.fetch = fetch
            assignment = fetch.assignment
            route = assignment.route
            # Read once: who has the head may write it meanwhile.
            settled = parked.settled
            if settled is None and parked.state in (KeyState.DEFERRED, KeyState.SENDING):
                # Also where its assignment is gone: what settles it later must find this head, and the key is not
                # handled twice at once.
                return True
            if settled is DONE or settled is HANDLED or not assignment.active:
                station.handled += settled is HANDLED
                self._parking.next_head(parked, station)
                continue
            if isinstance(settled, BaseException):
                parked.settled = None
                parked.state = KeyState.WAITING
                self._parking.failed(lane, key, parked, Failed(settled), station)
                continue
            now = self._now()
            # A head that waits for its first try waits for a limit, which may have changed.
            if parked.state is KeyState.STOPPING or (
                now < parked.due_at and (parked.attempts or isinstance(key, NotDue))
            ):
                return True
            if isinstance(key, NotDue):
                del lane.parked[key]
                key = key.key
                if key in lane.parked:
                    lane.parked[key].waiting.append(item)
                    return True
                lane.parked[key] = parked
            if now >= deadline or route.kind is not station.kind:
                lane.due.insert(0, key)
                return False
            answer = self._answer(route, key, record, now)
            if isinstance(answer, float):
                if answer != parked.due_at:
                    parked.due_at = answer
                    self._parking.wake_at(answer, lane, key)
                return True
            if isinstance(answer, Full):
                parked.due_at = now
                self.holding.line_up_key(lane, route.meter, key, parked)
                return True
            if answer is None:
                self._filtered(item, station)
                self._parking.next_head(parked, station)
                continue
            station.retried += parked.attempts > 0
            station.started, station.record, station.batch_count = now, record, 1
            if parked.attempts == 0:
                parked.since = now
            station.invoke = route.invoke
            outcome: Outcome
            if isinstance(answer, Failed):
                outcome = answer
            else:
                outcome = yield ([answer] if route.batch > 1 else answer)
            if route.batch > 1 and isinstance(outcome, DeferredCompletion):
                outcome = not_for_batches()
            if isinstance(outcome, Failed):
                self._parking.failed(
                    lane, key, parked, failures(outcome, 1)[0] if route.batch > 1 else outcome, station
                )
            elif outcome is not None:
                self._parking.put_off(lane, key, parked, outcome, station)
            else:
                self._done((item,), station)
                self._parking.next_head(parked, station)
        del lane.parked[key]
        return True

    def _answer(self, route: Route, key: Hashable, record: Record, now: float) -> Answer | None:
        """Return what to hand over for the head of a parked key, why not now, or None where it is refused."""
        if not route.gated:
            return route.message(record)
        # At each try: the failure may have been the filter's own, and then nothing has let the message pass yet.
        passes = route.screen(record)
        if not passes:
            return None
        if isinstance(passes, Failed):
            return passes
        return route.admit(key, record, now, 0)

    def _done(self, items: Sequence[Item], station: Station) -> None:
        for fetch, same in groupby(items, key=_fetch_of):
            indexes = [index for _, index, _ in same]
            fetch.assignment.tracker.complete(fetch.block, indexes)
            station.handled += len(indexes)

    def _filtered(self, item: Item, station: Station) -> None:
        item[0].assignment.tracker.complete(item[0].block, (item[1],))
        station.filtered += 1

    def busy_with(self, stations: Iterable[Station], assignments: Sequence[Assignment]) -> list[str]:
        """Return the names of the stations and completions that hold a message of one of these assignments."""
        busy = []
        for station in stations:
            fetch = station.fetch
            if fetch is not None and fetch.assignment in assignments:
                busy.append(station.name)
        busy += ["a deferred completion" for fetch in list(self.deferred.values()) if fetch.assignment in assignments]
        return busy


def _fetch_of(item: Item) -> Fetch:
    return item[0]


__all__ = ["Desk"]
