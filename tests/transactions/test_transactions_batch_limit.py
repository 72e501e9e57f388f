"""How many decisions share a Kafka transaction."""

from __future__ import annotations

import pytest

from penstock.transactions.core.pending import Pending
from penstock.transactions.core.state import PartitionState
from penstock.transactions.publishing.batch_limit import BatchLimit
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Verdict


def run(limit: BatchLimit, cost_s: float, groups: int, size_bytes: int = 128) -> int:
    """Fill so many groups to the limit, with this cost of a decision, and return the limit then."""
    for _ in range(groups):
        decisions = limit.decisions
        limit.measured(decisions, decisions * size_bytes, 0.004 + decisions * cost_s)
    return limit.decisions


def test_groups_grow_and_shrink_with_their_time() -> None:
    limit = BatchLimit(0.02)
    begun = limit.decisions

    quick = run(limit, 2e-6, 20)
    slow = run(limit, 20e-6, 40)
    quick_again = run(limit, 2e-6, 40)

    assert quick > 2 * begun
    assert slow <= 1.2 * 0.016 / 20e-6
    assert quick_again > 2 * slow


def test_large_messages_make_groups_small() -> None:
    limit = BatchLimit(0.02)

    few = run(limit, 2e-6, 20, size_bytes=1 << 20)

    assert few == 4


def pending(size_bytes: int, parts: int = 1) -> Pending:
    """Return a transaction of so many messages of this size."""
    name = new_id()
    halves = [
        Half(name, "orders", "t", None, None, bytes(size_bytes), (), None, part=(n + 1, parts) if parts > 1 else None)
        for n in range(parts)
    ]
    made = Pending(halves[0], 0)
    for offset, half in enumerate(halves[1:], start=1):
        made.add_part(offset, half)
    return made


def fill(limit: BatchLimit, waiting: list[Pending], parts: int = 1) -> list[Pending]:
    """Choose a group, or a part of one, as a partition does."""
    decisions = PartitionState(0, 0).queue
    for one in waiting[: 2 * limit.decisions]:
        one.verdict = Verdict.COMMIT
        decisions.add(one)
    return list(decisions.choose(max(1, limit.decisions // parts), lambda _: None, limit.bytes // parts).values())


def test_a_transaction_larger_than_a_group_goes_alone_and_nothing_passes_it() -> None:
    huge, small = pending(9 << 20), pending(10)

    assert fill(BatchLimit(0.02), [huge, small]) == [huge]
    assert fill(BatchLimit(0.02), [small, huge, small]) == [small]


@pytest.mark.parametrize(("buffer_messages", "buffer_bytes"), [(1_000, 1 << 30), (3_000_000, 1 << 20), (60, 30_000)])
def test_groups_shrink_until_the_clients_buffer_takes_them_and_are_seldom_refused_again(
    buffer_messages: int, buffer_bytes: int
) -> None:
    limit, refusals, groups = BatchLimit(0.02), 0, 0
    waiting = [pending(20, parts=50) for _ in range(1_000)]

    while waiting:
        chosen = fill(limit, waiting)
        size = sum(one.payload_bytes for one in chosen)
        if 50 * len(chosen) > buffer_messages or size > buffer_bytes:
            assert limit.refused(len(chosen), size), "each fits by itself"
            refusals += 1
        else:
            limit.measured(len(chosen), size, 0.01)
            groups += 1
            del waiting[: len(chosen)]

    # Some at first, and then one now and then, when larger ones are tried again.
    assert refusals <= 10 + groups / 16
