"""What is written on the way of a message: many changes in one transaction of the database."""

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

#: Changes in one transaction of the database.
BATCH = 500
_DONE = Outcome()
_PARAMETERS: dict[str, Any] = {column.name: sa.bindparam(column.name) for column in schema.message.c}


class Writing:
    """Writes changes; a second time after an error changes nothing. Used by one thread.

    Args:
        database: where to.
        shard_of: returns the shard of a transaction, by its first half and its ordering key.
        is_late: tells whether what is written now comes too late.
    """

    def __init__(
        self, database: Database, shard_of: Callable[[Half, bytes | None], int], is_late: Callable[[], bool]
    ) -> None:
        self._database = database
        self._shard_of = shard_of
        self._is_late = is_late

    def write(self, changes: Sequence[Prepare | Decide]) -> Sequence[Result]:
        """Write changes, and return what became of each."""
        results = self._attempt(changes)
        if _is_of_the_database(results):
            # A new session may do, or the lock be free.
            results = self._attempt(changes)
        if not isinstance(results, Exception):
            return results
        if _is_of_the_database(results) or self._is_late() or len(changes) == 1:
            return [results] * len(changes)
        _log.warning("a batch of the SQL store was not written: %s; each alone now", cause_of(results))
        # What one of them did wrong is no fault of the others'.
        return [alone if isinstance(alone := self._attempt([change]), Exception) else alone[0] for change in changes]

    def _attempt(self, changes: Sequence[Prepare | Decide]) -> list[Result] | Exception:
        results: list[Result] = []
        try:
            with self._database.begin() as connection:
                # In runs, for many rows of a kind are inserted at once.
                for is_new, run in itertools.groupby(changes, lambda change: isinstance(change, Prepare)):
                    if is_new:
                        new = cast("list[Prepare]", list(run))
                        self._insert(connection, new)
                        results += [_DONE] * len(new)
                    else:
                        results += [decide(self._database, connection, cast("Decide", change)) for change in run]
                if self._is_late():
                    # It waited for the database, and its changes counted as not stored.
                    raise StoppedError("the SQL store was stopped")  # noqa: TRY301 - so that it is rolled back
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
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
            }
            for transaction in new
            for first in transaction.halves[:1]
        ]
        # Who repeats this after an error whose transaction was committed all the same finds it there.
        database = self._database
        if database.kind == "mysql":
            first_number = database.draw(connection, len(rows))
            rows = [{**row, "seq": number} for number, row in enumerate(rows, first_number)]
        connection.execute(database.once("tx", lambda: _insert_tx(database)), rows)
        messages = [row for transaction in new for row in schema.message_rows(transaction.halves)]
        connection.execute(database.once("message", lambda: database.insert(schema.message, _PARAMETERS)), messages)


def _insert_tx(database: Database) -> sa.Executable:
    zero = ("check_count", "question", "taken_until", "held")
    constants = {
        "seq": sa.bindparam("seq") if database.kind == "mysql" else database.next,
        "birth": database.now,
        "state": sa.literal_column(str(schema.PREPARED), sa.SmallInteger),
        **dict.fromkeys(zero, sa.literal_column("0", sa.Integer)),
    }
    given = ("id", "shard", "producer_group", "order_key", "immunity", "deliver_at_ms")
    return database.insert(schema.tx, {**constants, **{name: sa.bindparam(name) for name in given}})


def decide(database: Database, connection: sa.Connection, change: Decide) -> Outcome:
    """Make a decision the transaction's state, unless that has one, or count an answered check.

    A message that is not due yet may be taken back. An operator may discard what is committed and refused by Kafka:
    nothing of it is under way, and only the trials of its coordinator take it, which mark it before.
    """
    if change.verdict is Verdict.UNKNOWN:
        _count_check(database, connection, change)
        return _DONE
    key = f"decide {change.group is not None} {change.cancels} {may_cancel(change.verdict, change.author)}"
    parameters = {
        "wanted_id": change.transaction_id,
        "wanted_group": change.group,
        "verdict": int(change.verdict),
        "by": int(change.author),
        "who": change.actor,
    }
    database.draw(connection)
    done = connection.execute(database.once(key, lambda: _decide(database, change)), parameters)
    if done.rowcount or _discards_held(database, connection, change):
        return _DONE
    tx = schema.tx
    row = connection.execute(sa.select(tx.c.state, tx.c.settled_at).where(_is_meant(change))).first()
    connection.execute(schema.refusal.insert().values(tx=change.transaction_id))
    if row is None:
        return Outcome(UNKNOWN_ID, is_known=False)
    if row.state == schema.PREPARED:
        return Outcome("it is not decided yet")
    stands = Verdict(row.state)
    is_held_up = change.verdict is Verdict.DISCARD and stands is Verdict.COMMIT and row.settled_at is None
    return Outcome(NOT_HELD if is_held_up else came_first(stands), stands)


def _decide(database: Database, change: Decide) -> sa.Executable:
    tx = schema.tx
    is_open = tx.c.state == schema.PREPARED
    if change.cancels:
        is_open = schema.is_delayed(database)
    elif may_cancel(change.verdict, change.author):
        is_open = sa.or_(is_open, schema.is_delayed(database))
    statement = tx.update().where(tx.c.id == sa.bindparam("wanted_id"), is_open)
    if change.group is not None:
        statement = statement.where(tx.c.producer_group == sa.bindparam("wanted_group"))
    verdict = sa.bindparam("verdict", type_=sa.SmallInteger)
    at_once = sa.literal_column("0", sa.BigInteger)
    return statement.values(
        state=verdict,
        author=sa.bindparam("by"),
        actor=sa.bindparam("who"),
        decided_seq=database.next,
        publish_at_ms=sa.case((verdict == schema.COMMIT, sa.func.coalesce(tx.c.deliver_at_ms, at_once)), else_=at_once),
        question=0,
    )


def _discards_held(database: Database, connection: sa.Connection, change: Decide) -> bool:
    if (change.verdict, change.author) != (Verdict.DISCARD, Author.OPERATOR):
        return False
    tx = schema.tx
    held = sa.and_(_is_meant(change), tx.c.state == schema.COMMIT, tx.c.settled_at.is_(None), tx.c.held == schema.HELD)
    values = {
        "state": schema.DISCARD,
        "author": int(change.author),
        "actor": change.actor,
        "decided_seq": database.next,
        **schema.FREE_AGAIN,
    }
    return bool(connection.execute(tx.update().where(held).values(**values)).rowcount)


def _count_check(database: Database, connection: sa.Connection, change: Decide) -> None:
    tx = schema.tx
    is_next = tx.c.check_count == change.check_number - 1
    counted = {"check_count": change.check_number, "answered_at": database.now, "question": 0, "taken_until": 0.0}
    connection.execute(tx.update().where(_is_meant(change), tx.c.state == schema.PREPARED, is_next).values(**counted))


def _is_meant(change: Decide) -> sa.ColumnElement[bool]:
    tx = schema.tx
    named = tx.c.id == change.transaction_id
    return named if change.group is None else named & (tx.c.producer_group == change.group)


def _is_of_the_database(error: object) -> bool:
    """Tell whether an error is no fault of a change: a session that was lost, a lock, or no session to be had."""
    of_session = isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated
    return of_session or isinstance(error, sa.exc.OperationalError | sa.exc.TimeoutError)
