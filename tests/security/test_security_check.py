"""`penstock check` prints the least rights of an app: with them, and no others, it starts and works."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import roles
from rights_table import DOCUMENT, documented, filled_in
from world import STEP_S, World

import penstock
from canary import PASSWORD
from commands import Outcome
from penstock.cli.needs import commands, needs_of_app
from penstock.fleet.commands.command import Command
from penstock.fleet.commands.sender import CommandSender
from penstock.spark_sink import DeadLetters, KafkaSink, SqlSink
from rights import Right, give
from waiting import wait_until

TABLE = documented(DOCUMENT.read_text())
NAMES = {"topic": "orders", "app": "shop", "target": "paid", "name": "copy", "ledger": "ledger", "prefix": "penstock"}


def given(lines: Iterable[str], user: str) -> list[Right]:
    """Return the rights that lines of `kafka-acls` give to a user."""
    found = []
    for line in lines:
        words = shlex.split(line)
        options = list(itertools.pairwise(words))
        assert ("--allow-principal", f"User:{user}") in options
        named = [value for name, value in options if name == "--operation"]
        operations = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", value).upper() for value in named]
        is_prefix = ("--resource-pattern-type", "prefixed") in options
        for option in ("--topic", "--group", "--transactional-id"):
            kind = option.strip("-").replace("-", "_")
            names = [value for name, value in options if name == option]
            found += [Right(kind, name, operation, is_prefix) for name in names for operation in operations]
    return found


def of_table(*parts: str, made: Sequence[str] = ()) -> set[Right]:
    """Return the required permissions of parts in the table, and Create for the topics that these make."""
    rights = {filled_in(one, NAMES) for part in parts for one in TABLE[part].needed}
    created = {filled_in(one, NAMES) for part in parts for one in TABLE[part].optional if one.operation == "CREATE"}
    return rights | {one for one in created if any(one.name == name for name in made)}


def least(app: penstock.App, there: Sequence[str] = ()) -> set[Right]:
    return set(given(commands(needs_of_app(app, there).rights, "User:shop", "a:1"), "shop"))


def check(world: World, monkeypatch: pytest.MonkeyPatch, app: penstock.App) -> Outcome:
    module = ModuleType("checked_shop")
    module.app = app  # type: ignore[attr-defined] # a module takes any
    monkeypatch.setitem(sys.modules, "checked_shop", module)
    return world.command("check", "checked_shop:app", "--json")


def test_an_app_starts_and_works_with_the_rights_that_check_printed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles.make_topics_of_publisher(world)
    reports = penstock.ReportSettings(topic=f"{world.names['topic']}-reports")
    command_settings = penstock.CommandSettings(world.names["commands"], world.names["audit"])
    reached = {"bootstrap_servers": world.servers, "config": world.config}
    app = penstock.App(world.names["app"], **reached, exactly_once=True, report=reports, commands=command_settings)

    topic, target, once = world.names["topic"], world.names["target"], penstock.retry(attempts=1)

    @app.handler(topic, to=target, retry=once, retry_delays=[0.1], on_failure="dead_letter")
    def copy(message: penstock.Message) -> bytes | None:
        if message.value == world.sent[0]:
            raise ValueError("no good")
        return message.value

    before = check(world, monkeypatch, app)
    found = json.loads(before.out)
    give(world.broker, world.user, given(found["commands"], world.user.name))
    allowed = check(world, monkeypatch, app)
    world.write()
    world.write()
    pause = Command("pause", app.name, None, {"topic": topic}, "a test", int(time.time() * 1000))
    with app.start() as running:
        wait_until(lambda: running._listener is not None and running._listener.is_listening.is_set(), STEP_S)
        [answer] = CommandSender(world.servers, world.broker.admin_config, command_settings).ask(pause, timeout=STEP_S)
        running.resume(topic)
        wait_until(lambda: world.arrived(target) == world.sent[1:], STEP_S, interval=0.2)
        wait_until(lambda: world.arrived(f"dlq.{topic}") == world.sent[:1], STEP_S, interval=0.2)
        wait_until(lambda: world.arrived(reports.topic), STEP_S, interval=0.2)
    after = check(world, monkeypatch, app)

    assert (before.code, found["ok"]) == (1, False)
    assert f"User:{world.user.name} lacks the permission Read on group {world.names['app']}" in before.err
    assert "can grant it with the commands above" in before.err
    assert (allowed.code, after.code) == (0, 0), allowed.err + after.err
    assert answer.outcome.value == "done"
    states = Counter(entry["state"] for entry in json.loads(after.out)["rights"])
    assert states == {"ok": 9, "unknown": 1}  # that on transactional ids
    assert {entry["partitions"] for entry in json.loads(after.out)["topics"]} == {1, 2}
    assert PASSWORD not in before.out + allowed.out + after.out
    assert {"name": "config['sasl.password']", "value": "***", "origin": "the code"} in found["settings"]


@pytest.mark.parametrize(
    ("part", "options", "handler"),
    [
        ("app", {}, {}),
        ("app that publishes", {}, {"to": "paid"}),
        ("app that publishes exactly once", {"exactly_once": True}, {"to": "paid"}),
    ],
)
def test_the_rights_of_an_app_are_those_of_the_table(part: str, options: Any, handler: Any) -> None:
    app = penstock.App("shop", bootstrap_servers="a:1", **options)
    app.handler("orders", **handler)(lambda message: message.value)

    assert least(app) == of_table(part)


def test_the_rights_of_sinks_are_those_of_the_table_and_of_the_source() -> None:
    app = penstock.App("shop", bootstrap_servers="a:1")
    app.handler("orders", to="paid", on_failure="dead_letter")(lambda message: message.value)
    sink = app.handler_sink(parallelism=1, name="copy", ledger_topic="ledger")
    app.sink("orders", sink=sink, checkpoint_location="/tmp/none")(lambda messages: messages)  # noqa: S108 - not used

    wanted = of_table(
        "source for Spark", "HandlerSink that publishes", "HandlerSink with dead letters", made=["ledger", "dlq.orders"]
    )
    assert least(app) == wanted
    assert least(app, ["ledger", "dlq.orders"]) == {one for one in wanted if one.operation != "CREATE"}


def test_the_rights_of_sinks_into_kafka_and_sql_are_those_of_the_table() -> None:
    app = penstock.App("shop", bootstrap_servers="a:1")
    kafka = KafkaSink("a:1", "paid", name="copy", ledger_topic="ledger")
    sql = SqlSink("sqlite:///none.db", "orders", ["text"], dead_letters=DeadLetters("a:1"))
    app.sink("orders", sink=kafka, name="one")(lambda messages: messages)
    app.sink("orders", sink=sql, name="two")(lambda messages: messages)

    parts = "source for Spark", "KafkaSink", "SqlSink with dead letters"
    assert least(app) == of_table(*parts, made=["ledger", "dlq.orders"])


def test_the_rights_of_a_coordinator_are_those_of_the_table() -> None:
    app = penstock.App("shop", bootstrap_servers="a:1", coordinator=True)
    needs = needs_of_app(app, [f"penstock.{one}" for one in ("half", "op", "done", "check", "discarded", "status")])
    targets = {one for one in of_table("coordinator") if one.name == "orders"}

    assert set(given(commands(needs.rights, "User:shop", "a:1"), "shop")) == of_table("coordinator") - targets
    assert "coordinator: grant Write on each topic that its producers send to" in needs.notes


def test_the_rights_of_a_member_that_reports_and_hears_commands_are_those_of_the_table() -> None:
    app = penstock.App("shop", bootstrap_servers="a:1", commands=True, report=True)
    names = {"penstock.commands": "<commands>", "penstock.audit": "<audit>"}
    reports = {Right("topic", "penstock.reports", operation) for operation in ("WRITE", "CREATE")}

    table = TABLE["member that hears commands"]
    optional = {one for one in table.optional if one.operation == "CREATE"}
    assert reports <= least(app)
    assert {replace(one, name=names[one.name]) for one in least(app) - reports} == table.needed | optional
    assert needs_of_app(app, []).made == {
        "penstock.reports": "reports",
        "penstock.commands": "commands",
        "penstock.audit": "the audit",
    }


def test_what_only_a_run_can_tell_is_said() -> None:
    app = penstock.App("shop", bootstrap_servers="a:1")
    app.handler(pattern="orders.*")(lambda _message: None)
    app.sink("orders", name="by-hand", checkpoint_location="none")(lambda _batch, _number: None)
    app.sink("orders", sink=KafkaSink("b:1", "paid", name="copy"), name="far")(lambda messages: messages)

    notes = " ".join(needs_of_app(app, ["orders.eu"]).notes)

    assert "topics that match them later" in notes
    assert "sink by-hand: the Kafka permissions of its function are unknown" in notes
    assert "sink far writes to the brokers at b:1: grant its permissions on them" in notes
    assert Right("topic", "orders.eu", "READ") in least(app, ["orders.eu"])
