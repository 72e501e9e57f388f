"""What a send waits for: handed over, stored, or visible."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from confluent_kafka import KafkaError
from transaction_tools import Bench

from penstock.errors import PublicationNotSeenError, TransactionRefusedError
from penstock.transactions import Transaction, TransactionState
from penstock.transactions.wire.ops import Author, Op, Verdict, encode_op
from waiting import wait_until


def test_published_is_told_only_after_a_committed_reader_sees_it(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer(wait="published", publish_timeout=60)

    for number in range(10):
        result = producer.send(bench.topic, key=b"k", value=b"%d" % number)
        assert bench.visible()[-1] == (b"k", b"%d" % number)
        assert result.state is TransactionState.COMMIT
    with producer.transaction(bench.topic, key=b"k", value=b"in a block"):
        pass

    assert bench.visible()[-1] == (b"k", b"in a block")
    assert bench.settled(coordinator, committed=11).committed == 11


def test_a_future_can_wait_for_the_publication(bench: Bench) -> None:
    bench.coordinator()
    producer = bench.producer()

    pledges = [producer.submit(bench.topic, value=b"%d" % number, wait="published") for number in range(100)]
    for pledge in pledges:
        pledge.result(60)

    assert len(bench.visible()) == 100


def test_who_waits_for_a_publication_that_does_not_come_is_told_that_it_is_decided(bench: Bench) -> None:
    producer = bench.producer(publish_timeout=0.5)

    with pytest.raises(PublicationNotSeenError, match="is committed"):
        producer.send(bench.topic, value=b"1", wait="published")
    with (
        pytest.raises(PublicationNotSeenError, match="it waits for a coordinator"),
        producer.transaction(bench.topic, value=b"2", wait="published"),
    ):
        pass

    wait_until(lambda: producer.statistics().committed == 2)
    coordinator = bench.coordinator()
    bench.settled(coordinator, committed=2)


def test_a_rollback_does_not_wait_for_a_publication(bench: Bench) -> None:
    producer = bench.producer(wait="published", publish_timeout=600)

    result = producer.send(bench.topic, value=b"v", execute=lambda _: TransactionState.ROLLBACK)

    assert result.state is TransactionState.ROLLBACK


def test_a_commit_that_came_too_late_is_told_who_waits_for_its_publication(bench: Bench) -> None:
    bench.coordinator(transaction_timeout=600)
    producer = bench.producer(wait="published", publish_timeout=60)

    def overtaken(tx: Transaction) -> TransactionState:
        (half,) = bench.messages(bench.topics.half)
        place = (half.partition(), (half.offset(),))
        op = Op(tx.transaction_id, Verdict.ROLLBACK, Author.CHECK, "orders", *place, 1)
        bench.write(bench.topics.op, half.partition(), None, encode_op(op))
        return TransactionState.COMMIT

    with pytest.raises(TransactionRefusedError, match="settled as ROLLBACK"):
        producer.send(bench.topic, value=b"v", execute=overtaken)

    assert bench.visible() == []


def test_wait_sent_tells_a_lost_decision_in_the_statistics_and_a_check_settles_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = bench.coordinator()
    producer = bench.producer(check=lambda _: TransactionState.COMMIT, wait="sent")
    sends = producer._store._sends  # type: ignore[attr-defined] # the store is Kafka's
    try_post, lost = sends.try_post, []

    def lose(topic: str, partition: int, value: bytes, report: Any) -> bool:
        if lost:
            return bool(try_post(topic, partition, value, report))
        lost.append(value)
        # Reports come from another thread.
        threading.Thread(target=report, args=(KafkaError(KafkaError._MSG_TIMED_OUT), None)).start()
        return True

    with producer.transaction(bench.topic, value=b"v"):
        monkeypatch.setattr(sends, "try_post", lose)
    wait_until(lambda: producer.statistics().lost_decisions == 1)
    bench.settled(coordinator, committed=1)

    assert len(lost) == 1
    assert producer.statistics().in_flight == 0
    assert bench.visible() == [(None, b"v")]


def test_wait_sent_returns_before_the_decision_is_stored(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, producer = bench.coordinator(), bench.producer(wait="sent")
    sends = producer._store._sends  # type: ignore[attr-defined] # the store is Kafka's
    try_post, held = sends.try_post, []

    def hold(*arguments: Any) -> bool:
        held.append(arguments)
        return True

    with producer.transaction(bench.topic, value=b"v"):
        monkeypatch.setattr(sends, "try_post", hold)
    in_flight = producer.statistics().in_flight
    monkeypatch.undo()
    for arguments in held:
        assert try_post(*arguments)
    bench.settled(coordinator, committed=1)

    assert (len(held), in_flight) == (1, 1)
    wait_until(lambda: producer.statistics().in_flight == 0)
