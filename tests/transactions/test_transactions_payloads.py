"""Which payloads stay in memory, which are read again and when, and that the order of keys holds meanwhile."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from itertools import takewhile
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.transactions.coordinator.state.pending.delays import Delays
from penstock.transactions.coordinator.state.pending.pending import Pending
from penstock.transactions.coordinator.state.pending.ready_queue import CommitBatch
from penstock.transactions.coordinator.state.recovered_state import restored, without_payloads
from penstock.transactions.coordinator.state.snapshot import to_snapshot
from penstock.transactions.coordinator.state.state_machine import PartitionState
from penstock.transactions.wire.done_records import Done, Note, Snapshot, SnapshotHalf
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


def test_what_is_beyond_the_budget_is_dropped_the_oldest_first_and_nothing_but_the_payload() -> None:
    partition = Partition()
    some = [partition.store(half(key=b"k", headers=(("h", b"1"),), order_key=b"o", part=None)) for _ in range(6)]

    assert [pending.dropped is None for pending in some] == [False] * 2 + [True] * 4
    assert partition.payloads.bytes <= BUDGET
    gone = some[0].half
    assert (gone.key, gone.value, gone.headers) == (None, None, ())
    assert gone == partition.halves[0]._replace(key=None, value=None, headers=())
    assert some[0].size_bytes == some[5].size_bytes
    assert some[0].keys == some[5].keys


def test_of_delayed_ones_those_that_are_due_last_are_dropped_and_read_again_before_they_are_due() -> None:
    partition = Partition(40_000)
    order = list(range(100))
    random.Random(1).shuffle(order)  # noqa: S311 - the same order each time
    by_due = {}
    for number in order:
        by_due[number] = partition.store(half(deliver_at_ms=1_000_000 + number * 1_000))
        partition.decide(by_due[number])
    in_memory = [number for number in range(100) if by_due[number].dropped is None]
    assert in_memory == list(range(len(in_memory)))
    assert len(in_memory) > 30

    assert partition.read(now_ms=0) == [], "nothing is due soon"
    published: list[int | None] = []
    for now_ms in range(0, 1_100_001, 1_000):
        partition.state.now_ms = now_ms
        partition.read(now_ms)
        published += [one.deliver_at_ms for one in partition.publish()]
        assert partition.payloads.bytes <= 40_000

    assert published == [1_000_000 + number * 1_000 for number in range(100)], "each at its time, without a wait"
    assert partition.payloads.loaded == 100 - len(in_memory), "each was read once"


def test_ready_ones_are_not_dropped_and_what_is_read_waits_for_room() -> None:
    partition = Partition()
    ready = [partition.store(half()) for _ in range(4)]
    for pending in ready:
        partition.decide(pending)
    late = partition.store(half())
    partition.payloads.drop(late)
    partition.decide(late)
    partition.state.next_batch(1, lambda _: None)
    assert partition.state.next_batch(100, lambda _: None) is not None

    assert [pending.dropped is None for pending in ready] == [True] * 4
    assert partition.payloads.next_read(0.0, 0) == [], "there is no room yet"
    assert len(partition.publish()) == 4
    assert partition.read() == [late]
    assert partition.publish() == [partition.halves[4]]


def test_one_payload_larger_than_the_budget_can_be_read_and_published() -> None:
    partition = Partition()
    large = partition.store(half(value=b"v" * 3 * BUDGET))
    assert large.dropped is not None
    partition.decide(large)

    assert partition.publish() == []
    assert partition.read() == [large]
    assert partition.publish() == [partition.halves[0]]


def test_a_transaction_of_several_messages_is_dropped_and_read_as_a_whole() -> None:
    partition = Partition()
    first = half(part=(1, 3), key=b"1")
    pending = partition.store(first)
    partition.payloads.drop(pending)
    partition.store(first._replace(part=(2, 3), key=b"2"))
    partition.store(first._replace(part=(3, 3), key=b"3"))
    assert all(one.value is None for one in pending.halves)
    assert len(pending.keys) == 3
    partition.decide(pending)

    assert partition.publish() == []
    assert not partition.state.load(first.transaction_id, [(0, partition.halves[0])]), "not all of it"
    assert partition.read() == [pending]
    assert partition.publish() == partition.halves
    assert partition.payloads.bytes == 0


def test_what_is_to_be_carried_is_read_before_it_is_carried() -> None:
    partition = Partition()
    old = [partition.store(half()) for _ in range(3)]
    for pending in old[:2]:
        partition.payloads.drop(pending)
    state = partition.state
    state.skip_half(500)

    assert to_snapshot(state, 0, 50) == [], "the third one is not snapshotted before the others"
    snapshotted = []
    while not snapshotted:
        assert partition.read()
        snapshotted = to_snapshot(state, 0, 50)
    assert snapshotted[0] is old[0]
    batch = state.next_batch(0, lambda _: None, snapshotted)
    assert batch is not None
    state.apply(batch)
    assert list(state.snapshotted) == snapshotted


def test_what_is_carried_comes_back_without_its_payload_when_a_partition_is_taken_over() -> None:
    one = half(key=b"k")
    note = Note(one.transaction_id, 7, Verdict.UNKNOWN, 0, 0)
    record = Done([], [Snapshot(note, (SnapshotHalf(7, 1, one),))])

    pending = restored(3, without_payloads(record).snapshots[0])

    assert pending.dropped is not None
    assert (pending.half.value, pending.keys) == (None, restored(3, record.snapshots[0]).keys)
    assert pending.payload_bytes == restored(3, record.snapshots[0]).payload_bytes
    assert pending.load([(7, one)])
    assert pending.half == one


def test_delays_keep_the_order_of_decisions_among_those_that_are_due_together() -> None:
    delays = Delays()
    some = [Pending(half(), n) for n in range(10)]
    for pending in some:
        delays.add(pending, 5)
    for pending in some[::3]:
        pending.drop()
        delays.moved(pending)
    delays.remove(some[4].half.transaction_id)

    assert list(delays.take_due(4)) == []
    assert list(delays.take_due(5)) == [*some[:4], *some[5:]]
    assert (len(delays), delays.bytes) == (0, 0)


def test_a_round_looks_at_the_oldest_carry_and_the_next_due_only_however_many_wait() -> None:
    partition = Partition()
    state = partition.state
    for number in range(2_000):
        partition.decide(partition.store(half(deliver_at_ms=10**12 + number)))
    for at, pending in enumerate(list(state.pending.values())):
        state._take_snapshot(at, Snapshot(pending.note(), (SnapshotHalf(pending.offset, 1, pending.half),)))
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        assert to_snapshot(state, 2_000, 50_000) == []
        assert partition.payloads.next_read(1.0, 1) == []
        assert state.next_batch(100, lambda _: None) is None
    finally:
        sys.setprofile(None)

    assert calls < 200


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
