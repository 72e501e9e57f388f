"""The stores that the conformance suite runs against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conformance.sql_cases import SqlBench
from conformance.store_cases import FileBench, KafkaBench, StoreBench

from databases import TestDatabase, new_database
from penstock.devbroker import DevBroker


@pytest.fixture(params=["kafka", "file", "sqlite", "postgresql"])
def store_bench(
    request: pytest.FixtureRequest, broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path
) -> Iterator[StoreBench]:
    """One store of each kind, of this test's own; all on it is stopped at its end."""
    topic = new_topic(partitions=1)
    made: StoreBench
    if request.param == "file":
        made = FileBench(broker.bootstrap_servers, topic, tmp_path / "store")
    elif request.param == "sqlite":
        made = SqlBench(broker.bootstrap_servers, topic, TestDatabase("sqlite", f"sqlite:///{tmp_path / 'store.db'}"))
    elif request.param == "postgresql":
        made = SqlBench(broker.bootstrap_servers, topic, new_database(request.getfixturevalue("postgresql_url")))
    else:
        made = KafkaBench(broker.bootstrap_servers, topic)
    yield made
    made.close()
