"""Faults of a fleet's broker. As in `chaos.scenarios`, each asserts its fault and waits for the end."""

from __future__ import annotations

import signal
import time

from chaos.fleet import Fleet, messages
from chaos.scenarios import fed_slowly
from histories import Span
from waiting import wait_until


def broker_killed_in_mid_run(group: Fleet, **options: object) -> None:
    """Kill the broker while three members work, and bring it back."""
    members = group.start_all(3, **options)
    total = 6000
    with fed_slowly(group, messages(total, keys=100, seconds=lambda chance: chance.uniform(0.0, 0.02)), 12):
        wait_until(lambda: group.handled > 500 and all(one.running_calls for one in members), timeout=60)
        group.broker.kill()
        assert not group.broker.running
        handled = group.handled
        group.broker.restart()
        assert handled < total
    group.wait_settled(120)
    for one in members:
        one.terminate()


def broker_frozen_in_mid_run(group: Fleet, seconds: float, **options: object) -> None:
    """Freeze the broker while three members work, and let it go on."""
    members = group.start_all(3, **options)
    total = 6000
    with fed_slowly(group, messages(total, keys=100, seconds=lambda chance: chance.uniform(0.0, 0.02)), 12):
        wait_until(lambda: group.handled > 500 and all(one.running_calls for one in members), timeout=60)
        group.broker.freeze()
        frozen = time.monotonic()
        # So long is the fault.
        time.sleep(seconds)
        handled, thawed = group.handled, time.monotonic()
        group.broker.thaw()
        assert handled < total
    group.wait_settled(120)
    for one in members:
        one.terminate()
    times = [commit.time for commit in group.commits()]
    assert any(one < frozen for one in times)
    assert not any(frozen + 1 < one < thawed - 1 for one in times)


def broker_killed_while_a_member_leaves(group: Fleet, **options: object) -> None:
    """Kill the broker while a stopping member is still in its last handlers."""
    first, second = group.start_all(2, **options)
    # One message of each partition takes so long that the broker is gone before the last commit.
    group.feed(messages(400, keys=100, seconds=lambda chance: chance.uniform(0.0, 0.01)))
    group.wait_settled()
    for partition in range(group.partitions):
        group.feed([(f"slow{partition}", 4.0)], partition=partition)
    wait_until(lambda: len(first.running_calls) == len(first.owned) and len(second.running_calls) == len(second.owned))
    mine = {(one.partition, one.offset) for one in first.running_calls}
    first.signal(signal.SIGTERM)
    group.broker.kill()
    assert {(one.partition, one.offset) for one in first.running_calls} == mine
    assert first.process.wait(120) is not None
    assert not first.running_calls
    last = first.look
    assert last is not None
    assert last.failed_commits > 0, first.log_end()

    group.broker.restart()
    assert all(group.committed()[partition] <= offset for partition, offset in mine)
    group.wait_shared([second])
    group.feed(messages(400, keys=100, seconds=lambda chance: chance.uniform(0.0, 0.01)))
    group.wait_settled(120)
    second.terminate()


def broker_frozen_in_a_revocation(group: Fleet, **options: object) -> dict[str, Span]:
    """Freeze the broker while a member waits for its handlers to give partitions away; let it go on after that.

    Returns:
        When the members may run what they do not own any more: their long handlers outlive a lost membership.
    """
    (first,) = group.start_all(1, **options)
    for partition in range(group.partitions):
        # Out of step, so that at any moment most have a while to go.
        group.feed([(f"slow{partition}", seconds) for seconds in (1.0 * partition, 4.0, 4.0, 4.0)], partition=partition)
        group.feed([(f"quick{partition}-{number}", 0.01) for number in range(50)], partition=partition)
    second = group.start(**options)
    wait_until(lambda: first.look is not None and first.look.revoking, timeout=60)
    running = {(one.partition, one.offset) for one in first.running_calls}
    group.broker.freeze()
    frozen = time.monotonic()
    assert running
    wait_until(lambda: not running & {(one.partition, one.offset) for one in first.running_calls})
    # Past the session's end: so long is the fault.
    time.sleep(7)
    thawed = time.monotonic()
    # The fault: the handlers have ended, and the revocation's commit had no answer.
    during = [look for look in first.looks if frozen < look.time < thawed]
    assert during[0].revoking
    log = first.log_end()
    assert during[-1].revoking or during[-1].failed_commits > 0 or "is not known to have the commit" in log, log
    group.broker.thaw()
    group.wait_shared([first, second], timeout=120)
    shared = time.monotonic()
    group.wait_settled(120)
    assert first.look is not None
    assert first.look.revoked + first.look.lost > 0
    for one in (first, second):
        one.terminate()
    return {one.name: (frozen, shared) for one in (first, second)}


__all__ = [
    "broker_frozen_in_a_revocation",
    "broker_frozen_in_mid_run",
    "broker_killed_in_mid_run",
    "broker_killed_while_a_member_leaves",
]
