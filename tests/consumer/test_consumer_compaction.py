"""A log that Kafka's cleaner has really compacted: offsets that do not exist are neither waited for nor lost."""

from __future__ import annotations

import threading

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from kafka_tools import Recorder, committed, ends, produce, read_all
from penstock import clients
from penstock.consumer import handler
from penstock.devbroker import DevBroker
from penstock.message import Message
from penstock.offsets import decode, owner_of
from support.consumers import NewTopic, consumer_of, group_of
from waiting import wait_until

COMPACTED = {
    "cleanup.policy": "compact",
    "segment.ms": "100",
    "min.cleanable.dirty.ratio": "0.001",
    "max.compaction.lag.ms": "100",
}
KEYS = [b"k%d" % number for number in range(50)]


def compacted_topic(servers: str, new_topic: NewTopic) -> tuple[str, list[tuple[bytes, int]]]:
    """Return a topic whose log has holes, and the key and offset of all that is left in it."""
    topic = new_topic(partitions=1, config=COMPACTED)
    written = 0

    def has_holes() -> bool:
        nonlocal written
        # Only segments that are no longer written to are compacted, and only a write begins the next one. Some keys
        # come once, so that what is left lies here and there.
        produce(servers, topic, [(b"once %d" % written, b"x"), *((key, b"x") for key in KEYS)])
        written += 1 + len(KEYS)
        return written > 20 * len(KEYS) and len(read_all(servers, topic)) < written // 2

    wait_until(has_holes, 90, interval=0.3)
    stop_compaction(servers, topic)
    left: list[tuple[bytes, int]] = []

    def stays() -> bool:
        # The cleaner may be at work for the last time.
        before = left[:]
        left[:] = [(message.key() or b"", message.offset() or 0) for message in read_all(servers, topic)]
        return left == before

    wait_until(stays, interval=1.0)
    return topic, left


def stop_compaction(servers: str, topic: str) -> None:
    """Leave a topic's log as it is from now on: what was read of it shall still be there when it is consumed."""
    settings = {"cleanup.policy": "delete", "retention.ms": "-1"}
    entries = [
        ConfigEntry(name, setting, incremental_operation=AlterConfigOpType.SET) for name, setting in settings.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    admin = clients.admin(servers, {})
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(20)


@pytest.mark.thorough
def test_what_compaction_left_is_handled_once_and_committed_to_the_end(broker: DevBroker, new_topic: NewTopic) -> None:
    servers = broker.bootstrap_servers
    topic, left = compacted_topic(servers, new_topic)
    group = group_of(topic)
    until = threading.Event()
    seen = Recorder()
    held = left[0][0]

    def hold_the_first(message: Message) -> None:
        if message.key == held:
            until.wait(60)
        else:
            seen(message)

    with consumer_of(broker, {topic: handler(hold_the_first)}, stop_timeout=0.5, revoke_timeout=0.5) as consumer:
        wait_until(lambda: consumer.statistics().in_flight == sum(key == held for key, _ in left))
        wait_until(lambda: committed(servers, group, topic, 1)[0].metadata)
        behind_the_first = {offset for key, offset in left if key != held}
        wait_until(lambda: behind_the_first == told_done(servers, group, topic) & {offset for _, offset in left})
        drained = consumer.stop()
    until.set()
    with consumer_of(broker, {topic: handler(seen)}):
        wait_until(lambda: committed(servers, group, topic, 1)[0].offset == ends(servers, topic, 1)[0])

    offsets = [offset for _, offset in left]
    assert offsets[-1] - offsets[0] >= 2 * len(offsets), "nothing was compacted"
    assert not drained
    assert sorted(call.offset for call in seen.calls) == offsets


def told_done(servers: str, group: str, topic: str) -> set[int]:
    """Return the offsets above the committed one that the group says are done; those that do not exist included."""
    one = committed(servers, group, topic, 1)[0]
    above = decode(one.offset, one.metadata, owner_of(group, topic, 0))
    return {offset for done in (above.done if above is not None else ()) for offset in done}
