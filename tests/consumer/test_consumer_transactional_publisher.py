"""Results and their offsets in Kafka transactions: what becomes of one that fails, hangs, or ends nobody knows how."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest
from confluent_kafka import KafkaError, KafkaException
from publisher_world import World, Writer

from penstock.clients.transactional.end_watch import UnknownEndError
from penstock.consumer.assignments import Assignment
from penstock.consumer.publishing import transaction_runner, transactional_publisher
from penstock.consumer.publishing.transaction import Places
from penstock.offsets import CommitPoint
from waiting import wait_until


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(transactional_publisher, "_AGAIN_S", 0.01)
    made = World()
    yield made
    assert made.publisher.stop(20)
    assert made.failures == []


def fails(error: BaseException) -> Callable[[Writer], None]:
    def fail(_writer: Writer) -> None:
        raise error

    return fail


def test_results_and_their_offsets_are_committed_together_in_the_order_of_submission(world: World) -> None:
    world.connect()
    for number in range(30):
        world.submit(b"%d" % number, b"%d again" % number)
    world.settle()

    assert world.broker.committed == [text for n in range(30) for text in (b"%d" % n, b"%d again" % n)]
    assert world.broker.positions["in", 0][0] == 30
    assert set(world.broker.generations) == {"generation"}
    assert (world.publisher.handled, world.publisher.published) == (30, 60)
    assert world.publisher.transactions < 30


@pytest.mark.parametrize("call", ["begin", "deliver", "positions", "commit"])
def test_what_was_aborted_is_written_again_from_the_results_at_hand(world: World, call: str) -> None:
    error = KafkaException(KafkaError(KafkaError.ILLEGAL_GENERATION))
    world.broker.faults[call] = [fails(error), fails(error)]
    world.submit(b"1")
    world.connect()
    world.submit(b"2")
    world.settle()

    assert world.broker.committed == [b"1", b"2"]
    assert world.broker.faults[call] == [], "the fault did not happen"
    assert world.refused == []


@pytest.mark.parametrize("was_committed", [True, False])
def test_a_transaction_in_doubt_is_settled_by_the_groups_offsets(world: World, was_committed: bool) -> None:
    def end(writer: Writer) -> None:
        if was_committed:
            writer.take_effect()
        raise UnknownEndError("no answer")

    world.broker.faults["commit"] = [end]
    world.submit(b"1")
    world.connect()
    world.settle()
    world.submit(b"2")
    world.settle()

    assert world.broker.committed == [b"1", b"2"]
    assert world.broker.positions["in", 0][0] == 2
    assert len(world.broker.opened) == 2, "a successor settles it"
    assert world.publisher.handled == 2


def test_a_call_that_never_returns_is_left_behind_and_its_end_is_settled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_runner, "_LIMIT_S", 0.2)
    held = threading.Event()

    def hang(_writer: Writer) -> None:
        held.wait(20)
        raise KafkaException(KafkaError(KafkaError._FENCED))

    world.broker.faults["commit"] = [hang]
    world.submit(b"1")
    world.connect()
    world.settle()
    held.set()

    assert world.broker.committed == [b"1"]


def test_what_is_left_behind_and_goes_on_to_its_end_is_not_published_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_runner, "_LIMIT_S", 0.2)
    held = threading.Event()

    def let_it_go_on(_successor: Writer) -> None:
        held.set()
        wait_until(lambda: world.broker.closed == 1)

    world.broker.faults["positions"] = [lambda _writer: held.wait(20)]
    world.broker.faults["open"] = [lambda _writer: None, let_it_go_on]
    world.submit(b"1")
    world.connect()
    world.settle()

    assert world.broker.faults["open"] == [], "the fault did not happen"
    assert world.broker.committed == [b"1"]
    assert world.publisher.handled == 1


def test_positions_go_with_the_generation_that_was_the_groups_before_they_were_gathered(world: World) -> None:
    def changed_in_a_rebalance(with_done: Mapping[Assignment, Places]) -> dict[Assignment, CommitPoint]:
        found = world.changed(with_done)
        # By now their partition may be another member's, who is in this generation, too.
        world.publisher.set_metadata("next generation")
        return found

    world.publisher.changed = changed_in_a_rebalance
    world.submit(b"1")
    world.connect()
    world.settle()

    assert world.broker.generations == ["generation"]


def test_a_right_that_is_missing_is_passed_on_and_the_same_failure_is_logged_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    error = KafkaException(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED))
    world.broker.faults["positions"] = [fails(error)] * 3
    world.submit(b"1")
    world.connect()
    world.settle()

    assert world.broker.committed == [b"1"]
    assert world.publisher.lacks_right
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1, "it is tried again at once, so it is not said each time"


def test_a_call_left_behind_before_its_commit_commits_nothing_when_it_returns(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_runner, "_LIMIT_S", 0.2)
    late: list[Writer] = []
    held, returned = threading.Event(), threading.Event()

    def hang(writer: Writer) -> None:
        late.append(writer)
        held.wait(20)

    def commit_before_the_successor_opens(_writer: Writer) -> None:
        held.set()
        # Its thread closes what was left behind once its call has returned.
        returned.wait(20)

    world.broker.faults["positions"] = [hang]
    world.broker.faults["open"] = [lambda _writer: None, commit_before_the_successor_opens]
    monkeypatch.setattr(Writer, "close", lambda writer: returned.set() if writer in late else None)
    world.submit(b"1")
    world.connect()
    world.settle()

    assert late
    assert returned.is_set()
    assert world.broker.committed == [b"1"]


def test_a_doubt_stays_as_long_as_the_groups_offset_of_a_partition_is_not_told(world: World) -> None:
    def end(writer: Writer) -> None:
        writer.take_effect()
        raise UnknownEndError("no answer")

    world.broker.faults["commit"] = [end]
    world.broker.offset_errors += [
        KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED),
        KafkaError(KafkaError.UNSTABLE_OFFSET_COMMIT),
    ]
    world.submit(b"1")
    world.connect()
    world.settle()

    assert world.broker.offset_errors == [], "it was not asked for"
    assert world.broker.committed == [b"1"]


def test_a_doubt_about_a_partition_that_is_gone_is_dropped_with_its_results(world: World) -> None:
    def end(writer: Writer) -> None:
        writer.take_effect()
        # Revoked meanwhile, and moved on by its next owner.
        world.assignment.active, world.assignment.is_gone = False, True
        world.broker.positions["in", 0] = (9, "")
        raise UnknownEndError("no answer")

    world.broker.faults["commit"] = [end]
    world.submit(b"1")
    world.connect()
    wait_until(lambda: world.broker.committed and not world.publisher.waiting)

    assert world.broker.committed == [b"1"]
    assert world.broker.positions["in", 0] == (9, "")
    assert world.assignment.committed != CommitPoint(9, "")


@pytest.mark.parametrize("was_committed", [True, False])
def test_a_doubt_is_settled_by_the_partitions_that_are_left(world: World, was_committed: bool) -> None:
    other = Assignment("in", 1, world.assignment.route, start=0)

    def changed(with_done: Mapping[Assignment, Places]) -> dict[Assignment, CommitPoint]:
        found = world.changed(with_done)
        return found if other.is_gone else {**found, other: CommitPoint(3, "")}

    def end(writer: Writer) -> None:
        if was_committed:
            writer.take_effect()
        # Its next owner has gone on, or has come to the same place by itself.
        other.is_gone = True
        world.broker.positions["in", 1] = (9 if was_committed else 3, "")
        raise UnknownEndError("no answer")

    world.publisher.changed = changed
    world.broker.faults["commit"] = [end]
    world.submit(b"1")
    world.connect()
    world.settle()

    assert world.broker.committed == [b"1"]
    assert world.broker.positions == {("in", 0): (1, ""), ("in", 1): (9 if was_committed else 3, "")}


def test_nothing_is_published_before_the_generation_is_known(world: World) -> None:
    world.publisher.set_metadata(None)
    world.submit(b"1")
    world.connect()
    wait_until(lambda: world.publisher.wants_metadata)

    assert world.broker.generations == []

    world.publisher.set_metadata("generation")
    world.settle()

    assert world.broker.committed == [b"1"]


def test_what_is_given_up_of_a_partition_that_is_gone_is_told_not_to_be_written(world: World) -> None:
    told = world.forward(world.take_in(), b"letter")
    world.assignment.active, world.assignment.is_gone = False, True
    world.connect()
    wait_until(lambda: not world.publisher.waiting)
    world.publisher.poll()

    assert world.broker.committed == []
    assert [error is not None for error in told] == [True]


def test_a_refused_result_fails_its_message_and_the_others_are_committed(world: World) -> None:
    world.broker.refuses.add(b"bad")
    for value in (b"1", b"bad", b"2"):
        world.submit(value)
    world.connect()
    wait_until(lambda: len(world.refused) == 1)
    wait_until(lambda: not world.publisher.waiting)

    (refused,) = world.refused
    assert refused.item[2].offset() == 1
    assert "too large" in str(refused.error)
    assert world.broker.committed == [b"1", b"2"]
    # The one that was refused holds the commit point; the map has the other.
    assert world.broker.positions["in", 0][0] == 1
    assert world.broker.opened[:2] == [False, True]


def test_results_of_a_partition_that_is_gone_are_dropped(world: World) -> None:
    world.submit(b"1")
    world.assignment.active, world.assignment.is_gone = False, True
    world.connect()
    wait_until(lambda: not world.publisher.waiting)

    assert world.broker.committed == []


def test_a_result_whose_offset_the_map_has_no_room_for_waits_until_it_has(world: World) -> None:
    stuck = world.take_in()
    world.map_chars = 0
    world.submit(b"1")
    world.submit(b"2")
    world.connect()
    wait_until(lambda: bool(world.broker.opened))
    # A transaction or two would have come to an end meanwhile.
    other = threading.Event()
    assert not other.wait(0.2)

    assert world.broker.committed == []

    world.complete(stuck)
    world.settle()

    assert world.broker.committed == [b"1", b"2"]
    assert world.broker.positions["in", 0] == (3, "")


def test_what_is_given_up_goes_into_the_transaction_that_commits_its_offset(world: World) -> None:
    told = world.forward(world.take_in(), b"letter")
    world.connect()
    world.settle()

    assert world.broker.committed == [b"letter"]
    assert world.broker.positions["in", 0] == (1, "")
    assert told == [], "the poll thread tells it"
    world.publisher.poll()
    assert told == [None]
    assert world.assignment.tracker.in_flight == 0


def test_what_is_given_up_and_refused_is_told_and_its_offset_stays(world: World) -> None:
    world.broker.refuses.add(b"large")
    told = world.forward(world.take_in(), b"large")
    world.submit(b"1")
    world.connect()
    wait_until(lambda: not world.publisher.waiting)
    world.publisher.poll()

    assert [error.code() for error in told if error is not None] == [KafkaError.MSG_SIZE_TOO_LARGE]
    assert world.broker.committed == [b"1"]
    assert world.broker.positions["in", 0][0] == 0
    assert world.assignment.tracker.in_flight == 1


def test_a_refusal_at_a_later_try_still_fails_its_message(world: World) -> None:
    def refuse(_writer: Writer) -> None:
        world.broker.refuses.add(b"bad")
        raise KafkaException(KafkaError(KafkaError.ILLEGAL_GENERATION))

    world.broker.faults["positions"] = [refuse]
    world.submit(b"bad")
    world.submit(b"2")
    world.connect()
    wait_until(lambda: len(world.refused) == 1)
    wait_until(lambda: not world.publisher.waiting)

    assert world.broker.committed == [b"2"]
    assert world.broker.positions["in", 0][0] == 0
