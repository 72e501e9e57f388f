"""Fixtures of the telemetry tests: no broker is needed for any of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.telemetry.consumer import ConsumerTelemetry
from telemetry_tools import Recorded


@pytest.fixture
def recorded() -> Recorded:
    """Providers that keep all spans and metrics."""
    return Recorded()


@pytest.fixture
def consumer(recorded: Recorded) -> Iterator[ConsumerTelemetry]:
    """The telemetry of a consumer of group `billing`."""
    telemetry = ConsumerTelemetry(recorded.telemetry(), "billing")
    yield telemetry
    telemetry.close()
