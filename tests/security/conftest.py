"""Fixtures of the tests that run each part with the rights of docs/security.md."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from world import World

from commands import Command, commands
from penstock.devbroker import DevBroker, User


@pytest.fixture
def penstock_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return commands(monkeypatch, capsys)


@pytest.fixture
def world(secured: DevBroker, new_user: Callable[..., User], tmp_path: Path, penstock_command: Command) -> World:
    user = new_user()
    placeholders = ("app", "topic", "group", "prefix", "target", "ledger", "name", "reports", "commands", "audit")
    names = {name: f"{user.name}-{name}" for name in placeholders}
    return World(secured, user, names, tmp_path, penstock_command)


@pytest.fixture(autouse=True)
def all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Let penstock say all that it ever says; that neither passwords nor payloads are in it is looked at everywhere."""
    caplog.set_level(logging.DEBUG, "penstock")
