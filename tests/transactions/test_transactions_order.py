"""`order="half"`: per key in send order, whatever is decided in between, and an undecided half holds only its key."""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any

import pytest
from transaction_tools import Bench, child, kill, line_of

from kafka_tools import read_all
from penstock.transactions import HalfMessage, Transaction, TransactionState
from penstock.transactions.coordinator.state.pending.pending import Pending
from penstock.transactions.coordinator.state.state_machine import PartitionState
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict
from waiting import wait_until


class Line:
    """A partition whose halves have keys."""

    def __init__(self, keys: str) -> None:
        self.state = PartitionState(0, 0)
        self.ops = 0
        self.halves = []
        for offset, key in enumerate(keys):
            half = Half(new_id(), "g", "topic", None, key.encode(), b"v", (), None, order_key=key.encode())
            self.halves.append(half)
            self.state.add_half(offset, half)

    def decide(self, offset: int, verdict: Verdict = Verdict.COMMIT) -> None:
        op = Op(self.halves[offset].transaction_id, verdict, Author.PRODUCER, "g", 0, (offset,), 0)
        assert self.state.add_op(self.ops, op, 0) is None
        self.ops += 1

    def pending(self, offset: int) -> Pending:
        return self.state.pending[self.halves[offset].transaction_id]

    def next_batch(self, limit: int = 100, missing: int | None = None) -> list[int]:
        """Settle what can be settled and return its offsets in the order of publication."""
        batch = self.state.next_batch(limit, lambda pending: "topic" if pending.offset == missing else None)
        if batch is None:
            return []
        self.state.apply(batch)
        return [pending.offset for pending in batch.decided]


def test_an_undecided_half_holds_later_halves_of_its_key_and_no_others() -> None:
    line = Line("aabba")
    for offset in (1, 4, 3, 2):
        line.decide(offset)

    assert line.next_batch() == [2, 3]
    assert line.state.queue.held_by(line.pending(4)) is line.pending(0)
    assert line.state.queue.keys.behind == 2
    assert not line.state.has_work, "what waits is no reason to look again and again"

    line.decide(0)
    assert line.next_batch() == [0, 1, 4]


@pytest.mark.parametrize("verdict", [Verdict.ROLLBACK, Verdict.DISCARD])
def test_what_is_never_published_leaves_the_line_from_where_it_stands(verdict: Verdict) -> None:
    line = Line("aaa")
    line.decide(2)
    line.decide(1, verdict)

    assert line.next_batch() == [1]
    line.decide(0, verdict)
    assert line.next_batch() == [0, 2]


def test_a_head_that_its_target_refuses_holds_its_key() -> None:
    line = Line("aab")
    for offset in range(3):
        line.decide(offset)

    assert line.next_batch(missing=0) == [2]
    assert line.next_batch(missing=0) == []
    line.state.queue.release("topic")
    assert line.next_batch() == [0, 1]


def test_a_hot_key_fills_groups_up_to_their_limit() -> None:
    line = Line("a" * 50)
    for offset in reversed(range(50)):
        line.decide(offset)

    assert line.next_batch(20) == list(range(20))
    assert line.next_batch(20) == list(range(20, 40))
    assert line.next_batch(20) == list(range(40, 50))


def assert_published(bench: Bench, wanted: dict[bytes, list[bytes]]) -> None:
    """Wait until as many messages as are wanted can be seen, and judge each key's order."""
    expected = sum(map(len, wanted.values()))
    wait_until(lambda: len(bench.visible()) >= expected, 60)
    seen: dict[bytes | None, list[bytes | None]] = {}
    for key, value in bench.visible():
        seen.setdefault(key, []).append(value)
    assert seen == wanted


def end(tx: Transaction, outcome: str) -> None:
    """Run a local transaction of this outcome: "commit", "rollback" or "unknown"."""
    with tx:
        if outcome == "rollback":
            tx.rollback()
        if outcome == "unknown":
            tx.unknown()


def test_halves_of_a_key_become_visible_in_send_order_under_any_mix_of_outcomes(bench: Bench) -> None:
    chance = random.Random(5)  # noqa: S311 - the same mix each time
    answers = {True: TransactionState.COMMIT, False: TransactionState.ROLLBACK}
    later: dict[str, TransactionState] = {}

    def check(half: HalfMessage) -> TransactionState:
        return later.get(half.transaction_id, TransactionState.UNKNOWN)

    producer = bench.producer(check=check, order="half")
    bench.coordinator(check_max=1_000)
    wanted: dict[bytes, list[bytes]] = {}
    open_ones: list[Any] = []
    for number in range(80):
        key, value = b"%d" % (number % 4), b"%d" % number
        tx = producer.transaction(bench.topic, key=key, value=value, partition=0)
        tx.__enter__()
        outcome = chance.choice(("commit", "commit", "rollback", "check", "late"))
        if outcome == "rollback":
            tx.rollback()
        if outcome == "check":
            tx.unknown()
            later[tx.transaction_id] = answers[chance.random() < 0.5]
        if outcome == "late":
            open_ones.append(tx)
        else:
            tx.__exit__(None, None, None)
        if outcome in {"commit", "late"} or later.get(tx.transaction_id) is TransactionState.COMMIT:
            wanted.setdefault(key, []).append(value)
    chance.shuffle(open_ones)
    for tx in open_ones:
        tx.__exit__(None, None, None)

    assert_published(bench, wanted)


