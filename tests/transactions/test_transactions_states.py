"""Each state of the design's table that exists now, on a real broker."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from transaction_tools import INTERVAL_S, TIMEOUT_S, Bench

from penstock.transactions import HalfMessage, Transaction, TransactionState
from waiting import wait_until


def unknown(_: Transaction) -> TransactionState:
    return TransactionState.UNKNOWN


def test_a_committed_message_becomes_visible_once_with_its_key_and_headers(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()

    with producer.transaction(bench.topic, key=b"k", value=b"v", headers={"a": b"1", "none": None}):
        assert bench.visible() == []
    bench.settled(coordinator, committed=1)

    (message,) = bench.messages()
    assert (message.key(), message.value(), message.headers()) == (b"k", b"v", [("a", b"1"), ("none", None)])


def test_an_exception_in_the_block_rolls_back_and_goes_on(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()

    with pytest.raises(RuntimeError, match="no stock"), producer.transaction(bench.topic, value=b"v"):
        raise RuntimeError("no stock")
    bench.settled(coordinator, rolled_back=1)

    assert bench.visible() == []
    assert producer.statistics().rolled_back == 1


def test_rollback_inside_the_block_needs_no_exception(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()

    with producer.transaction(bench.topic, value=b"v") as tx:
        tx.rollback()
    bench.settled(coordinator, rolled_back=1)

    assert bench.visible() == []


def test_an_interrupt_leaves_the_message_to_the_check(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer(check=lambda _: TransactionState.COMMIT)

    with pytest.raises(KeyboardInterrupt), producer.transaction(bench.topic, value=b"v"):
        raise KeyboardInterrupt
    bench.settled(coordinator, committed=1)

    assert bench.visible() == [(None, b"v")]
    assert producer.statistics().unknown == 1


def test_unknown_is_committed_by_the_check(bench: Bench) -> None:
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


def test_unknown_is_rolled_back_by_the_check(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer(check=lambda _: TransactionState.ROLLBACK)

    producer.send(bench.topic, value=b"v", execute=unknown)
    bench.settled(coordinator, rolled_back=1)

    assert bench.visible() == []


@pytest.mark.parametrize("broken", [False, True], ids=["unknown", "raising"])
def test_always_undecided_is_discarded_after_exactly_the_limit_of_answered_checks(bench: Bench, broken: bool) -> None:
    counts: list[int] = []

    def check(half: HalfMessage) -> TransactionState:
        counts.append(half.check_count)
        if broken:
            raise RuntimeError("the database is down")
        return TransactionState.UNKNOWN

    coordinator, producer = bench.coordinator(check_max=3), bench.producer(check=check)

    result = producer.send(bench.topic, key=b"k", value=b"v", execute=unknown)
    statistics = bench.settled(coordinator, discarded=1)

    # A check that is slow to be answered is asked again under its number; it counts once.
    assert set(counts) == {0, 1, 2}
    assert (statistics.answered_checks, statistics.committed) == (3, 0)
    assert bench.visible() == []
    (discarded,) = bench.messages(bench.topics.discarded)
    assert (discarded.key(), discarded.value()) == (b"k", b"v")
    headers = dict(discarded.headers())
    assert headers["penstock-tx"] == result.transaction_id.encode()
    assert headers["penstock-topic"] == bench.topic.encode()
    assert headers["penstock-reason"] == b"checks exhausted"


def test_a_message_without_a_local_transaction_commits_at_once(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()

    result = producer.send(bench.topic, value=b"v")
    bench.settled(coordinator, committed=1)

    assert result.state is TransactionState.COMMIT
    assert bench.visible() == [(None, b"v")]


def test_no_check_comes_before_the_immunity_ends_and_none_is_spent_on_it(bench: Bench) -> None:
    immunity = TIMEOUT_S + 3 * INTERVAL_S
    asked: list[tuple[bytes | None, int, float]] = []

    def check(half: HalfMessage) -> TransactionState:
        asked.append((half.value, half.check_count, time.time()))
        return TransactionState.UNKNOWN

    coordinator, producer = bench.coordinator(check_max=1), bench.producer(check=check)

    sent = time.time()
    producer.send(bench.topic, value=b"immune", check_immunity=immunity, execute=unknown)
    producer.send(bench.topic, value=b"plain", execute=unknown)
    statistics = bench.settled(coordinator, discarded=2)

    # The broker's clock, which gives the birth, is this machine's, in whole milliseconds.
    assert min(at for value, _, at in asked if value == b"immune") >= sent + immunity - 0.01
    assert min(at for value, _, at in asked if value == b"plain") >= sent + TIMEOUT_S - 0.01
    assert {(value, count) for value, count, _ in asked} == {(b"immune", 0), (b"plain", 0)}
    assert statistics.answered_checks == 2


def test_a_check_that_reaches_nobody_counts_for_nothing_and_raises_the_alarm(bench: Bench) -> None:
    coordinator, silent = bench.coordinator(check_max=2), bench.producer()

    silent.send(bench.topic, value=b"v", execute=unknown)
    waiting = bench.counted(coordinator, no_producer=5)

    assert (waiting.checks, waiting.answered_checks, waiting.pending) == (0, 0, 1)
    bench.producer(check=lambda _: TransactionState.COMMIT)
    bench.settled(coordinator, committed=1)
    assert bench.visible() == [(None, b"v")]


def test_a_check_that_hangs_costs_one_worker_and_delays_nobody_else(bench: Bench) -> None:
    release = threading.Event()

    def check(half: HalfMessage) -> TransactionState:
        if half.value == b"hangs":
            release.wait(60)
        return TransactionState.COMMIT

    coordinator, producer = bench.coordinator(), bench.producer(check=check, check_workers=2)

    producer.send(bench.topic, value=b"hangs", execute=unknown)
    for number in range(10):
        producer.send(bench.topic, value=b"%d" % number, execute=unknown)
    bench.counted(coordinator, committed=10)

    assert coordinator.statistics().pending == 1
    release.set()
    bench.settled(coordinator, committed=11)
    assert len(bench.visible()) == 11


def test_many_threads_share_one_producer_and_every_message_is_visible_once(bench: Bench) -> None:
    outcomes = [TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.COMMIT, TransactionState.UNKNOWN]

    def check(half: HalfMessage) -> TransactionState:
        # A decision that takes its time may be overtaken by a check, which then has to say the same.
        return TransactionState.ROLLBACK if int(half.value or b"") % 4 == 1 else TransactionState.COMMIT

    coordinator, producer = bench.coordinator(), bench.producer(check=check)

    def send(number: int) -> None:
        state = outcomes[number % 4]
        producer.send(bench.topic, key=b"%d" % (number % 10), value=b"%d" % number, execute=lambda _: state)

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(send, range(1000)))
    bench.settled(coordinator, committed=750, rolled_back=250)

    seen = Counter(value for _, value in bench.visible())
    assert seen == Counter(b"%d" % number for number in range(1000) if number % 4 != 1)
    assert producer.statistics().in_flight == 0


def test_messages_of_one_key_are_visible_in_the_order_of_their_decisions(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()

    for number in range(100):
        producer.send(bench.topic, key=b"k", value=b"%d" % number)
    bench.settled(coordinator, committed=100)

    assert [value for _, value in bench.visible()] == [b"%d" % number for number in range(100)]


def test_two_coordinators_share_the_partitions_and_one_takes_over_what_the_other_leaves(bench: Bench) -> None:
    first, producer = bench.coordinator(), bench.producer(check=lambda _: TransactionState.COMMIT)
    bench.counted(first, partitions=2)
    second = bench.coordinator()
    wait_until(lambda: first.statistics().partitions == second.statistics().partitions == 1, 60)

    for number in range(50):
        producer.send(bench.topic, key=b"%d" % number, value=b"%d" % number)
    wait_until(lambda: first.statistics().committed + second.statistics().committed == 50, 60)
    shares = first.statistics().committed, second.statistics().committed
    producer.send(bench.topic, key=b"a", value=b"late", execute=unknown)
    producer.send(bench.topic, key=b"b", value=b"late", execute=unknown)
    first.stop()
    bench.settled(second)

    assert min(shares) > 0
    assert first.statistics().committed + second.statistics().committed == 52
    seen = Counter(value for _, value in bench.visible())
    assert seen == Counter({b"late": 2, **{b"%d" % number: 1 for number in range(50)}})
