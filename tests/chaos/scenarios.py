"""Faults of a fleet: for a minute with `make chaos`, and for some seconds with `make test`.

Each scenario asserts that its fault really happened, waits until the group has committed everything, and returns. The
test then judges the history.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf

from chaos.fleet import Fleet, Member, messages
from histories import Span
from kafka_tools import ends, transactional, wait_for_markers
from waiting import wait_until


@contextmanager
def fed_slowly(group: Fleet, records: Sequence[tuple[str, float]], over: float) -> Iterator[threading.Event]:
    """Feed messages from a separate thread, over some seconds; setting the event feeds the rest at once.

    Left, it has fed everything.
    """
    hurry = threading.Event()
    failures: list[BaseException] = []
    step = max(1, round(len(records) * 0.1 / over))

    def feed() -> None:
        try:
            for begin in range(0, len(records), step):
                group.feed(records[begin : begin + step])
                hurry.wait(0.1)
        except BaseException as error:  # noqa: BLE001 - it is raised where the test hears it
            failures.append(error)

    thread = threading.Thread(target=feed, name="feeder", daemon=True)
    thread.start()
    try:
        yield hurry
    finally:
        hurry.set()
        thread.join(120)
    assert not thread.is_alive(), "the messages could not be fed"
    if failures:
        raise failures[0]


def restart_each_in_turn(
    group: Fleet, total: int, over: float, end: Callable[[Member], None], **options: object
) -> None:
    """Let three members work, end each in mid-work and start another in its place; wait until all is committed.

    Args:
        group: a fleet without members.
        total: how many messages are fed, of 100 keys.
        over: seconds over which they are fed.
        end: how a member is ended.
        options: options of the members.
    """
    members = group.start_all(3, **options)
    records = messages(total, keys=100, seconds=lambda chance: chance.uniform(0.0, 0.02))
    with fed_slowly(group, records, over):
        for number in range(3):
            victim = members[number]
            wait_until(lambda: victim.handled > 20 and victim.running_calls, timeout=60)  # noqa: B023 - asked at once
            handled = group.handled
            end(victim)
            assert not victim.alive
            # In mid-work: there was more to come, and the victim had its share.
            assert handled < total
            assert victim.owned or victim.looks[-1].assigned > 0
            members[number] = group.start(**options)
            group.wait_shared(members)
    group.wait_settled()
    for one in members:
        one.terminate()
        assert one.handled > 0, f"{one.name} had nothing to do"


def members_come_and_go(group: Fleet, turns: int, every: float, total: int, *, kills: bool, **options: object) -> None:
    """Let a member join or leave in turn while another one stays; wait until all is committed.

    Args:
        group: a fleet without members.
        turns: how often one joins or leaves.
        every: seconds between two turns.
        total: how many messages are fed, of 100 keys.
        kills: whether every other leaves by SIGKILL instead of SIGTERM.
        options: options of the members.
    """
    group.start_all(1, **options)
    guests: list[Member] = []
    terminated = killed = 0
    records = messages(total, keys=100, seconds=lambda drawn: drawn.uniform(0.0, 0.01))
    with fed_slowly(group, records, turns * every * 2):
        for turn in range(turns):
            # The rhythm is the thing under test, not a wait for something.
            time.sleep(every)
            if turn < 2 or turn % 2:
                guests.append(group.start(**options))
                continue
            guest = guests.pop(0)
            wait_until(lambda: guest.look is not None)  # noqa: B023 - asked at once
            if kills and terminated > killed:
                guest.kill()
                killed += 1
            else:
                guest.signal(signal.SIGTERM)
                terminated += 1
        # Half was fed by now: the members had something to do while they came and went, and did it.
        assert total * 0.1 < group.handled < total
    group.wait_settled(120)
    remaining = [one for one in group.members if one.alive]
    # The last to come may not listen to signals yet.
    wait_until(lambda: all(one.look is not None for one in remaining), timeout=60)
    for one in remaining:
        one.signal(signal.SIGTERM)
    codes = {one: one.process.wait(60) for one in group.members}
    failed = {one.name: (code, one.log_end()) for one, code in codes.items() if code not in {0, -signal.SIGKILL}}
    assert not failed
    assert list(codes.values()).count(-signal.SIGKILL) == killed
    assert terminated >= 1
    assert killed >= 1 or not kills
    assert sum(one.look.revoked for one in group.members if one.look is not None) > 0, "no partition ever moved"


def revoke_during_long_handlers(group: Fleet, seconds: float, **options: object) -> dict[str, Span]:
    """Let a second member join while a long handler runs in each partition; wait until all is committed.

    Args:
        group: a fleet without members.
        seconds: how long the handlers take; much longer than a revocation waits.
        options: options of the members.

    Returns:
        When the first member may run what it does not own any more.
    """
    for partition in range(group.partitions):
        group.feed([(f"slow{partition}", seconds), (f"slow{partition}", 0.0)], partition=partition)
        group.feed([(f"quick{partition}-{number}", 0.0) for number in range(50)], partition=partition)
    (first,) = group.start_all(1, **options)
    wait_until(lambda: len(first.running_calls) == group.partitions and first.handled >= group.partitions)

    since = time.monotonic()
    second = group.start(pace=0.05, **options)
    group.wait_shared([first, second])

    # The fault: the second has begun what the first is still at.
    again = wait_until(lambda: [one for one in second.calls if one.key.startswith("slow")])
    at_it = {(one.partition, one.offset) for one in first.running_calls}
    assert {(one.partition, one.offset) for one in again} <= at_it
    stuck = {number: group.committed()[number] for number in second.owned}
    for partition in range(group.partitions):
        group.feed([(f"slow{partition}", 0.0), (f"later{partition}", 0.0)], partition=partition)
    # The new owner's commits go on while the former one is still at it.
    wait_until(lambda: all(group.committed()[number] > offset for number, offset in stuck.items()))
    assert {(one.partition, one.offset) for one in first.running_calls} >= at_it
    group.wait_settled(2 * seconds + 60)
    for one in (first, second):
        one.terminate()
    return {first.name: (since, inf)}


def aborted_tail(group: Fleet, **options: object) -> None:
    """End the log in aborted messages, and restart; the group must stand at the end of the log both times."""
    group.feed(messages(200, keys=20, seconds=lambda chance: chance.uniform(0.0, 0.01)))
    (first,) = group.start_all(1, **options)
    wait_until(lambda: first.handled == 200)
    before = ends(group.broker.bootstrap_servers, group.topic, group.partitions)
    producer = transactional(group.broker.bootstrap_servers)
    for _ in range(3):
        producer.begin_transaction()
        for number in range(10 * group.partitions):
            producer.produce(group.topic, b"0", key=b"aborted", partition=number % group.partitions)
        producer.flush()
        producer.abort_transaction()
    wait_for_markers(group.broker.bootstrap_servers, group.topic)
    after = ends(group.broker.bootstrap_servers, group.topic, group.partitions)
    # Three times ten messages and a marker.
    assert after == {number: offset + 33 for number, offset in before.items()}
    group.wait_settled()
    first.terminate()
    assert group.committed() == after

    second = group.start(**options)
    group.wait_shared([second])
    group.feed([("last", 0.0)])
    wait_until(lambda: second.handled)
    group.wait_settled()
    second.terminate()
    assert [one.key for one in second.calls] == ["last"]
    assert second.look is not None
    assert second.look.received == 1


def frozen_past_its_membership(group: Fleet, **options: object) -> dict[str, Span]:
    """Suspend one of two members until the other has all partitions and has moved on, and let it go on then.

    Args:
        group: a fleet without members.
        options: options of the members; their session must be short.

    Returns:
        When the suspended member may run what it does not own any more.
    """
    first, second = group.start_all(2, **options)
    records = messages(8000, keys=100, seconds=lambda chance: chance.uniform(0.0, 0.05))
    with fed_slowly(group, records, 40) as hurry:
        wait_until(lambda: first.handled > 50 and first.running_calls)
        owned, since = first.owned, time.monotonic()
        assert owned
        first.signal(signal.SIGSTOP)
        group.wait_shared([second])
        taken_at = group.committed()
        # The fault: the other has moved past what the suspended one will still believe to be its own.
        wait_until(lambda: all(group.committed()[number] > taken_at[number] + 5 for number in owned), timeout=60)
        first.signal(signal.SIGCONT)
        wait_until(lambda: first.look is not None and first.look.lost >= len(owned), timeout=60)
        group.wait_shared([first, second])
        back, handled = time.monotonic(), first.handled
        wait_until(lambda: first.handled > handled + 20, timeout=60)
        hurry.set()
    group.wait_settled(120)
    assert any(one.start < since < (one.end or 0.0) for one in first.calls), "no handler was frozen"
    assert any(one.start > back for one in first.calls)
    for one in (first, second):
        one.terminate()
    return {first.name: (since, back)}


def restart_within_the_session(group: Fleet, **config: str | int) -> None:
    """Restart a named member of the group; the other one must not notice it.

    Args:
        group: a fleet without members.
        config: client settings of the members.
    """
    named = [{**config, "group.instance.id": name} for name in ("one", "two")]
    first, second = (group.start(config=one) for one in named)
    group.wait_shared([first, second])
    group.feed(messages(500, keys=100, seconds=lambda chance: chance.uniform(0.0, 0.02)))
    wait_until(lambda: second.handled > 50)
    wait_until(lambda: group.handled == 500)
    owned, before = second.owned, first.look
    assert owned
    assert before is not None
    second.terminate()

    again = group.start(config=named[1])
    group.wait_shared([first, again])
    group.feed(messages(500, keys=100, seconds=lambda chance: chance.uniform(0.0, 0.02)))
    wait_until(lambda: again.handled > 50)
    group.wait_settled()

    assert again.process.pid != second.process.pid
    assert again.owned == owned
    after = first.look
    assert after is not None
    assert (after.assigned, after.revoked, after.lost) == (before.assigned, before.revoked, before.lost)
    assert all(look.owned == before.owned for look in first.looks if look.time >= before.time)
    for one in (first, again):
        one.terminate()


__all__ = [
    "aborted_tail",
    "fed_slowly",
    "frozen_past_its_membership",
    "members_come_and_go",
    "restart_each_in_turn",
    "restart_within_the_session",
    "revoke_during_long_handlers",
]
