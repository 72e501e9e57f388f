"""Coordinators that are killed every five seconds, for three minutes, under load."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from chaos.transfer import Killed, Transfer, faults, has_open_transaction
from kafka_tools import ends
from penstock import clients
from penstock.devbroker import DevBroker
from penstock.transactions.wire.topics import open_topics
from waiting import wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

RATE = 500
EVERY_S = 5.0
SECONDS = float(os.environ.get("PENSTOCK_BOUNCE_SECONDS", "180"))


@pytest.mark.parametrize("instances", [("a",), ("a", "b")], ids=["one instance", "two instances in turns"])
def test_a_coordinator_bounced_every_5_s_for_3_minutes_loses_doubles_shows_and_reorders_nothing(
    tmp_path: Path, instances: Sequence[str]
) -> None:
    with DevBroker() as broker:
        servers = broker.bootstrap_servers
        broker.create_topic("target", 4)
        open_topics(clients.admin(servers, {}), "penstock", 2)
        coordinators = [Killed(servers, "penstock", name, tmp_path) for name in instances]
        for one in coordinators:
            one.start()
        inside, moved = 0, []
        try:
            with Transfer(servers, "penstock", "target", RATE, seed=1) as transfer:
                begun = time.monotonic()
                turn = 0
                while time.monotonic() - begun < SECONDS:
                    # The rhythm of the kills is what is tested.
                    time.sleep(EVERY_S)
                    coordinator = coordinators[turn % len(coordinators)]
                    turn += 1
                    coordinator.kill()
                    inside += has_open_transaction(servers, "penstock.done")
                    moved.append(sum(ends(servers, "target", 4).values()))
                    coordinator.start()
                transfer.finish()
                # The last one is left alone, and all that was committed becomes visible.
                wait_until(lambda: not faults(servers, "target", transfer.sent), timeout=180, interval=5)
        finally:
            for one in coordinators:
                one.kill()

        assert transfer.failures == []
        assert transfer.sent.count > 0.8 * RATE * 2 / 3 * SECONDS
        assert len(transfer.sent.rolled_back) > transfer.sent.count / 3
        assert faults(servers, "target", transfer.sent) == []
        # The faults happened, some of them inside an open Kafka transaction, and the work went on between them.
        assert sum(one.kills for one in coordinators) >= SECONDS / EVERY_S * 0.8
        assert inside >= 1
        assert len(set(moved)) > len(moved) / 2
