"""A half partition in a coordinator's hands, and records of its logs as the client hands them over: without Kafka."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.transactions.core.check_plan import CheckPolicy
from penstock.transactions.core.checkpoints import Mark
from penstock.transactions.core.state import PartitionState
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.coordinator.half_partition import HalfPartition
from penstock.transactions.stores.kafka.logs.recovered_partition import DONE, HALF, OP, RecoveredPartition
from penstock.transactions.wire.half import Half, encode_half
from penstock.transactions.wire.ops import Op, encode_op
from penstock.transactions.wire.topics import StoreTopics


@dataclass(frozen=True)
class _Fetched:
    """The used parts of a message of the client library."""

    place: int
    content: bytes | None
    named: Sequence[tuple[str, bytes | None]]
    appended_s: float
    name: bytes | None

    def offset(self) -> int:
        return self.place

    def key(self) -> bytes | None:
        return self.name

    def value(self) -> bytes | None:
        return self.content

    def headers(self) -> Sequence[tuple[str, bytes | None]]:
        return self.named

    def timestamp(self) -> tuple[int, int]:
        # By the broker's clock, at its append.
        return 2, int(self.appended_s * 1000)


def fetched(
    offset: int,
    value: bytes | None,
    headers: Sequence[tuple[str, bytes | None]] = (),
    appended_s: float | None = None,
    key: bytes | None = None,
) -> Any:
    """Return a record, appended now unless a time is given, in seconds."""
    return _Fetched(offset, value, headers, time.time() if appended_s is None else appended_s, key)


def half_record(offset: int, half: Half, appended_s: float | None = None) -> Any:
    """Return a record of the half log."""
    return fetched(offset, half.value, encode_half(half), appended_s, half.key)


def op_record(offset: int, op: Op, appended_s: float | None = None) -> Any:
    """Return a record of the op log."""
    return fetched(offset, encode_op(op), appended_s=appended_s)


def context_of(topics: StoreTopics, servers: str = "", policy: CheckPolicy | None = None) -> CoordinatorContext:
    """Return the shared context of a coordinator's parts."""
    return CoordinatorContext(servers, {}, policy or CheckPolicy(6, 30, 15), topics)


def recovered_at(half: int, op: int, half_end: int = 0, op_end: int = 0) -> RecoveredPartition:
    """Return the recovered state of a partition with an empty done log, whose logs were read to these places."""
    starts, ends = {HALF: half, OP: op, DONE: 0}, {HALF: half_end, OP: op_end, DONE: 0}
    return RecoveredPartition(PartitionState(half, op), starts, ends, Mark(0, 0, 0))


def half_partition(
    recovered: RecoveredPartition | None = None,
    context: CoordinatorContext | None = None,
) -> HalfPartition:
    """Return half partition 0 as its coordinator has it; its logs are empty unless something else was recovered."""
    owned = HalfPartition(context or context_of(StoreTopics("store", 1)), 0, recovered or recovered_at(0, 0))
    owned.settled(owned.claim())
    return owned


__all__ = ["context_of", "fetched", "half_partition", "half_record", "op_record", "recovered_at"]
