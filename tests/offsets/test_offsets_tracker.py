"""The watermark never passes an offset that is not done, in any order of completion (I3, I4)."""

from __future__ import annotations

import random
import sys
import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.offsets import Block, OffsetMap, Tracker, decode


class TrackerMachine(RuleBasedStateMachine):
    """A tracker, and a plain set of the offsets that are not done."""

    @initialize(start=st.integers(0, 1000))
    def begin(self, start: int) -> None:
        self.tracker = Tracker(start)
        self.open: dict[int, tuple[Block, int]] = {}
        self.fetched: set[int] = set()
        self.position = start
        self.committed = start

    @rule(steps=st.lists(st.integers(1, 4), min_size=1, max_size=30), tail=st.integers(0, 3))
    def fetch_with_holes(self, steps: list[int], tail: int) -> None:
        offsets, at = [], self.position - 1
        for step in steps:
            at += step
            offsets.append(at)
        self.position = at + 1 + tail
        block = self.tracker.register(offsets, size_bytes=len(offsets) * 10 + steps[0])
        self.tracker.advance(self.position)
        self.open |= {offset: (block, index) for index, offset in enumerate(offsets)}
        self.fetched |= set(offsets)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def complete_some_of_a_block(self, data: st.DataObject) -> None:
        starts = sorted({block.offsets[0] for block, _ in self.open.values()})
        start = data.draw(st.sampled_from(starts))
        block = next(block for block, _ in self.open.values() if block.offsets[0] == start)
        mine = [(offset, index) for offset, (other, index) in self.open.items() if other is block]
        chosen = data.draw(st.lists(st.sampled_from(mine), min_size=1, unique=True))
        self.tracker.complete(block, [index for _, index in chosen])
        for offset, _ in chosen:
            del self.open[offset]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def ask_for_the_commit_point_as_if_more_were_done(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.open)), min_size=1))
        left = self.open.keys() - chosen

        places: dict[Block, list[int]] = {}
        for offset in chosen:
            block, index = self.open[offset]
            places.setdefault(block, []).append(index)
        point = self.tracker.commit_point(with_done=places)

        assert point.offset == min(left, default=self.position)
        found = decode(point.offset, point.metadata)
        done_above = {offset for offset in self.fetched if offset > point.offset and offset not in left}
        assert {offset for offset in self.fetched if found is not None and offset in found} == done_above
        # The invariants require that nothing has changed.
        assert self.tracker.in_flight == len(self.open)

    @precondition(lambda self: self.open)
    @rule()
    def complete_the_lowest_run(self) -> None:
        block, index = self.open[min(self.open)]
        stop = index
        while stop < len(block.offsets) and block.offsets[stop] in self.open:
            del self.open[block.offsets[stop]]
            stop += 1
        self.tracker.complete(block, range(index, stop))

    @rule(markers=st.integers(1, 5))
    def pass_markers_at_the_tail(self, markers: int) -> None:
        self.position += markers
        self.tracker.advance(self.position)

    @invariant()
    def the_commit_point_is_the_lowest_open_offset(self) -> None:
        point = self.tracker.commit_point()
        assert point.offset == min(self.open, default=self.position)
        assert point.offset >= self.committed
        self.committed = point.offset

    @invariant()
    def the_map_holds_exactly_what_is_done_above(self) -> None:
        point = self.tracker.commit_point()
        found = decode(point.offset, point.metadata)
        done_above = {offset for offset in self.fetched if offset > point.offset and offset not in self.open}
        assert {offset for offset in self.fetched if found is not None and offset in found} == done_above

    @invariant()
    def the_counts_add_up(self) -> None:
        blocks = {id(block): block for block, _ in self.open.values()}.values()
        assert self.tracker.in_flight == len(self.open)
        assert self.tracker.bytes_in_flight == sum(one.size_bytes * one.left // len(one.done) for one in blocks)


TestTrackerMachine = TrackerMachine.TestCase


@given(st.integers(0, 100), st.sets(st.integers(1, 200), max_size=60))
def test_work_done_by_a_former_owner_is_not_done_again_and_not_forgotten(start: int, done_before: set[int]) -> None:
    ranges = tuple(range(start + step, start + step + 1) for step in sorted(done_before))
    tracker = Tracker(start, OffsetMap(start, ranges))
    offsets = list(range(start, start + 100))

    untouched = tracker.commit_point()
    block = tracker.register(offsets)
    todo = [index for index, done in enumerate(block.done) if not done]
    fetched = tracker.commit_point()
    tracker.complete(block, todo)

    above = {start + step for step in done_before}
    for point in (untouched, fetched):
        read = decode(point.offset, point.metadata)
        assert point.offset == start
        assert {offset for offset in range(start, start + 201) if read is not None and offset in read} == above
    assert {offsets[index] for index in todo} == set(offsets) - above
    assert tracker.watermark == start + 100


def test_a_map_of_another_offset_is_not_applied() -> None:
    tracker = Tracker(10, OffsetMap(9, (range(11, 20),)))

    block = tracker.register(range(10, 20))

    assert block.left == 10


def test_an_offset_completed_twice_is_an_error_and_the_counts_stay_right() -> None:
    tracker = Tracker(0)
    block = tracker.register([0, 1, 2])
    tracker.complete(block, [1])

    tracker.complete(block, [0, 1])
    with pytest.raises(ValueError, match="1 of 3 offsets from 0 were done before"):
        _ = tracker.in_flight

    assert tracker.in_flight == 1


def test_offsets_that_go_back_are_refused() -> None:
    tracker = Tracker(0)
    tracker.register([5, 6])

    with pytest.raises(ValueError, match="rise above 7"):
        tracker.register([6, 7])


def test_each_message_counts_as_the_mean_of_its_fetch_until_it_is_done() -> None:
    tracker = Tracker(0)
    block = tracker.register([0, 1], size_bytes=300)

    tracker.complete(block, [0])
    half_way = tracker.bytes_in_flight
    tracker.complete(block, [1])

    assert (half_way, tracker.bytes_in_flight) == (150, 0)


def test_the_bytes_in_flight_are_known_without_a_look_at_each_block() -> None:
    tracker = Tracker(0)
    for offset in range(10_000):
        tracker.register([offset], size_bytes=7)
    steps = 0

    def counts(*_: object) -> None:
        nonlocal steps
        steps += 1

    sys.setprofile(counts)
    try:
        found = tracker.bytes_in_flight
    finally:
        sys.setprofile(None)

    assert found == 70_000
    assert steps < 100


def test_threads_that_complete_at_random_lose_no_offset_and_the_watermark_never_falls() -> None:
    tracker = Tracker(0)
    blocks = [tracker.register(range(base, base + 500)) for base in range(0, 50_000, 500)]
    work = [(block, range(at, at + 50)) for block in blocks for at in range(0, 500, 50)]
    random.Random(7).shuffle(work)  # noqa: S311 - a seed, not a secret
    marks: list[int] = []

    def run(part: int) -> None:
        for block, indexes in work[part::8]:
            tracker.complete(block, indexes)
            if part == 0:
                marks.append(tracker.watermark)

    threads = [threading.Thread(target=run, args=(part,)) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert tracker.watermark == 50_000
    assert tracker.in_flight == 0
    assert marks == sorted(marks)


def test_an_offset_that_is_stuck_while_millions_pass_costs_a_commit_no_memory_for_each() -> None:
    tracker = Tracker(0)
    stuck = tracker.register([0])
    passing = tracker.register(range(1, 501))
    tracker.complete(passing, range(100, 500))
    tracker.advance(300_000_000)

    tracemalloc.start()
    try:
        point = tracker.commit_point()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 20_000_000
    assert point.offset == 0
    restored = decode(0, point.metadata)
    assert restored is not None
    assert list(restored.done) == [range(101, 300_000_000)]
    tracker.complete(stuck, [0])
    assert tracker.commit_point().offset == 1


@pytest.mark.parametrize("as_if_done", [False, True])
def test_what_a_former_owner_did_right_behind_what_was_fetched_survives_the_next_commit(as_if_done: bool) -> None:
    tracker = Tracker(0, OffsetMap(0, (range(1, 2), range(3, 5))))
    block = tracker.register([0])
    places = {block: [0]}
    if not as_if_done:
        tracker.complete(block, [0])
        places = {}

    point = tracker.commit_point(with_done=places)

    assert point.offset == 2
    assert decode(point.offset, point.metadata) == OffsetMap(2, (range(3, 5),))
