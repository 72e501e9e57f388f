"""Each state of the design's table that exists now, on a real broker."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from transaction_tools import Bench, unknown

from penstock.errors import DecisionNotStoredError, HalfNotStoredError, TransactionError
from penstock.transactions import HalfMessage, TransactionState
from waiting import wait_until


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


def test_a_message_without_a_local_transaction_commits_at_once(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()

    result = producer.send(bench.topic, value=b"v")
    bench.settled(coordinator, committed=1)

    assert result.state is TransactionState.COMMIT
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


def test_two_coordinators_share_the_partitions_and_one_takes_over_what_the_other_leaves(bench: Bench) -> None:
    first, producer = bench.coordinator(), bench.producer(check=lambda _: TransactionState.COMMIT)
    bench.counted(first, partitions=2)
    second = bench.coordinator()
    wait_until(lambda: first.statistics().partitions == second.statistics().partitions == 1, 60)

    for number in range(50):
        producer.send(bench.topic, key=b"%d" % number, value=b"%d" % number)
    wait_until(lambda: first.statistics().committed + second.statistics().committed == 50, 60)
    batches = first.statistics().committed, second.statistics().committed
    producer.send(bench.topic, key=b"a", value=b"late", execute=unknown)
    producer.send(bench.topic, key=b"b", value=b"late", execute=unknown)
    first.stop()
    bench.settled(second)

    assert min(batches) > 0
    assert first.statistics().committed + second.statistics().committed == 52
    seen = Counter(value for _, value in bench.visible())
    assert seen == Counter({b"late": 2, **{b"%d" % number: 1 for number in range(50)}})


def test_a_result_is_what_was_stored_and_there_is_none_before(bench: Bench) -> None:
    producer = bench.producer()
    transaction = producer.transaction(bench.topic, value=b"v")

    with pytest.raises(TransactionError, match="cannot be left: its half is not stored"):
        transaction.__exit__(None, None, None)
    with pytest.raises(TransactionError, match="has no result"):
        _ = transaction.result
    with transaction, pytest.raises(TransactionError, match="not left yet"):
        _ = transaction.result
    for late in (transaction.rollback, transaction.unknown):
        with pytest.raises(TransactionError, match="its decision cannot be changed any more"):
            late()

    assert transaction.result.state is TransactionState.COMMIT
    several = producer.transaction_of()
    with pytest.raises(TransactionError, match="has no result"):
        _ = several.result
    with pytest.raises(TransactionError, match="has no message yet"):
        _ = several.message


def test_a_block_that_swallows_the_error_of_its_prepare_is_told_when_it_is_left(bench: Bench) -> None:
    producer = bench.producer()
    transaction = producer.transaction_of()

    def swallow() -> None:
        with transaction:
            transaction.add(bench.topic, value=bytes(2_000_000))
            with contextlib.suppress(HalfNotStoredError):
                transaction.prepare()

    with pytest.raises(TransactionError, match=r"left though its prepare\(\) had failed") as told:
        swallow()
    with pytest.raises(TransactionError, match="has no result"):
        _ = transaction.result

    assert isinstance(told.value.__cause__, HalfNotStoredError)


def test_the_result_of_a_transaction_whose_decision_is_not_known_to_be_stored_is_that_error(bench: Bench) -> None:
    producer = bench.producer()
    transaction = producer.transaction(bench.topic, value=b"v")

    with pytest.raises(DecisionNotStoredError, match="stopped"), transaction:
        producer.stop()

    with pytest.raises(DecisionNotStoredError, match="stopped"):
        _ = transaction.result
