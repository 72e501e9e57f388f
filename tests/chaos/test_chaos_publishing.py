"""Handlers that publish while members are killed every five seconds, join and leave, and their broker is harmed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from chaos.fleet import CLASSIC, KIP848, KIP848_BROKER
from chaos.publishing import Publishers, faults_of_at_least_once, faults_of_exactly_once
from penstock.devbroker import DevBroker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

KEYS = 1_000
MESSAGES = int(os.environ.get("PENSTOCK_PUBLISHING_MESSAGES", "200000"))
SECONDS = float(os.environ.get("PENSTOCK_PUBLISHING_SECONDS", "150"))
EVERY_S = 5.0
#: A broker that is frozen for longer than its session shuts itself out, and one that was killed is back after it.
BROKER = {**KIP848_BROKER, "broker.session.timeout.ms": "22000"}


def harm_broker(group: Publishers, feeding: threading.Thread, failures: list[BaseException]) -> None:
    """Freeze the broker for 10 to 20 s and kill it by turns, for as long as messages are fed."""
    frozen_s = [10.0, 20.0, 15.0]
    try:
        while feeding.is_alive():
            # The rhythm of the faults is what is tested.
            time.sleep(15.0)
            if group.freezes > group.broker_kills:
                group.kill_broker()
            else:
                group.freeze_broker(frozen_s[group.freezes % 3])
    except BaseException as error:  # noqa: BLE001 - it is raised where the test hears it
        failures.append(error)


def harm(group: Publishers) -> None:
    """Feed, and meanwhile kill members, let others join and leave, and harm the broker; then wait until all is done."""
    failures: list[BaseException] = []
    begun = time.monotonic()
    for _ in range(3):
        group.start()
    with group.fed(MESSAGES, KEYS, SECONDS) as feeding:
        breaking = threading.Thread(target=harm_broker, args=(group, feeding, failures), daemon=True)
        breaking.start()
        turn = 0
        while feeding.is_alive():
            time.sleep(EVERY_S)
            turn += 1
            group.kill_one()
            group.start()
            group.restart_ended()
            # Another joins now and then, and leaves.
            if turn % 6 == 2:
                group.start()
            if turn % 6 == 5:
                group.let_one_leave()
            # One is frozen for longer than its session, and does not know that it was put out.
            if turn % 5 == 1:
                group.freeze_first()
            if turn % 5 == 3:
                group.thaw()
        group.thaw()
        breaking.join(120)
    assert failures == []
    written, harmed_s = group.written(), time.monotonic() - begun
    group.finish(300)
    print(  # noqa: T201 - the figures of the run
        f"{MESSAGES} messages: {group.kills} members killed, {group.members_frozen} frozen, {group.left} left, "
        f"{group.not_started} found no broker; {group.said('offsets will tell')} transactions were in doubt; "
        f"the broker frozen {group.freezes} times and killed {group.broker_kills} times, in {harmed_s:.0f} s; "
        f"by then {written} results were written; all was done {time.monotonic() - begun - harmed_s:.0f} s later"
    )
    # Members that find no broker when they start are not killed.
    assert group.kills >= 0.4 * SECONDS / EVERY_S
    assert group.members_frozen >= 2
    assert group.freezes >= 2
    assert group.broker_kills >= 1
    assert group.left >= 3
    assert written > MESSAGES / 4, "the work did not go on between the faults"


@pytest.mark.parametrize("config", [CLASSIC, KIP848], ids=["classic", "kip848"])
def test_each_result_is_visible_once_and_in_order_whatever_dies(
    tmp_path: Path, config: Mapping[str, str | int]
) -> None:
    with DevBroker(config=BROKER) as broker:
        group = Publishers(broker, tmp_path, exactly_once=True, config=config)
        try:
            harm(group)
            seen = group.seen()
            assert faults_of_exactly_once(seen, group.batches(), MESSAGES, KEYS) == []
            # Members were killed inside transactions.
            assert len(group.seen(committed_only=False)) > len(seen)
        finally:
            group.close()


def test_no_result_is_missing_and_those_of_a_key_begin_again_from_a_commit_whatever_dies(tmp_path: Path) -> None:
    with DevBroker(config=BROKER) as broker:
        group = Publishers(broker, tmp_path, exactly_once=False)
        try:
            harm(group)
            seen = group.seen()
            assert faults_of_at_least_once(seen, group.batches(), MESSAGES, KEYS) == []
            # What was done and not committed yet when a member was killed is done again.
            assert len(seen) > len({(one.number, one.part) for one in seen})
        finally:
            group.close()
