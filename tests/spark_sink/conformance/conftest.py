"""Fixtures of the sinks' conformance suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tenacity
from sinks_under_test import SINKS, SinkUnderTest

from penstock.spark_sink.sinks.sql import sink as sql_sink


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_sink, "_WAIT", tenacity.wait_none())


@pytest.fixture
def new_sink(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], SinkUnderTest]:
    """Return a function that makes a sink with an empty target, by its name in `SINKS`."""

    def make(name: str) -> SinkUnderTest:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return SINKS[name](request.getfixturevalue, folder)

    return make
