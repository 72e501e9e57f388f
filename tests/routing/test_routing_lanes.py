"""Lanes and their scheduler, alone: reach, fairness, and never two holders (I1)."""

from __future__ import annotations

from collections import Counter

import pytest
from confluent_kafka import murmur2
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.routing import Run, Scheduler, lane_of


def test_the_hash_is_the_same_for_ever() -> None:
    assert [lane_of(key, 512) for key in (b"", b"a", b"N14228", b"\xff\x00")] == [194, 31, 166, 487]


@pytest.mark.parametrize("partitions", [4, 8, 12])
def test_the_keys_of_each_partition_reach_every_lane(partitions: int) -> None:
    lanes = 12
    keys = [b"key-%d" % i for i in range(4000)]

    reached = {
        partition: {lane_of(key, lanes) for key in keys if murmur2(key, partitions) == partition}
        for partition in range(partitions)
    }

    assert all(found == set(range(lanes)) for found in reached.values())


def test_lanes_are_filled_evenly() -> None:
    counts = Counter(lane_of(b"key-%d" % i, 64) for i in range(64_000))

    assert min(counts.values()) > 850
    assert max(counts.values()) < 1150


def test_the_lane_whose_head_is_oldest_is_served_first() -> None:
    scheduler: Scheduler[None, str] = Scheduler([0] * 8)
    for number, arrival in ((3, 30), (1, 10), (2, 20)):
        scheduler.lanes[number].runs.append(run_of(arrival, "x"))
    scheduler.ready(scheduler.lanes)

    order = [lane.number for _ in range(3) if (lane := scheduler.take(0)) is not None]

    assert order == [1, 2, 3]
    assert scheduler.take(0) is None


def test_a_due_retry_goes_before_newer_runs() -> None:
    scheduler: Scheduler[None, str] = Scheduler([0] * 4)
    scheduler.lanes[0].runs.append(run_of(1, "x"))
    scheduler.ready(scheduler.lanes)

    scheduler.wake(scheduler.lanes[2], b"key")

    lane = scheduler.take(0)
    assert lane is scheduler.lanes[2]


def test_pinned_workers_take_only_their_own_lane() -> None:
    scheduler: Scheduler[None, str] = Scheduler(range(3))
    for lane in scheduler.lanes:
        lane.runs.append(run_of(1, "x"))

    queues = scheduler.ready(scheduler.lanes)

    assert sorted(queues) == [0, 1, 2]
    assert [scheduler.take(worker) for worker in range(3)] == list(scheduler.lanes)


def run_of(arrival: int, *records: str) -> Run[None, str]:
    return Run(None, arrival, list(records), list(range(len(records))))


class LanesMachine(RuleBasedStateMachine):
    """Workers take and give back lanes while runs arrive: nothing is held twice, nothing is forgotten."""

    @initialize(workers=st.integers(1, 3), pinned=st.booleans())
    def begin(self, workers: int, pinned: bool) -> None:
        self.workers = workers
        self.queues = workers if pinned else 1
        self.scheduler: Scheduler[None, str] = Scheduler([number % self.queues for number in range(workers * 3)])
        self.held: dict[int, int] = {}
        self.tokens: Counter[int] = Counter()
        self.arrival = 0

    @rule(numbers=st.sets(st.integers(0, 8), min_size=1))
    def runs_arrive(self, numbers: set[int]) -> None:
        self.arrival += 1
        lanes = [self.scheduler.lanes[number % len(self.scheduler.lanes)] for number in numbers]
        for lane in lanes:
            lane.runs.append(run_of(self.arrival, "x"))
        self.tokens.update(self.scheduler.ready(dict.fromkeys(lanes)))

    @rule(number=st.integers(0, 8))
    def a_retry_is_due(self, number: int) -> None:
        lane = self.scheduler.lanes[number % len(self.scheduler.lanes)]
        self.tokens.update(self.scheduler.wake(lane, b"key"))

    @rule(worker=st.integers(0, 2))
    def a_worker_takes(self, worker: int) -> None:
        queue = worker % self.queues
        lane = self.scheduler.take(queue)
        assert (lane is not None) == (self.tokens[queue] > 0)
        if lane is not None:
            self.tokens[queue] -= 1
            assert lane.number not in self.held
            self.held[lane.number] = queue

    @precondition(lambda self: self.held)
    @rule(data=st.data(), taken=st.integers(0, 2))
    def a_worker_gives_back(self, data: st.DataObject, taken: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        lane = self.scheduler.lanes[number]
        lane.due.clear()
        for _ in range(min(taken, len(lane.runs))):
            lane.runs.popleft()
        del self.held[number]
        queue = self.scheduler.give_back(lane)
        if queue is not None:
            self.tokens[queue] += 1

    @invariant()
    def every_lane_with_work_is_claimed_once(self) -> None:
        for lane in self.scheduler.lanes:
            assert lane.claim.locked() or not (lane.runs or lane.due)
        claimed = sum(lane.claim.locked() for lane in self.scheduler.lanes)
        assert claimed == len(self.held) + sum(self.tokens.values())
        assert self.scheduler.idle == (claimed == 0)


TestLanesMachine = LanesMachine.TestCase


@given(st.binary(max_size=40), st.integers(1, 5000))
def test_every_key_has_a_lane(key: bytes, lanes: int) -> None:
    assert 0 <= lane_of(key, lanes) < lanes
