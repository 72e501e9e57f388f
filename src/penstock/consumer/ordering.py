"""Which messages wait for each other: the identity of a message under an order mode, and its lane."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum
from itertools import count

from xxhash import xxh3_64_intdigest

from penstock.message import Record
from penstock.routing import lane_of

#: The lane of all keyless messages under `Keyless.TOGETHER`.
_NO_KEY = b"__nokey"


class Order(Enum):
    """Which messages are handled one at a time and in order."""

    #: Messages with the same key, whichever partitions and topics of the app they come from.
    KEY = "key"
    #: Messages of the same partition.
    PARTITION = "partition"
    #: None; every message stands for itself.
    NONE = "none"


class Keyless(Enum):
    """How messages without a key are ordered under `Order.KEY`."""

    #: In the order of their partition, as Kafka has it.
    PARTITION = "partition"
    #: All in one order.
    TOGETHER = "together"
    #: Each stands for itself.
    SPREAD = "spread"


class Ordering:
    """The order of one handler over a number of lanes.

    Used by the poll thread and by workers; its only state is a counter that the poll thread alone moves.

    Args:
        order: the order mode.
        keyless: what to do without a key.
        lanes: number of lanes.
    """

    def __init__(self, order: Order, keyless: Keyless, lanes: int) -> None:
        self._order = order
        self._keyless = keyless
        self._lanes = lanes
        self._turn = count()

    def lane_numbers(self, topic: str, partition: int, keys: Sequence[bytes | None]) -> list[int]:
        """Return the lane of each message of one partition, given their keys. On the poll thread only."""
        lanes = self._lanes
        if self._order is Order.KEY:
            if None not in keys:
                # `lane_of`, written out: a call for each message would cost as much as the hash.
                return [xxh3_64_intdigest(key) % lanes for key in keys]  # type: ignore[arg-type] # no None in it
            return [self._keyless_lane(topic, partition) if key is None else lane_of(key, lanes) for key in keys]
        if self._order is Order.PARTITION:
            return [self._partition_lane(topic, partition)] * len(keys)
        return [next(self._turn) % lanes for _ in keys]

    def identity(self, record: Record) -> Hashable:
        """Return what the messages that wait for this one have in common with it."""
        if self._order is Order.KEY:
            key = record.key()
            if key is not None:
                return key
            if self._keyless is Keyless.TOGETHER:
                return None
            if self._keyless is Keyless.PARTITION:
                return (record.topic(), record.partition())
        elif self._order is Order.PARTITION:
            return (record.topic(), record.partition())
        return (record.topic(), record.partition(), record.offset())

    def _keyless_lane(self, topic: str, partition: int) -> int:
        if self._keyless is Keyless.PARTITION:
            return self._partition_lane(topic, partition)
        if self._keyless is Keyless.TOGETHER:
            return lane_of(_NO_KEY, self._lanes)
        return next(self._turn) % self._lanes

    def _partition_lane(self, topic: str, partition: int) -> int:
        return lane_of(f"{topic}\0{partition}".encode(), self._lanes)


__all__ = ["Keyless", "Order", "Ordering"]
