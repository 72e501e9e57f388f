"""The main paths of a member that hears commands, and of who commands it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from world import STEP_S, World

from penstock import clients
from penstock.clients.topics import ensure_topics
from penstock.fleet.commands.audit import AuditRecord, Kind, audit_spec, commands_spec
from penstock.fleet.commands.command import Command
from penstock.fleet.commands.listener import CommandListener
from penstock.fleet.commands.sender import CommandSender
from penstock.fleet_member import CommandSettings, Member, Outcome
from waiting import wait_until


def settings_of(world: World) -> CommandSettings:
    return CommandSettings(world.names["commands"], world.names["audit"])


def make_topics(world: World) -> None:
    settings = settings_of(world)
    specs = [commands_spec(settings.topic), audit_spec(settings.audit_topic)]
    ensure_topics(clients.admin(world.servers, world.broker.admin_config), specs)


@contextmanager
def listening(world: World, done: list[str]) -> Iterator[CommandListener]:
    doing = Member(lambda topic, _: done.append(topic), lambda *_: None, lambda *_: "", dict)
    made = CommandListener(
        "shop",
        "one",
        doing,
        bootstrap_servers=world.servers,
        config=world.config,
        settings=settings_of(world),
    )
    made.start()
    try:
        yield made
    finally:
        made.stop()


def ask(world: World, timeout: float) -> bool:
    pause = Command("pause", "shop", None, {"topic": "orders"}, "a test", int(time.time() * 1000))
    asked = AuditRecord(Kind.ASKED, pause.id, pause.name, pause.parameters, pause.by, "here", pause.asked_ms)
    sender = CommandSender(world.servers, world.config, settings_of(world))
    sender.append(asked, pause.key)
    return [one.outcome for one in sender.ask(pause, ["one"], timeout)] == [Outcome.DONE]


def hear_commands(world: World) -> None:
    """Have a member pause a topic and answer."""
    done: list[str] = []
    administrator = world.as_administrator()
    with listening(world, done) as member:
        assert member.is_listening.wait(STEP_S)
        world.trial.rounds(lambda: wait_until(lambda: ask(administrator, 10.0), STEP_S))
    assert set(done) == {"orders"}


def command_members(world: World) -> None:
    """Command a member, and hear its answer."""
    with listening(world.as_administrator(), []) as member:
        assert member.is_listening.wait(STEP_S)
        assert world.trial.attempt(lambda: ask(world, STEP_S))