def test_send_order_per_key_holds_while_coordinators_come_and_go(bench: Bench) -> None:
    chance = random.Random(7)  # noqa: S311 - the same mix each time
    enough = threading.Event()
    rolled_back: set[bytes | None] = set()

    def check(half: HalfMessage) -> TransactionState:
        # Also asked where a decision comes late.
        return TransactionState.ROLLBACK if half.value in rolled_back else TransactionState.COMMIT

    producer = bench.producer(check=check, order="half")
    running = [bench.coordinator()]
    wanted: dict[bytes, list[bytes]] = {}

    def send() -> None:
        # At a pace that lets all that happens to the coordinators happen meanwhile.
        for number in itertools.takewhile(lambda _: not enough.wait(0.02), itertools.count()):
            key, value = b"%d" % (number % 5), b"%d" % number
            outcome = chance.choice(("commit", "commit", "rollback", "unknown"))
            if outcome == "rollback":
                rolled_back.add(value)
            end(producer.transaction(bench.topic, key=key, value=value, partition=0), outcome)
            if outcome != "rollback":
                wanted.setdefault(key, []).append(value)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    for _ in range(3):
        running.append(bench.coordinator())
        wait_until(lambda: running[-1].statistics().partitions > 0, 60)
        running.pop(0).stop()
    enough.set()
    sender.join(60)
    assert not sender.is_alive()

    assert_published(bench, wanted)


@pytest.mark.parametrize("where", ["before commit", "after commit"])
def test_send_order_per_key_holds_when_a_coordinator_is_killed_around_its_kafka_commit(
    bench: Bench, where: str
) -> None:
    chance = random.Random(11)  # noqa: S311 - the same mix each time
    producer = bench.producer(check=lambda _: TransactionState.COMMIT, order="half")
    wanted: dict[bytes, list[bytes]] = {}

    def send(numbers: range) -> None:
        for number in numbers:
            key, value = b"%d" % (number % 5), b"%d" % number
            outcome = chance.choice(("commit", "commit", "rollback", "unknown"))
            end(producer.transaction(bench.topic, key=key, value=value, partition=0), outcome)
            if outcome != "rollback":
                wanted.setdefault(key, []).append(value)

    # There before it starts, so that the Kafka transaction in which it dies holds several of some keys.
    send(range(40))
    with child("coordinator_child.py", bench.servers, bench.topics.prefix, where, "same") as first:
        assert line_of(first) == "started"
        assert line_of(first) == where
        send(range(40, 60))
        kill(first)
    # The fault happened: some were written, in a transaction that is open, or whose end nobody took in.
    assert 0 < bench.ends(bench.topic, "read_uncommitted") < sum(map(len, wanted.values()))
    if where == "before commit":
        assert read_all(bench.servers, bench.topic, left_open=True) == []
    else:
        wait_until(lambda: read_all(bench.servers, bench.topic, left_open=True))
    bench.coordinator(instance="same")
    send(range(60, 80))

    assert_published(bench, wanted)


def test_an_undecided_half_holds_its_key_in_kafka_and_the_wait_is_counted(bench: Bench) -> None:
    producer, coordinator = bench.producer(order="half"), bench.coordinator(transaction_timeout=60.0)
    go_on = threading.Event()

    def first() -> None:
        with producer.transaction(bench.topic, key="a", value="1", partition=0):
            stored.set()
            go_on.wait(60)

    stored = threading.Event()
    thread = threading.Thread(target=first, daemon=True)
    thread.start()
    assert stored.wait(60)
    producer.send(bench.topic, key="a", value="2", partition=0)
    producer.send(bench.topic, key="b", value="3", partition=0)

    wait_until(lambda: bench.visible() == [(b"b", b"3")], 60)
    wait_until(lambda: coordinator.statistics().held_by_key == 1, 20)
    go_on.set()
    thread.join(60)
    wait_until(lambda: bench.visible() == [(b"b", b"3"), (b"a", b"1"), (b"a", b"2")], 60)


def test_what_is_brought_back_before_its_discard_is_known_stands_before_what_was_stored_after_it() -> None:
    line = Line("a")
    line.decide(0, Verdict.DISCARD)
    under_way = line.state.next_batch(100, lambda _: None)
    assert under_way is not None
    again = line.halves[0]._replace(resumed="discarded[0]@0")
    later = Half(new_id(), "g", "topic", None, b"a", b"v", (), None, order_key=b"a")
    for half in (again, later):
        line.state.add_half(len(line.halves), half)
        line.halves.append(half)
    line.decide(2)

    line.state.apply(under_way)

    assert [pending.offset for pending in line.state.only_in_half_log] == [1, 2]
    assert line.state.checkpoints()[0] == 1, "a restart reads what was brought back"
    assert line.next_batch() == [], "what was stored after it waits"
    line.decide(1)
    assert line.next_batch() == [1, 2]
