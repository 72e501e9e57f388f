"""What a reporter depends on is forbidden, restarts, or was never there: it says so once, and goes on by itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.devbroker import DevBroker, User
from penstock.reports.reader import ReportReader
from penstock.reports.reporter import Reporter, sender_of
from penstock.reports.settings import ReportSettings
from rights import give, on_topic, take
from waiting import wait_until

GROUP = "shop"


@contextmanager
def reporting(servers: str, topic: str, config: dict[str, Any]) -> Iterator[Reporter]:
    made = Reporter(sender_of(GROUP, config), dict, servers, config, ReportSettings(topic=topic, interval=1.0))
    made.start()
    try:
        yield made
    finally:
        made.stop()


def sequence(reader: ReportReader) -> int:
    """Return the number of the last report that came; 0 where none did."""
    reader.follow(0.5)
    return max((member.report.sequence for group in reader.groups() for member in group.members), default=0)


def test_a_right_that_is_missing_is_named_once_and_reports_come_when_it_is_given(
    secured: DevBroker, new_secured_topic: Callable[..., str], new_user: Callable[..., User], caplog: Any
) -> None:
    topic, user = new_secured_topic(), new_user()
    # With it a refusal ends a producer for ever.
    config = {**user.config, "enable.idempotence": True}
    give(secured, user, on_topic(topic, "Write", "Describe"))
    with (
        ReportReader(secured.bootstrap_servers, secured.admin_config, topic) as reader,
        caplog.at_level(logging.WARNING, "penstock.reports"),
        reporting(secured.bootstrap_servers, topic, config),
    ):
        wait_until(lambda: sequence(reader) > 0, timeout=60)

        take(secured, user, on_topic(topic, "Write"))
        wait_until(lambda: "does not report to" in caplog.text, timeout=60)
        give(secured, user, on_topic(topic, "Write"))
        before = sequence(reader)
        wait_until(lambda: sequence(reader) > before, timeout=60)

    assert caplog.text.count("does not report to") == 1


def test_a_reporter_that_may_not_write_from_the_start_names_the_command_that_gives_the_right(
    secured: DevBroker, new_secured_topic: Callable[..., str], new_user: Callable[..., User], caplog: Any
) -> None:
    topic, user = new_secured_topic(), new_user()
    give(secured, user, on_topic(topic, "Describe"))

    with (
        caplog.at_level(logging.WARNING, "penstock.reports"),
        reporting(secured.bootstrap_servers, topic, dict(user.config)),
    ):
        wait_until(lambda: f"--operation Write --topic '{topic}'" in caplog.text, timeout=10)


def test_reports_go_on_when_their_broker_is_back_and_a_stop_without_it_does_not_wait() -> None:
    with DevBroker(start_timeout=150) as broker:
        topic = "reports"
        with reporting(broker.bootstrap_servers, topic, {}) as reporter:

            def is_there() -> bool:
                try:
                    with ReportReader(broker.bootstrap_servers, None, topic) as reader:
                        return sequence(reader) > 0
                except LookupError:
                    return False

            wait_until(is_there, timeout=60)
            with ReportReader(broker.bootstrap_servers, None, topic) as reader:
                before = sequence(reader)
                broker.kill()
                broker.restart()
                wait_until(lambda: sequence(reader) > before, timeout=90)

            broker.kill()
            begun = time.monotonic()
            reporter.stop()
            assert time.monotonic() - begun < 5
