"""What a send waits for: handed over, stored, or visible."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from confluent_kafka import KafkaError
from transaction_tools import Bench

from penstock.transactions import TransactionState
from waiting import wait_until


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
