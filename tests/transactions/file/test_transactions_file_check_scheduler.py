"""The file store's checks by the time they are due."""

from __future__ import annotations

from penstock.transactions import new_id
from penstock.transactions.stores.file.check_scheduler import DueQueue
from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.wire.ops import Verdict


def stored(number: int = 1) -> StoredTransaction:
    return StoredTransaction(new_id(), "orders", number, 5_000, 0, 0, None, 0, 1 << 40, 77, None, None, None, ("t",))


def test_checks_come_up_in_the_order_of_their_times_and_no_more_than_a_round_has_time_for() -> None:
    queue, rows = DueQueue(), [stored(number) for number in range(8)]
    for number, row in enumerate(rows):
        queue.plan(row, 10.0 + number)
    assert queue.next_due == 10.0

    assert queue.take_due(9.0, 100) == []
    assert queue.take_due(11.5, 100) == rows[:2]
    assert queue.next_due == 12.0
    for row in rows[:2]:
        queue.plan(row, 50.0)
    # Decided and settled ones are not checked any more.
    rows[3].verdict = Verdict.COMMIT
    rows[7].settled = True
    assert queue.take_due(20.0, 3) == [rows[2], rows[4], rows[5]]
    assert queue.take_due(20.0, 3) == [rows[6]]
    assert queue.next_due == 50.0


def test_what_is_planned_anew_comes_up_once_at_its_new_time() -> None:
    queue, row = DueQueue(), stored()
    queue.plan(row, 10.0)
    queue.plan(row, 30.0)
    queue.plan(row, 20.0)

    assert queue.take_due(15.0, 10) == []
    assert queue.take_due(100.0, 10) == [row]
    assert queue.take_due(100.0, 10) == []
    assert queue.next_due == float("inf")


def test_what_is_decided_leaves_the_memory_before_its_check_would_have_been_due() -> None:
    queue, waiting = DueQueue(), stored()
    queue.plan(waiting, 1e9)
    for _ in range(20_000):
        row = stored()
        queue.plan(row, 1e6)
        row.verdict = Verdict.COMMIT

    assert len(queue._entries) < 5_000
    assert queue.take_due(1e9, 10) == [waiting]
