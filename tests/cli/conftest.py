"""Fixtures of the command line's tests: a command run in this process, and a dead-letter topic."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from commands import Command, commands
from penstock.devbroker import DevBroker


@pytest.fixture
def penstock_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `penstock ARGUMENTS...` in this process, on a wide terminal."""
    return commands(monkeypatch, capsys)


@pytest.fixture
def on_broker(penstock_command: Command, broker: DevBroker, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return the same function; commands reach the run's broker, which the environment names."""
    monkeypatch.setenv("PENSTOCK_BOOTSTRAP_SERVERS", broker.bootstrap_servers)
    return penstock_command


@pytest.fixture
def dead_letter_topic(broker: DevBroker, new_topic: Callable[..., str]) -> Callable[..., tuple[str, str]]:
    """Return a function that creates a topic and its dead-letter topic: `dead_letter_topic(partitions=1)`."""

    def create(partitions: int = 1) -> tuple[str, str]:
        original = new_topic(partitions)
        broker.create_topic(letters := f"dlq.{original}", partitions)
        return original, letters

    return create
