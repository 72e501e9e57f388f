"""A group whose members come, go, restart and hang: nothing is lost, and the order holds.

`make chaos` has the long forms, and those whose broker fails.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.fleet import CLASSIC, KIP848, Member, fleet
from chaos.scenarios import (
    aborted_tail,
    members_come_and_go,
    restart_each_in_turn,
    restart_within_the_session,
    revoke_during_long_handlers,
    revoke_during_short_handlers,
)
from penstock.devbroker import DevBroker

pytestmark = pytest.mark.thorough


NewTopic = Callable[..., str]


def test_members_that_restart_in_turn_lose_repeat_and_reorder_nothing(
    broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    with fleet(broker, new_topic(partitions=8), 8, tmp_path) as group:
        restart_each_in_turn(group, 3000, 12, Member.terminate)
        report = group.report()

    assert report.faults == []
    assert report.repeats == 0


@pytest.mark.chaos
def test_members_that_come_and_go_lose_and_reorder_nothing(
    broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    with fleet(broker, new_topic(partitions=8), 8, tmp_path) as group:
        members_come_and_go(group, 6, 1.5, 3000, kills=True)
        report = group.report()

    assert report.faults == []


def test_members_of_the_newer_protocol_that_come_and_go_lose_and_reorder_nothing(
    broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    with fleet(broker, new_topic(partitions=8), 8, tmp_path) as group:
        members_come_and_go(group, 6, 1.5, 3000, kills=False, config=KIP848)
        assert group.uses_newer_protocol()
        report = group.report()

    assert report.faults == []


def test_a_revocation_waits_for_running_handlers_so_that_nothing_is_done_twice(
    broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    with fleet(broker, new_topic(partitions=8), 8, tmp_path) as group:
        revoke_during_short_handlers(group)
        report = group.report()

    assert report.faults == []
    assert report.repeats == 0


@pytest.mark.chaos
def test_commits_go_on_after_a_partition_was_revoked_during_a_long_handler(
    broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    with fleet(broker, new_topic(partitions=4), 4, tmp_path) as group:
        doubtful = revoke_during_long_handlers(group, 15)
        report = group.report(doubtful)

    assert report.faults == []
    assert report.repeats == 2


def test_a_restart_behind_aborted_messages_has_nothing_left_to_do(
    broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    with fleet(broker, new_topic(partitions=2), 2, tmp_path) as group:
        aborted_tail(group)
        report = group.report()

    assert report.faults == []
    assert report.repeats == 0


def test_a_named_member_that_restarts_within_its_session_moves_no_partition(
    broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    with fleet(broker, new_topic(partitions=4), 4, tmp_path) as group:
        restart_within_the_session(group, **{**CLASSIC, "session.timeout.ms": 30_000})
        report = group.report()

    assert report.faults == []
    assert report.repeats == 0
