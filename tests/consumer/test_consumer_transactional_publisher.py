"""Results and their offsets in Kafka transactions: what becomes of one that fails, hangs, or ends nobody knows how."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from penstock.clients.bounded_calls import Disposable
from penstock.clients.transactional.end_watch import UnknownEndError
from penstock.clients.transactional.faults import Blame
from penstock.consumer.assignments import Assignment, Assignments, ConsumerLane, Fetch, Item
from penstock.consumer.handlers.handler import handler
from penstock.consumer.handlers.results import Result
from penstock.consumer.polling.transactional_commits import TransactionalCommits
from penstock.consumer.publishing import transaction_runner, transactional_publisher
from penstock.consumer.publishing.result_publisher import RefusedResults
from penstock.consumer.publishing.transaction import Places
from penstock.consumer.publishing.transactional_publisher import TransactionalPublisher
from penstock.offsets import MAX_METADATA_CHARS, CommitPoint
from waiting import wait_until

Call = tuple[str, object]


@dataclass
class Broker:
    """What writers write into: committed values, committed positions, and what is to go wrong."""

    committed: list[bytes | None] = field(default_factory=list)
    positions: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict)
    opened: list[bool] = field(default_factory=list)
    #: By the name of a call: what it does in place of what it should, once each.
    faults: dict[str, list[Callable[[Writer], None]]] = field(default_factory=dict)
    refuses: set[bytes | None] = field(default_factory=set)
    #: As of which generation positions came.
    generations: list[object] = field(default_factory=list)
    closed: int = 0

    def writer(self, apart: bool) -> Writer:
        self.opened.append(apart)
        return Writer(self, apart)


@dataclass
class Writer:
    """Stands in for `TransactionalWriter`."""

    broker: Broker
    apart: bool
    values: list[bytes | None] = field(default_factory=list)
    positions: list[TopicPartition] = field(default_factory=list)
    blame: Blame = field(default_factory=Blame)

    def _meet(self, call: str) -> None:
        faults = self.broker.faults.get(call)
        if faults:
            faults.pop(0)(self)

    def open(self, _limit_s: float, _try_s: float) -> None:
        self._meet("open")

    def begin(self) -> None:
        self.values, self.positions, self.blame = [], [], Blame()
        self._meet("begin")

    def produce(self, name: str, messages: Sequence[Sequence[Any]], *, room_s: float) -> None:
        assert room_s > 0
        for _topic, _partition, _key, value, _headers in messages:
            if value in self.broker.refuses:
                error = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
                self.blame.add(name, "out", error, "too large")
            self.values.append(value)

    def deliver(self, _limit_s: float) -> bool:
        self._meet("deliver")
        return not self.blame.cause

    def not_let_in(self) -> dict[str, str]:
        return {}

    def send_positions(self, positions: list[TopicPartition], metadata: object) -> None:
        self.broker.generations.append(metadata)
        self._meet("positions")
        self.positions = positions

    def commit(self) -> None:
        self._meet("commit")
        self.take_effect()

    def take_effect(self) -> None:
        self.broker.committed += self.values
        for one in self.positions:
            self.broker.positions[one.topic, one.partition] = one.offset, one.metadata

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self.broker.closed += 1


class World:
    """A publisher on a broker that is none, and one partition."""

    def __init__(self) -> None:
        self.broker = Broker()
        self.failures: list[BaseException] = []
        self.refused: list[RefusedResults] = []
        route = SimpleNamespace(handler=handler(print))
        self.assignment = Assignment("in", 0, cast("Any", route), start=0)
        self.publisher = TransactionalPublisher(
            "g", 0.02, time, wake=lambda _, refused: self.refused.append(refused), fail=self.failures.append
        )
        self.publisher.changed = self.changed
        self.publisher.set_metadata("generation")
        self._next = 0
        self.map_chars = MAX_METADATA_CHARS

    def changed(self, with_done: Mapping[Assignment, Places] = MappingProxyType({})) -> dict[Assignment, CommitPoint]:
        done = with_done.get(self.assignment, ())
        point = self.assignment.tracker.commit_point(self.map_chars, with_done=done)
        return {} if point == self.assignment.committed or self.assignment.is_gone else {self.assignment: point}

    def connect(self) -> None:
        cluster = SimpleNamespace(
            principal="User:me",
            disposable=Disposable,
            transactional_writer=lambda _id, _config, *, apart: self.broker.writer(apart),
            stable_offsets=lambda _group, partitions: [
                TopicPartition(one.topic, one.partition, at[0], metadata=at[1])
                for one in partitions
                if (at := self.broker.positions.get((one.topic, one.partition))) is not None
            ],
        )
        self.publisher.connect(cast("Any", cluster), {})
        self.publisher.start()

    def take_in(self) -> Item:
        block = self.assignment.tracker.register([self._next], 1)
        record = SimpleNamespace(offset=lambda at=self._next: at)
        self._next += 1
        return Fetch(self.assignment, block, 0.0), 0, cast("Any", record)

    def complete(self, item: Item) -> None:
        self.assignment.tracker.complete(item[0].block, (item[1],))

    def forward(self, item: Item, value: bytes) -> list[KafkaError | None]:
        told: list[KafkaError | None] = []
        to = Result("dlq", value, b"k", [], -1)
        self.publisher.forward(item, to, lambda: self.complete(item), told.append)
        return told

    def submit(self, *values: bytes) -> None:
        item = self.take_in()
        results = [Result("out", value, b"k", [], -1) for value in values]
        self.publisher.submit(cast("ConsumerLane", None), (item,), results)

    def settle(self) -> None:
        wait_until(lambda: not self.publisher.waiting and not self.changed())


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


def test_positions_are_of_the_generation_in_which_their_partitions_were_looked_at(world: World) -> None:
    changed = world.publisher.changed

    def changed_while_the_group_rebalances(places: Mapping[Assignment, Places]) -> dict[Assignment, CommitPoint]:
        found = changed(places)
        if places:
            world.publisher.set_metadata("the next generation")
        return found

    world.publisher.changed = changed_while_the_group_rebalances
    world.submit(b"1")
    world.connect()
    world.settle()

    assert world.broker.generations == ["generation"]


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


@pytest.mark.parametrize("ids", [("", ""), ("m1", ""), ("", "m2"), (None, None)])
def test_a_member_without_an_id_commits_as_of_its_former_generation(ids: tuple[str | None, str | None]) -> None:
    # Kafka fences no positions in a transaction that name no member.
    taken: list[object] = []
    publisher = SimpleNamespace(set_metadata=taken.append)
    commits = TransactionalCommits(Assignments(), 1.0, time, lambda: None, cast("Any", publisher))
    answers = iter(ids)
    client = SimpleNamespace(memberid=lambda: next(answers), consumer_group_metadata=lambda: "nobody's")

    commits.note_rebalanced(cast("Any", client))

    assert taken == []


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
