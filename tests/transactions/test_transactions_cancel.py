"""A scheduled message that its producer, or an operator, takes back, on a store in Kafka."""

from __future__ import annotations

import time

import pytest
from transaction_tools import Bench

from penstock.errors import DecisionNotStoredError, TransactionRefusedError
from penstock.transactions.stores.kafka.administration import KafkaAdministration
from penstock.transactions.wire.ops import Verdict
from waiting import wait_until

FAR_S = 4e9


def test_a_waiter_for_the_publication_of_a_cancelled_message_is_notified(bench: Bench) -> None:
    bench.coordinator(transaction_timeout=600)
    producer = bench.producer(publish_timeout=120.0)
    future = producer.submit(bench.topic, value=b"later", deliver_at=FAR_S, wait="published")
    with KafkaAdministration(bench.servers, bench.topics.prefix) as store:
        wait_until(lambda: [transaction for transaction in store.pending() if transaction.decided is not None])

        assert store.decide(future.transaction_id, Verdict.ROLLBACK, "me", timeout_s=30.0) == ""

    with pytest.raises(TransactionRefusedError, match="settled as ROLLBACK"):
        future.result(60)


def test_what_was_cancelled_in_time_stays_so_though_the_coordinator_starts_only_when_it_is_due(bench: Bench) -> None:
    producer = bench.producer()
    # A slow machine takes longer until it is cancelled.
    for delay_s in (5, 20, 80):
        due, values = time.time() + delay_s, (b"cancelled %d" % delay_s, b"published %d" % delay_s)
        cancelled, _ = (producer.send(bench.topic, key=b"k", value=value, deliver_at=due) for value in values)
        with pytest.raises((DecisionNotStoredError, TransactionRefusedError)) as caught:
            producer.cancel(cancelled.transaction_id, timeout=0.1)
        if time.time() < due:
            break
    assert "no coordinator has settled it" in str(caught.value)
    wait_until(lambda: time.time() > due, 120)
    bench.settled(bench.coordinator(transaction_timeout=600), rolled_back=1)

    seen = [value for _, value in bench.visible()]
    assert (values[0] in seen, values[1] in seen) == (False, True)
