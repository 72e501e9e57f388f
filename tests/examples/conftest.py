"""Fixture of the examples' tests: programs against the run's broker."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_programs import Examples

from penstock.devbroker import DevBroker


@pytest.fixture
def examples(broker: DevBroker, tmp_path: Path) -> Examples:
    """Run the programs of `examples` against the broker of this run."""
    return Examples(broker.bootstrap_servers, tmp_path)
