"""Members carry out commands of a topic, once, and answer in the audit: on a real broker."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from tenacity import wait_fixed

import penstock
from kafka_tools import produce
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError
from penstock.fleet.commands.audit import AuditRecord, audit_records
from penstock.fleet.commands.command import Command, encode_command
from penstock.fleet.commands.listener import CommandListener
from penstock.fleet.commands.sender import CommandSender, summary
from penstock.fleet.wire import SIGNATURE, signature
from penstock.fleet_member import CommandSettings, Member, Outcome
from raw_produce import produce_raw
from waiting import wait_until


@pytest.fixture
def settings(broker: DevBroker, topic_numbers: Iterator[int]) -> CommandSettings:
    number = next(topic_numbers)
    return CommandSettings(f"commands-{number}", f"audit-{number}")


def asked(broker: DevBroker, settings: CommandSettings, command: Command, **options: object) -> list[AuditRecord]:
    sender = CommandSender(broker.bootstrap_servers, {}, settings)
    return sender.ask(command, **{"timeout": 60.0, **options})  # type: ignore[arg-type] # the test's


def command(name: str, group: str, member: str | None = None, **fields: object) -> Command:
    return Command(name, group, member, fields, "a test", int(time.time() * 1000))


@contextmanager
def listening(
    servers: str, settings: CommandSettings, name: str = "one", give_up: Callable[..., str] = str, **options: Any
) -> Iterator[tuple[CommandListener, list[str]]]:
    """Hear commands as a member of `sms`; the block gets it, and the topics that were paused."""
    paused: list[str] = []
    doing = Member(lambda topic, _: paused.append(topic), lambda *_: None, give_up, dict)
    made = CommandListener("sms", name, doing, bootstrap_servers=servers, config={}, settings=settings, **options)
    made.start()
    try:
        assert made.is_listening.wait(60)
        yield made, paused
    finally:
        made.stop()


def test_a_message_that_is_parked_and_one_that_hangs_are_given_up_by_command_and_stacks_name_the_handler(
    broker: DevBroker, new_topic: Callable[..., str], settings: CommandSettings
) -> None:
    topic, hang = new_topic(), threading.Event()
    app = penstock.App(topic, bootstrap_servers=broker.bootstrap_servers, commands=settings, exactly_once=True)

    @app.handler(topic, retry=penstock.retry(attempts=99, wait=wait_fixed(600)))
    async def picky_handler(message: penstock.Message) -> None:
        if message.value == b"bad":
            raise ValueError("no good")
        if message.value == b"hangs":
            await asyncio.to_thread(hang.wait, 200)

    def give_up(offset: int) -> AuditRecord:
        named = command("give-up", topic, topic=topic, partition=0, offset=offset, member=listener._member)
        [answer] = asked(broker, settings, named)
        return answer

    with app.start() as running:
        listener: Any = running._listener
        assert listener.is_listening.wait(60)
        produce(broker.bootstrap_servers, topic, [(b"1", b"bad"), (b"1", b"next")])
        wait_until(lambda: [part.state for part in running.explain()] == ["parked"], 60)
        parked = give_up(0)
        wait_until(lambda: running.explain()[0].lag == 0 and running.explain()[0].watermark == 2, 60)
        again = give_up(0)
        produce(broker.bootstrap_servers, topic, [(b"1", b"hangs")])
        wait_until(lambda: running.explain()[0].state == "in handler", 60)
        [record] = asked(broker, settings, command("stacks", topic))
        hung = give_up(2)
        hang.set()

    for answer, offset in ((parked, 0), (hung, 2)):
        said = f"{topic}:0@{offset} was given up: dlq.{topic} has it, and its key goes on"
        assert (answer.outcome, answer.said) == (Outcome.DONE, said)
    assert (again.outcome, "nothing does" in again.said) == (Outcome.REFUSED, True)
    assert record.details is not None
    assert "picky_handler" in record.details
    assert "to_thread(" not in record.details


def test_who_gives_a_message_up_is_waited_for_though_others_refuse_at_once(
    broker: DevBroker, settings: CommandSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.fleet.commands.sender._OTHER_ANSWERS_S", 0.0)
    refused = threading.Event()

    def refuse(*_: object) -> str:
        refused.set()
        raise ConfigurationError("orders:0 is not here")

    def give_up(*_: object) -> str:
        assert refused.wait(60)
        return "dlq.orders"

    asks = command("give-up", "sms", topic="orders", partition=0, offset=0)
    servers = broker.bootstrap_servers
    with listening(servers, settings, give_up=refuse), listening(servers, settings, "two", give_up=give_up):
        answers = asked(broker, settings, asks, timeout=60.0)

    assert summary(asks, answers)[0] is Outcome.DONE


def test_what_is_no_command_for_a_member_costs_nothing_and_the_next_one_is_done(
    broker: DevBroker, settings: CommandSettings
) -> None:
    signed, servers = replace(settings, token="signed" * 4), broker.bootstrap_servers

    def by_its_token(value: bytes) -> list[tuple[str, bytes]]:
        return [(SIGNATURE, signature(str(signed.token), signed.topic, value))]

    pause = command("pause", "sms", topic="orders")
    value, key = encode_command(pause), pause.key
    old = encode_command(replace(pause, id="0" * 32, asked_ms=pause.asked_ms - 400_000))
    planted = [
        (b"\xff" * 100, by_its_token(value)),
        (b"[" * 5000, by_its_token(value)),
        (value, []),
        (value, [(SIGNATURE, b"0" * 64)]),
        (None, []),
        (old, by_its_token(old)),
        (value, by_its_token(value)),
        (value, by_its_token(value)),
    ]
    with listening(servers, signed) as (listener, _):
        # The client cannot show its headers: any writer of the topic can send that.
        produce_raw(servers, signed.topic, [(key, [(b"\xff", b"v")])])
        for body, headers in planted:
            produce(servers, signed.topic, [(key, body)], headers=headers)
        produce(servers, signed.topic, [(b"another group", value)], headers=by_its_token(value))

        [record] = asked(broker, signed, command("resume", "sms", topic="orders"))

    every = [record for record in audit_records(servers, {}, signed.audit_topic, 100) if record is not None]
    answers = [(record.name, record.outcome) for record in every]
    assert answers == [("pause", Outcome.REFUSED), ("pause", Outcome.DONE), ("resume", Outcome.DONE)]
    assert "the command is a copy, or the sender's clock is wrong" in every[0].said
    assert record.outcome is Outcome.DONE
    # Garbage, forged, and what was heard before.
    assert listener.passed_over == 7


def test_a_command_that_is_heard_too_late_or_has_no_time_of_the_brokers_is_refused(
    broker: DevBroker, new_topic: Callable[..., str], settings: CommandSettings
) -> None:
    """The second topic was made without `message.timestamp.type=LogAppendTime`."""
    said = []
    for given, ahead_s in ((settings, 61), (CommandSettings(new_topic(), settings.audit_topic), 0)):
        ahead = partial(lambda seconds: time.time() + seconds, ahead_s)
        with listening(broker.bootstrap_servers, given, clock=ahead) as (_, paused):
            [answer] = asked(broker, given, command("pause", "sms", topic="orders"))
        said.append(answer.said)
        assert (answer.outcome, paused) == (Outcome.REFUSED, [])

    assert "s after the broker had it, by this machine's clock, and is valid for 60 s" in said[0]
    assert "message.timestamp.type=LogAppendTime" in said[1]
