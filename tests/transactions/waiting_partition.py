"""A half partition of a coordinator with many waiting transactions, without a reader of payloads.

As a script it tells how much memory they take: it prints resident bytes before, and when all are there.
Arguments: how many; bytes of payloads that may be in memory.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from half_partition import half_partition, half_record, op_record

from penstock.transactions.core.pending import Pending
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict

#: A time that does not come while a test runs, in milliseconds.
NEXT_YEAR_MS = 4_000_000_000_000
VALUE = b"v" * 4_000


class WaitingPartition:
    """A partition whose logs are written by hand, and which keeps few payloads in memory."""

    def __init__(self, budget: int) -> None:
        self.owned = half_partition()
        self.state = self.owned.state
        self.state.payloads.limit = budget

    def store(self, **more: object) -> Pending:
        """Store a half."""
        half = Half(new_id(), "orders", "topic", None, None, VALUE, (), None)._replace(**more)  # type: ignore[arg-type] # as told
        offset = self.state.half_position
        self.owned.feed.take_half(half_record(offset, half), 0.0)
        return self.state.pending[half.transaction_id]

    def commit(self, pending: Pending) -> None:
        op = Op(pending.half.transaction_id, Verdict.COMMIT, Author.PRODUCER, "orders", 0, pending.offsets, 0)
        self.owned.feed.take_op(op_record(self.state.op_position, op), 0.0)

    def delayed(self, count: int) -> None:
        """Let so many transactions wait for their time."""
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
