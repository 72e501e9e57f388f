"""A reporter whose broker goes away goes on by itself when it is back; permissions are in tests/security."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from kafka_proxy import KafkaProxy
from penstock import clients
from penstock.clients.answers import answered
from penstock.devbroker import DevBroker
from penstock.errors import PenstockError
from penstock.fleet.reports.reader import ReportReader
from penstock.fleet.reports.reporter import Reporter
from penstock.fleet_member import ReportSettings, sender_of
from waiting import wait_until


def test_reports_go_on_when_their_broker_is_back_and_a_stop_without_it_ends(
    broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    with ExitStack() as reachable, ReportReader(broker.bootstrap_servers, None, topic) as reader:
        proxy = reachable.enter_context(KafkaProxy(broker.bootstrap_servers))
        settings = ReportSettings(topic=topic, interval=1.0)
        reporter = Reporter(sender_of("shop", {}), dict, proxy.bootstrap_servers, {}, settings)

        def sequence() -> int:
            """Return the number of the last report that came; 0 where none did."""
            reader.follow(0.5)
            return max((member.report.sequence for group in reader.groups() for member in group.members), default=0)

        reporter.start()
        wait_until(lambda: sequence() > 0)
        reachable.close()
        before = sequence()
        with KafkaProxy(broker.bootstrap_servers, proxy.own_port):
            wait_until(lambda: sequence() > before, timeout=120)
        reporter.stop()


def test_a_topic_of_reports_that_was_deleted_is_made_again(broker: DevBroker, new_topic: Callable[..., str]) -> None:
    topic = new_topic()
    settings = ReportSettings(topic=topic, interval=0.5)
    reporter = Reporter(sender_of("shop", {}), dict, broker.bootstrap_servers, {}, settings)

    def reported() -> bool:
        try:
            with ReportReader(broker.bootstrap_servers, None, topic) as reader:
                return bool(reader.groups())
        except PenstockError:
            return False

    reporter.start()
    wait_until(reported, timeout=120)
    admin = clients.admin(broker.bootstrap_servers, {})
    answered(admin.delete_topics([topic])[topic], 60)
    wait_until(lambda: not reported(), timeout=120)
    wait_until(reported, timeout=120)
    reporter.stop()
