"""What many waiting transactions cost: memory, and work in a round; and what becomes of payloads that are nowhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from transaction_tools import child, line_of
from waiting_partition import VALUE, WaitingPartition

from penstock.transactions.core.pending import Pending
from penstock.transactions.core.snapshot import pinning
from penstock.transactions.stores.kafka.coordinator.half_partition import HalfPartition
from penstock.transactions.stores.kafka.logs.log_identity import HALF
from penstock.transactions.wire.done_records import Snapshot, SnapshotHalf
from penstock.transactions.wire.ops import Verdict

#: Bytes that docs/transactions.md states for each pending transaction.
STATED_BYTES = 1_300
#: A budget for a few payloads, and one for none to speak of.
BUDGET = 4 << 20
SMALL = 10_000


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_each_of_many_delayed_messages_takes_no_more_memory_than_is_stated() -> None:
    count = 30_000
    with child("waiting_partition.py", f"{count}", f"{BUDGET}") as process:
        waiting, before, after = map(int, line_of(process).split())

    assert waiting == count
    bound = BUDGET + count * STATED_BYTES
    assert count * len(VALUE) > 2 * bound, "the payloads alone would not fit"
    assert after - before < bound


@contextmanager
def touched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Note which pending transactions anybody looks at."""
    seen: set[int] = set()
    get = object.__getattribute__

    def noting(self: Pending, name: str) -> object:
        seen.add(id(self))
        return get(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Pending, "__getattribute__", noting)
        yield seen


def snapshot_all(owned: HalfPartition, some: list[Pending]) -> None:
    """Take in that the done log holds these whole."""
    for at, pending in enumerate(some):
        owned.state._take_snapshot(at, Snapshot(pending.note(), (SnapshotHalf(pending.offset, 1, pending.half),)))


def a_round(owned: HalfPartition) -> None:
    """Do what a coordinator does in a round, looks for what is to be snapshotted or deleted among it."""
    owned._snapshot_due = 0.0
    owned.note_progress(1.0)
    batch = owned.next_batch(1_000, lambda _: None, 1 << 20)
    assert batch is None or not (batch.decided or batch.snapshots)
    owned.truncated(HALF, 0)
    owned.schedule.next_due()
    assert list(owned.schedule.take_due(time.time(), 100)) == []
    pinning(owned.state)


def objects_touched_in_a_round(count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many of so many waiting transactions one round looks at."""
    partition = WaitingPartition(SMALL)
    owned = partition.owned
    partition.delayed(count)
    snapshot_all(owned, list(owned.state.pending.values())[: count // 2])
    for _ in range(count // 10):
        partition.store(immunity_ms=10**9)
    owned.clock.marked(int(time.time() * 1000), 0.0, 0.0)
    owned.note_progress(0.0)
    # What was decided meanwhile leaves the schedule of checks the first time.
    a_round(owned)
    with touched(monkeypatch) as seen:
        a_round(owned)
    return len(seen)


def test_a_round_looks_at_a_few_transactions_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (objects_touched_in_a_round(count, monkeypatch) for count in (100, 3_000))

    assert 0 < many <= few
    assert many < 20


def chosen(partition: WaitingPartition) -> list[Pending]:
    batch = partition.state.next_batch(100, lambda _: None)
    return [] if batch is None else batch.decided


def chosen_once_read(partition: WaitingPartition, count: int) -> list[Pending]:
    """Have payloads read until so many can be published, and return them."""
    some: list[Pending] = []
    for second in range(1, 100):
        partition.owned.note_progress(float(second))
        batch = partition.state.next_batch(100, lambda _: None)
        if batch is not None:
            some += batch.decided
            partition.state.apply(batch)
        if len(some) == count:
            break
    return some


def gone_for_good(partition: WaitingPartition, pending: Pending) -> None:
    """The half is not in the log any more."""
    del partition.shelf.halves[pending.offset]
    partition.shelf.gone.add(pending.offset)


def something_else_is_there(partition: WaitingPartition, pending: Pending) -> None:
    """A half of another transaction lies at its offset."""
    other = partition.shelf.halves[pending.offset]
    partition.shelf.halves[pending.offset] = other._replace(transaction_id="0" * len(other.transaction_id))


@pytest.mark.parametrize("what", [gone_for_good, something_else_is_there])
def test_a_payload_that_is_not_found_again_is_lost_only_once_that_has_lasted_and_then_told(
    what: Callable[[WaitingPartition, Pending], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    partition = WaitingPartition(0)
    first, second = (partition.store(keep=True, key=b"k") for _ in range(2))
    what(partition, first)
    for pending in (first, second):
        partition.state.payloads.drop(pending)
        partition.commit(pending)
    assert chosen(partition) == []

    for now in (1.0, 1.1, 2.0, 2.1, 3.0, 3.9):
        partition.owned.note_progress(now)
    assert (partition.counts.lost, caplog.text) == (0, ""), "who lost the partition must not call it lost"
    assert chosen(partition) == []
    assert chosen_once_read(partition, 1) == [second]

    assert partition.counts.lost == 1
    assert first.half.transaction_id in caplog.text
    assert first.verdict is Verdict.COMMIT
