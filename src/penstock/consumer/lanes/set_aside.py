"""Runs set aside: they wait for a token of their handler's rate, or for more messages of their batch.

A rate covers all keys of a handler, and a batch has any keys. So no key is parked: the runs step aside unchanged, and
later runs of their handler queue behind them. A key keeps its order, and a throttled handler costs one waiter per lane
in its token bucket, however many messages wait. A rate does not hold other handlers: their runs in the lane go on. Runs
that wait for more of a batch stop waiting when runs of another handler stand behind them, which may have the same keys.

Once their lane is given back, something always wakes runs set aside: the token bucket if `awaits_token` is set, a timer
if they wait for more of their batch, or they are in `lane.due`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable
from functools import partial

from penstock.clients.cluster import Clock
from penstock.consumer.assignments import Assignment, ConsumerAside, ConsumerLane, ConsumerParked
from penstock.consumer.handlers.route import Route
from penstock.consumer.lanes.batches import Batches
from penstock.consumer.lanes.slot import ExecutionSlot, Outcome, Work
from penstock.consumer.timers import Timers
from penstock.routing import RunsAside


class SetAside:
    """Lets runs wait, and parked keys for tokens. Thread-safe: the caller of every method holds the lane.

    Runs under one name in `Lane.aside` are of one handler. With `one_partition`, a batch has messages of one partition,
    so runs of batches under one name are of one assignment.
    """

    def __init__(
        self,
        clock: Clock,
        timers: Timers,
        batches: Batches,
        *,
        wake: Callable[[ConsumerAside | ConsumerParked], None],
        one_partition: bool,
    ) -> None:
        self._now = clock.monotonic
        self._timers = timers
        self._batches = batches
        self._wake = wake
        self._one_partition = one_partition
        #: Whether batches that are not full are handed over at once: set when the consumer drains. Any thread.
        self.draining = False

    def name_of(self, assignment: Assignment) -> Hashable:
        """Return the name under which messages of an assignment are set aside. All messages of a batch share it."""
        route = assignment.route
        return assignment if self._one_partition and route.batch > 1 else route.token_bucket

    def put(self, lane: ConsumerLane) -> ConsumerAside:
        """Set runs at the front of a lane aside. Return them with the earlier runs of their name."""
        name = self.name_of(lane.runs[0].owner.assignment)
        aside = lane.aside.get(name)
        if aside is None:
            aside = lane.aside[name] = RunsAside(lane, name)
        self._add(aside)
        return aside

    def _add(self, aside: ConsumerAside) -> None:
        """Add runs of the name at the front of the lane: at least one, and as many as fill a batch."""
        runs = aside.lane.runs
        while runs and self.name_of(assignment := runs[0].owner.assignment) is aside.name:
            run = runs.popleft()
            aside.runs.append(run)
            aside.count += len(run.records) - run.next
            if aside.count >= assignment.route.batch:
                return

    def overtaken(self, lane: ConsumerLane) -> list[ConsumerAside]:
        """Return runs that wait for more of their batch while runs of another handler stand behind them."""
        return [aside for aside in lane.aside.values() if not aside.awaits_token and _is_overtaken(aside)]

    def process(self, aside: ConsumerAside, slot: ExecutionSlot) -> Generator[Work, Outcome, bool]:
        """Process runs set aside, as far as tokens and full batches go. Return False if the time slice is over."""
        lane = aside.lane
        while aside.runs:
            fetch = slot.fetch = aside.runs[0].owner
            now = self._now()
            route = slot.route = fetch.assignment.route
            if aside.count < route.batch:
                self._add(aside)
            until = fetch.arrived + route.linger
            waits = aside.count < route.batch and now < until and not self.draining
            if waits and not _is_overtaken(aside):
                if aside.wakes_at is None or not now < aside.wakes_at <= until:
                    aside.wakes_at = until
                    self._timers.add(until, partial(self._wake, aside))
                return True
            if now >= slot.deadline:
                # Back to the front of their lane. The scheduler orders lanes by the age of the first run.
                lane.runs.extendleft(reversed(aside.runs))
                aside.runs.clear()
                aside.count = 0
                return False
            if (yield from self._batches.process(lane, aside, slot)):
                run = aside.runs[0]
                self.await_token(aside, route, run.arrival + run.indexes[run.next])
                return True
        if not aside.awaits_token and lane.aside.get(aside.name) is aside:
            # A later wake-up finds nothing to do.
            del lane.aside[aside.name]
        return True

    @staticmethod
    def drop_inactive(lane: ConsumerLane) -> None:
        """Drop runs of inactive assignments. Without this they would stay uncounted until something wakes them."""
        for aside in lane.aside.values():
            aside.runs = deque(run for run in aside.runs if run.owner.assignment.active)
            aside.count = sum(len(run.records) - run.next for run in aside.runs)

    def await_token(self, waiter: ConsumerAside | ConsumerParked, route: Route, arrival: int = 0) -> None:
        """Let a waiter wait for a token: parked keys first, then runs by the age of their first message."""
        if waiter.awaits_token:
            return
        waiter.awaits_token = True

        def wake() -> None:
            # Before the wake-up: the holder may ask for a token again at once.
            waiter.awaits_token = False
            self._wake(waiter)

        route.token_bucket.wait(arrival, wake)


def _is_overtaken(aside: ConsumerAside) -> bool:
    """Tell whether runs of another handler stand behind the runs set aside."""
    runs, waiting = aside.lane.runs, aside.runs
    if not runs or not waiting:
        return False
    return runs[0].owner.assignment.route.token_bucket is not waiting[0].owner.assignment.route.token_bucket
