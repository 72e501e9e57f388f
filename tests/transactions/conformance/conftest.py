"""The stores that the conformance suite runs against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conformance.store_cases import StoreBench, bench_of

if TYPE_CHECKING:
    from penstock.devbroker import DevBroker


LATER = [pytest.param(kind, marks=pytest.mark.thorough) for kind in ("postgresql", "mariadb")]


@pytest.fixture(params=["kafka", "file", "sqlite", *LATER])
def store_bench(
    request: pytest.FixtureRequest, broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path
) -> Iterator[StoreBench]:
    """One store of each kind, of this test's own; all on it is stopped at its end."""
    url = partial(request.getfixturevalue, f"{request.param}_url")
    made = bench_of(request.param, broker.bootstrap_servers, new_topic(partitions=1), tmp_path, url)
    yield made
    made.close()
