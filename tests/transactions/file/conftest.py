"""Fixtures of the file store's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conformance.store_cases import FileBench

from penstock.devbroker import DevBroker


@pytest.fixture
def bench(broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path) -> Iterator[FileBench]:
    """A file store of this test's own."""
    made = FileBench(broker.bootstrap_servers, new_topic(partitions=1), tmp_path / "store")
    yield made
    made.close()
