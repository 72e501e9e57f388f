"""Writes of producers: many changes in one transaction of the database."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import sqlalchemy as sa

from penstock.errors import StoppedError
from penstock.transactions.connections import cause_of
from penstock.transactions.core.decisions import may_cancel
from penstock.transactions.stores.relayed_store import (
    NOT_HELD,
    UNKNOWN_ID,
    Decide,
    Outcome,
    Prepare,
    Result,
    came_first,
)
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import Database
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Verdict

_log = logging.getLogger("penstock.transactions")

#: Most changes in one transaction of the database.
BATCH = 500
_DONE = Outcome()
_GROUP = sa.bindparam("wanted_group", type_=sa.Text)
#: The condition that a row is the transaction that a change names, and of its group if the change names one.
_IS_OF_GROUP = _GROUP.is_(None) | (schema.tx.c.producer_group == _GROUP)
_IS_ADDRESSED = (schema.tx.c.id == sa.bindparam("wanted_id")) & _IS_OF_GROUP


class Writing:
    """Writes changes. Repeating a write after an error is safe. Used by one thread.

    Args:
        database: the database.
        shard_of: returns the shard of a transaction, by its first half and its ordering key.
        is_late: returns whether the store was stopped.
    """

    def __init__(
        self, database: Database, shard_of: Callable[[Half, bytes | None], int], is_late: Callable[[], bool]
    ) -> None:
        self._database = database
        self._shard_of = shard_of
        self._is_late = is_late

    def write(self, changes: Sequence[Prepare | Decide]) -> Sequence[Result]:
        """Write changes, and return the result of each."""
        results = self._attempt(changes)
        if _is_database_error(results):
            # A new session may work, or the lock be free.
            results = self._attempt(changes)
        if not isinstance(results, Exception):
            return results
        if _is_database_error(results) or self._is_late() or len(changes) == 1:
            return [results] * len(changes)
        _log.warning("a batch of the SQL store was not written: %s; writing each change alone", cause_of(results))
        # The error of one change must not fail the others.
        return [alone if isinstance(alone := self._attempt([change]), Exception) else alone[0] for change in changes]

    def _attempt(self, changes: Sequence[Prepare | Decide]) -> list[Result] | Exception:
        results: list[Result] = []
        try:
            with self._database.begin() as connection:
                # In runs of one kind: many rows are inserted at once.
                for is_new, run in itertools.groupby(changes, lambda change: isinstance(change, Prepare)):
                    if is_new:
                        new = cast("list[Prepare]", list(run))
                        self._insert(connection, new)
                        results += [_DONE] * len(new)
                    else:
                        results += [decide(self._database, connection, cast("Decide", change)) for change in run]
                if self._is_late():
                    # The stop no longer waits, and the producer counts the changes as not stored.
                    raise StoppedError("the SQL store was stopped")  # noqa: TRY301 - so that it is rolled back
        except Exception as error:  # noqa: BLE001 - the error is the result
            return error
        return results

    def _insert(self, connection: sa.Connection, new: Sequence[Prepare]) -> None:
        """Insert transactions, in their order."""
        rows = [
            {
                "id": first.transaction_id,
                "shard": self._shard_of(first, transaction.ordering_key),
                "producer_group": first.group,
                "order_key": first.order_key,
                "immunity": (first.immunity_ms or 0) / 1000,
                "deliver_at_ms": first.deliver_at_ms,
                **schema.message_columns(transaction.halves),
            }
            for transaction in new
            for first in transaction.halves[:1]
        ]
        # After an error whose transaction was committed all the same, the repeated insert finds the row.
        database = self._database
        if database.kind == "mysql":
            first_number = database.draw_numbers(connection, len(rows))
            rows = [{**row, "seq": number} for number, row in enumerate(rows, first_number)]
        connection.execute(database.cached_statement("insert", lambda: _insert(database)), rows)


def _insert(database: Database) -> sa.Executable:
    number = sa.bindparam("seq") if database.kind == "mysql" else database.next_number
    columns = ("id", "shard", "producer_group", "order_key", "immunity", "deliver_at_ms", "topics", "halves")
    values: dict[str, Any] = {name: sa.bindparam(name) for name in columns}
    return database.insert_absent(schema.tx, {"seq": number, "birth": database.now, **values})


def decide(database: Database, connection: sa.Connection, change: Decide) -> Outcome:
    """Store a decision if the transaction is undecided, or count an answered check.

    A message before its delivery time can be rolled back. An operator can discard a committed message that Kafka
    refuses: only trials of its coordinator take it, and they mark it before.
    """
    if change.verdict is Verdict.UNKNOWN:
        _count_check(connection, change)
        return _DONE
    parameters = {
        "wanted_id": change.transaction_id,
        "wanted_group": change.group,
        "verdict": int(change.verdict),
        "by": int(change.author),
        "who": change.actor,
        "decides": not change.cancels,
        "withdraws": change.cancels or may_cancel(change.verdict, change.author),
        "overrules": (change.verdict, change.author) == (Verdict.DISCARD, Author.OPERATOR),
    }
    database.draw_numbers(connection)
    if connection.execute(database.cached_statement("decide", lambda: _decide(database)), parameters).rowcount:
        return _DONE
    tx = schema.tx
    row = connection.execute(sa.select(tx.c.state, tx.c.settled_at).where(_IS_ADDRESSED), parameters).first()
    connection.execute(schema.refusal.insert().values(tx=change.transaction_id))
    if row is None:
        return Outcome(UNKNOWN_ID, is_known=False)
    if row.state == schema.PREPARED:
        return Outcome("it is not decided yet")
    stands = Verdict(row.state)
    is_held_up = change.verdict is Verdict.DISCARD and stands is Verdict.COMMIT and row.settled_at is None
    return Outcome(NOT_HELD if is_held_up else came_first(stands), stands)


def _decide(database: Database) -> sa.Executable:
    tx = schema.tx
    verdict = sa.bindparam("verdict", type_=sa.SmallInteger)
    is_held = (tx.c.state == schema.COMMIT) & tx.c.settled_at.is_(None) & (tx.c.held == 1)
    states = {"decides": tx.c.state == schema.PREPARED, "withdraws": schema.is_delayed(database), "overrules": is_held}
    is_accepted = sa.or_(*(sa.bindparam(name, type_=sa.Boolean) & state for name, state in states.items()))
    at_once = sa.literal_column("0", sa.BigInteger)
    return (
        tx.update()
        .where(_IS_ADDRESSED, is_accepted)
        .values(
            state=verdict,
            author=sa.bindparam("by"),
            actor=sa.bindparam("who"),
            decided_seq=database.next_number,
            publish_at_ms=sa.case(
                (verdict == schema.COMMIT, sa.func.coalesce(tx.c.deliver_at_ms, at_once)), else_=at_once
            ),
            asked_at=None,
            held=0,
            held_why=None,
        )
    )


def _count_check(connection: sa.Connection, change: Decide) -> None:
    tx = schema.tx
    is_next = (tx.c.state == schema.PREPARED) & (tx.c.check_count == change.check_number - 1)
    counted = tx.update().where(_IS_ADDRESSED, is_next).values(check_count=change.check_number, asked_at=None)
    connection.execute(counted, {"wanted_id": change.transaction_id, "wanted_group": change.group})


def _is_database_error(error: object) -> bool:
    """Return whether an error is not the fault of a change: a lost session, a lock, or no free session."""
    of_session = isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated
    return of_session or isinstance(error, sa.exc.OperationalError | sa.exc.TimeoutError)
