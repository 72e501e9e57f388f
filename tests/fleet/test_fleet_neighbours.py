"""A process whose topic or broker goes away reports it, and goes on by itself; tests/security has permissions."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack, suppress

from action_tools import reasons

from kafka_proxy import KafkaProxy
from penstock import App
from penstock.clients import admin
from penstock.clients.answers import answered
from penstock.clients.topics import ask_topic_ids
from penstock.devbroker import DevBroker
from penstock.errors import PenstockError
from penstock.fleet import Address, AppEndpoints
from penstock.fleet.commands.command import Command
from penstock.fleet.commands.sender import CommandSender
from penstock.fleet.reports.reader import ReportReader
from penstock.fleet_member import CommandSettings, Outcome, ReportSettings
from waiting import wait_until


def test_a_process_reports_hears_commands_and_is_ready_again_when_its_topic_or_its_broker_is_back(
    broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    topic, reports, client = new_topic(), new_topic(), admin(broker.bootstrap_servers, {})
    commands = CommandSettings(f"commands.{topic}", f"audit.{topic}")

    def sequence() -> int:
        """Return the number of the last report; 0 where there is none."""
        with suppress(PenstockError), ReportReader(broker.bootstrap_servers, None, reports) as reader:
            return max((member.report.sequence for group in reader.groups() for member in group.members), default=0)
        return 0

    def pauses() -> bool:
        pause = Command("pause", topic, None, {"topic": topic})
        with suppress(PenstockError):
            sender = CommandSender(broker.bootstrap_servers, {}, commands)
            return [answer.outcome for answer in sender.ask(pause, timeout=5.0)] == [Outcome.DONE]
        return False

    with ExitStack() as reachable:
        proxy = reachable.enter_context(KafkaProxy(broker.bootstrap_servers))
        report, stop = ReportSettings(reports, interval=0.5), {"revoke_timeout": 0.5, "stop_timeout": 1.0}
        app = App(topic, bootstrap_servers=proxy.bootstrap_servers, report=report, commands=commands, **stop)
        app.handler(topic)(lambda _: None)
        with AppEndpoints(app, Address("127.0.0.1", 0)) as endpoints, app.start() as running:
            endpoints.watch(running)
            wait_until(lambda: sequence() and not reasons(endpoints, "/readyz"))

            known = ask_topic_ids(client, [reports], 60.0).ids
            answered(client.delete_topics([reports])[reports], 60)
            wait_until(lambda: ask_topic_ids(client, [reports], 60.0).ids not in ({}, known) and sequence(), 120)

            reachable.close()
            # Its partition stands still, or was lost because the session has ended.
            wait_until(lambda: re.search(f"{topic}.*(brokers|Connection refused)", reasons(endpoints, "/readyz")), 60)
            assert reasons(endpoints, "/healthz") == "", "no reason to restart it"
            before = sequence()

            with KafkaProxy(broker.bootstrap_servers, proxy.own_port):
                wait_until(lambda: sequence() > before and not reasons(endpoints, "/readyz"), 120)
                wait_until(pauses, 120)
