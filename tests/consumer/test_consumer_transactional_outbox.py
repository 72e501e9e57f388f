"""Rules of the transactional outbox that simulated runs meet too seldom; `simulation` has all others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.clients.rights import THIS_CLIENT
from penstock.clients.transactional.end_watch import UnknownEndError
from penstock.clients.transactional.faults import GivenUpError, IdLostError
from penstock.consumer import handler
from penstock.consumer.assignments import Assignment, Assignments, Fetch, Item
from penstock.consumer.handlers.handler import orderings_of
from penstock.consumer.handlers.results import Result
from penstock.consumer.outbox.outbox import HandlerResults, RefusedResults, Submission
from penstock.consumer.outbox.transaction import Places, Transaction
from penstock.consumer.outbox.transaction_runner import Faults, Steps, TooSlowError, TransactionRunner
from penstock.consumer.outbox.transactional_outbox import TransactionalOutbox
from penstock.consumer.poll.commits import TransactionalCommits
from penstock.message import FixedRecord
from penstock.offsets import MAX_METADATA_CHARS, CommitPoint
from penstock.testing import TestClock


class Runner:
    """Replaces a `TransactionRunner`: keeps the commits, and fails as planned, once each."""

    def __init__(self) -> None:
        self.committed_values: list[bytes | None] = []
        self.positions: dict[Assignment, CommitPoint] = {}
        self.generations: list[object] = []
        self.errors: list[Exception] = []
        #: Values that are refused, that take too long together with others or alone, and topics that do not answer.
        self.refused: set[bytes] = set()
        self.slow: set[bytes] = set()
        self.silent: set[str] = set()
        #: The values of each transaction that was tried, whether it was committed or not.
        self.tried: list[list[bytes | None]] = []
        self.lost_ids = 0
        self._faults = Faults()
        #: Whether a transaction takes effect whose end is not known.
        self.takes_effect = True
        self.require_open: Callable[[], Iterable[None]] = tuple
        self.is_calling = False

    def discard(self, *, is_lost: bool = False, **_: bool) -> None:
        self.lost_ids += is_lost

    def run(self, transaction: Transaction, metadata: object, **_: bool) -> Iterator[None]:
        yield
        self.generations.append(metadata)
        messages = [message for submission in transaction.submissions for message in submission.messages]
        self.tried.append([message.value for message in messages])
        fault = self.errors.pop() if self.errors else self._found(messages)
        if fault is None or (isinstance(fault, UnknownEndError) and self.takes_effect):
            self.committed_values += [message.value for message in messages]
            self.positions.update(transaction.positions)
        if fault is not None:
            raise fault

    def _found(self, messages: list[Result]) -> Exception | None:
        self._faults = Faults(silent={message.topic for message in messages} & self.silent)
        values = {message.value for message in messages}
        if values & self.refused:
            self._faults = Faults(message=("out", KafkaError(KafkaError.INVALID_RECORD)))
        if values & self.slow:
            return TooSlowError("it takes too long")
        return BufferError("a topic says no, or nothing") if self._faults else None

    def faults(self) -> Faults:
        return self._faults

    def committed(self, assignments: Sequence[Assignment]) -> Steps[dict[Assignment, CommitPoint]]:
        yield
        return {assignment: self.positions[assignment] for assignment in assignments if assignment in self.positions}


def route_of(topic: str) -> Any:
    return SimpleNamespace(handler=handler(print), ordering=orderings_of({topic: handler(print)}, 1)[topic])


class Stepped:
    """A publisher whose transactions are run by hand, and one partition."""

    def __init__(self) -> None:
        self.runner: Any = Runner()
        self.clock = TestClock()
        self.assignment = Assignment("in", 0, route_of("in"), start=0)
        self.others: dict[Assignment, CommitPoint] = {}
        self.outbox = TransactionalOutbox(
            "g", 0.0, self.clock, assignments=Assignments(), complete_finished=lambda: None
        )
        self.outbox._runner = self.runner
        self.outbox.changed = self.changed  # type: ignore[method-assign] # what would be committed of one partition
        self.outbox.generation = lambda: "generation"
        self.refusals: list[KafkaError] = []
        self.outbox.note_refusal = self.refusals.append
        self.woken: list[RefusedResults] = []
        self.results = HandlerResults(self.outbox, lambda _lane, refused: self.woken.append(refused), THIS_CLIENT)
        self.map_chars = MAX_METADATA_CHARS
        self._next = 0

    def changed(self, done: Mapping[Assignment, Places] = MappingProxyType({})) -> dict[Assignment, CommitPoint]:
        most = min(self.map_chars, self.outbox._map_chars)
        point = self.assignment.tracker.commit_point(most, with_done=done.get(self.assignment, {}))
        mine = {} if point == self.assignment.committed else {self.assignment: point}
        return {place: at for place, at in (mine | self.others).items() if not place.is_gone}

    def take_in(self, key: bytes = b"k") -> Item:
        block = self.assignment.tracker.register([self._next], 1)
        self._next += 1
        return Fetch(self.assignment, block, 0.0), 0, FixedRecord("in", 0, self._next - 1, key, b"v", (), None)

    def submit(self, value: bytes, item: Item | None = None, *, topic: str = "out", lane: Any = "a lane") -> None:
        self.results.submit(lane, (item or self.take_in(),), [Result(topic, value, b"k", [], -1)])

    def give_up(self, value: bytes, item: Item) -> None:
        self.outbox.submit((item,), [Result("dlq", value, b"k", [], -1)], lambda _: None)

    def transact(self, times: int = 5) -> None:
        for _ in range(times):
            for _ in self.outbox._transact():
                pass
            self.clock.advance(1)


@pytest.mark.parametrize("was_committed", [True, False])
def test_a_doubt_is_settled_by_the_partitions_that_are_left(was_committed: bool) -> None:
    stepped = Stepped()
    other = Assignment("in", 1, stepped.assignment.route, start=0)
    stepped.others = {other: CommitPoint(3, "")}
    stepped.runner.takes_effect = was_committed
    stepped.runner.errors = [UnknownEndError("no answer")]
    stepped.submit(b"1")
    stepped.transact(1)
    # Its next owner has gone on, or has come to the same place by itself.
    other.is_gone = True
    stepped.runner.positions[other] = CommitPoint(9 if was_committed else 3, "")

    stepped.transact()

    assert stepped.runner.committed_values == [b"1"]
    assert stepped.runner.positions[stepped.assignment].offset == 1
    assert stepped.results.handled == 1


def test_a_broker_that_tells_what_was_is_not_believed_before_results_are_written_again() -> None:
    stepped = Stepped()
    stepped.runner.errors = [UnknownEndError("no answer")]
    stepped.submit(b"1")
    stepped.transact(1)
    tells, other = stepped.runner.committed, Assignment("in", 0, stepped.assignment.route, start=0)
    # It stood still, and does not know yet that another one coordinates the group.
    stepped.runner.committed = lambda _: tells([other])  # a fault
    stepped.transact(2)
    stepped.runner.committed = tells  # repaired

    stepped.transact()

    assert stepped.runner.committed_values == [b"1"]
    assert stepped.results.handled == 1


def test_no_offsets_are_read_for_a_transaction_whose_end_had_not_begun() -> None:
    stepped = Stepped()
    stepped.runner.committed = lambda _: pytest.fail("asked")  # as it says
    stepped.runner.errors = [GivenUpError("it took too long")]
    stepped.submit(b"1")

    stepped.transact()

    assert stepped.runner.committed_values == [b"1"]
    assert (stepped.outbox.waiting, stepped.results.handled) == (0, 1)


def test_a_doubt_about_a_partition_that_is_gone_is_dropped_with_its_results() -> None:
    stepped = Stepped()
    stepped.runner.errors = [UnknownEndError("no answer")]
    stepped.submit(b"1")
    stepped.transact(1)
    stepped.assignment.active, stepped.assignment.is_gone = False, True
    # Moved on by its next owner.
    stepped.runner.positions[stepped.assignment] = CommitPoint(9, "")

    stepped.transact()

    assert stepped.runner.committed_values == [b"1"]
    assert (stepped.outbox.waiting, stepped.results.handled) == (0, 0)


def test_a_right_that_is_missing_is_passed_on_and_the_same_failure_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stepped = Stepped()
    stepped.runner.errors = [KafkaException(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)) for _ in range(3)]
    # Routine in a rebalance: no warning.
    stepped.runner.errors += [KafkaException(KafkaError(KafkaError.ILLEGAL_GENERATION))]
    stepped.submit(b"1")

    stepped.transact(5)

    assert stepped.runner.committed_values == [b"1"]
    assert stepped.refusals
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


@pytest.mark.parametrize("most", [1, 100])
@pytest.mark.parametrize("kind", ["results", "dead letters"])
def test_what_the_offset_map_has_no_room_for_waits_and_holds_back_nothing_that_gives_it_room(
    kind: str, most: int
) -> None:
    stepped = Stepped()
    stepped.outbox._most = most
    stepped.map_chars = 0
    # The second is of the first one's key, and is handled after it; the third, of another, was quicker than both.
    first, second, third = (stepped.take_in(key) for key in (b"k", b"k", b"other"))
    put = stepped.submit if kind == "results" else stepped.give_up
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
    assert (stepped.outbox.waiting, stepped.runner.positions[stepped.assignment].offset) == (0, 3)


def test_results_of_a_key_stay_in_order_while_another_of_their_lane_waits_for_room_in_the_map() -> None:
    stepped = Stepped()
    stepped.outbox._most, stepped.map_chars = 1, 0
    other = Assignment("in", 1, stepped.assignment.route, start=0)
    stepped.others = {other: CommitPoint(1, "")}
    second, quick = stepped.take_in(), stepped.take_in(b"quick")
    first = Fetch(other, other.tracker.register([0], 1), 0.0), 0, FixedRecord("in", 1, 0, b"k", b"v", (), None)
    for value, item in ((b"quick", quick), (b"first", first), (b"second", second)):
        stepped.submit(value, item)

    stepped.transact()

    assert stepped.runner.committed_values == [b"first", b"quick", b"second"]


def test_partitions_that_share_keys_do_not_wait_for_each_others_room_in_the_map() -> None:
    stepped = Stepped()
    stepped.outbox._most, stepped.map_chars = 1, 0
    other = Assignment("other", 0, stepped.assignment.route, start=0)

    def changed(done: Mapping[Assignment, Places] = MappingProxyType({})) -> dict[Assignment, CommitPoint]:
        points = {
            place: place.tracker.commit_point(0, with_done=done.get(place, {})) for place in (stepped.assignment, other)
        }
        return {place: point for place, point in points.items() if point != place.committed}

    stepped.outbox.changed = changed  # type: ignore[method-assign] # of both partitions
    block = other.tracker.register([0, 1], 2)
    first, second = stepped.take_in(b"m"), stepped.take_in(b"k")
    others = [
        (Fetch(other, block, 0.0), offset, FixedRecord("other", 0, offset, key, b"v", (), None))
        for offset, key in enumerate((b"k", b"m"))
    ]
    # What is first in each partition is of the key of what waits for room in the other.
    for value, item in ((b"1", second), (b"other 1", others[1]), (b"0", first), (b"other 0", others[0])):
        stepped.submit(value, item)

    stepped.transact(9)

    assert sorted(stepped.runner.committed_values) == [b"0", b"1", b"other 0", b"other 1"]
    assert stepped.outbox.waiting == 0


def test_what_is_done_again_for_a_refusal_gives_room_to_a_later_one_of_its_key() -> None:
    stepped = Stepped()
    stepped.outbox._most, stepped.map_chars = 1, 0
    refused, later = stepped.take_in(), stepped.take_in()
    stepped.submit(b"later", later)
    stepped.submit(b"refused before", refused)

    stepped.transact()

    assert stepped.runner.committed_values == [b"refused before", b"later"]


def test_what_a_topic_refuses_is_found_by_halves_and_fails_its_message_alone() -> None:
    stepped = Stepped()
    stepped.runner.refused = {b"5"}
    for number in range(8):
        stepped.submit(b"%d" % number)

    stepped.transact(12)

    assert stepped.runner.committed_values == [b"%d" % number for number in range(8) if number != 5]
    assert [str(refused.item[1]) for refused in stepped.woken] == ["0"]
    assert (stepped.outbox.waiting, stepped.results.handled) == (0, 7)


def test_a_transaction_that_takes_too_long_is_split_until_it_does_not() -> None:
    stepped = Stepped()
    values = [b"%d" % number for number in range(8)]
    for value in values:
        stepped.submit(value)
    run = stepped.runner.run
    stepped.runner.run = lambda transaction, metadata, **more: (  # slow brokers
        setattr(stepped.runner, "slow", set(values) if len(transaction.submissions) > 2 else set())
        or run(transaction, metadata, **more)
    )

    stepped.transact(12)

    assert [len(tried) for tried in stepped.runner.tried[:3]] == [8, 4, 2]
    assert stepped.runner.committed_values == values
    assert stepped.woken == []


@pytest.mark.parametrize(("size", "is_refused"), [(10, False), (2 << 20, True)])
def test_only_a_large_one_that_is_too_slow_alone_and_again_fails_its_message(size: int, is_refused: bool) -> None:
    stepped = Stepped()
    large = b"x" * size
    stepped.runner.slow = {large}
    stepped.submit(large)
    stepped.transact(1)
    once = list(stepped.woken)

    stepped.transact(2)

    assert once == []
    assert bool(stepped.woken) == is_refused
    if is_refused:
        assert "bytes are not delivered in the time of one Kafka transaction" in str(stepped.woken[0].error)


def test_a_transaction_is_bounded_by_bytes() -> None:
    stepped = Stepped()
    for number in range(3):
        stepped.submit(b"%d" % number * (20 << 20))

    stepped.transact(3)

    assert [len(tried) for tried in stepped.runner.tried] == [1, 1, 1]


def test_a_topic_that_does_not_answer_waits_with_what_is_behind_it_and_all_else_goes_on() -> None:
    stepped = Stepped()
    stepped.runner.silent = {"away"}
    stepped.submit(b"1", topic="away", lane="lane 1")
    stepped.submit(b"2", lane="lane 2")
    stepped.submit(b"3", lane="lane 1")
    stepped.transact(3)
    while_away = list(stepped.runner.committed_values)
    # Tried alone now and then.
    stepped.clock.advance(6)
    stepped.submit(b"4", lane="lane 2")
    stepped.transact(2)
    stepped.runner.silent = set()
    stepped.clock.advance(6)

    stepped.transact(2)

    assert while_away == [b"2"]
    assert stepped.runner.tried[2] == [b"1"]
    assert stepped.runner.committed_values == [b"2", b"4", b"1", b"3"]
    # The broker may not be able to end what was open there.
    assert stepped.runner.lost_ids == 2
    assert (stepped.woken, stepped.outbox.waiting) == ([], 0)


def test_an_id_that_the_broker_cannot_free_is_left_for_another() -> None:
    stepped = Stepped()
    stepped.submit(b"1")
    open_id = stepped.runner.require_open

    def lost() -> Iterable[None]:
        stepped.runner.require_open = open_id
        raise IdLostError("the broker cannot end a transaction of it")

    stepped.runner.require_open = lost
    stepped.transact(2)

    assert (stepped.runner.lost_ids, stepped.runner.committed_values) == (1, [b"1"])


def test_nothing_is_judged_for_a_partition_that_is_gone() -> None:
    stepped = Stepped()
    ended: list[Submission] = []
    stepped.outbox.submit((stepped.take_in(),), [Result("out", b"refused", b"k", [], -1)], ended.append)
    stepped.runner.refused = {b"refused"}
    stepped.assignment.active = False

    stepped.transact(1)

    assert [(write.is_written, write.refusal) for write in ended] == [(False, None)]


def test_where_a_broker_takes_no_map_results_wait_for_what_is_below_them() -> None:
    stepped = Stepped()
    below, above = stepped.take_in(b"a"), stepped.take_in(b"b")
    stepped.runner.errors = [KafkaException(KafkaError(KafkaError.OFFSET_METADATA_TOO_LARGE))]
    stepped.submit(b"above", above)
    stepped.transact()
    before = list(stepped.runner.committed_values)

    stepped.submit(b"below", below)
    stepped.transact()

    assert before == []
    assert sorted(stepped.runner.committed_values) == [b"above", b"below"]
    assert stepped.runner.positions[stepped.assignment] == CommitPoint(2, "")


@pytest.mark.parametrize(("is_away", "committed"), [(False, [b"1"]), (True, [])])
def test_what_handlers_finished_is_written_before_a_revoked_partition_goes(
    is_away: bool, committed: list[bytes]
) -> None:
    stepped = Stepped()
    engine = Mock(settings=Mock(commit_interval=1.0), clock=stepped.clock)
    stepped.submit(b"1", topic="away" if is_away else "out")
    stepped.runner.silent = {"away"}
    begun = stepped.clock.monotonic()

    TransactionalCommits(engine, Mock(), stepped.outbox).commit_revoked(Mock(), [stepped.assignment], 0.5)

    assert stepped.runner.committed_values == committed
    assert stepped.clock.monotonic() - begun <= 0.6


def test_many_that_wait_for_a_silent_topic_do_not_make_the_outbox_look_at_them_at_each_step() -> None:
    stepped = Stepped()
    stepped.outbox._interval_s = 0.1
    stepped.outbox._silent = {"away": stepped.clock.monotonic() + 100}
    for _ in range(6_000):
        stepped.submit(b"1", topic="away", lane=None)
    looks = Mock(wraps=stepped.outbox._next)
    stepped.outbox._next = looks  # type: ignore[method-assign] # counted
    stepped.clock.advance(1)

    for _ in range(20):
        stepped.outbox.serve()

    assert looks.call_count == 1


@pytest.mark.parametrize("has_begun_its_end", [False, True])
def test_a_transaction_under_way_at_the_end_is_aborted_unless_its_end_has_begun(has_begun_its_end: bool) -> None:
    cluster, writer = Mock(), Mock(give_up=Mock(return_value=not has_begun_its_end))
    runner = TransactionRunner("outbox", "g", cluster, {})
    runner._writer, runner._calls = writer, cluster.disposable()

    runner.close()
    asked_before_it_returned = writer.give_up.called
    cluster.disposable().start.call_args.args[1]()

    assert not asked_before_it_returned
    assert (writer.abort.called, writer.close.called) == (not has_begun_its_end, True)
