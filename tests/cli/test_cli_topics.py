"""`penstock topics create`: the topics of an app are there before it starts, as it would have made them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from commands import Command
from penstock.clients.topics import partition_counts, topic_settings
from penstock.devbroker import DevBroker
from settings_tools import clean_settings
from waiting import wait_until

APP = """
import penstock
app = penstock.App(
    {name!r}, bootstrap_servers={servers!r}, coordinator=True, prefix={name!r},
    report=penstock.ReportSettings({name!r} + ".reports"),
    commands=penstock.CommandSettings({name!r} + ".commands", {name!r} + ".audit"),
)

@app.handler({topic!r}, to={name!r} + ".paid", retry_delays=[0.1], on_failure="dead_letter")
def handle(message):
    return message.value
"""


def test_what_an_app_needs_is_shown_made_once_and_left_alone_after(  # noqa: PLR0917 - fixtures
    penstock_command: Command,
    broker: DevBroker,
    admin: AdminClient,
    new_topic: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers, topic = broker.bootstrap_servers, new_topic(3)
    name = f"shop-{topic}"
    clean_settings(monkeypatch, tmp_path)
    (tmp_path / "app_with_needs.py").write_text(APP.format(name=name, servers=servers, topic=topic))

    def create(*options: str) -> dict[str, str]:
        outcome = penstock_command("topics", "create", "app_with_needs:app", "--json", *options)
        assert outcome.code == 0, outcome.err
        found: Any = json.loads(outcome.out)
        return {row["topic"]: row["state"] for row in found["topics"]}

    own = {f"{name}.{part}" for part in ("half", "op", "done", "check", "discarded", "status")}
    own |= {f"{name}.reports", f"{name}.commands", f"{name}.audit", f"dlq.{topic}"}
    shown = create("--dry-run")
    before = partition_counts(admin)
    made = create()
    results = create("--all", "--partitions", "2")
    again = create("--all")
    wait_until(lambda: own <= partition_counts(admin).keys())
    counts = partition_counts(admin)

    retries = {found for found in shown if found.startswith("retry.")}
    assert {found for found, state in shown.items() if state == "missing"} == own | retries
    assert not (own | retries) & before.keys()
    assert {found for found, state in made.items() if state == "created"} == own | retries
    assert made[f"{name}.paid"] == "missing: see --all"
    assert {found for found, state in results.items() if state == "created"} == {f"{name}.paid"}
    assert set(again.values()) == {"there"}
    assert (counts[f"dlq.{topic}"], counts[f"{name}.paid"], counts[f"{name}.half"]) == (3, 2, 2)
    assert "compact" in topic_settings(admin, [f"{name}.reports"])[0][f"{name}.reports"]["cleanup.policy"]
    assert len(retries) == 1
