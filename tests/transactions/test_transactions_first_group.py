"""The backlog at a coordinator's start may be more than the Kafka client's buffer takes at once."""

from __future__ import annotations

from collections import Counter

import pytest
from transaction_tools import Bench

from penstock.outgoing import Outgoing
from penstock.transactions import TransactionalProducer
from penstock.transactions.publishing.batch_limit import BatchLimit
from penstock.transactions.publishing.engine import Engine

#: A client's buffer of a mebibyte, the least that still takes what these tests send as one transaction.
SMALL_BUFFER = {"queue.buffering.max.kbytes": 1024}


def commit_several(producer: TransactionalProducer, topic: str, name: bytes, messages: int, size_bytes: int) -> str:
    """Commit a transaction of so many messages of this size; return its id."""
    several = [Outgoing(topic, key=name, value=bytes(size_bytes)) for _ in range(messages)]
    with producer.transaction_of(several) as transaction:
        return transaction.transaction_id


def test_decided_transactions_that_do_not_fit_the_clients_buffer_together_are_published_in_smaller_groups(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = bench.producer()
    for number in range(12):
        commit_several(producer, bench.topic, b"%d" % number, 10, 20_000)
    refused: list[tuple[int, int]] = []
    original = BatchLimit.refused

    def noted(self: BatchLimit, decisions: int, size_bytes: int) -> bool:
        refused.append((decisions, size_bytes))
        return original(self, decisions, size_bytes)

    is_ready = Engine.is_ready

    def is_ready_with_all(self: Engine, now: float) -> bool:
        # On a busy machine the backlog is read in parts, and each part would fit.
        ready = sum(backlog.queue.ready for backlog in self._owned.values())
        return is_ready(self, now) and (bool(refused) or ready == 12)

    monkeypatch.setattr(BatchLimit, "refused", noted)
    monkeypatch.setattr(Engine, "is_ready", is_ready_with_all)

    coordinator = bench.coordinator(config=SMALL_BUFFER)
    bench.settled(coordinator, timeout=90, committed=12)

    assert Counter(key for key, _ in bench.visible()) == {b"%d" % number: 10 for number in range(12)}
    # It happened: 2.4 MB of them were tried as one group; and each refusal halved the next.
    assert refused
    assert refused[0][1] > 1 << 20
    assert len(refused) <= 4


@pytest.mark.thorough
def test_a_transaction_larger_than_the_clients_buffer_is_reported_and_held_and_delays_no_others(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    producer = bench.producer()
    huge = commit_several(producer, bench.topic, b"huge", 100, 20_000)
    for number in range(20):
        producer.send(bench.topic, key=b"%d" % number, value=b"v")

    coordinator = bench.coordinator(config=SMALL_BUFFER)
    waiting = bench.counted(coordinator, timeout=90, committed=20, held=1)

    assert (waiting.committed, waiting.pending) == (20, 1)
    assert {key for key, _ in bench.visible()} == {b"%d" % number for number in range(20)}
    assert any(huge in line and "queue.buffering.max.kbytes" in line for line in caplog.messages)
    for number in range(20, 40):
        producer.send(bench.topic, key=b"%d" % number, value=b"v")
    bench.counted(coordinator, committed=40)
    coordinator.stop()
    # With room for it, it is published like any other.
    bench.settled(bench.coordinator(), timeout=60)
    assert Counter(key for key, _ in bench.visible())[b"huge"] == 100
