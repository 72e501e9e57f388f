"""Operator commands on a SQL store: from any process, with or without a coordinator."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from penstock.errors import DecisionNotStoredError, TransactionError, TransactionRefusedError
from penstock.transactions.connections import cause_of
from penstock.transactions.core.pending import Pending
from penstock.transactions.model import PendingTransaction
from penstock.transactions.operator.administration import (
    NO_PRODUCER,
    Act,
    Discarded,
    StoreAdministration,
    hanging,
    shown,
)
from penstock.transactions.stores.relayed_store import decision
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import Database
from penstock.transactions.stores.sql.writing import decide
from penstock.transactions.wire.half import BY_OPERATOR, EXHAUSTED, Half
from penstock.transactions.wire.ops import Author, Verdict


class SqlAdministration(StoreAdministration):
    """Shows and settles pending transactions. Each act is written to `penstock_audit` and kept. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def pending(self) -> Sequence[PendingTransaction]:
        """Return the unsettled transactions, oldest first."""
        return self._shown(schema.tx.c.settled_at.is_(None))

    def oldest(self, most: int, shards: Collection[int]) -> Sequence[PendingTransaction]:
        """Return the oldest unsettled transactions of some shards, at most `most`."""
        tx = schema.tx
        waiting = sa.select(tx.c.id).where(tx.c.settled_at.is_(None), tx.c.shard.in_(shards))
        # The ids come first, so that the subqueries run for these rows only. MariaDB takes no limit right within an IN.
        oldest = waiting.order_by(tx.c.birth, tx.c.seq).limit(most).subquery()
        return self._shown(tx.c.id.in_(sa.select(oldest.c.id)))

    def show(self, transaction_id: str) -> PendingTransaction | None:
        """Return one pending transaction, or None."""
        found = self._shown(schema.tx.c.settled_at.is_(None) & (schema.tx.c.id == transaction_id))
        return found[0] if found else None

    def discarded(self) -> Sequence[Discarded]:
        """Return the discarded transactions that can be resumed, latest first. They are kept for 30 days."""
        tx = schema.tx
        gone = (tx.c.state == schema.DISCARD) & tx.c.settled_at.is_not(None)
        with self._database.read() as connection:
            discarded = sa.select(*schema.without_messages).where(gone).order_by(tx.c.settled_at.desc(), tx.c.seq)
            rows = connection.execute(discarded).all()
        return [
            Discarded(
                transaction_id=row.id,
                group=row.producer_group,
                topics=tuple(row.topics.split()),
                reason=BY_OPERATOR if row.author == Author.OPERATOR else EXHAUSTED,
                check_count=row.check_count,
                at_ms=int(row.settled_at * 1000),
                resumed_by="",
            )
            for row in rows
        ]

    def acts(self, transaction_id: str) -> Sequence[Act]:
        """Return the acts of operators on a transaction, oldest first. They are kept forever."""
        audit = schema.audit
        named = sa.select(audit).where(audit.c.tx == transaction_id).order_by(audit.c.number)
        with self._database.read() as connection:
            rows = connection.execute(named).all()
        # The column of the actor includes the reason.
        return [
            Act(row.actor, row.what, row.tx, "", "penstock_audit", "", row.number, int(row.at * 1000)) for row in rows
        ]

    def _store_decision(self, transaction_id: str, verdict: Verdict, actor: str, why: str) -> None:
        """Store an operator's decision, with the operator's name and reason."""
        actor = _signed(actor, why)
        what = f"transaction {transaction_id}: its {verdict.name}"
        with self._storing(f"{what} by {actor}") as connection:
            change = decision(transaction_id, None, verdict, Author.OPERATOR)._replace(actor=actor)
            outcome = decide(self._database, connection, change)
            self._write_down(connection, actor, verdict.name.lower(), transaction_id)
        if outcome.refused is not None:
            raise TransactionRefusedError(f"{what} was refused: {outcome.refused}")

    def resume(self, transaction_id: str, actor: str, why: str = "", *, again: bool = False) -> int:  # noqa: ARG002 - a row comes back once
        """Bring a discarded transaction back; see `Administration.resume`."""
        actor = _signed(actor, why)
        tx, what = schema.tx, f"transaction {transaction_id}: its resume by {actor}"
        empty = ("settled_at", "author", "actor", "decided_seq", "check_at", "asked_at", "held_why", "publish_at_ms")
        zero = ("immunity", "check_count", "held")
        fresh = {"state": schema.PREPARED, "birth": self._database.now}
        with self._storing(what) as connection:
            done = connection.execute(
                tx.update()
                .where(tx.c.id == transaction_id, tx.c.state == schema.DISCARD, tx.c.settled_at.is_not(None))
                .values(**fresh, **dict.fromkeys(empty), **dict.fromkeys(zero, 0))
            )
            self._write_down(connection, actor, "resume", transaction_id)
            topics = connection.execute(sa.select(tx.c.topics).where(tx.c.id == transaction_id)).scalar()
        if not done.rowcount:
            raise TransactionError(
                f"transaction {transaction_id} is not among the discarded ones of the store: it was not discarded, was "
                "resumed already, or was discarded too long ago; its message is in the discarded topic"
            )
        return len((topics or "").split())

    @contextmanager
    def _storing(self, what: str) -> Iterator[sa.Connection]:
        """Open a transaction that may write, or raise `DecisionNotStoredError` for `what`."""
        try:
            with self._database.begin() as connection:
                yield connection
        except sa.exc.SQLAlchemyError as error:
            raise DecisionNotStoredError(
                f"{what} is not known to be stored in the database: {cause_of(error)}; check its state, and try again"
            ) from error

    def _write_down(self, connection: sa.Connection, actor: str, what: str, transaction_id: str) -> None:
        act = schema.audit.insert().values(at=self._database.now, actor=actor, what=what, tx=transaction_id)
        connection.execute(act)

    def _shown(self, condition: sa.ColumnElement[bool]) -> list[PendingTransaction]:
        tx, now = schema.tx, self._database.now
        # The row of a shard without a living coordinator is out of date.
        shard = schema.shard
        published = sa.and_(shard.c.number == tx.c.shard, shard.c.lease_until > now)
        has_producer = sa.exists().where(
            schema.is_living_producer(now), schema.alive.c.producer_group == tx.c.producer_group
        )
        with self._database.read() as connection:
            rows = connection.execute(
                sa.select(
                    *schema.without_messages,
                    has_producer.label("has_producer"),
                    (now - tx.c.birth).label("age"),
                    (now * 1000).label("now_ms"),
                    shard.c.slow_call,
                    (now - shard.c.slow_since).label("silent_s"),
                )
                .select_from(tx.outerjoin(shard, published))
                .where(condition)
                .order_by(tx.c.birth, tx.c.seq)
            ).all()
            heads = _heads(connection, {row.order_key for row in rows if row.order_key is not None})
        return [_described(row, heads.get(_line(row))) for row in rows]


