"""Apps that publish what their handlers return, on a broker in memory."""

from __future__ import annotations

from penstock.testing import TestApp


def written(test: TestApp, topic: str = "out") -> list[tuple[bytes | None, bytes | None]]:
    return [(message.key, message.value) for message in test.published(topic)]


def in_flight(test: TestApp) -> int:
    return test.statistics().in_flight
