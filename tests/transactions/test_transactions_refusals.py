"""Decisions and records that must not count: second, unknown, foreign, forged."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from transaction_tools import Bench

from penstock.transactions import Coordinator, Transaction, TransactionalProducer, TransactionState, new_id
from penstock.transactions.kafka_store import StoredHalves
from penstock.transactions.records import Author, Op, Verdict, encode_op


def unknown(_: Transaction) -> TransactionState:
    return TransactionState.UNKNOWN


def prepared(producer: TransactionalProducer, topic: str, value: bytes = b"v") -> StoredHalves:
    """Store a half and leave it undecided; return its place."""
    transaction = producer.transaction(topic, value=value)
    transaction.unknown()
    with transaction:
        assert transaction._flight is not None
        stored = transaction._flight._prepared
    assert isinstance(stored, StoredHalves)
    return stored


def decide(bench: Bench, stored: StoredHalves, verdict: Verdict, **other: Any) -> None:
    """Write a decision by hand."""
    half = stored.halves[0]
    op = Op(half.transaction_id, verdict, Author.PRODUCER, half.group, stored.partition, stored.offsets, 0)
    bench.write(bench.topics.op, stored.partition, None, encode_op(op._replace(**other)))


@pytest.fixture
def coordinator(bench: Bench) -> Coordinator:
    """A coordinator that asks nobody during the test."""
    return bench.coordinator(transaction_timeout=600)


def test_a_commit_written_twice_makes_one_message(bench: Bench, coordinator: Coordinator) -> None:
    stored = prepared(bench.producer(), bench.topic)

    decide(bench, stored, Verdict.COMMIT)
    decide(bench, stored, Verdict.COMMIT)
    bench.settled(coordinator, committed=1, refused=1)

    assert bench.visible() == [(None, b"v")]


@pytest.mark.parametrize("settled_first", [False, True], ids=["at once", "long after"])
@pytest.mark.parametrize(
    ("first", "second", "visible"),
    [(Verdict.ROLLBACK, Verdict.COMMIT, 0), (Verdict.COMMIT, Verdict.ROLLBACK, 1)],
    ids=["commit after rollback", "rollback after commit"],
)
def test_the_first_decision_stands(
    bench: Bench, coordinator: Coordinator, *, first: Verdict, second: Verdict, visible: int, settled_first: bool
) -> None:
    stored = prepared(bench.producer(), bench.topic)

    decide(bench, stored, first)
    if settled_first:
        bench.settled(coordinator, **{"committed" if visible else "rolled_back": 1})
    decide(bench, stored, second)
    statistics = bench.settled(coordinator, refused=1)

    assert (statistics.committed, statistics.rolled_back) == (visible, 1 - visible)
    assert len(bench.visible()) == visible


def test_a_decision_for_an_unknown_id_is_refused(bench: Bench, coordinator: Coordinator) -> None:
    stored = prepared(bench.producer(), bench.topic)

    decide(bench, stored, Verdict.COMMIT, transaction_id=new_id())
    waiting = bench.counted(coordinator, refused=1)

    assert (waiting.pending, waiting.committed) == (1, 0)


def test_a_decision_for_a_half_that_never_was_is_refused_and_holds_nothing(
    bench: Bench, coordinator: Coordinator
) -> None:
    stored = prepared(bench.producer(), bench.topic)

    decide(bench, stored, Verdict.COMMIT, transaction_id=new_id(), half_offsets=(1 << 60,))
    decide(bench, stored, Verdict.COMMIT, transaction_id=new_id(), half_offsets=())
    decide(bench, stored, Verdict.COMMIT)
    bench.settled(coordinator, committed=1, refused=2)

    assert bench.visible() == [(None, b"v")]


@pytest.mark.parametrize(
    "wrong", [{"group": "others"}, {"half_offsets": (0, 1)}, {"author": Author.OPERATOR, "group": "x"}]
)
def test_a_decision_of_another_group_or_for_other_offsets_is_refused(
    bench: Bench, coordinator: Coordinator, wrong: dict[str, Any]
) -> None:
    stored = prepared(bench.producer(), bench.topic)

    decide(bench, stored, Verdict.ROLLBACK, **wrong)
    decide(bench, stored, Verdict.COMMIT)
    statistics = bench.settled(coordinator, committed=1, refused=1)

    assert statistics.rolled_back == 0
    assert bench.visible() == [(None, b"v")]


def test_forged_halves_and_decisions_are_counted_and_the_others_go_on(bench: Bench, coordinator: Coordinator) -> None:
    producer = bench.producer()
    stored = prepared(producer, bench.topic)
    half = stored.halves[0]
    good = [
        ("penstock-tx", new_id().encode()),
        ("penstock-group", b"orders"),
        ("penstock-topic", bench.topic.encode()),
    ]
    forged: list[list[tuple[str, bytes | None]]] = [
        [],
        [("penstock-tx", b"\xff\xfe")],
        [*good, ("penstock-tx", new_id().encode())],
        [*good, ("penstock-part", b"1/2")],
        [*good, ("penstock-partition", b"-1")],
        [*good, ("penstock-check-immunity-ms", b"9" * 30)],
        [good[0], good[1], ("penstock-topic", bench.topics.op.encode())],
        [good[0], good[1], ("penstock-topic", b"__consumer_offsets")],
        [good[0], good[1], ("penstock-topic", b"no topic at all!")],
        # Another half under the id of a pending one.
        [("penstock-tx", half.transaction_id.encode()), *good[1:]],
    ]

    for headers in forged:
        bench.write(bench.topics.half, stored.partition, b"k", b"forged", headers)
    for value in (None, b"", b"\x01", struct.pack(">I", 7) * 40, encode_op(_op(stored))[:-1]):
        bench.write(bench.topics.op, stored.partition, None, value)
    # It claims to belong to another half partition than the one it stands in.
    decide(bench, stored, Verdict.ROLLBACK, half_partition=stored.partition + 1)
    decide(bench, stored, Verdict.COMMIT)
    producer.send(bench.topic, value=b"after")
    statistics = bench.settled(coordinator, committed=2, forged=len(forged) + 6)

    assert (statistics.forged, statistics.rolled_back) == (len(forged) + 6, 0)
    assert sorted(bench.visible()) == [(None, b"after"), (None, b"v")]


def _op(stored: StoredHalves) -> Op:
    half = stored.halves[0]
    return Op(half.transaction_id, Verdict.COMMIT, Author.PRODUCER, half.group, stored.partition, stored.offsets, 0)


def test_a_late_answer_of_an_earlier_check_does_not_count_twice(bench: Bench, coordinator: Coordinator) -> None:
    stored = prepared(bench.producer(), bench.topic)

    for number in (1, 1, 3, 2, 0):
        decide(bench, stored, Verdict.UNKNOWN, author=Author.CHECK, check_number=number)
    decide(bench, stored, Verdict.COMMIT)
    statistics = bench.settled(coordinator, committed=1)

    assert (statistics.answered_checks, statistics.refused) == (2, 0)
