"""Fixtures of the SQL store's tests: a store in each kind of database, with one shard or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conformance.store_cases import SqlBench

from databases import TestDatabase, new_database
from penstock.devbroker import DevBroker

LATER = [pytest.param(kind, marks=pytest.mark.thorough) for kind in ("sqlite", "mariadb")]


@pytest.fixture(params=["postgresql", *LATER])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> TestDatabase:
    """A database for each kind; the suite of all stores has SQLite in every run."""
    if request.param == "sqlite":
        return TestDatabase("sqlite", f"sqlite:///{tmp_path / 'test.db'}")
    return new_database(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def sql_bench(broker: DevBroker, new_topic: Callable[..., str], database: TestDatabase) -> Iterator[SqlBench]:
    """A SQL store of this test's own, in each kind of database; all on it is stopped at its end."""
    made = SqlBench(broker.bootstrap_servers, new_topic(), database)
    yield made
    made.close()
