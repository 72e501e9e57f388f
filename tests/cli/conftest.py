"""Fixtures of the command line's tests: a command run in this process, and a dead-letter topic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka.admin import AdminClient

from commands import Command, commands
from penstock.clients.topics import TopicSpec, ensure_topics, partition_counts
from penstock.devbroker import DevBroker
from waiting import wait_until


@pytest.fixture
def penstock_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `penstock ARGUMENTS...` in this process, on a wide terminal."""
    return commands(monkeypatch, capsys)


@pytest.fixture
def dead_letter_topic(
    broker: DevBroker, admin: AdminClient, new_topic: Callable[..., str]
) -> Callable[..., tuple[str, str]]:
    """Return a function that creates a topic and its dead-letter topic: `dead_letter_topic(name="dlq.{}")`."""

    def create(partitions: int = 1, name: str = "dlq.{}") -> tuple[str, str]:
        original = new_topic(partitions)
        letters = name.format(original)
        ensure_topics(admin, broker.bootstrap_servers, [TopicSpec(letters, partitions)])
        wait_until(lambda: letters in partition_counts(admin, broker.bootstrap_servers))
        return original, letters

    return create
