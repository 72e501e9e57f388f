"""One script on the broker in memory and on a real one: the clients must see the same.

Each scenario is written once, against the client's calls and the few things a test does to a broker (`World`), and
returns what was seen. It is run on both, and both are compared with each other: so the one in memory tells the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from conformance_worlds import Client, KafkaWorld, MemoryWorld, Seen, World, refusal

from penstock.devbroker import DevBroker
from penstock.testing import TestBroker
from waiting import wait_until


def markers_and_aborted_ranges(world: World) -> Seen:
    world.produce(b"0", b"1", b"2")
    for end in ("commit", "abort"):
        tx = world.begin()
        tx.produce(world.topic, end.encode(), partition=0)
        getattr(tx, end)()
    client = Client(world)
    seen: Seen = [client.position()]
    for _ in range(4):
        seen += client.take(1)
        seen.append(client.position())
    client.until(lambda: client.position() == 7)
    world.produce(b"7")
    seen += client.take(1)
    seen += [client.position(), client.client.get_watermark_offsets(TopicPartition(world.topic, 0), timeout=60)]
    client.client.close()
    return seen


def open_transactions(world: World) -> Seen:
    world.produce(b"0")
    tx = world.begin()
    tx.produce(world.topic, b"open", partition=0)
    world.produce(b"2")
    client = Client(world)
    curious = Client(world, group=f"{world.group}-other", isolation_level="read_uncommitted")
    place = TopicPartition(world.topic, 0)
    seen = [client.take(1), client.idle(), client.position(), curious.take(3)]
    seen += [client.client.get_watermark_offsets(place, timeout=60)]
    seen += [curious.client.get_watermark_offsets(place, timeout=60)]
    tx.commit()
    seen += [client.take(2)]
    client.until(lambda: client.position() == 4)
    client.client.close()
    curious.client.close()
    return seen


def offsets_and_metadata(world: World) -> Seen:
    client = Client(world, join=False)
    seen: Seen = [client.committed(), client.commit(5), client.committed(), client.commit(4, ""), client.committed()]
    seen += [
        client.commit(3, "map"),
        client.committed(0, 1),
        client.commit(10**6),
        client.commit(0),
        client.committed(),
    ]
    seen += [client.commit(-1), client.commit(-1001)]
    seen += [refusal(lambda: client.client.commit(offsets=[], asynchronous=False))]
    client.client.close()
    return seen


def metadata_limit(world: World) -> Seen:
    client = Client(world, join=False)
    seen: Seen = []
    for letter in ("m", "é"):
        seen += [client.commit(1, letter * 4095), client.committed() == [(1, letter * 4095, None)]]
        seen += [client.commit(2, letter * 4096), client.committed() == [(1, letter * 4095, None)]]
    points = [TopicPartition(world.topic, 0, 3, "m" * 4096), TopicPartition(world.topic, 1, 3, "fine")]
    seen += [refusal(lambda: client.client.commit(offsets=points, asynchronous=False)), client.committed(1)]
    client.client.commit(offsets=points, asynchronous=True)
    client.until(lambda: bool(client.answers))
    client.client.commit(offsets=points[1:], asynchronous=True)
    client.until(lambda: len(client.answers) > 1)
    seen += client.answers
    client.client.close()
    return seen


def pausing(world: World) -> Seen:
    world.produce(*(b"%d" % number for number in range(10)))
    client, place = Client(world), TopicPartition(world.topic, 0)
    seen: Seen = [client.take(2)]
    client.client.pause([place])
    seen += [client.position(), client.idle()]
    client.client.resume([place])
    seen += [client.take(8), client.position()]
    client.client.pause([place])
    client.client.incremental_unassign([place])
    client.client.incremental_assign([TopicPartition(world.topic, 0, 8)])
    # The new assignment is paused as the old one was.
    seen += [client.idle(20), client.position()]
    client.client.resume([place])
    seen += [client.take(2), client.position()]
    seen += [refusal(lambda: client.client.incremental_assign([TopicPartition(world.topic, 0, 0)]))]
    seen += [refusal(lambda: client.client.incremental_unassign([TopicPartition(world.topic, 5)]))]
    seen += [[one.offset for one in client.client.position([TopicPartition(world.topic, 9)])]]
    seen += [refusal(lambda: client.client.get_watermark_offsets(TopicPartition(world.topic, 9), timeout=60))]
    client.client.close()
    seen += [client.events, refusal(client.client.close), refusal(lambda: client.client.poll(0))]
    return seen


def offsets_outside_of_the_log(world: World) -> Seen:
    world.produce(*(b"%d" % number for number in range(5)))
    world.delete_before(3)
    seen: Seen = []
    for offset, reset in product((1, 99), ("earliest", "latest", "error")):
        group = f"{world.group}-{reset}-{offset}"
        outside = Client(world, join=False, group=group)
        outside.commit(offset)
        outside.client.close()
        client = Client(world, group=group, auto_offset_reset=reset)
        if reset == "earliest":
            seen += client.take(2)
        else:
            client.until(lambda client=client: bool(client.events))  # type: ignore[misc] # bound now
            seen += client.idle(20)
        seen += [reset, client.position(), client.committed(), [error for error in client.errors if error[2] == 0]]
        client.client.close()
    return seen


def no_offset_and_no_policy(world: World) -> Seen:
    world.produce(b"0")
    client = Client(world, auto_offset_reset="error")
    client.until(lambda: len(client.errors) > 1)
    seen = [sorted(client.errors), client.idle(), client.position()]
    client.client.close()
    return seen


def a_second_member(world: World) -> Seen:
    first = Client(world)
    first.until(lambda: bool(first.events))
    outside = Client(world, join=False)
    refused: Seen = [outside.commit(1)]
    second = Client(world)
    answers: Seen = []
    first.on_revoke = lambda: answers.append(first.commit(2, partition=0))

    def moved() -> bool:
        first.client.poll(0.05)
        second.client.poll(0.05)
        return bool(second.events)

    wait_until(moved)
    seen = [*refused, *answers, [len(places) for _, places in first.events], first.events[-1][0], second.events[0][0]]
    # What one gave back the other has, and what one committed then is the group's.
    seen += [first.events[-1][1] == second.events[0][1], second.committed(0)]
    second.client.close()
    first.until(lambda: first.events[-1][0] == "assign")
    seen += [len(first.events[-1][1]), second.events[-1][0]]
    first.client.close()
    return seen


def an_evicted_member(world: World) -> Seen:
    config = {"session_timeout_ms": 6_000, "max_poll_interval_ms": 6_000}
    client = Client(world, **config)
    client.until(lambda: bool(client.events))
    seen: Seen = [client.commit(1)]
    world.pass_time(8)
    seen += [client.commit(2)]
    client.client.commit(offsets=[TopicPartition(world.topic, 0, 3)], asynchronous=True)
    client.until(lambda: len(client.events) > 2)
    client.until(lambda: bool(client.answers))
    seen += [client.events, client.answers, client.errors, client.committed()]
    client.client.close()
    return seen


_SCENARIOS = [
    markers_and_aborted_ranges,
    open_transactions,
    offsets_and_metadata,
    metadata_limit,
    pausing,
    offsets_outside_of_the_log,
    no_offset_and_no_policy,
    a_second_member,
    pytest.param(an_evicted_member, marks=pytest.mark.thorough),  # it waits for a session of a real broker to end
]


@pytest.mark.parametrize("scenario", _SCENARIOS, ids=lambda scenario: getattr(scenario, "__name__", None))
def test_the_clients_see_the_same_on_both(
    scenario: Callable[[World], Seen], broker: DevBroker, admin: AdminClient, new_topic: Callable[..., str]
) -> None:
    partitions = 2

    memory = TestBroker()
    memory.create_topic("t", partitions)
    in_memory = _placed(scenario(MemoryWorld(memory)), "t")
    topic = new_topic(partitions=partitions)
    in_truth = _placed(scenario(KafkaWorld(broker, admin, topic)), topic)

    assert in_memory == in_truth


def _placed(seen: Seen, topic: str) -> str:
    """Return the events as text, without the name of the topic."""
    return "\n".join(repr(one).replace(repr(topic), "TOPIC") for one in seen)
