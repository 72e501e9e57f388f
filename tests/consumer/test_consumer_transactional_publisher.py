"""Rules of the transactional publisher that simulated runs meet too seldom; `simulation` has all others."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from penstock.clients.transactional.end_watch import UnknownEndError
from penstock.clients.transactional.errors import GivenUpError
from penstock.consumer import handler
from penstock.consumer.assignments import Assignment, Fetch, Item
from penstock.consumer.handlers.results import Result
from penstock.consumer.publishing.transaction import Places, Transaction
from penstock.consumer.publishing.transactional_publisher import TransactionalPublisher
from penstock.offsets import MAX_METADATA_CHARS, CommitPoint
from penstock.testing import TestClock


class Runner:
    """Stands in for a `TransactionRunner`: what is committed, and what is to go wrong, once each."""

    def __init__(self) -> None:
        self.committed_values: list[bytes | None] = []
        self.positions: dict[tuple[str, int], CommitPoint] = {}
        self.generations: list[object] = []
        self.faults: list[Exception] = []
        #: Whether a transaction takes effect whose end is not known.
        self.takes_effect = True
        self.require_open = self.discard = lambda **_: None

    def run(self, transaction: Transaction, metadata: object) -> None:
        self.generations.append(metadata)
        fault = self.faults.pop() if self.faults else None
        if fault is None or (isinstance(fault, UnknownEndError) and self.takes_effect):
            self.committed_values += [result.value for one in transaction.inside for result in one.results]
            self.positions.update(((one.topic, one.partition), at) for one, at in transaction.positions.items())
        if fault is not None:
            raise fault

    def refused(self, _transaction: Transaction) -> tuple[dict[Any, Any], bool]:
        return {}, False

    def committed(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        known = [(one, self.positions.get((one.topic, one.partition))) for one in partitions]
        return [
            TopicPartition(one.topic, one.partition, at.offset, metadata=at.metadata)
            for one, at in known
            if at is not None
        ]


class Stepped:
    """A publisher whose transactions are run by hand, and one partition."""

    def __init__(self) -> None:
        self.runner, self.clock = Runner(), TestClock()
        self.assignment = Assignment("in", 0, cast("Any", SimpleNamespace(handler=handler(print))), start=0)
        self.others: dict[Assignment, CommitPoint] = {}
        self.publisher = TransactionalPublisher("g", 0.0, self.clock, wake=cast("Any", None), fail=pytest.fail)
        self.publisher._runner = cast("Any", self.runner)
        self.publisher.changed = self.changed
        self.publisher.set_metadata("generation")
        self.map_chars = MAX_METADATA_CHARS
        self._next = 0

    def changed(self, with_done: Mapping[Assignment, Places]) -> dict[Assignment, CommitPoint]:
        point = self.assignment.tracker.commit_point(self.map_chars, with_done=with_done.get(self.assignment, {}))
        mine = {} if point == self.assignment.committed else {self.assignment: point}
        return {one: at for one, at in (mine | self.others).items() if not one.is_gone}

    def take_in(self) -> Item:
        block = self.assignment.tracker.register([self._next], 1)
        self._next += 1
        return Fetch(self.assignment, block, 0.0), 0, cast("Any", None)

    def submit(self, value: bytes, item: Item | None = None) -> None:
        lane: Any = "a lane"
        self.publisher.submit(lane, (item or self.take_in(),), [Result("out", value, b"k", [], -1)])

    def forward(self, value: bytes, item: Item) -> None:
        def complete() -> None:
            self.assignment.tracker.complete(item[0].block, (item[1],))

        self.publisher.forward(item, Result("dlq", value, b"k", [], -1), complete, lambda _: None)

    def transact(self, times: int = 5) -> None:
        for _ in range(times):
            self.publisher.transact()
            self.clock.advance(1)


def test_positions_go_with_the_generation_that_was_the_groups_before_they_were_gathered() -> None:
    stepped = Stepped()

    def changed_in_a_rebalance(with_done: Mapping[Assignment, Places]) -> dict[Assignment, CommitPoint]:
        found = stepped.changed(with_done)
        # By now their partition may be another member's, who is in this generation, too.
        stepped.publisher.set_metadata("next generation")
        return found

    stepped.publisher.changed = changed_in_a_rebalance
    stepped.submit(b"1")
    stepped.transact(1)

    assert stepped.runner.generations == ["generation"]


@pytest.mark.parametrize("was_committed", [True, False])
def test_a_doubt_is_settled_by_the_partitions_that_are_left(was_committed: bool) -> None:
    stepped = Stepped()
    other = Assignment("in", 1, stepped.assignment.route, start=0)
    stepped.others = {other: CommitPoint(3, "")}
    stepped.runner.takes_effect = was_committed
    stepped.runner.faults = [UnknownEndError("no answer")]
    stepped.submit(b"1")
    stepped.transact(1)
    # Its next owner has gone on, or has come to the same place by itself.
    other.is_gone = True
    stepped.runner.positions["in", 1] = CommitPoint(9 if was_committed else 3, "")

    stepped.transact()

    assert stepped.runner.committed_values == [b"1"]
    assert stepped.runner.positions["in", 0].offset == 1
    assert stepped.publisher.handled == 1


def test_a_broker_that_tells_what_was_is_not_believed_before_results_are_written_again() -> None:
    stepped = Stepped()
    stepped.runner.faults = [UnknownEndError("no answer")]
    stepped.submit(b"1")
    stepped.transact(1)
    tells = stepped.runner.committed
    # It stood still, and does not know yet that another one coordinates the group.
    stepped.runner.committed = lambda _: [TopicPartition("in", 0, 0, metadata="")]  # type: ignore[method-assign] # a fault
    stepped.transact(2)
    stepped.runner.committed = tells  # type: ignore[method-assign] # mended

    stepped.transact()

    assert stepped.runner.committed_values == [b"1"]
    assert stepped.publisher.handled == 1


@pytest.mark.parametrize(
    "known",
    [UnknownEndError("its end was sent more than once", is_committed=True), GivenUpError("its end had not begun")],
)
def test_nobody_is_asked_about_a_transaction_of_which_it_is_known_how_it_ends(known: Exception) -> None:
    stepped = Stepped()
    stepped.runner.committed = lambda _: pytest.fail("asked")  # type: ignore[method-assign] # as it says
    stepped.runner.takes_effect = isinstance(known, UnknownEndError)
    stepped.runner.faults = [known]
    stepped.submit(b"1")

    stepped.transact()

    assert stepped.runner.committed_values == [b"1"]
    assert (stepped.publisher.waiting, stepped.publisher.handled) == (0, 1)


def test_a_doubt_about_a_partition_that_is_gone_is_dropped_with_its_results() -> None:
    stepped = Stepped()
    stepped.runner.faults = [UnknownEndError("no answer")]
    stepped.submit(b"1")
    stepped.transact(1)
    stepped.assignment.active, stepped.assignment.is_gone = False, True
    # Moved on by its next owner.
    stepped.runner.positions["in", 0] = CommitPoint(9, "")

    stepped.transact()

    assert stepped.runner.committed_values == [b"1"]
    assert (stepped.publisher.waiting, stepped.publisher.handled) == (0, 0)


def test_a_right_that_is_missing_is_passed_on_and_the_same_failure_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stepped = Stepped()
    stepped.runner.faults = [KafkaException(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)) for _ in range(3)]
    # Routine in a rebalance: no warning.
    stepped.runner.faults += [KafkaException(KafkaError(KafkaError.ILLEGAL_GENERATION))]
    stepped.submit(b"1")

    stepped.transact(5)

    assert stepped.runner.committed_values == [b"1"]
    assert stepped.publisher.lacks_right
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


@pytest.mark.parametrize("kind", ["results", "dead letters"])
def test_what_the_offset_map_has_no_room_for_waits_and_holds_back_nothing_that_gives_it_room(kind: str) -> None:
    stepped = Stepped()
    stepped.map_chars = 0
    # The second is of the first one's key, and is handled after it; the third, of another, was quicker than both.
    first, second, third = (stepped.take_in() for _ in range(3))
    put = stepped.submit if kind == "results" else stepped.forward
    put(b"third", third)
    stepped.transact(1)
    alone = list(stepped.runner.committed_values)
    put(b"first", first)
    stepped.transact(1)
    room_for_one = list(stepped.runner.committed_values)
    put(b"second", second)

    stepped.transact()

    assert (alone, room_for_one) == ([], [b"first"])
    assert stepped.runner.committed_values == [b"first", b"third", b"second"]
    assert (stepped.publisher.waiting, stepped.runner.positions["in", 0].offset) == (0, 3)
