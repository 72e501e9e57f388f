"""Members do what they are told in a topic, once, and answer in the audit: on a real broker."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from tenacity import wait_fixed

import penstock
from kafka_proxy import KafkaProxy
from kafka_tools import produce
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError
from penstock.fleet.commands.audit import AuditRecord
from penstock.fleet.commands.audit_log import audit_records
from penstock.fleet.commands.command import Command, encode_command
from penstock.fleet.commands.listener import CommandListener
from penstock.fleet.commands.sender import CommandSender, summary
from penstock.fleet.wire import SIGNATURE, signature
from penstock.fleet_member import CommandSettings, Member, Outcome
from raw_produce import produce_raw
from waiting import wait_until

TOKEN = "signed" * 4
RunApp = Callable[..., penstock.RunningApp]


@pytest.fixture
def settings(broker: DevBroker, topic_numbers: Iterator[int]) -> CommandSettings:
    number = next(topic_numbers)
    return CommandSettings(f"commands-{number}", f"audit-{number}")


@pytest.fixture
def run_app(broker: DevBroker, settings: CommandSettings) -> Iterator[RunApp]:
    """Return a function that starts an app whose handler fails for "bad", and that hears commands."""
    with ExitStack() as running:

        def run(name: str, topic: str, given: CommandSettings | None = settings, **options: object) -> object:
            app = penstock.App(
                name,
                bootstrap_servers=broker.bootstrap_servers,
                commands=given or False,
                commit_interval=0.2,
                **options,  # type: ignore[arg-type] # the test's
            )

            @app.handler(topic, retry=penstock.retry(attempts=99, wait=wait_fixed(600)))
            def handle(message: penstock.Message) -> None:
                if message.value == b"bad":
                    raise ValueError("no good")

            started = running.enter_context(app.start())
            if started._listener is not None:
                assert started._listener.is_listening.wait(60)
            wait_until(lambda: started.statistics().partitions, 60)
            return started

        yield run  # type: ignore[misc] # as above


def asked(broker: DevBroker, settings: CommandSettings, command: Command, **options: object) -> list[AuditRecord]:
    with CommandSender(broker.bootstrap_servers, {}, settings) as sender:
        return sender.ask(command, **options)  # type: ignore[arg-type] # the test's


def command(name: str, group: str, **fields: object) -> Command:
    member = cast("str | None", fields.pop("member", None))
    return Command(name, group, member, fields, "a test", int(time.time() * 1000))


@pytest.mark.parametrize("exactly_once", [False, True])
def test_a_message_that_holds_its_partition_is_given_up_by_command(
    broker: DevBroker, new_topic: Callable[..., str], settings: CommandSettings, run_app: RunApp, exactly_once: bool
) -> None:
    topic = new_topic()
    running = run_app(topic, topic, exactly_once=exactly_once)
    produce(broker.bootstrap_servers, topic, [(b"1", b"bad"), (b"1", b"next")])
    wait_until(lambda: running.explain()[0].state == "parked", 60)

    give_up = command("give-up", topic, topic=topic, partition=0, offset=0)
    [answer] = asked(broker, settings, give_up)

    assert (answer.outcome, answer.said) == (
        Outcome.DONE,
        f"{topic}:0@0 was given up: dlq.{topic} has it, and its key goes on",
    )
    wait_until(lambda: running.explain()[0].lag == 0 and running.explain()[0].watermark == 2, 60)
    assert running._listener is not None
    to_it = {"member": running._listener._member}
    [again] = asked(broker, settings, command("give-up", topic, topic=topic, partition=0, offset=0, **to_it))
    assert (again.outcome, "nothing does" in again.said) == (Outcome.REFUSED, True)


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

    listeners = [
        CommandListener(
            "shop",
            name,
            Member(Mock(), Mock(), does, Mock()),
            bootstrap_servers=broker.bootstrap_servers,
            config={},
            settings=settings,
        )
        for name, does in (("one", refuse), ("two", give_up))
    ]
    try:
        for listener in listeners:
            listener.start()
            assert listener.is_listening.wait(60)
        asks = command("give-up", "shop", topic="orders", partition=0, offset=0)
        answers = asked(broker, settings, asks, timeout=60.0)
    finally:
        for listener in listeners:
            listener.stop()

    assert summary(asks, answers)[0] is Outcome.DONE


def test_the_stacks_name_a_handler_that_hangs_and_its_message_is_given_up(
    broker: DevBroker, new_topic: Callable[..., str], settings: CommandSettings
) -> None:
    topic, hang = new_topic(), threading.Event()
    app = penstock.App(topic, bootstrap_servers=broker.bootstrap_servers, commands=settings)

    @app.handler(topic)
    async def hanging_handler(message: penstock.Message) -> None:
        await asyncio.to_thread(hang.wait, 200)

    with app.start() as running:
        assert running._listener is not None
        assert running._listener.is_listening.wait(60)
        produce(broker.bootstrap_servers, topic, [(b"1", b"good")])
        wait_until(lambda: [one.state for one in running.explain()] == ["in handler"], 60)

        give_up = command("give-up", topic, topic=topic, partition=0, offset=0)
        [told] = asked(broker, settings, command("stacks", topic))
        [given] = asked(broker, settings, give_up)
        hang.set()

    assert given.outcome is Outcome.DONE
    assert f"dlq.{topic} has it" in given.said
    assert told.details is not None
    assert "hanging_handler" in told.details
    assert "to_thread(" not in told.details


def test_what_is_no_command_for_a_member_costs_nothing_and_the_next_one_is_done(
    broker: DevBroker, new_topic: Callable[..., str], settings: CommandSettings, run_app: RunApp
) -> None:
    topic, signed = new_topic(), replace(settings, token=TOKEN)
    running = run_app(topic, topic, signed)
    listener = running._listener
    assert listener is not None
    pause = command("pause", topic, topic=topic)
    value, key = encode_command(pause), pause.key
    good = [(SIGNATURE, signature(TOKEN, signed.topic, value))]
    old = encode_command(replace(pause, id="0" * 32, asked_ms=pause.asked_ms - 400_000))
    planted = [
        (b"\xff" * 100, good),
        (b"[" * 5000, good),
        (value, []),
        (value, [(SIGNATURE, b"0" * 64)]),
        (None, []),
        (old, [(SIGNATURE, signature(TOKEN, signed.topic, old))]),
        (value, good),
        (value, good),
    ]
    # The client cannot show its headers: whoever may write to the topic can send that.
    produce_raw(broker.bootstrap_servers, signed.topic, [(topic.encode(), [(b"\xff", b"v")])])
    for body, headers in planted:
        produce(broker.bootstrap_servers, signed.topic, [(key, body)], headers=headers)
    produce(broker.bootstrap_servers, signed.topic, [(b"another group", value)], headers=good)

    [told] = asked(broker, signed, command("resume", topic, topic=topic))

    every = [one for one in audit_records(broker.bootstrap_servers, {}, signed.audit_topic, 100) if one is not None]
    answers = [(one.name, one.outcome) for one in every]
    assert answers == [("pause", Outcome.REFUSED), ("pause", Outcome.DONE), ("resume", Outcome.DONE)]
    assert "it is a copy, or the clock of who asked is wrong" in every[0].said
    assert told.outcome is Outcome.DONE
    # Garbage, forged, and what was heard before.
    assert listener.passed_over == 7


def test_a_command_that_is_heard_too_late_or_has_no_time_of_the_brokers_is_refused(
    broker: DevBroker, new_topic: Callable[..., str], settings: CommandSettings
) -> None:
    """The second topic was made without `message.timestamp.type=LogAppendTime`."""
    said = []
    for given, ahead_s in ((settings, 61), (CommandSettings(new_topic(), settings.audit_topic), 0)):
        with listening(broker.bootstrap_servers, given, clock=lambda ahead_s=ahead_s: time.time() + ahead_s) as done:
            [answer] = asked(broker, given, command("pause", "sms", topic="orders"))
        said.append(answer.said)
        assert (answer.outcome, done) == (Outcome.REFUSED, [])

    assert "s after the broker had it, by this machine's clock, and holds for 60 s" in said[0]
    assert "message.timestamp.type=LogAppendTime" in said[1]


@pytest.mark.thorough
def test_commands_are_heard_again_when_the_broker_is_back_and_a_stop_without_it_ends(
    broker: DevBroker, settings: CommandSettings
) -> None:
    def is_done() -> bool:
        pause = command("pause", "sms", topic="orders")
        try:
            return [one.outcome for one in asked(broker, settings, pause, timeout=5.0)] == [Outcome.DONE]
        except penstock.PenstockError:
            return False

    with ExitStack() as reachable:
        proxy = reachable.enter_context(KafkaProxy(broker.bootstrap_servers))
        with listening(proxy.bootstrap_servers, settings) as done:
            reachable.close()
            with KafkaProxy(broker.bootstrap_servers, proxy.own_port):
                wait_until(is_done, 120)
    assert done


@contextmanager
def listening(servers: str, settings: CommandSettings, **options: Any) -> Iterator[list[str]]:
    """Hear commands as a member of `sms`; the block gets the topics that were paused."""
    done: list[str] = []
    doing = Member(lambda topic, _: done.append(topic), lambda *_: None, lambda *_: "", dict)
    made = CommandListener("sms", "one", doing, bootstrap_servers=servers, config={}, settings=settings, **options)
    made.start()
    try:
        assert made.is_listening.wait(60)
        yield done
    finally:
        made.stop()
