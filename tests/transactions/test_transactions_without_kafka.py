"""Senders on stores outside Kafka while no broker answers: they start, send and decide without waiting for Kafka."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from conformance.store_cases import FileBench, SqlBench, StoreBench, bench_of, settled

from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError, TopicNotFoundError
from penstock.transactions import TransactionalProducer
from waiting import wait_until

_NOWHERE = "127.0.0.1:9"


@pytest.fixture(params=["file", "sqlite"])
def away(request: pytest.FixtureRequest, new_topic: Callable[..., str], tmp_path: Path) -> Iterator[StoreBench]:
    """A store whose Kafka does not answer."""
    made = bench_of(request.param, _NOWHERE, new_topic(), tmp_path)
    yield made
    made.close()


def test_a_producer_starts_stores_and_decides_while_kafka_is_away(away: StoreBench, broker: DevBroker) -> None:
    topic = away.topic

    with TransactionalProducer("orders", store=away.make_store()) as producer:
        producer.send(topic, key=b"k", value=b"first")
        with producer.transaction(topic, key=b"k", value=b"second", partition=0):
            pass
        asyncio.run(producer.send_async(topic, key=b"k", value=b"from a loop"))  # type: ignore[arg-type] # it is a coroutine
        # What is known without Kafka is refused as ever.
        with pytest.raises(ConfigurationError, match="belongs to the store"):
            producer.send(away.discarded, value=b"v")

    away.servers = broker.bootstrap_servers
    settled(away.coordinator(), committed=3)
    assert away.seen() == [b"first", b"second", b"from a loop"]


def test_an_outbox_stores_in_the_users_transaction_while_kafka_is_away(tmp_path: Path) -> None:
    bench = bench_of("sqlite", _NOWHERE, "orders", tmp_path)
    assert isinstance(bench, SqlBench)
    store = bench.sql_store

    with closing(sqlite3.connect(bench.database.url.removeprefix("sqlite:///"))) as connection:
        store.outbox(connection).send("orders", key="k", value="v")
        connection.commit()

    assert bench.database.rows("SELECT topics FROM penstock_tx") == [("orders",)]
    bench.close()


def test_targets_are_looked_up_again_once_kafka_answers(
    broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic(partitions=2)
    bench = FileBench(broker.bootstrap_servers, topic, tmp_path)
    # As if no broker had answered in time.
    monkeypatch.setattr("penstock.transactions.stores.target_topics._LOOKUP_BUDGET_S", 0.0)
    bench.store.require_target("there-is-none", None)

    def is_refused(name: str, partition: int | None, error: type[Exception]) -> bool:
        try:
            bench.store.require_target(name, partition)
        except error:
            return True
        return False

    monkeypatch.undo()
    wait_until(lambda: is_refused("there-is-none", None, TopicNotFoundError))
    wait_until(lambda: is_refused(topic, 2, ConfigurationError))
    bench.store.require_target(topic, 1)
    bench.close()
