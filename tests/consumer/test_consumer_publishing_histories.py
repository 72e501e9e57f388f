"""Handlers that publish while a member and then the broker are killed; `make chaos` has the long form."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.publishing import Publishers, faults_of_at_least_once, faults_of_exactly_once
from penstock.devbroker import DevBroker
from waiting import wait_until

KEYS, MESSAGES = 60, 4_000
#: One that was killed is back soon, and finds the transaction of a member that was.
BROKER = {
    "broker.session.timeout.ms": "3000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
}


@pytest.mark.parametrize("exactly_once", [True, False], ids=["exactly once", "at least once"])
def test_a_member_and_the_broker_killed_in_mid_stream_cost_time_only(exactly_once: bool, tmp_path: Path) -> None:
    judge = faults_of_exactly_once if exactly_once else faults_of_at_least_once
    with DevBroker(config=BROKER, start_timeout=150) as broker:
        group = Publishers(broker, tmp_path, exactly_once=exactly_once)
        try:
            for _ in range(2):
                group.start()
            with group.fed(MESSAGES, KEYS, 3.0):
                wait_until(lambda: group.written() > 200)
                group.kill_one()
                group.start()
                wait_until(lambda: group.written() > 500)
                group.kill_broker()
            group.finish(150)

            assert judge(group.seen(), group.batches(), MESSAGES, KEYS) == []
            assert (group.kills, group.broker_kills) == (1, 1)
        finally:
            group.close()
