"""Payloads that wait long leave the coordinator's memory, and are read again when they are needed."""

from __future__ import annotations

import time
from collections import Counter, defaultdict

import pytest
from half_partition import half_record, op_record
from transaction_tools import Bench, decide, prepared

from penstock.transactions import HalfMessage, TransactionState
from penstock.transactions.core.payloads import Payloads
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.state import PartitionState
from penstock.transactions.stores.kafka.coordinator import payload_reader
from penstock.transactions.stores.kafka.inspection import ReadPartition
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict
from penstock.transactions.wire.topics import StoreTopics
from waiting import wait_until

#: Bytes of payloads in memory, rather than 64 MiB.
BUDGET = 1_000_000


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Set a small budget; return how many payloads a test's coordinators dropped and loaded again."""
    counts = Counter[str]()

    def count(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def counting(*arguments: object) -> object:
            counts[name] += 1
            return original(*arguments)

        monkeypatch.setattr(kind, name, counting)

    monkeypatch.setattr(payload_reader, "PAYLOAD_BYTES", BUDGET)
    count(Pending, "drop")
    count(Payloads, "take_in")
    return counts


@pytest.mark.chaos
def test_delayed_messages_beyond_the_budget_are_published_once_each_when_due_in_the_order_of_their_keys(
    bench: Bench, seen: Counter[str]
) -> None:
    count, keys, begun = 20_000, 40, time.time()
    due = {key: begun + 10 + key * 0.2 if key % 10 else begun for key in range(keys)}
    producer, coordinator = bench.producer(), bench.coordinator()

    sends = [
        producer.submit(
            bench.topic,
            key=f"{n % keys}",
            value=f"{n}".ljust(100).encode(),
            headers=[("h", b"1")],
            deliver_at=due[n % keys],
        )
        for n in range(count)
    ]
    for send in sends:
        send.result(60)
    at_once = count // 10
    wait_until(lambda: (now := coordinator.statistics()).committed >= at_once and now.pending <= count - at_once, 60)
    coordinator.stop()
    again = bench.coordinator()
    bench.settled(again, 120)

    published = bench.messages()
    values = [int(message.value()) for message in published]
    assert sorted(values) == list(range(count))
    by_key = defaultdict(list)
    for message in published:
        key = int(message.key())
        by_key[key].append(int(message.value()))
        assert message.timestamp()[1] >= due[key] * 1000 - 50, "nothing is published before its time"
        assert message.headers() == [("h", b"1")]
    assert all(some == sorted(some) for some in by_key.values())
    assert seen["drop"] > count // 2
    assert seen["take_in"] > count // 2


@pytest.mark.thorough
def test_a_second_check_and_a_late_decision_find_a_payload_that_was_dropped_after_the_first_check(
    bench: Bench, seen: Counter[str]
) -> None:
    asked: list[tuple[bytes | None, int]] = []

    def check(half: HalfMessage) -> TransactionState:
        asked.append((half.value, half.check_count))
        is_second = half.check_count > 0 and half.value is not None and half.value.startswith(b"asked")
        return TransactionState.COMMIT if is_second else TransactionState.UNKNOWN

    producer = bench.producer(check=check)
    bench.await_checkers(1)
    values = [b"%s %d " % (kind, n) + b"x" * 100_000 for kind in (b"asked", b"late") for n in range(15)]
    stored = [prepared(producer, bench.topic, value) for value in values]
    coordinator = bench.coordinator(transaction_timeout=1.0, check_interval=0.5, check_max=1_000)
    wait_until(lambda: coordinator.statistics().committed == 15, 60)

    for one in stored[15:]:
        decide(bench, one, Verdict.COMMIT)
    bench.settled(coordinator, 60, committed=30)

    assert sorted(value or b"" for _, value in bench.visible()) == sorted(values)
    assert {value for value, count in asked if count} >= set(values[:15])
    assert seen["take_in"] >= 15


@pytest.mark.thorough
def test_a_discard_policy_is_given_a_payload_that_was_dropped_and_so_is_the_discarded_topic(
    bench: Bench, seen: Counter[str]
) -> None:
    given: list[bytes | None] = []

    def policy(half: HalfMessage) -> TransactionState:
        given.append(half.value)
        return TransactionState.UNKNOWN

    bench.producer(check=lambda _: TransactionState.UNKNOWN)
    bench.await_checkers(1)
    producer = bench.producer()
    stored = [prepared(producer, bench.topic, b"%d " % n + b"x" * 100_000) for n in range(30)]
    values = sorted(half.value or b"" for one in stored for half in one.halves)
    coordinator = bench.coordinator(transaction_timeout=1.0, check_interval=0.5, check_max=1, discard=policy)
    bench.settled(coordinator, 90, discarded=len(stored))

    assert sorted(value or b"" for value in given) == values
    assert sorted(value or b"" for _, value in bench.visible(bench.topics.discarded)) == values
    assert seen["drop"] > 0


def test_a_list_of_what_is_pending_has_one_payload_and_nothing_that_coordinators_refuse() -> None:
    halves = [Half(new_id(), "orders", "topic", None, b"k", b"v" * 1_000, (), None) for _ in range(3)]
    asked_for = halves[1].transaction_id
    partition = ReadPartition(PartitionState(0, 0), StoreTopics("store"), 0, asked_for)

    for offset, half in enumerate((*halves, halves[0]._replace(transaction_id=new_id(), topic="store.op"))):
        partition.take_half(half_record(offset, half))
    for offset, half in enumerate(halves):
        # The last decision is in the log of another half partition.
        op = Op(half.transaction_id, Verdict.COMMIT, Author.PRODUCER, "orders", offset // 2, (offset,), 0)
        partition.take_op(op_record(offset, op))

    pending = partition.state.pending
    assert {name: one.half.value for name, one in pending.items() if one.half.value} == {asked_for: b"v" * 1_000}
    assert [value.verdict for value in pending.values()] == [Verdict.COMMIT, Verdict.COMMIT, None]
