"""The file store below the producer that users meet: in one process, with its coordinator."""

from __future__ import annotations

from collections import Counter

import pytest
from conformance.store_cases import FileBench, settled

from penstock.transactions import HalfMessage, Transaction, TransactionalProducer, TransactionState
from penstock.transactions.stores.file import FileStore


def unknown(_: Transaction) -> TransactionState:
    return TransactionState.UNKNOWN


def test_a_producer_on_a_file_store_sends_checks_and_waits_until_all_is_visible(bench: FileBench) -> None:
    coordinator = bench.coordinator()
    store = bench.store
    assert isinstance(store, FileStore)

    def check(half: HalfMessage) -> TransactionState:
        return TransactionState.ROLLBACK if half.value in (b"denied", b"raised") else TransactionState.COMMIT

    with TransactionalProducer("orders", store=store, check=check) as producer:
        with producer.transaction(bench.topic, key=b"k", value=b"entered"):
            assert bench.seen() == []
        with pytest.raises(RuntimeError, match="no stock"), producer.transaction(bench.topic, value=b"raised"):
            raise RuntimeError("no stock")
        producer.send(bench.topic, value=b"asked", execute=unknown)
        producer.send(bench.topic, value=b"denied", execute=unknown)
        result = producer.send(bench.topic, value=b"seen", wait="published")
        assert result.state is TransactionState.COMMIT
        assert b"seen" in bench.seen()
        statistics = settled(coordinator, committed=3, rolled_back=2)

    assert (statistics.committed, statistics.rolled_back, statistics.refused) == (3, 2, 0)
    assert Counter(bench.seen()) == Counter([b"entered", b"asked", b"seen"])


def test_thousands_are_in_flight_from_one_thread(bench: FileBench) -> None:
    coordinator = bench.coordinator()
    store = bench.store
    assert isinstance(store, FileStore)

    with TransactionalProducer("orders", store=store) as producer:
        futures = [producer.submit(bench.topic, value=b"%d" % number) for number in range(5_000)]
        for future in futures:
            assert future.result(60).state is TransactionState.COMMIT
        settled(coordinator, committed=5_000)

    assert bench.seen() == [b"%d" % number for number in range(5_000)]
