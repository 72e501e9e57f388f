"""Groups for the commands on offsets, as an app or another tool would have left them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from confluent_kafka import Consumer, TopicPartition

from kafka_tools import committed
from penstock.offsets import decode, encode, owner_of

#: Topic, partition, committed offset, ranges done above it.
Standing = tuple[int, tuple[range, ...]]


def stand(
    bootstrap: str, group: str, topic: str, partition: int, offset: int, *, done: Sequence[range] = (), text: str = ""
) -> None:
    """Commit as an app does, with an offset map; or with this text, as another tool does."""
    metadata = text or encode(offset, done, owner=owner_of(group, topic, partition))
    with closing(Consumer({"bootstrap.servers": bootstrap, "group.id": group})) as bare:
        bare.commit(offsets=[TopicPartition(topic, partition, offset, metadata=metadata)], asynchronous=False)


def stands(bootstrap: str, group: str, topic: str, partition: int = 0) -> Standing:
    """Return where a group stands, as an app reads it; -1 without an offset."""
    found = committed(bootstrap, group, topic, partition + 1)[partition]
    if found.offset < 0:
        return -1, ()
    done = decode(found.offset, found.metadata, owner_of(group, topic, partition))
    return found.offset, done.done if done else ()


def rows(out: str) -> list[list[str]]:
    """Return the cells of a printed table, without its head."""
    return [line.split() for line in out.splitlines() if line.startswith(" ")][1:]
