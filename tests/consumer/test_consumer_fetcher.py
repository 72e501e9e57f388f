"""The fetcher alone: its requests to the client, and its runs, with logs that go back or have holes."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.consumer import ConsumerSettings, handler
from penstock.consumer.assignments import Assignment
from penstock.consumer.engine import Engine
from penstock.consumer.poll.loop import PollLoop
from penstock.message import FixedRecord
from penstock.offsets import OffsetMap
from penstock.testing import TestClock
from support.consumers import nothing


def engine_of_one_lane() -> Engine:
    return Engine("g", {"t": handler(nothing)}, ConsumerSettings(workers=1, pinned=True), TestClock())


class Record:
    """A record of the client, as far as the fetcher looks at it."""

    def error(self) -> None:
        """Return no error."""


class Noting:
    """A client with so many messages, and back-pressure with a limit; they record their requests."""

    def __init__(self, there: int, fetch_limit: int) -> None:
        self.client, self.fetch_limit, self.in_flight = self, fetch_limit, 0
        self._there = there
        self.asked: list[int] = []
        self.routed: list[int] = []

    def apply(self, *_: object) -> bool:
        return True

    def consume(self, most: int, _timeout: float) -> list[Record]:
        self.asked.append(most)
        found = min(most, self._there)
        self._there -= found
        return [Record()] * found

    def poll(self, _timeout: float) -> None:
        return None

    def put_on_lanes(self, batch: list[Record], _now: float) -> None:
        self.routed.append(len(batch))


@pytest.mark.parametrize(
    ("there", "fetch_limit", "asked", "routed"),
    [
        (10_000, 1_200, [500, 500, 200], [1_200]),
        (700, 10_000, [500, 500], [700]),
        (3, 2, [2], [2]),
        (0, 10_000, [500], []),
    ],
)
def test_the_client_hands_over_a_large_fetch_in_pieces_and_it_is_routed_as_a_whole(
    there: int, fetch_limit: int, asked: list[int], routed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: Any = Noting(there, fetch_limit)
    fetcher = PollLoop(engine_of_one_lane()).fetcher
    fetcher._membership, fetcher._back_pressure = parts, parts
    monkeypatch.setattr(fetcher, "put_on_lanes", parts.put_on_lanes)

    fetcher.fetch(lambda _: 0.0)

    assert (parts.asked, parts.routed) == (asked, routed)


class Routed:
    """A fetcher with one partition and one lane."""

    def __init__(self, restored: OffsetMap | None = None) -> None:
        self.engine = engine = engine_of_one_lane()
        self.first = Assignment("t", 0, engine.routes["t"], start=0, restored=restored)
        engine.assignments.put(self.first)
        self.fetcher = PollLoop(engine).fetcher

    def take(self, *offsets: int) -> None:
        self.fetcher.put_on_lanes([FixedRecord("t", 0, offset, b"k", b"v", (), None) for offset in offsets], 0.0)

    @property
    def current(self) -> Assignment:
        found = self.engine.assignments.get("t", 0)
        assert found is not None
        return found

    def waiting(self) -> list[int]:
        """Return the offsets that will be handed over, in order."""
        runs = self.engine.scheduler.lanes[0].runs
        return [record.offset() for run in runs if run.owner.assignment.active for record in run.records]


def test_a_log_that_goes_back_within_one_batch_is_followed_from_where_it_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routed, woken = Routed(), list[str]()
    monkeypatch.setattr(routed.engine.processor, "wake_all", lambda: woken.append("all"))

    routed.take(50, 51, 52, 0, 1, 2)

    assert not routed.first.active
    assert routed.waiting() == [0, 1, 2]
    assert (routed.current.tracker.watermark, routed.current.tracker.position) == (0, 3)
    assert (routed.current.tracker.in_flight, routed.engine.counts.received) == (3, 6)
    assert woken == ["all"]


def test_a_compacted_log_is_tracked_by_the_offsets_that_are_there() -> None:
    routed = Routed()

    routed.take(0, 7, 8, 1000)
    run = routed.engine.scheduler.lanes[0].runs[0]
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
    assert (routed.engine.counts.received, routed.engine.counts.restored) == (7, 3)


@pytest.mark.parametrize("senders", [2, 3, 4, 8, 10, 16, 32])
def test_large_keys_that_come_by_turns_with_small_ones_are_seen(senders: int) -> None:
    routed = Routed()
    keys = [b"x" * 10_000 if i % senders == senders - 1 else b"k" for i in range(2_000)]

    routed.fetcher.put_on_lanes([FixedRecord("t", 0, i, key, b"v", (), None) for i, key in enumerate(keys)], 0.0)

    assert sum(map(len, keys)) <= routed.current.tracker.bytes_in_flight <= sum(map(len, keys)) + 2_000 * 1_000


class UnreadableRecord(FixedRecord):
    """A record whose headers the client cannot carry over."""

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        """Raise, as `headers_of` does then."""
        raise UnicodeDecodeError("utf-8", b"?", 0, 1, "the name of a header is not text")


def test_headers_that_cannot_be_read_stop_no_routing() -> None:
    routed = Routed()

    routed.fetcher.put_on_lanes([UnreadableRecord("t", 0, 0, b"k", b"v", (), None)], 0.0)

    assert routed.waiting() == [0]
