"""Which pending transactions are snapshotted past the checkpoints."""

from __future__ import annotations

import pytest

from penstock.transactions.coordinator.state.pending.pending import Pending
from penstock.transactions.coordinator.state.snapshot import LARGEST_BYTES, to_snapshot
from penstock.transactions.coordinator.state.state_machine import PartitionState
from penstock.transactions.wire.done_records import Done
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict

GAP = 50


class Log:
    """A partition with a done log; what is not said to stay is rolled back as soon as it is stored."""

    def __init__(self) -> None:
        self.state = PartitionState(0, 0)
        self.done: list[Done] = []
        self.positions = (0, 0)

    def store(self, value: bytes = b"v", *, stays: bool = True, part: tuple[int, int] | None = None) -> Half:
        half = Half(new_id(), "g", "topic", None, None, value, (("h", b"1"),), None, part=part)
        self.state.add_half(self.state.half_position, half, 7)
        if not stays:
            self.decide(half, Verdict.ROLLBACK)
        return half

    def decide(self, half: Half, verdict: Verdict) -> None:
        offset = self.state.pending[half.transaction_id].offset
        op = Op(half.transaction_id, verdict, Author.PRODUCER, "g", 0, (offset,), 0)
        assert self.state.add_op(self.state.op_position, op, 0) is None

    def go_on(self, count: int) -> None:
        for _ in range(count):
            self.store(stays=False)

    def next_batch(self) -> list[bytes | None]:
        """Settle what is decided, then snapshot what is old, and return what was snapshotted."""
        self.settle([])
        return self.settle(to_snapshot(self.state, len(self.done), GAP))

    def settle(self, snapshot: list[Pending]) -> list[bytes | None]:
        batch = self.state.next_batch(1_000, lambda _: None, snapshot)
        if batch is None:
            return []
        self.done.append(Done(batch.notes(), batch.snapshots))
        self.state.apply(batch, len(self.done) - 1)
        self.positions = (batch.half_checkpoint, batch.op_checkpoint)
        return [snapshotted.halves[0].half.value for snapshotted in batch.snapshots]


def test_what_is_old_is_carried_and_what_is_young_is_not() -> None:
    log = Log()
    log.store(b"old")
    log.go_on(40)
    assert log.next_batch() == []
    log.store(b"young")
    log.go_on(20)

    assert log.next_batch() == [b"old"]
    assert log.positions[0] == 41
    assert log.next_batch() == []


@pytest.mark.parametrize("kind", ["large", "incomplete"])
def test_what_cannot_be_carried_pins_the_log_and_all_that_is_behind_it_stays_in_order(kind: str) -> None:
    log = Log()
    log.store(b"first")
    log.store(b"x" * LARGEST_BYTES if kind == "large" else b"x", part=(1, 2) if kind == "incomplete" else None)
    log.store(b"behind")
    log.go_on(60)

    assert log.next_batch() == [b"first"]
    assert log.positions[0] == 1
