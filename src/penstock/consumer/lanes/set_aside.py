"""Runs that were set aside: they wait for a token of their handler's rate, or for more of their batch.

A rate is one for all keys of a handler, and a batch is of any keys, so no key is parked: the runs step aside as they
are, and later ones of their handler go behind. So a key keeps its order, and a throttled handler costs one waiter in
its token bucket for each lane, however many messages wait. A rate holds no other handler: the lane goes on meanwhile.
For more of a batch runs wait only while no other handler's stand behind them, which may have the same keys.

Runs that are set aside always have somebody who wakes them, as soon as their lane is given back: the token bucket where
`awaits_token` is set, a timer where they wait for more of their batch, or they stand in `lane.due`. Each call is for a
lane that the caller holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from functools import partial

from penstock.consumer.assignments import Assignment, ConsumerAside, ConsumerLane, ConsumerParked
from penstock.consumer.timers import Timers
from penstock.routing import RunsAside


class SetAside:
    """Lets runs wait, and parked keys for tokens. Thread-safe: each call is for a lane that the caller holds.

    What waits together, under one name in `Lane.aside`, is of one handler. With `one_partition` batches are of one
    partition, so it is of one assignment there.
    """

    def __init__(self, timers: Timers, wake: Callable[[ConsumerLane, Hashable], None], *, one_partition: bool) -> None:
        self._timers = timers
        self._wake = wake
        self._one_partition = one_partition
        #: How often assignments were dropped: runs are searched for theirs. Raised before they are woken.
        self.dropped = 0

    def name_of(self, assignment: Assignment) -> Hashable:
        """Return under what messages of an assignment are set aside; those of a batch have it in common."""
        route = assignment.route
        return assignment if self._one_partition and route.batch > 1 else route.token_bucket

    def put(self, lane: ConsumerLane) -> tuple[Hashable, ConsumerAside]:
        """Set runs at the front of a lane aside; returns them with their name, and what waited under it before."""
        name = self.name_of(lane.runs[0].owner.assignment)
        aside = lane.aside.get(name)
        if aside is None:
            aside = lane.aside[name] = RunsAside(dropped=self.dropped)
        self.add(lane, name, aside)
        return name, aside

    def add(self, lane: ConsumerLane, name: Hashable, aside: ConsumerAside) -> None:
        """Add runs of a name that stand at the front of their lane: one at least, and what makes a batch full."""
        runs = lane.runs
        while runs and self.name_of(assignment := runs[0].owner.assignment) is name:
            run = runs.popleft()
            aside.runs.append(run)
            aside.count += len(run.records) - run.next
            if aside.count >= assignment.route.batch:
                return

    @staticmethod
    def is_overtaken(lane: ConsumerLane, aside: ConsumerAside) -> bool:
        """Tell whether the runs of another handler stand behind what was set aside."""
        mine = aside.runs[0].owner.assignment.route.token_bucket
        return bool(lane.runs) and lane.runs[0].owner.assignment.route.token_bucket is not mine

    def overtaken(self, lane: ConsumerLane) -> list[tuple[Hashable, ConsumerAside]]:
        """Return, with their names, runs that wait for more of their batch before those of another handler."""
        waiting = [(name, aside) for name, aside in lane.aside.items() if aside.runs and not aside.awaits_token]
        return [(name, aside) for name, aside in waiting if self.is_overtaken(lane, aside)]

    @staticmethod
    def drop_first(aside: ConsumerAside) -> None:
        """Drop the first of the runs."""
        run = aside.runs.popleft()
        aside.count -= len(run.records) - run.next

    @staticmethod
    def forget(lane: ConsumerLane, name: Hashable, aside: ConsumerAside, now: float) -> None:
        """Forget what has no runs left, unless something will wake it still."""
        if not aside.awaits_token and (aside.wakes_at is None or aside.wakes_at <= now):
            del lane.aside[name]

    @staticmethod
    def put_back(lane: ConsumerLane, aside: ConsumerAside) -> None:
        """Move runs to the front of their lane again, which is served by the age of the first."""
        lane.runs.extendleft(reversed(aside.runs))
        aside.runs.clear()
        aside.count = 0

    def drop_inactive(self, aside: ConsumerAside) -> None:
        """Drop runs of inactive assignments: they would stay, counted by nobody, as long as nothing wakes them."""
        if aside.dropped != self.dropped:
            aside.dropped = self.dropped
            aside.runs = deque(run for run in aside.runs if run.owner.assignment.active)
            aside.count = sum(len(run.records) - run.next for run in aside.runs)

    def wake_at(self, until: float, now: float, lane: ConsumerLane, name: Hashable, aside: ConsumerAside) -> None:
        """Have runs woken when they have waited long enough for more of their batch."""
        if aside.wakes_at is None or not now < aside.wakes_at <= until:
            aside.wakes_at = until
            self._timers.add(until, partial(self._wake, lane, name))

    def await_token(self, lane: ConsumerLane, name: Hashable, aside: ConsumerAside) -> None:
        """Let runs wait for a token, among those of all lanes by the age of their first message."""
        if not aside.awaits_token:
            aside.awaits_token = True
            run = aside.runs[0]
            arrival = run.arrival + run.indexes[run.next]
            run.owner.assignment.route.token_bucket.wait(arrival, partial(self._wake_for_token, lane, name, aside))

    def await_token_for_key(self, lane: ConsumerLane, key: Hashable, parked: ConsumerParked) -> None:
        """Let the head of a parked key wait for a token, before the runs of all lanes: it has waited longer."""
        if not parked.awaits_token:
            parked.awaits_token = True
            token_bucket = parked.waiting[0][0].assignment.route.token_bucket
            token_bucket.wait(0, partial(self._wake_for_token, lane, key, parked))

    def _wake_for_token(self, lane: ConsumerLane, name: Hashable, waiter: ConsumerAside | ConsumerParked) -> None:
        # First: the holder may ask for a token again as soon as it is woken.
        waiter.awaits_token = False
        self._wake(lane, name)
