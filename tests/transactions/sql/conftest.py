"""Fixtures of the SQL store's tests: a store in each kind of database, with one shard or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from conformance.store_cases import SqlBench

from databases import TestDatabase
from penstock.devbroker import DevBroker


@pytest.fixture
def sql_bench(broker: DevBroker, new_topic: Callable[..., str], database: TestDatabase) -> Iterator[SqlBench]:
    """A SQL store of this test's own, in each kind of database; all on it is stopped at its end."""
    made = SqlBench(broker.bootstrap_servers, new_topic(), database)
    yield made
    made.close()
