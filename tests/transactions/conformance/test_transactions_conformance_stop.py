"""One suite for every store: a stopped producer leaves no caller without an answer."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from conformance.store_cases import BUT_SQL, NO_CHECKS, StoreBench, settled

from penstock.errors import DecisionNotStoredError, PublicationNotSeenError, StoppedError
from penstock.transactions import Submission, TransactionalProducer, TransactionState
from waiting import wait_until

pytestmark = BUT_SQL


def test_what_was_submitted_is_stored_when_the_producer_has_stopped(store_bench: StoreBench) -> None:
    with TransactionalProducer("orders", store=store_bench.make_store()) as producer:
        sent = [producer.submit(store_bench.topic, value=b"%d" % number) for number in range(500)]

    assert [future.done() for future in sent] == [True] * 500
    assert {future.result(0).state for future in sent} == {TransactionState.COMMIT}
    statistics = producer.statistics()
    assert (statistics.committed, statistics.in_flight) == (500, 0)
    settled(store_bench.coordinator(**NO_CHECKS), committed=500)
    assert Counter(store_bench.seen()) == Counter(b"%d" % number for number in range(500))


def test_an_exception_that_leaves_the_producers_block_goes_on_and_what_was_submitted_is_stored(
    store_bench: StoreBench,
) -> None:
    sent: list[Submission] = []

    def fail() -> None:
        with TransactionalProducer("orders", store=store_bench.make_store()) as producer:
            sent.extend(producer.submit(store_bench.topic, value=b"v") for _ in range(50))
            raise KeyError("no stock")

    with pytest.raises(KeyError, match="no stock"):
        fail()

    assert len(sent) == 50
    assert {future.result(0).state for future in sent} == {TransactionState.COMMIT}


def test_a_stop_from_a_callback_does_not_wait_for_itself_and_a_second_one_waits_for_the_first(
    store_bench: StoreBench,
) -> None:
    producer = TransactionalProducer("orders", store=store_bench.make_store()).start()
    asked, refused = threading.Event(), threading.Event()

    def stop(_: object) -> None:
        producer.stop()
        asked.set()
        with pytest.raises(StoppedError):
            producer.submit(store_bench.topic, value=b"too late")
        refused.set()

    sent = [producer.submit(store_bench.topic, value=b"%d" % number) for number in range(200)]
    sent[-1].add_done_callback(stop)
    assert asked.wait(30)
    producer.stop()

    assert refused.is_set()
    assert {future.result(0).state for future in sent} == {TransactionState.COMMIT}
    assert producer.statistics().in_flight == 0


def test_a_decision_after_the_stop_is_reported_as_not_stored(store_bench: StoreBench) -> None:
    producer = TransactionalProducer("orders", store=store_bench.make_store()).start()

    with (
        pytest.raises(DecisionNotStoredError, match="stopped"),
        producer.transaction(store_bench.topic, value=b"v"),
    ):
        producer.stop()

    assert producer.statistics().in_flight == 0


def test_a_callback_that_submits_goes_on_until_the_stop_and_every_one_ends(store_bench: StoreBench) -> None:
    producer = TransactionalProducer("orders", store=store_bench.make_store()).start()
    sent: list[Submission] = []
    refused: list[StoppedError] = []

    def again(_: object) -> None:
        try:
            one = producer.submit(store_bench.topic, value=b"%d" % len(sent))
        except StoppedError as error:
            refused.append(error)
            return
        sent.append(one)
        one.add_done_callback(again)

    again(None)
    wait_until(lambda: len(sent) > 20)
    producer.stop()

    assert len(refused) == 1
    assert {future.result(0).state for future in sent} == {TransactionState.COMMIT}


def test_a_waiter_for_a_publication_is_notified_at_the_stop(store_bench: StoreBench) -> None:
    producer = TransactionalProducer("orders", store=store_bench.make_store(), wait="published").start()
    errors: list[Exception] = []

    def send() -> None:
        try:
            with producer.transaction(store_bench.topic, value=b"in a block"):
                pass
        except PublicationNotSeenError as error:
            errors.append(error)

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    sent = producer.submit(store_bench.topic, value=b"submitted")
    wait_until(lambda: producer.statistics().committed == 2)
    producer.stop()
    sending.join(30)

    with pytest.raises(PublicationNotSeenError, match="is committed, but the producer was stopped before it was seen"):
        sent.result(0)
    assert len(errors) == 1
    settled(store_bench.coordinator(**NO_CHECKS), committed=2)