def _signed(actor: str, why: str) -> str:
    """Return the operator's name and reason: `penstock_audit` has one column for both."""
    return f"{actor}: {why}" if why else actor


def _line(row: Any) -> tuple[int, str, bytes]:
    return row.shard, row.producer_group, row.order_key


def _heads(connection: sa.Connection, keys: Collection[bytes]) -> Mapping[tuple[int, str, bytes], sa.Row[Any]]:
    """Return the first unsettled transaction of each line with one of these keys."""
    tx, heads = schema.tx, dict[tuple[int, str, bytes], sa.Row[Any]]()
    for some in schema.in_groups(list(keys)):
        in_lines = tx.c.order_key.in_(some) & tx.c.settled_at.is_(None)
        first = sa.select(sa.func.min(tx.c.seq)).where(in_lines).group_by(*schema.line)
        found = sa.select(*schema.without_messages).where(in_lines, tx.c.seq.in_(first))
        heads.update((_line(row), row) for row in connection.execute(found))
    return heads


def _described(row: Any, head: Any) -> PendingTransaction:
    now_ms = float(row.now_ms)
    first = Half(row.id, row.producer_group, "", None, None, None, (), None, row.deliver_at_ms)
    pending = Pending(first, row.seq, int(now_ms - float(row.age) * 1000))
    pending.verdict = None if row.state == schema.PREPARED else Verdict(row.state)
    pending.check_count = row.check_count
    obstacle = "" if row.slow_call is None else hanging(row.slow_call, row.silent_s)
    if pending.verdict is None:
        obstacle = NO_PRODUCER.format(row.producer_group) if row.asked_at and not row.has_producer else ""
    elif row.held_why is not None:
        obstacle = f"Kafka to take it: {row.held_why}"
    held_by = head.id if head is not None and head.seq < row.seq else None
    return replace(shown(pending, now_ms, held_by, obstacle), topics=tuple(row.topics.split()))
