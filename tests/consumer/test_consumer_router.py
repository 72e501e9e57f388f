"""The router on logs that go back and logs with holes: pure."""

from __future__ import annotations

import pytest

from penstock.consumer import handler
from penstock.consumer.assignments import Assignment, Assignments, Fetch
from penstock.consumer.handlers.ordering import Keyless, Order, Ordering
from penstock.consumer.handlers.route import Route
from penstock.consumer.poll.router import Router
from penstock.message import FixedRecord, Record
from penstock.offsets import OffsetMap
from penstock.routing import Scheduler
from penstock.testing import TestClock
from support.consumers import nothing


class Routed:
    """A router with one partition and one lane."""

    def __init__(self, restored: OffsetMap | None = None) -> None:
        self.scheduler: Scheduler[Fetch, Record] = Scheduler([0])
        ordering = Ordering(Order.KEY, Keyless.PARTITION, 1)
        route = Route(handler(nothing), ordering, nothing, lanes=self.scheduler.lanes)
        self.first = Assignment("t", 0, route, start=0, restored=restored)
        self.assignments = Assignments()
        self.assignments.put(self.first)
        self.let_go = 0
        self.router = Router(
            "g",
            TestClock(),
            self.assignments,
            self.scheduler,
            wake=lambda _: None,
            on_dropped=self._let_go,
            topics=["t"],
            slow_keys_s=1.0,
        )

    def _let_go(self) -> None:
        self.let_go += 1

    def take(self, *offsets: int) -> None:
        self.router.route([FixedRecord("t", 0, offset, b"k", b"v", (), None) for offset in offsets], 0.0)

    @property
    def current(self) -> Assignment:
        found = self.assignments.get("t", 0)
        assert found is not None
        return found

    def waiting(self) -> list[int]:
        """Return the offsets that will be handed over, in order."""
        runs = self.scheduler.lanes[0].runs
        return [record.offset() for run in runs if run.owner.assignment.active for record in run.records]


def test_a_log_that_goes_back_within_one_batch_is_followed_from_where_it_begins_anew() -> None:
    routed = Routed()

    routed.take(50, 51, 52, 0, 1, 2)

    assert not routed.first.active
    assert routed.waiting() == [0, 1, 2]
    assert (routed.current.tracker.watermark, routed.current.tracker.position) == (0, 3)
    assert (routed.current.tracker.in_flight, routed.router.received) == (3, 6)
    assert routed.let_go == 1


def test_a_compacted_log_is_tracked_by_the_offsets_that_are_there() -> None:
    routed = Routed()

    routed.take(0, 7, 8, 1000)
    run = routed.scheduler.lanes[0].runs[0]
    tracker = routed.current.tracker
    tracker.complete(run.owner.block, [1, 2])
    above = tracker.gaps()
    tracker.complete(run.owner.block, [0])

    assert above == [range(1, 1000)]
    assert (tracker.watermark, tracker.position, tracker.in_flight) == (1000, 1001, 1)


def test_what_a_former_owner_had_done_is_counted_and_not_handed_over() -> None:
    routed = Routed(OffsetMap(0, (range(1, 3), range(5, 6))))

    routed.take(0, 1, 2, 3)
    routed.take(4, 5, 6)

    assert routed.waiting() == [0, 3, 4, 6]
    assert (routed.router.received, routed.router.restored) == (7, 3)


@pytest.mark.parametrize("senders", [2, 3, 4, 8, 10, 16, 32])
def test_large_keys_that_come_by_turns_with_small_ones_are_seen(senders: int) -> None:
    routed = Routed()
    keys = [b"x" * 10_000 if i % senders == senders - 1 else b"k" for i in range(2_000)]

    routed.router.route([FixedRecord("t", 0, i, key, b"v", (), None) for i, key in enumerate(keys)], 0.0)

    assert sum(map(len, keys)) <= routed.current.tracker.bytes_in_flight <= sum(map(len, keys)) + 2_000 * 1_000


class UnreadableRecord(FixedRecord):
    """A record whose headers the client cannot carry over."""

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        """Raise, as `headers_of` does then."""
        raise UnicodeDecodeError("utf-8", b"?", 0, 1, "the name of a header is not text")


def test_headers_that_cannot_be_read_stop_no_routing() -> None:
    routed = Routed()

    routed.router.route([UnreadableRecord("t", 0, 0, b"k", b"v", (), None)], 0.0)

    assert routed.waiting() == [0]
