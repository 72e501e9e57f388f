"""Cancelling in a database: one conditional update."""

from __future__ import annotations

import sqlalchemy as sa

from penstock.transactions.coordinator.state.cancelling import not_cancelled, not_pending
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import Database
from penstock.transactions.wire.ops import Author, Verdict


def cancel(database: Database, transaction_id: str, group: str) -> None:
    """Take a committed message back that is not due yet. Raises as `Store.cancel`."""
    tx = schema.tx
    named = (tx.c.id == transaction_id) & (tx.c.producer_group == group)
    with database.storing(f"transaction {transaction_id}: that it is cancelled", "try again") as connection:
        done = connection.execute(
            tx.update()
            .where(named, schema.is_delayed(database))
            .values(state=schema.ROLLBACK, author=int(Author.PRODUCER), decided_seq=database.next)
        )
        state = connection.execute(sa.select(tx.c.state).where(named)).scalar()
    if state is None:
        raise not_pending(transaction_id, group)
    if not done.rowcount and state != schema.ROLLBACK:
        raise not_cancelled(transaction_id, None if state == schema.PREPARED else Verdict(state))
