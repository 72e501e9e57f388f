"""Causes beside the message itself that hold a partition: its topic, a dead letter, a key parked in another topic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from penstock.consumer.assignments import AppPause, Assignment, ConsumerParked, Fetch
from penstock.consumer.execution_slot import ExecutionSlot
from penstock.message import Record
from penstock.options import ClientConfig
from penstock.routing import Scheduler

#: An assignment and an offset of it.
Place = tuple[Assignment, int]


def no_partition(config: ClientConfig) -> str:
    """Return why a member with this configuration has no partition, where its group did not refuse it."""
    session = "the brokers' group.consumer.session.timeout.ms, 45000 by default"
    if "session.timeout.ms" in config:
        session = f"session.timeout.ms={config['session.timeout.ms']}"
    return (
        "no partition is assigned to this member: other members have them all, or the group rebalances, and waits for "
        f"a member that died until its session ends ({session}), or for one that lives until it has given partitions "
        f"back (max.poll.interval.ms={config.get('max.poll.interval.ms', 300_000)})"
    )


@dataclass(frozen=True, slots=True)
class Causes:
    """What holds partitions beside the messages themselves, in words. Any thread."""

    #: Where messages are that go to another topic.
    publishing: Mapping[Place, str]
    #: Returns what is wrong with a topic, or None.
    topic_trouble: Callable[[str], str | None]
    #: Returns which rights are missing that a topic comes to a halt without, or None.
    missing_rights: Callable[[str], str | None]
    #: Returns where what a handler returned for a message is, or None.
    results: Callable[[Assignment, int], str | None] = lambda _assignment, _offset: None
    #: Returns that another's open transaction is in the way, in words, or None.
    open_transaction: Callable[[Assignment], str | None] = lambda _assignment: None
    #: Returns the app's own pause of a partition, or None.
    app_pause: Callable[[Assignment], AppPause | None] = lambda _assignment: None


@dataclass(frozen=True, slots=True)
class EarlierCall:
    """A call under way behind which a message waits."""

    handler: str
    worker: str
    #: When it began, on the engine's clock.
    since: float
    #: Whether it is for a message of the same key, and not of another one that shares the lane.
    is_same_key: bool = True


def calls_ahead(slots: Iterable[ExecutionSlot], wanted: Collection[Place]) -> dict[Place, EarlierCall]:
    """Return the calls behind which these messages wait in their lanes, each the lowest in flight of its partition.

    Also of a former incarnation of a partition, which nothing else shows: after a rebalance its handler goes on.
    """
    found: dict[Place, EarlierCall] = {}
    for slot in slots if wanted else ():
        lane, record, fetch, since = slot.lane, slot.record, slot.fetch, slot.started
        if lane is None or record is None or fetch is None:
            continue
        route = fetch.assignment.route
        # A copy, made in one step: the router appends and the holder takes meanwhile.
        for run in lane.runs.copy():
            if run.next >= len(run.records):
                continue
            first = run.records[run.next]
            place = (run.owner.assignment, first.offset())
            if place in wanted:
                ordering = run.owner.assignment.route.ordering
                is_same = route.handler.key is None and ordering.identity(first) == route.ordering.identity(record)
                found[place] = EarlierCall(route.handler.name, slot.name, since, is_same)
    return found


def parked_ahead(scheduler: Scheduler[Fetch, Record], wanted: Collection[Place]) -> dict[Place, ConsumerParked]:
    """Return the parked keys behind whose head these messages wait. All that waits is searched for them."""
    found: dict[Place, ConsumerParked] = {}
    for lane in scheduler.lanes if wanted else ():
        # Copies, each made in one step: the holder of the lane changes them meanwhile.
        for parked in lane.parked.copy().values() if lane.parked else ():
            for fetch, _, record in parked.waiting.copy():
                place = (fetch.assignment, record.offset())
                if place in wanted:
                    found[place] = parked
    return found
