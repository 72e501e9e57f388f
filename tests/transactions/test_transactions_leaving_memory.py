"""What is settled leaves the coordinator's memory at once, whenever its check would have been due."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from half_partition import half_partition, half_record, op_record

from penstock.transactions.coordinator.state.pending.pending import Pending
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict

MANY = 2_000


class Partition:
    """A half partition of a coordinator, whose logs are written by hand."""

    def __init__(self) -> None:
        self.owned = half_partition()

    def store(self, half: Half) -> int:
        offset = self.owned.state.half_position
        self.owned.feed.half(half_record(offset, half), 0.0)
        return offset

    def decide(self, transaction_id: str, offsets: tuple[int, ...], verdict: Verdict) -> None:
        op = Op(transaction_id, verdict, Author.PRODUCER, "orders", 0, offsets, 0)
        self.owned.feed.op(op_record(self.owned.state.op_position, op), 0.0)

    def settle_all(self) -> None:
        # What is delayed waits until a mark of the coordinator's own has told the time.
        self.owned.clock.marked(1_000_000, 0.0, 0.0)
        self.owned.note_progress(0.0)
        while (batch := self.owned.next_batch(500, lambda _: None, 1 << 30)) is not None:
            self.owned.settled(batch)


def in_memory() -> int:
    gc.collect()
    return sum(isinstance(one, Pending) for one in gc.get_objects())


def half(**more: Any) -> Half:
    return Half(new_id(), "orders", "topic", None, None, b"v", (), None)._replace(**more)


@pytest.mark.parametrize("verdict", [Verdict.COMMIT, Verdict.ROLLBACK])
@pytest.mark.parametrize("kind", ["of two messages", "immune for an hour", "usual", "delayed, and due"])
def test_nothing_of_what_is_settled_is_in_memory_whenever_its_check_would_have_been_due(
    kind: str, verdict: Verdict
) -> None:
    before = in_memory()
    partition = Partition()

    for _ in range(MANY):
        if kind == "of two messages":
            first = half(part=(1, 2))
            offsets = partition.store(first), partition.store(first._replace(part=(2, 2)))
        else:
            immunity_ms = 3_600_000 if kind == "immune for an hour" else None
            first = half(immunity_ms=immunity_ms, deliver_at_ms=1 if kind == "delayed, and due" else None)
            offsets = (partition.store(first),)
        partition.decide(first.transaction_id, offsets, verdict)
    stays = half(immunity_ms=3_600_000)
    partition.store(stays)
    assert in_memory() - before == MANY + 1
    partition.settle_all()

    assert in_memory() - before == 1
    assert list(partition.owned.state.pending) == [stays.transaction_id]
