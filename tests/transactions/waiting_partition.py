"""A half partition of a coordinator with many transactions that wait, and a reader of payloads that is no Kafka client.

As a script it tells how much memory they take: it prints resident bytes before, and when all are there.
Arguments: how many; bytes of payloads that may be in memory.
"""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from half_partition import half_partition, half_record, op_record

from penstock.transactions.core.pending import Pending
from penstock.transactions.stores.kafka.coordinator.counts import Counts
from penstock.transactions.stores.kafka.logs.payload_reader import Read, Wanted
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict

#: A time that does not come while a test runs, in milliseconds.
NEXT_YEAR_MS = 4_000_000_000_000
VALUE = b"v" * 4_000


@dataclass
class ReadyQueue:
    """Reads payloads: those that it was given."""

    budget: int
    halves: dict[int, Half]
    gone: set[int]
    answer: Read | None = None

    def budget_bytes(self, _: object) -> int:
        return self.budget

    def read(self, _: object, wanted: Wanted) -> bool:
        halves = {offset: self.halves[offset] for offset in wanted.halves if offset in self.halves}
        self.answer = Read(halves, set(wanted.halves & self.gone), gone_snapshots=set(wanted.snapshots))
        return True

    def take(self, _: object) -> Read | None:
        return self.answer


class WaitingPartition:
    """A partition whose logs are written by hand, and which keeps few payloads in memory."""

    def __init__(self, budget: int) -> None:
        self.counts = Counts()
        self.shelf = ReadyQueue(budget, {}, set())
        self.owned = half_partition(counts=self.counts, reader=self.shelf)
        self.state = self.owned.state

    def store(self, *, keep: bool = False, **more: object) -> Pending:
        """Store a half; the reader of payloads has it where `keep` says so."""
        half = Half(new_id(), "orders", "topic", None, None, VALUE, (), None)._replace(**more)  # type: ignore[arg-type] # as told
        offset = self.state.half_position
        if keep:
            self.shelf.halves[offset] = half
        self.owned.feed.half(half_record(offset, half), 0.0)
        return self.state.pending[half.transaction_id]

    def commit(self, pending: Pending) -> None:
        op = Op(pending.half.transaction_id, Verdict.COMMIT, Author.PRODUCER, "orders", 0, pending.offsets, 0)
        self.owned.feed.op(op_record(self.state.op_position, op), 0.0)

    def delayed(self, count: int) -> None:
        """Let so many wait for their time."""
        for number in range(count):
            self.commit(self.store(deliver_at_ms=NEXT_YEAR_MS + number))


def resident_bytes() -> int:
    """Return how much of this process is in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    count, budget = map(int, sys.argv[1:])
    partition = WaitingPartition(budget)
    before = resident_bytes()
    partition.delayed(count)
    waiting = len(partition.state.queue.delays)
    print(waiting, before, resident_bytes(), flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main()
