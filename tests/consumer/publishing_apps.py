"""Apps that publish what their handlers return, on a broker in memory."""

from __future__ import annotations

from typing import Any

import penstock
from penstock.testing import TestApp


def app_of(**options: Any) -> penstock.App:
    """An app that nobody's broker sees."""
    return penstock.App("app", bootstrap_servers="memory:0", **options)


def written(test: TestApp, topic: str = "out") -> list[tuple[bytes | None, bytes | None]]:
    return [(message.key, message.value) for message in test.published(topic)]


def in_flight(test: TestApp) -> int:
    return test.statistics().in_flight
