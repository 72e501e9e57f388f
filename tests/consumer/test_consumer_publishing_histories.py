"""Handlers that publish while a member and then the broker are killed; `make chaos` has the long form."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from chaos.publishing import Publishers, faults_of_at_least_once, faults_of_exactly_once
from penstock.devbroker import DevBroker
from waiting import wait_until

pytestmark = pytest.mark.thorough


KEYS, MESSAGES = 60, 3_000
#: One that was killed is back soon, and finds the transaction of a member that was.
BROKER = {
    "broker.session.timeout.ms": "3000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
}


def test_members_and_their_broker_killed_in_mid_stream_cost_time_only(tmp_path: Path) -> None:
    with DevBroker(config=BROKER, start_timeout=150) as broker, ExitStack() as ends:
        # Side by side: most of the time is waited for the broker.
        once, at_least_once = (
            ends.enter_context(closing(Publishers(broker, tmp_path, prefix, exactly_once=prefix == "once-")))
            for prefix in ("once-", "at-least-once-")
        )
        groups = (once, at_least_once)
        for group in groups:
            group.start()
            group.start()
        with once.fed(MESSAGES, KEYS, 3.0), at_least_once.fed(MESSAGES, KEYS, 3.0):
            for group in groups:
                wait_until(lambda group=group: group.written() > 200)
                group.kill_one()
                group.start()
            wait_until(lambda: all(group.written() > 500 for group in groups))
            once.kill_broker()
        for group in groups:
            group.finish(150)

        assert faults_of_exactly_once(once.seen(), once.batches(), MESSAGES, KEYS) == []
        assert faults_of_at_least_once(at_least_once.seen(), at_least_once.batches(), MESSAGES, KEYS) == []
        assert [group.kills for group in groups] == [1, 1]
