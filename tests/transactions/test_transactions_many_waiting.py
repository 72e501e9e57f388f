"""What many waiting transactions cost: memory, and work in a round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from transaction_tools import child, line_of
from waiting_partition import VALUE, WaitingPartition

from penstock.transactions.core.pending import Pending
from penstock.transactions.stores.kafka.coordinator.half_partition import HalfPartition
from penstock.transactions.stores.kafka.logs.recovered_partition import LOGS
from penstock.transactions.wire.done_records import Snapshot, StoredHalf

#: Bytes that docs/transactions.md states for each pending transaction.
STATED_BYTES = 1_300
#: A budget for a few payloads, and one for none to speak of.
BUDGET = 4 << 20
SMALL = 10_000


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_each_of_many_delayed_messages_stays_within_the_stated_memory() -> None:
    count = 30_000
    with child("waiting_partition.py", f"{count}", f"{BUDGET}") as process:
        waiting, before, after = map(int, line_of(process).split())

    assert waiting == count
    bound = BUDGET + count * STATED_BYTES
    assert count * len(VALUE) > 2 * bound, "the payloads alone would not fit"
    assert after - before < bound


@contextmanager
def touched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Record each access to a pending transaction."""
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
        owned.state._take_snapshot(at, Snapshot(pending.note(), (StoredHalf(pending.offset, 1, pending.half),)))


def a_round(owned: HalfPartition) -> None:
    """Run a coordinator's round, with its search for transactions to snapshot or delete."""
    owned._snapshot_due = 0.0
    owned.note_progress(1.0)
    batch = owned.next_batch(1_000, lambda _: None, 1 << 20)
    assert batch is None or not (batch.decided or batch.snapshots)
    owned.take_bounds(dict.fromkeys(LOGS, (0, 0)), 0)
    owned.plan.next_due()
    assert list(owned.plan.take_due(time.time(), 100)) == []


def objects_touched_in_a_round(count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many of `count` waiting transactions one round reads."""
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
