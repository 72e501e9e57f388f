"""Fixtures of the transaction tests: one store per test, with short times, and readers of visible messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transaction_tools import Bench

from databases import Connect, TestDatabase, connect_by, driver_connect, new_database
from kafka_proxy import KafkaProxy
from penstock.devbroker import DevBroker


@pytest.fixture
def bench(broker: DevBroker, new_topic: Callable[..., str]) -> Iterator[Bench]:
    """Producers, coordinators and readers on a store of this test's own; all are stopped at its end."""
    made = Bench(broker.bootstrap_servers, new_topic(partitions=3))
    yield made
    made.close()


@pytest.fixture
def proxy(broker: DevBroker) -> Iterator[KafkaProxy]:
    """A proxy to the broker that loses requests and answers; clients with another address connect directly."""
    with KafkaProxy(broker.bootstrap_servers) as made:
        yield made


@pytest.fixture
def logs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing deleted from logs that a slow test has yet to read."""
    monkeypatch.setattr("penstock.transactions.stores.kafka.coordinator.log_upkeep.UPKEEP_S", 600.0)


@pytest.fixture(params=["sqlite", "postgresql", pytest.param("mariadb", marks=pytest.mark.thorough)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> TestDatabase:
    """A database of each kind that a user's transactions may be in."""
    if request.param == "sqlite":
        return TestDatabase("sqlite", f"sqlite:///{tmp_path / 'test.db'}")
    return new_database(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture(params=["driver", "connection", "session"])
def connect(request: pytest.FixtureRequest, database: TestDatabase) -> Connect:
    """What opens a connection of each kind to a database that the test's module has prepared."""
    request.module.prepare(database)
    return connect_by(request.param, database)


@pytest.fixture
def simple(request: pytest.FixtureRequest, database: TestDatabase) -> Connect:
    """What opens the driver's connection to such a database."""
    request.module.prepare(database)
    return driver_connect(database)
