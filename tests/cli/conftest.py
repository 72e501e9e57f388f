"""Fixtures of the command line's tests: a command run in this process, and a dead-letter topic."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
from confluent_kafka.admin import AdminClient

import penstock.kafka
from penstock.cli import main
from penstock.devbroker import DevBroker
from penstock.kafka import TopicSpec, ensure_topics, partition_counts
from waiting import wait_until


class Outcome(NamedTuple):
    code: object
    out: str
    err: str


@pytest.fixture
def penstock_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Return a function that runs `penstock ARGUMENTS...` in this process, on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("PENSTOCK_DEBUG", "0")
    monkeypatch.delenv("PENSTOCK_BOOTSTRAP_SERVERS", raising=False)

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        printed = capsys.readouterr()
        return Outcome(left.value.code, printed.out, printed.err)

    return call


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a broker one second to answer, not fifteen."""
    monkeypatch.setattr(penstock.kafka, "partition_counts", functools.partial(partition_counts, timeout_s=1))


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
