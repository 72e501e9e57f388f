"""Halves and decisions are read side by side: neither kind far ahead of the other, and neither kept from the other."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from penstock.transactions.coordinator.partitions.log_reader import LogReader
from penstock.transactions.wire.ops import DECISION_BYTES
from penstock.transactions.wire.topics import StoreTopics

TOPICS = StoreTopics("penstock", 1)


@dataclass
class Fetched:
    """A record of a log."""

    at: int
    name: int
    size: int = DECISION_BYTES
    number: int = 0

    def error(self) -> None:
        return None

    def offset(self) -> int:
        return self.at

    def partition(self) -> int:
        return self.number

    def __len__(self) -> int:
        return self.size


@dataclass
class Log:
    """A consumer of one kind of log: what it has fetched, and what the broker has beyond that."""

    fetched: deque[Fetched] = field(default_factory=deque)
    known_end: int = 0
    waited: list[float] = field(default_factory=list)

    def holds(self, *names: int, size: int = DECISION_BYTES) -> None:
        """Have records of these names fetched."""
        for name in names:
            self.fetched.append(Fetched(self.known_end, name, size))
            self.known_end += 1

    def poll(self, timeout_s: float) -> Fetched | None:
        self.waited.append(timeout_s)
        return self.fetched.popleft() if self.fetched else None

    def consume(self, count: int, timeout_s: float) -> list[Fetched]:
        assert timeout_s == 0
        return [self.fetched.popleft() for _ in range(min(count, len(self.fetched)))]

    def incremental_assign(self, places: list[TopicPartition]) -> None:
        assert len(places) == 1

    def get_watermark_offsets(self, place: TopicPartition, *, cached: bool) -> tuple[int, int]:
        assert cached
        assert place.partition == 0
        return 0, self.known_end


@pytest.fixture
def halves() -> Log:
    return Log()


@pytest.fixture
def ops() -> Log:
    return Log()


@pytest.fixture
def logs(halves: Log, ops: Log) -> LogReader:
    made = iter((halves, ops))
    both = LogReader(lambda: next(made), TOPICS)  # type: ignore[arg-type,return-value] # what is used of it
    both.add(0, 0, 0)
    return both


def times(records: Any) -> list[int]:
    return [record.time_ms for record in records]


def values(records: Any) -> list[int]:
    return [record.name for record in records]


def test_what_is_there_is_read_halves_first_and_what_is_waited_for_is_a_decision(
    logs: LogReader, halves: Log, ops: Log
) -> None:
    halves.holds(1, 2)
    ops.holds(3)

    assert values(logs.read(0.05, 100, for_halves=False, full=False)) == [1, 2, 3]

    assert ops.waited == [0.05]
    assert halves.waited == [0]


def test_where_decisions_came_before_their_halves_it_is_halves_that_are_waited_for(
    logs: LogReader, halves: Log, ops: Log
) -> None:
    halves.holds(1)
    ops.holds(2)

    assert values(logs.read(0.05, 100, for_halves=True, full=True)) == [1, 2]

    assert halves.waited == [0.05]
    assert ops.waited == [0]


def test_where_there_are_many_undecided_halves_decisions_are_read_alone(logs: LogReader, halves: Log, ops: Log) -> None:
    halves.holds(1)
    ops.holds(2)

    assert values(logs.read(0, 100, for_halves=False, full=True)) == [2]
    ops.known_end += 1  # the broker has another, which is not fetched yet
    assert values(logs.read(0, 100, for_halves=False, full=True)) == []
    ops.known_end -= 1
    assert values(logs.read(0, 100, for_halves=False, full=True)) == [1], "there are no decisions to read"


def test_pieces_are_about_as_many_decisions_as_halves(logs: LogReader, halves: Log, ops: Log) -> None:
    halves.holds(*range(3_000))
    ops.holds(*range(50), size=200 * DECISION_BYTES)

    pieces = [values(logs.read(0, 1_000, for_halves=False, full=False)) for _ in range(3)]

    assert [len(piece) for piece in pieces] == [1_000 + 1, 1_000 + 5, 1_000 + 5], (
        "the first op shows how large they are"
    )
