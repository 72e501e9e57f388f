"""What must never go wrong with transactional messages, scenario by scenario, on a real broker: decisions."""

from __future__ import annotations

import struct
import threading
from collections import Counter
from typing import Any

import pytest
from transaction_tools import Bench, decide, prepared, unknown

from penstock.transactions import Coordinator, HalfMessage, TransactionState, new_id
from penstock.transactions.stores.kafka.store import StoredHalves
from penstock.transactions.wire.ops import Author, Op, Verdict, encode_op


@pytest.fixture
def silent(bench: Bench) -> Coordinator:
    """A coordinator that asks nobody during the test."""
    return bench.coordinator(transaction_timeout=600)


def test_scenario_01_a_commit_is_visible_once(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()

    with producer.transaction(bench.topic, key=b"k", value=b"v", headers={"a": b"1", "none": None}):
        assert bench.visible() == []
    bench.settled(coordinator, committed=1)

    (message,) = bench.messages()
    assert (message.key(), message.value(), message.headers()) == (b"k", b"v", [("a", b"1"), ("none", None)])


def test_scenario_02_a_rollback_is_never_visible(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()

    with pytest.raises(RuntimeError, match="no stock"), producer.transaction(bench.topic, value=b"v"):
        raise RuntimeError("no stock")
    bench.settled(coordinator, rolled_back=1)

    # Nor was it ever written and then aborted.
    assert bench.messages(isolation="read_uncommitted") == []
    assert producer.statistics().rolled_back == 1


def test_scenario_03_unknown_is_committed_by_a_check(bench: Bench) -> None:
    asked: list[HalfMessage] = []

    def check(half: HalfMessage) -> TransactionState:
        asked.append(half)
        return TransactionState.COMMIT

    coordinator, producer = bench.coordinator(), bench.producer(check=check)

    result = producer.send(bench.topic, key=b"k", value=b"v", headers=[("h", b"1")], execute=unknown)
    bench.settled(coordinator, committed=1)

    assert result.state is TransactionState.UNKNOWN
    # A check that is slow to be answered is asked again under its number.
    assert set(asked) == {HalfMessage(bench.topic, b"k", b"v", (("h", b"1"),), result.transaction_id, 0)}
    assert bench.visible() == [(b"k", b"v")]


def test_scenario_04_unknown_is_rolled_back_by_a_check(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer(check=lambda _: TransactionState.ROLLBACK)

    producer.send(bench.topic, value=b"v", execute=unknown)
    bench.settled(coordinator, rolled_back=1)

    assert bench.visible() == []


@pytest.mark.parametrize("broken", [False, True], ids=["unknown", "raising"])
def test_scenario_05_always_unknown_is_discarded_after_exactly_15_answered_checks(
    bench: Bench, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Time to read the op log between two checks; it bounds how fast they can follow each other.
    monkeypatch.setattr("penstock.transactions.coordinator.checks.check_scheduler._TICK_S", 0.05)
    counts: list[int] = []

    def check(half: HalfMessage) -> TransactionState:
        counts.append(half.check_count)
        if broken:
            raise RuntimeError("the database is down")
        return TransactionState.UNKNOWN

    coordinator, producer = bench.coordinator(check_interval=0.05), bench.producer(check=check)

    result = producer.send(bench.topic, key=b"k", value=b"v", execute=unknown)
    statistics = bench.settled(coordinator, discarded=1)

    # A check that is slow to be answered is asked again under its number; it counts once.
    assert set(counts) == set(range(15))
    assert (statistics.answered_checks, statistics.committed) == (15, 0)
    assert bench.visible() == []
    (discarded,) = bench.messages(bench.topics.discarded)
    assert (discarded.key(), discarded.value()) == (b"k", b"v")
    headers = dict(discarded.headers())
    assert headers["penstock-tx"] == result.transaction_id.encode()
    assert headers["penstock-topic"] == bench.topic.encode()
    assert headers["penstock-reason"] == b"checks exhausted"


def test_scenario_06_120_messages_with_a_five_way_mix_of_outcomes(bench: Bench) -> None:
    def check(half: HalfMessage) -> TransactionState:
        # The first two were decided by the producer; where a check overtakes that, it must say the same.
        said = {0: TransactionState.COMMIT, 1: TransactionState.ROLLBACK, 2: TransactionState.COMMIT}
        said[3] = TransactionState.ROLLBACK
        return said.get(int(half.value or b"") % 5, TransactionState.UNKNOWN)

    coordinator, producer = bench.coordinator(check_max=2), bench.producer(check=check)

    for number in range(120):
        with producer.transaction(bench.topic, key=b"%d" % (number % 7), value=b"%d" % number) as tx:
            if number % 5 == 1:
                tx.rollback()
            elif number % 5:
                tx.unknown()
    statistics = bench.settled(coordinator, committed=48, rolled_back=48, discarded=24)

    assert (statistics.committed, statistics.rolled_back, statistics.discarded) == (48, 48, 24)
    assert Counter(value for _, value in bench.visible()) == Counter(b"%d" % n for n in range(120) if n % 5 in (0, 2))
    discarded = Counter(value for _, value in bench.visible(bench.topics.discarded))
    assert discarded == Counter(b"%d" % n for n in range(120) if n % 5 == 4)


def test_scenario_07_a_duplicate_commit_makes_one_message(bench: Bench, silent: Coordinator) -> None:
    stored = prepared(bench.producer(), bench.topic)

    decide(bench, stored, Verdict.COMMIT)
    decide(bench, stored, Verdict.COMMIT)
    bench.settled(silent, committed=1, refused=1)

    assert bench.visible() == [(None, b"v")]


@pytest.mark.parametrize("settled_first", [False, True], ids=["at once", "long after"])
def test_scenario_08_a_commit_after_a_rollback_is_refused(
    bench: Bench, silent: Coordinator, settled_first: bool
) -> None:
    stored = prepared(bench.producer(), bench.topic)

    decide(bench, stored, Verdict.ROLLBACK)
    if settled_first:
        bench.settled(silent, rolled_back=1)
    decide(bench, stored, Verdict.COMMIT)
    statistics = bench.settled(silent, refused=1)

    assert (statistics.committed, statistics.rolled_back) == (0, 1)
    assert bench.visible() == []


@pytest.mark.parametrize("settled_first", [False, True], ids=["at once", "long after"])
def test_scenario_09_a_rollback_after_a_commit_is_refused(
    bench: Bench, silent: Coordinator, settled_first: bool
) -> None:
    stored = prepared(bench.producer(), bench.topic)

    decide(bench, stored, Verdict.COMMIT)
    if settled_first:
        bench.settled(silent, committed=1)
    decide(bench, stored, Verdict.ROLLBACK)
    statistics = bench.settled(silent, refused=1)

    assert (statistics.committed, statistics.rolled_back) == (1, 0)
    assert bench.visible() == [(None, b"v")]


def test_scenario_10_a_late_commit_that_races_a_check_makes_one_message(bench: Bench) -> None:
    """The producer decides while its half is being checked: ten times just before the answer, ten times just after."""
    leave = {number: threading.Event() for number in range(20)}
    left = {number: threading.Event() for number in range(20)}

    def check(half: HalfMessage) -> TransactionState:
        number = int(half.value or b"")
        leave[number].set()
        if number % 2:
            left[number].wait(60)
        return TransactionState.COMMIT

    coordinator, producer = bench.coordinator(), bench.producer(check=check, check_workers=8)

    def late(number: int) -> None:
        with producer.transaction(bench.topic, key=b"%d" % number, value=b"%d" % number):
            leave[number].wait(60)
        left[number].set()

    threads = [threading.Thread(target=late, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    # Both decisions of each were stored; the one that came second was refused. A check that was asked twice is a third.
    statistics = bench.settled(coordinator, committed=20, refused=20)

    assert statistics.committed == 20
    assert Counter(value for _, value in bench.visible()) == Counter(b"%d" % number for number in range(20))


@pytest.mark.parametrize(
    "wrong",
    [{"group": "others"}, {"half_offsets": (0, 1)}, {"author": Author.OPERATOR, "group": "x"}, {"transaction_id": ""}],
    ids=["another group", "other offsets", "a stranger as an operator", "an unknown id"],
)
def test_scenario_11_a_decision_for_an_unknown_id_or_of_another_group_is_refused(
    bench: Bench, silent: Coordinator, wrong: dict[str, Any]
) -> None:
    stored = prepared(bench.producer(), bench.topic)
    if "transaction_id" in wrong:
        wrong = {"transaction_id": new_id()}

    decide(bench, stored, Verdict.ROLLBACK, **wrong)
    waiting = bench.counted(silent, refused=1)
    assert (waiting.pending, waiting.rolled_back) == (1, 0)
    decide(bench, stored, Verdict.COMMIT)
    statistics = bench.settled(silent, committed=1, refused=1)

    assert statistics.rolled_back == 0
    assert bench.visible() == [(None, b"v")]


def test_scenario_20_records_forged_by_hand_are_refused_and_counted(bench: Bench, silent: Coordinator) -> None:
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
        [*good, ("penstock-part", b"3/2")],
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
    statistics = bench.settled(silent, committed=2, forged=len(forged) + 6)

    assert (statistics.forged, statistics.rolled_back) == (len(forged) + 6, 0)
    assert sorted(bench.visible()) == [(None, b"after"), (None, b"v")]


def _op(stored: StoredHalves) -> Op:
    half = stored.halves[0]
    return Op(half.transaction_id, Verdict.COMMIT, Author.PRODUCER, half.group, stored.partition, stored.offsets, 0)
