"""A scheduled message that its producer, or an operator, takes back, on a store in Kafka."""

from __future__ import annotations

import time

import pytest
from transaction_tools import Bench

from commands import commands
from penstock.errors import ConfigurationError, DecisionNotStoredError, TransactionRefusedError
from penstock.transactions.operator.kafka_operator import Effect, KafkaAdministration
from penstock.transactions.wire.ops import Verdict
from waiting import wait_until

FAR_S = 4e9


def test_any_producer_of_the_group_cancels_and_the_result_is_told(bench: Bench) -> None:
    coordinator = bench.coordinator(transaction_timeout=600)
    sent = bench.producer().send(bench.topic, value=b"later", deliver_at=FAR_S)
    published = bench.producer().send(bench.topic, value=b"now", wait="published")
    wait_until(lambda: coordinator.statistics().delayed == 1)

    bench.producer().cancel(sent.transaction_id)

    with pytest.raises(TransactionRefusedError, match="published"):
        bench.producer().cancel(published.transaction_id)
    with pytest.raises(ConfigurationError, match="no transaction's id"):
        bench.producer().cancel("nonsense")
    statistics = bench.settled(coordinator, rolled_back=1, committed=1)
    assert (statistics.delayed, statistics.refused) == (0, 0)
    assert bench.visible() == [(None, b"now")]


def test_who_waits_for_the_publication_of_what_is_cancelled_is_told(bench: Bench) -> None:
    bench.coordinator(transaction_timeout=600)
    producer = bench.producer(publish_timeout=120.0)
    future = producer.submit(bench.topic, value=b"later", deliver_at=FAR_S, wait="published")
    with KafkaAdministration(bench.servers, bench.topics.prefix) as store:
        wait_until(lambda: [one for one in store.pending() if one.decided is not None])

        assert store.decide(future.transaction_id, Verdict.ROLLBACK, "me").effect is Effect.DONE

    with pytest.raises(TransactionRefusedError, match="settled as ROLLBACK"):
        future.result(60)


def test_what_was_cancelled_in_time_stays_so_though_the_coordinator_starts_only_when_it_is_due(bench: Bench) -> None:
    producer, due = bench.producer(), time.time() + 8
    cancelled = producer.send(bench.topic, key=b"k", value=b"cancelled", deliver_at=due)
    producer.send(bench.topic, key=b"k", value=b"published", deliver_at=due)

    with pytest.raises(DecisionNotStoredError, match="no coordinator has settled it"):
        producer.cancel(cancelled.transaction_id, timeout=0.1)
    assert time.time() < due
    wait_until(lambda: time.time() > due)
    bench.settled(bench.coordinator(transaction_timeout=600), rolled_back=1, committed=1)

    assert bench.visible() == [(b"k", b"published")]


def test_an_operator_rolls_back_what_is_not_due_and_is_refused_where_it_is_not_delayed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tx(*arguments: str) -> tuple[object, str]:
        outcome = commands(monkeypatch, capsys)(
            "tx", *arguments, "--bootstrap-servers", bench.servers, "--prefix", bench.topics.prefix
        )
        return outcome.code, outcome.out

    later = bench.producer().send(bench.topic, value=b"later", deliver_at=FAR_S).transaction_id
    at_once = bench.producer().send(bench.topic, value=b"now").transaction_id

    refused = tx("rollback", at_once)
    coordinator = bench.coordinator(transaction_timeout=600)
    done = tx("rollback", later, "--reason", "the customer called")

    assert refused[0] == 1
    assert "refused: COMMIT was decided before" in refused[1]
    assert done[0] == 0
    assert "rolled back" in done[1]
    bench.settled(coordinator, rolled_back=1, committed=1)
    assert bench.visible() == [(None, b"now")]
