"""Members that restart, come, go, hang and freeze, for as long as it takes to be sure."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.fleet import CLASSIC, KIP848, Fleet, Member, fleet
from chaos.scenarios import (
    aborted_tail,
    frozen_past_its_membership,
    members_come_and_go,
    restart_each_in_turn,
    restart_within_the_session,
    revoke_during_long_handlers,
)
from penstock.devbroker import DevBroker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

NewFleet = Callable[[int], Fleet]

both_protocols = pytest.mark.parametrize("config", [CLASSIC, KIP848], ids=["classic", "kip848"])


@both_protocols
@pytest.mark.parametrize("end", [Member.terminate, Member.kill], ids=["terminated", "killed"])
def test_ten_thousand_messages_survive_the_restart_of_each_member(
    new_fleet: NewFleet, config: dict[str, str | int], end: Callable[[Member], None]
) -> None:
    group = new_fleet(8)

    restart_each_in_turn(group, 10_000, 30, end, config=config)

    assert group.uses_newer_protocol() == (config is KIP848)
    report = group.report()
    assert report.faults == []
    # After a kill, messages that were done and not committed are done again. An orderly end leaves none.
    assert report.repeats < 1000
    assert end is Member.kill or report.repeats == 0
    assert {-signal.SIGKILL if end is Member.kill else 0} == {member.process.returncode for member in group.members[:3]}


@both_protocols
def test_members_that_come_and_go_for_a_minute_lose_and_reorder_nothing(
    new_fleet: NewFleet, config: dict[str, str | int]
) -> None:
    group = new_fleet(8)

    members_come_and_go(group, 30, 2.0, 20_000, kills=True, config=config)

    assert group.uses_newer_protocol() == (config is KIP848)
    assert group.report().faults == []


@both_protocols
def test_commits_go_on_after_a_revocation_during_handlers_of_twenty_seconds(
    new_fleet: NewFleet, config: dict[str, str | int]
) -> None:
    group = new_fleet(4)

    doubtful = revoke_during_long_handlers(group, 20, config=config)

    report = group.report(doubtful)
    assert report.faults == []
    # The long calls of the partitions that moved, and nothing else.
    assert report.repeats == 2


@both_protocols
def test_a_process_frozen_past_its_membership_undoes_nothing_of_its_successor(
    new_fleet: NewFleet, config: dict[str, str | int]
) -> None:
    group = new_fleet(4)

    doubtful = frozen_past_its_membership(group, config={**config, "max.poll.interval.ms": 6000})

    assert group.report(doubtful).faults == []


@both_protocols
def test_only_aborted_messages_at_the_tail_leave_a_restart_nothing_to_do(
    new_fleet: NewFleet, config: dict[str, str | int]
) -> None:
    group = new_fleet(4)

    aborted_tail(group, config=config)

    report = group.report()
    assert report.faults == []
    assert report.repeats == 0


def test_a_named_member_of_the_newer_protocol_restarted_within_its_session_moves_no_partition(
    broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    # On a broker with Kafka's own session of 45 s: a restart must fit in.
    with fleet(broker, new_topic(partitions=4), 4, tmp_path) as group:
        restart_within_the_session(group, **KIP848)
        assert group.uses_newer_protocol()
        report = group.report()

    assert report.faults == []
    assert report.repeats == 0
