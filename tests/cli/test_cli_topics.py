"""`penstock topics create`: the topics of an app are there before it starts, as it would have made them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

import penstock
from commands import Command
from kafka_tools import produce
from penstock import clients
from penstock.clients.topics import TopicSpec, ensure_topics, partition_counts, topic_setting
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


Laid = Callable[[str, str], str]


@pytest.fixture
def laid(broker: DevBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Laid:
    """Return a function that writes a module with an app of a name, which handles a topic; its `MODULE:APP`."""
    clean_settings(monkeypatch, tmp_path)

    def lay(name: str, topic: str) -> str:
        module = f"app_{name.replace('-', '_').replace('.', '_')}"
        text = APP.format(name=name, servers=broker.bootstrap_servers, topic=topic)
        (tmp_path / f"{module}.py").write_text(text)
        return f"{module}:app"

    return lay


def test_what_an_app_needs_is_shown_made_once_and_left_alone_after(
    penstock_command: Command, broker: DevBroker, new_topic: Callable[..., str], laid: Laid
) -> None:
    servers, topic = broker.bootstrap_servers, new_topic(3)
    name = f"shop-{topic}"
    target = laid(name, topic)
    admin = clients.admin(servers, {})

    def create(*options: str) -> dict[str, str]:
        outcome = penstock_command("topics", "create", target, "--json", *options)
        assert outcome.code == 0, outcome.err
        found: Any = json.loads(outcome.out)
        return {row["topic"]: row["state"] for row in found["topics"]}

    own = {f"{name}.{part}" for part in ("half", "op", "done", "check", "discarded", "status")}
    own |= {f"{name}.reports", f"{name}.commands", f"{name}.audit", f"dlq.{topic}"}
    shown = create("--dry-run")
    before = partition_counts(admin, servers)
    made = create()
    results = create("--all", "--partitions", "2")
    again = create("--all")
    wait_until(lambda: own <= partition_counts(admin, servers).keys())
    counts = partition_counts(admin, servers)

    retries = {found for found in shown if found.startswith("retry.")}
    assert {found for found, state in shown.items() if state == "missing"} == own | retries
    assert not (own | retries) & before.keys()
    assert {found for found, state in made.items() if state == "created"} == own | retries
    assert made[f"{name}.paid"] == "missing: see --all"
    assert {found for found, state in results.items() if state == "created"} == {f"{name}.paid"}
    assert set(again.values()) == {"there"}
    assert (counts[f"dlq.{topic}"], counts[f"{name}.paid"], counts[f"{name}.half"]) == (3, 2, 2)
    assert "compact" in topic_setting(admin, [f"{name}.reports"], "cleanup.policy")[f"{name}.reports"]
    assert len(retries) == 1


def test_an_app_that_is_refused_its_topics_starts_once_they_were_made(
    penstock_command: Command, broker: DevBroker, new_name: Callable[[str], str], laid: Laid
) -> None:
    servers, name = broker.bootstrap_servers, new_name("bare")
    target = laid(name, f"{name}.orders")

    refused = penstock_command("check", target)
    made = penstock_command("topics", "create", target, "--all")
    handled: list[penstock.Message] = []
    app = penstock.App(name, bootstrap_servers=servers)
    app.handler(f"{name}.orders")(handled.append)
    with app.start():
        produce(servers, f"{name}.orders", [(b"k", b"v")])
        wait_until(lambda: handled)

    assert (refused.code, made.code) == (1, 0), made.err
    assert "penstock topics create MODULE:APP --all" in refused.err
    wait_until(lambda: penstock_command("check", target).code == 0)


def test_a_dead_letter_topic_whose_name_collides_is_wrong_use(
    penstock_command: Command, broker: DevBroker, new_topic: Callable[..., str], laid: Laid, admin: AdminClient
) -> None:
    topic = new_topic()
    ensure_topics(admin, broker.bootstrap_servers, [TopicSpec(f"dlq_{topic}", 1)])
    target = laid(f"collides-{topic}", topic)

    outcome = penstock_command("topics", "create", target)

    assert outcome.code == 2, outcome
    assert f"does not take the name of topic 'dlq.{topic}'" in outcome.err
    assert "another dead_letter_topic" in outcome.err
