"""Which payloads stay in memory, which are read again and when, and that the order of keys holds meanwhile."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import takewhile
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.transactions.coordinator.state.pending.pending import Pending
from penstock.transactions.coordinator.state.pending.ready_queue import CommitBatch
from penstock.transactions.coordinator.state.state_machine import PartitionState
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict

#: Bytes that a payload of this test takes in memory, and a budget for four of them.
PAYLOAD = b"v" * 800
BUDGET = 4_100


def half(**more: Any) -> Half:
    return Half(new_id(), "orders", "topic", None, None, PAYLOAD, (), None)._replace(**more)


class Partition:
    """A partition whose payloads can be read again."""

    def __init__(self, budget: int = BUDGET) -> None:
        self.halves: list[Half] = []
        self.state = PartitionState(0, 0)
        self.payloads = self.state.payloads
        self.payloads.limit = budget

    def store(self, one: Half) -> Pending:
        offset = len(self.halves)
        self.halves.append(one)
        pending = self.state.add_half(offset, one, 1)
        assert isinstance(pending, Pending)
        self.payloads.make_room()
        return pending

    def decide(self, pending: Pending, verdict: Verdict = Verdict.COMMIT) -> None:
        name = pending.half.transaction_id
        op = Op(name, verdict, Author.PRODUCER, "orders", 0, pending.offsets, 0)
        assert self.state.add_op(self.state.op_position, op, 0) is None

    def read(self, now_ms: int = 0) -> list[Pending]:
        """Have read what is asked for, and return it."""
        some = self.payloads.next_read(0.0, now_ms)
        for pending in some:
            halves = [(offset, self.halves[offset]) for offset in pending.offsets]
            assert self.state.load(pending.half.transaction_id, halves) is pending
        return some

    def publish(self, limit: int = 100) -> list[Half]:
        batch = self.state.next_batch(limit, lambda _: None)
        if batch is None:
            return []
        published = [one for pending in batch.decided for one in pending.halves]
        self.state.apply(batch)
        return published


class Keys:
    """A partition on which anything happens, and what became visible of each key and target."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311 - the same run for the same seed
        self.partition = Partition(self.chance.choice((1_100, 4_100, 20_000)))
        self.queue = self.partition.state.queue
        self.undecided: list[Pending] = []
        self.decided: dict[tuple[str, bytes | None], list[str]] = defaultdict(list)
        self.published: dict[tuple[str, bytes | None], list[str]] = defaultdict(list)
        self.out: set[str] = set()
        self.under_way: CommitBatch | None = None

    def begin(self) -> None:
        count = self.chance.choice((1, 1, 1, 2))
        first = half()
        for number in range(1, count + 1):
            key, topic = self.chance.choice((None, b"a", b"b")), self.chance.choice(("topic", "other"))
            part = None if count == 1 else (number, count)
            pending = self.partition.store(first._replace(key=key, topic=topic, part=part))
        self.undecided.append(pending)

    def decide(self) -> None:
        if self.undecided:
            pending = self.undecided.pop(self.chance.randrange(len(self.undecided)))
            for offset in pending.offsets:
                one = self.partition.halves[offset]
                self.decided[one.topic, one.key].append(one.transaction_id)
            self.partition.decide(pending)

    def drop(self) -> None:
        pending = self.chance.choice([*self.partition.state.pending.values(), None])
        if pending is not None and not self.partition.payloads._is_needed(pending):
            self.partition.payloads.drop(pending)

    def take_off(self) -> None:
        """Begin a Kafka transaction; what is read meanwhile comes before its end."""
        if self.under_way is None:
            limit = self.chance.choice((1, 3, 100))
            self.under_way = self.partition.state.next_batch(limit, self.topic_out)
            self.mark(in_flight=True)

    def land(self) -> None:
        """End it, one way or the other."""
        if self.under_way is not None:
            self.mark(in_flight=False)
            if self.chance.random() < 0.7:
                self.settle(self.under_way)
            self.under_way = None

    def mark(self, *, in_flight: bool) -> None:
        for pending in self.under_way.decided if self.under_way else ():
            pending.in_flight = in_flight

    def settle(self, batch: CommitBatch) -> None:
        for pending in batch.decided:
            for one in pending.halves:
                assert one.value == PAYLOAD
                self.published[one.topic, one.key].append(one.transaction_id)
        self.partition.state.apply(batch)

    def topic_out(self, pending: Pending) -> str | None:
        return next((half.topic for half in pending.halves if half.topic in self.out), None)

    def put_out(self) -> None:
        self.out.add(self.chance.choice(("topic", "other")))

    def release(self) -> None:
        self.out.clear()
        for topic in ("topic", "other"):
            self.queue.release(topic)

    def try_apart(self) -> None:
        """Publish what is set aside, as far as it is in memory, without anything of its topics under way."""
        topic = self.chance.choice(("topic", "other"))
        some = self.queue.set_aside.take(topic, self.chance.choice((1, 100)), lambda _: False)
        for pending in some:
            self.partition.payloads.want(pending, 0.0)
        some = list(takewhile(lambda one: one.dropped is None, some))
        if some and self.under_way is None:
            self.settle(CommitBatch(some, [], -1, -1, moves=False))

    def run(self) -> None:
        moves, weights = zip(
            (self.begin, 14),
            (self.decide, 12),
            (self.partition.read, 8),
            (self.drop, 8),
            (self.take_off, 8),
            (self.land, 8),
            (self.put_out, 2),
            (self.release, 2),
            (self.try_apart, 3),
            strict=True,
        )
        for _ in range(160):
            self.chance.choices(moves, weights)[0]()
        self.land()
        for _ in range(300):
            self.release()
            self.partition.read()
            self.take_off()
            self.land()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32))
def test_messages_of_a_key_are_published_in_the_order_of_their_decisions_whatever_was_dropped(seed: int) -> None:
    keys = Keys(seed)

    keys.run()

    keyed = {place: ids for place, ids in keys.decided.items() if place[1] is not None}
    assert {place: keys.published[place] for place in keyed} == keyed
    assert keys.partition.payloads.bytes == sum(one.held_bytes for one in keys.undecided if one.dropped is None)
