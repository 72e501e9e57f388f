"""Cancelling in a store in Kafka: the transaction is looked for in the logs, for no index of ids is kept anywhere.

So it costs a reading of what is pending. The ROLLBACK is an op record like any other; whether it came in time is shown
by the done log, once a coordinator has settled the transaction.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import DecisionNotStoredError
from penstock.transactions.core.decisions import not_cancelled, not_pending
from penstock.transactions.stores.kafka.inspection import KafkaInspection
from penstock.transactions.wire.ops import Author, Op, Verdict
from penstock.transactions.wire.topics import StoreTopics


def cancel(
    inspection: KafkaInspection,
    topics: StoreTopics,
    store: Callable[[Op], None],
    *,
    transaction_id: str,
    group: str,
    wait_s: float,
) -> None:
    """Take a committed message back that is not due yet, and return once it is rolled back.

    `store` returns once a decision is durable, or raises `DecisionNotStoredError`. Waits at most `wait_s` seconds until
    a coordinator has settled it. Raises as `Store.cancel` and as `KafkaInspection`.
    """
    found = inspection.find(transaction_id)
    if found is None:
        ends = (inspection.ends_of(transaction_id, number, 0) for number in range(topics.partitions))
        end = next((note.verdict for note in ends if note is not None), None)
        if end is Verdict.ROLLBACK:
            return
        raise not_pending(transaction_id, group) if end is None else not_cancelled(transaction_id, end)
    pending = found.pending
    if pending.group != group:
        raise not_pending(transaction_id, group)
    end = pending.verdict
    if end is Verdict.COMMIT and pending.half.deliver_at_ms is not None:
        # Whether it is due goes by the broker's clock, where the record is stored.
        number = found.half_partition
        done_from = inspection.end(topics.done, number)
        store(Op(transaction_id, Verdict.ROLLBACK, Author.PRODUCER, group, number, pending.offsets, 0))
        note = inspection.await_end(found, done_from, wait_s)
        now = inspection.find(transaction_id) if note is None else None
        if note is None and (now is None or now.pending.verdict is Verdict.ROLLBACK):
            raise DecisionNotStoredError(
                f"transaction {transaction_id}: that it is cancelled is stored, but no coordinator has settled it in "
                f"{wait_s:g} s; one that is started does so, if that was stored before it was due: look with "
                f"`penstock tx show {transaction_id}`"
            )
        stands = None if now is None else now.pending.verdict
        end = stands if note is None else note.verdict
    if end is not Verdict.ROLLBACK:
        raise not_cancelled(transaction_id, end)
