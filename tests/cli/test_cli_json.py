"""Every command that prints what it found prints it as JSON, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click
import pytest
import typer.main
from dead_letter_tools import put
from offsets_tools import commit

from commands import Command
from penstock.cli.frame import frame
from penstock.devbroker import DevBroker
from waiting import wait_until

#: Commands that run until they are stopped, and one that writes JSON anyway.
WITHOUT = {"run", "demo", "broker", "coordinator", "dashboard", "offsets export"}


def leaves(command: Any, name: str = "") -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for word, one in command.commands.items():
        full = f"{name} {word}".strip()
        found |= leaves(one, full) if hasattr(one, "commands") else {full: one}
    return found


def test_every_command_that_prints_has_the_option_json() -> None:
    commands = leaves(typer.main.get_command(frame()))

    assert {
        name for name, one in commands.items() if not any("--json" in param.opts for param in one.params)
    } == WITHOUT


@pytest.mark.thorough
def test_offsets_dead_letters_and_transactions_are_told_as_json(
    penstock_command: Command, broker: DevBroker, dead_letter_topic: Callable[..., tuple[str, str]]
) -> None:
    original, letters = dead_letter_topic()
    servers = ("--bootstrap-servers", broker.bootstrap_servers, "--json")
    for topic in (original, letters):
        put(broker.bootstrap_servers, topic, value=b"\x1b[31mvalue", headers=[("own", b"canary")])
    group = f"g-{original}"
    commit(broker.bootstrap_servers, group, original, 0, 1)

    def told(*arguments: str) -> Any:
        outcome = penstock_command(*arguments, *servers)
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    (row,) = told("offsets", "ls", group)["partitions"]
    assert (row["topic"], row["committed"], row["log_end"], row["lag"]) == (original, 1, 1, 0)
    assert told("offsets", "reset", group, "--to", "earliest", "--dry-run") == {
        "group": group,
        "changed": False,
        "partitions": [
            {"topic": original, "partition": 0, "committed": 1, "becomes": 0, "handled_again": 1, "skipped": 0}
            | {"done_above_before": 0, "done_above": 0}
        ],
    }
    (kind,) = told("dlq", "ls", letters)
    assert (kind["dead_letter_topic"], kind["count"]) == (letters, 1)
    (hidden,) = told("dlq", "show", letters)
    (shown,) = told("dlq", "show", letters, "--payload")
    assert (hidden["offset"], hidden["headers"], "value" in hidden) == (0, ["own"], False)
    assert (shown["value"], shown["header_values"]) == ("\\x1b[31mvalue", ["canary"])
    assert told("dlq", "replay", letters, "--to", original, "--dry-run")["sent"] == {original: 1}
    wait_until(lambda: "topics" in told("doctor"))
