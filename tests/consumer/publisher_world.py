"""A transactional publisher on a broker that is none: what is written there, and what goes wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

from confluent_kafka import KafkaError, TopicPartition

from penstock.clients.bounded_calls import Disposable
from penstock.clients.transactional.faults import Blame
from penstock.consumer.assignments import Assignment, ConsumerLane, Fetch, Item
from penstock.consumer.handlers.handler import handler
from penstock.consumer.handlers.results import Result
from penstock.consumer.publishing.result_publisher import RefusedResults
from penstock.consumer.publishing.transaction import Places
from penstock.consumer.publishing.transactional_publisher import TransactionalPublisher
from penstock.offsets import MAX_METADATA_CHARS, CommitPoint
from waiting import wait_until


@dataclass
class Broker:
    """What writers write into: committed values, committed positions, and what is to go wrong."""

    committed: list[bytes | None] = field(default_factory=list)
    positions: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict)
    opened: list[bool] = field(default_factory=list)
    #: By the name of a call: what it does in place of what it should, once each.
    faults: dict[str, list[Callable[[Writer], None]]] = field(default_factory=dict)
    refuses: set[bytes | None] = field(default_factory=set)
    #: The group's metadata that came with positions.
    generations: list[object] = field(default_factory=list)
    closed: int = 0
    #: What the question for a partition's offset is answered with in place of it, once each.
    offset_errors: list[KafkaError] = field(default_factory=list)

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
        done = with_done.get(self.assignment, {})
        point = self.assignment.tracker.commit_point(self.map_chars, with_done=done)
        return {} if point == self.assignment.committed or self.assignment.is_gone else {self.assignment: point}

    def connect(self) -> None:
        cluster = SimpleNamespace(
            principal="User:me",
            disposable=Disposable,
            transactional_writer=lambda _id, _config, *, apart: self.broker.writer(apart),
            stable_offsets=self._stable_offsets,
        )
        self.publisher.connect(cast("Any", cluster), {})
        self.publisher.start()

    def _stable_offsets(self, _group: str, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        if self.broker.offset_errors:
            error = self.broker.offset_errors.pop()
            return [cast("TopicPartition", SimpleNamespace(**named(one), error=error)) for one in partitions]
        return [
            TopicPartition(one.topic, one.partition, at[0], metadata=at[1])
            for one in partitions
            if (at := self.broker.positions.get((one.topic, one.partition))) is not None
        ]

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


def named(one: TopicPartition) -> dict[str, Any]:
    return {"topic": one.topic, "partition": one.partition, "offset": one.offset, "metadata": None}
