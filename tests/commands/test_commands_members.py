"""Members do what they are told in a topic, once, and answer in the audit: on a real broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from confluent_kafka import Producer
from tenacity import wait_fixed

import penstock
from penstock.commands.audit import AuditRecord, Outcome
from penstock.commands.command import Command
from penstock.commands.sender import CommandSender
from penstock.commands.settings import CommandSettings
from penstock.devbroker import DevBroker
from waiting import wait_until

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


def send(broker: DevBroker, topic: str, *values: bytes) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    for value in values:
        producer.produce(topic, value, key=b"1")
    assert producer.flush(60) == 0


def asked(broker: DevBroker, settings: CommandSettings, command: Command, **options: object) -> list[AuditRecord]:
    with CommandSender(broker.bootstrap_servers, {}, settings) as sender:
        return sender.ask(command, **options)  # type: ignore[arg-type] # the test's


def command(name: str, group: str, **fields: object) -> Command:
    return Command(name, group, by="a test", asked_ms=int(time.time() * 1000), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("exactly_once", [False, True])
def test_a_message_that_holds_its_partition_is_given_up_by_command(
    broker: DevBroker, new_topic: Callable[..., str], settings: CommandSettings, run_app: RunApp, exactly_once: bool
) -> None:
    topic = new_topic()
    running = run_app(topic, topic, exactly_once=exactly_once)
    send(broker, topic, b"bad", b"next")
    wait_until(lambda: running.explain()[0].state == "parked", 60)

    give_up = command("give-up", topic, topic=topic, partition=0, offset=0)
    [answer] = asked(broker, settings, give_up)

    assert (answer.outcome, answer.said) == (
        Outcome.DONE,
        f"{topic}[0]@0 was given up: dlq.{topic} has it, and its key goes on",
    )
    wait_until(lambda: running.explain()[0].lag == 0 and running.explain()[0].watermark == 2, 60)
    [again] = asked(broker, settings, command("give-up", topic, topic=topic, partition=0, offset=0))
    assert (again.outcome, "nothing does" in again.said) == (Outcome.REFUSED, True)
