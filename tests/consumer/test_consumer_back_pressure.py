"""Back-pressure: what stops back-pressure, and what does not. Pure, with a client that only notes calls."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import cast

import pytest
from confluent_kafka import TopicPartition

from penstock.clients.cluster import ConsumerClient
from penstock.consumer import ConsumerSettings, handler
from penstock.consumer.assignments import Assignment, PauseReason
from penstock.consumer.handlers.ordering import Keyless, Order, Ordering
from penstock.consumer.handlers.route import Route
from penstock.consumer.poll.back_pressure import GRACE_S, BackPressure
from penstock.offsets import MAX_METADATA_CHARS, Block, decode
from support.consumers import nothing

KIB = 1024


class PausingClient:
    """Notes which partitions are paused."""

    def __init__(self) -> None:
        self.paused: set[int] = set()

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self.paused |= {partition.partition for partition in partitions}

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self.paused -= {partition.partition for partition in partitions}


class Taker:
    """Takes messages in as the poll loop does, where back-pressure lets it."""

    def __init__(self, back_pressure: BackPressure, partitions: int = 1) -> None:
        route = Route(handler(nothing), Ordering(Order.KEY, Keyless.PARTITION, 1), nothing, make_results=nothing)
        self.back_pressure = back_pressure
        self.client = PausingClient()
        self.assignments = [Assignment("t", number, route, start=0) for number in range(partitions)]
        self.now = 0.0

    def apply(self) -> bool:
        """Ask long enough for a partition that stays full to be paused; return whether anything may be fetched."""
        answer = False
        for _ in range(3):
            answer = self.back_pressure.apply(cast("ConsumerClient", self.client), self.assignments, self.now)
            self.now += GRACE_S
        return answer

    def fetch(self, count: int, weight: int = KIB, partition: int = 0, stride: int = 1) -> Block:
        tracker = self.assignments[partition].tracker
        first = tracker.position
        return tracker.register(range(first, first + count * stride, stride), count * weight)

    def reason(self, partition: int = 0) -> str | None:
        return self.assignments[partition].paused


def taker(
    *,
    in_flight: int = 10_000,
    in_flight_bytes: int = 1 << 40,
    partitions: int = 1,
    fetch_size: int = 10_000,
) -> Taker:
    settings = ConsumerSettings(max_in_flight=in_flight, max_in_flight_bytes=in_flight_bytes, fetch_size=fetch_size)
    return Taker(BackPressure(settings), partitions)


def test_a_full_partition_is_paused_only_after_a_moment_and_comes_back_at_half() -> None:
    one = taker(in_flight=100)
    block = one.fetch(100)
    tracker = one.assignments[0].tracker

    at_once = one.back_pressure.apply(cast("ConsumerClient", one.client), one.assignments, one.now)
    before = set(one.client.paused)
    one.apply()
    after = set(one.client.paused)
    tracker.complete(block, range(50))
    one.apply()
    at_half = set(one.client.paused)
    tracker.complete(block, range(50, 51))
    one.apply()

    assert (at_once, before, after, at_half, one.client.paused) == (False, set(), {0}, {0}, set())
    assert one.back_pressure.pauses[PauseReason.IN_FLIGHT] == 1


def test_a_full_partition_takes_up_to_twice_its_limit_where_another_is_hungry() -> None:
    one = taker(in_flight=100, partitions=2)
    client = cast("ConsumerClient", one.client)

    def may_fetch() -> bool:
        return one.back_pressure.apply(client, one.assignments, one.now)

    one.fetch(100)
    beside_a_hungry_one = may_fetch()
    second = one.fetch(99)
    below_twice = may_fetch()
    one.fetch(1)
    at_twice = may_fetch()
    one.fetch(50, partition=1)
    one.assignments[0].tracker.complete(second, range(99))
    none_is_hungry = may_fetch()

    assert (beside_a_hungry_one, below_twice, at_twice, none_is_hungry) == (True, True, False, False)
    assert one.client.paused == set()


def test_parked_messages_do_not_count_as_in_flight_until_their_own_limit_is_reached() -> None:
    one = taker(in_flight=100, partitions=2)
    tracker = one.assignments[0].tracker

    one.fetch(99)
    tracker.park(99, 99 * KIB)
    one.fetch(99)
    assert one.apply()
    assert one.reason() is None
    tracker.park(5, 5 * KIB)
    one.apply()
    full = one.reason(), one.reason(1)
    tracker.park(-60, -60 * KIB)
    one.apply()

    assert full == (PauseReason.PARKED, None)
    # 44 wait yet, but what waited is in flight now.
    assert one.reason() == PauseReason.IN_FLIGHT


def test_the_bytes_of_parked_messages_have_a_quarter_of_the_limit_for_themselves() -> None:
    one = taker(in_flight_bytes=400 * KIB)
    tracker = one.assignments[0].tracker

    one.fetch(150)
    tracker.park(99, 99 * KIB)
    one.apply()
    below = one.reason()
    tracker.park(1, KIB)
    one.apply()

    assert (below, one.reason()) == (None, PauseReason.PARKED)


def test_a_partition_that_holds_little_fetches_though_others_have_all_the_bytes() -> None:
    one = taker(in_flight_bytes=800 * KIB, partitions=4)
    one.fetch(900)
    one.fetch(60, partition=1)

    may_fetch = one.apply()
    first, room = [one.reason(number) for number in range(4)], one.back_pressure.fetch_limit
    while one.reason(2) is None:
        one.fetch(one.back_pressure.fetch_limit, partition=2)
        one.apply()
    taken = one.assignments[2].tracker.in_flight
    one.apply()

    # A quarter of the even part of four: 50 KiB.
    assert (may_fetch, first) == (True, [PauseReason.BYTES, PauseReason.BYTES, None, None])
    assert room == 50
    assert taken == 50
    assert one.reason(3) is None


def test_a_partition_that_has_little_left_goes_on_before_the_others() -> None:
    one = taker(in_flight_bytes=800 * KIB, partitions=2)
    one.fetch(600)
    block = one.fetch(300, partition=1)
    one.apply()
    both = one.reason(0), one.reason(1)

    one.assignments[1].tracker.complete(block, range(251))
    one.apply()

    assert both == (PauseReason.BYTES, PauseReason.BYTES)
    assert (one.reason(0), one.reason(1)) == (PauseReason.BYTES, None)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_smallest_limits_let_one_message_after_the_other_through(limit: int) -> None:
    one = taker(in_flight=limit, in_flight_bytes=limit)
    tracker = one.assignments[0].tracker

    for _ in range(3):
        one.apply()
        assert one.reason() is None
        block = one.fetch(3)
        tracker.park(1, KIB)
        one.apply()
        assert one.reason() is not None
        tracker.park(-1, -KIB)
        tracker.complete(block, range(3))


@pytest.mark.parametrize(
    ("undone", "offsets", "stride", "fetch_size"),
    [
        pytest.param(0.02, 150_000, 7, 10_000, marks=pytest.mark.thorough),
        (0.1, 60_000, 7, 50_000),
        (0.3, 30_000, 2, 2_000),
        (0.5, 26_000, 1, 10_000),
    ],
)
def test_the_map_of_scattered_undone_offsets_is_complete_at_every_moment_and_fetching_goes_on_after(
    undone: float, offsets: int, stride: int, fetch_size: int
) -> None:
    draw = random.Random(f"{undone} {stride} {fetch_size}")  # noqa: S311 - the same pattern at each run
    one = taker(in_flight=1_000_000, fetch_size=fetch_size)
    tracker = one.assignments[0].tracker
    waiting: list[tuple[Block, int]] = []
    taken = 0

    while one.apply():
        if one.reason() is not None:
            break
        count = one.back_pressure.fetch_limit
        block = one.fetch(count, stride=stride)
        taken += count
        places = draw.sample(range(count), count)
        # The first of all stays: it holds the watermark.
        held = {0} if not waiting else set()
        held |= set(places[: int(undone * count)])
        waiting += [(block, place) for place in held]
        tracker.park(len(held), len(held) * KIB)
        done = [place for place in places if place not in held]
        for third in (done[: len(done) // 3], done[len(done) // 3 : len(done) // 2], done[len(done) // 2 :]):
            tracker.complete(block, third)
            check_map(one)
        assert taken < 1_000_000, "nothing stopped back-pressure"

    assert one.reason() == PauseReason.OFFSET_MAP
    # It did not stop before it had to, by more than what is in flight may cost.
    assert taken >= offsets / 3
    for block, place in waiting:
        tracker.complete(block, [place])
    tracker.park(-len(waiting), -len(waiting) * KIB)
    one.apply()
    assert one.reason() is None
    assert one.back_pressure.fetch_limit >= min(fetch_size, 10_000)


def check_map(one: Taker) -> None:
    """Assert that what would be committed now is small enough, and tells all that is done."""
    tracker = one.assignments[0].tracker
    point = tracker.commit_point()
    assert len(point.metadata) <= MAX_METADATA_CHARS
    decoded = decode(point.offset, point.metadata)
    gaps = tracker.gaps()
    assert (decoded.done if decoded is not None else ()) == tuple(gaps)
