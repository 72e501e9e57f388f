"""A group whose broker is killed or frozen: in mid-run, while a member leaves, and in the middle of a revocation."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from chaos.broker_scenarios import (
    broker_frozen_in_a_revocation,
    broker_frozen_in_mid_run,
    broker_killed_in_mid_run,
    broker_killed_while_a_member_leaves,
)
from chaos.fleet import CLASSIC, KIP848, Fleet
from waiting import wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

NewFleet = Callable[[int], Fleet]

#: A client of the newer protocol that misses the answer with its new assignment (librdkafka 2.16) gets it again only
#: when the broker gives it up: after the poll interval, which is five minutes by default.
GIVEN_UP_SOON = {**KIP848, "max.poll.interval.ms": 15_000}
both_protocols = pytest.mark.parametrize("config", [CLASSIC, GIVEN_UP_SOON], ids=["classic", "kip848"])


@both_protocols
def test_a_broker_killed_in_mid_run_costs_neither_messages_nor_order(
    fragile_fleet: NewFleet, config: dict[str, str | int]
) -> None:
    group = fragile_fleet(8)

    broker_killed_in_mid_run(group, config=config)

    assert group.report().faults == []


@both_protocols
def test_a_broker_frozen_for_ten_seconds_costs_neither_messages_nor_order(
    fragile_fleet: NewFleet, config: dict[str, str | int]
) -> None:
    group = fragile_fleet(8)

    broker_frozen_in_mid_run(group, 10, config=config)

    assert group.report().faults == []


def test_commits_that_fail_while_a_member_leaves_lose_nothing(fragile_fleet: NewFleet) -> None:
    group = fragile_fleet(4)

    broker_killed_while_a_member_leaves(group)

    report = group.report()
    assert report.faults == []
    # What the leaving member did and could not commit.
    assert report.repeats > 0


@both_protocols
def test_commits_that_fail_in_a_revocation_lose_nothing(fragile_fleet: NewFleet, config: dict[str, str | int]) -> None:
    group = fragile_fleet(4)

    doubtful = broker_frozen_in_a_revocation(group, config=config)

    assert group.report(doubtful).faults == []


def test_a_stop_keeps_its_time_when_the_broker_is_gone(fragile_fleet: NewFleet) -> None:
    group = fragile_fleet(1)
    group.feed([("slow", 2.0)])
    (only,) = group.start_all(1, stop_timeout=4.0, config={})
    wait_until(lambda: only.running_calls)

    group.broker.kill()
    only.signal(signal.SIGTERM)
    # Ten times what it may take.
    code = only.process.wait(40)

    assert code == 0
    assert not group.broker.running
    assert only.handled == 1
