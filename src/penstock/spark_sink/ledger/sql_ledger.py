"""A ledger in a table of the database that holds the rows: both change in one transaction.

A second copy of a query, started by mistake, meets the first at the ledger's rows: it waits for the first to commit,
and then finds its own rows applied. Queries of other names have rows of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.elements import quoted_name

from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.ledger.state import LedgerState
from penstock.spark_sink.source.offsets.planning import Offsets, TopicPartition

#: Makes an `INSERT` that can have an `ON CONFLICT` clause, of the database's dialect.
Insert = Callable[[sa.Table], Any]


def ledger_table(name: str, metadata: sa.MetaData, schema: str | None = None) -> sa.Table:
    """Return the ledger's table: one row per query, target table, topic and partition."""
    return sa.Table(
        quoted_name(name, quote=True),
        metadata,
        sa.Column("query", sa.Text, primary_key=True),
        sa.Column("target", sa.Text, primary_key=True),
        sa.Column("topic", sa.Text, primary_key=True),
        sa.Column("partition", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("next_offset", sa.BigInteger, nullable=False),
        # Which batch moved it last; empty where the run of the query is not known.
        sa.Column("batch", sa.Text),
        schema=None if schema is None else quoted_name(schema, quote=True),
    )


def require_ledger(connection: sa.Connection, ledger: sa.Table) -> None:
    """Raise `SchemaMismatchError` where the ledger's table, which exists, does not tell queries apart."""
    found = sa.inspect(connection).get_columns(ledger.name, schema=ledger.schema)
    if not any(column["name"] == "query" for column in found):
        raise SchemaMismatchError(
            f"table {ledger.name} lacks the column query, so it is no ledger, or that of an earlier version, and does "
            "not fit what the frame needs; name another ledger_table, or make this one anew: rename it, let a sink's "
            "check make the new one, and insert the old rows with the name of the query that they belong to"
        )


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose the rows of a ledger are: a query's, by its name if it has one, and the table's that it fills."""

    query: str
    target: str

    def rows(self, ledger: sa.Table) -> sa.ColumnElement[bool]:
        """Return the condition that is true for them."""
        return sa.and_(ledger.c.query == self.query, ledger.c.target == self.target)


def read_ledger(connection: sa.Connection, ledger: sa.Table, owner: Owner) -> LedgerState:
    """Return the ledger of a query and table as it stands, without locking it."""
    return _state(connection, sa.select(ledger).where(owner.rows(ledger)))


def lock_ledger(
    connection: sa.Connection, insert: Insert, ledger: sa.Table, owner: Owner, parts: Iterable[TopicPartition]
) -> LedgerState:
    """Lock the ledger's rows of a query and table and return them.

    A row that is absent is made first: there must be something to lock. The order is fixed, so that two
    transactions cannot wait for each other.
    """
    rows = [
        {"query": owner.query, "target": owner.target, "topic": topic, "partition": partition, "next_offset": 0}
        for topic, partition in sorted(parts)
    ]
    connection.execute(insert(ledger).on_conflict_do_nothing(), rows)
    return _state(
        connection,
        sa.select(ledger)
        .where(owner.rows(ledger), ledger.c.topic.in_({row["topic"] for row in rows}))
        .order_by(ledger.c.topic, ledger.c.partition)
        .with_for_update(),
    )


def _state(connection: sa.Connection, statement: sa.Select[Any]) -> LedgerState:
    rows = connection.execute(statement).mappings().all()
    return LedgerState(
        {(row["topic"], row["partition"]): row["next_offset"] for row in rows},
        {(row["topic"], row["partition"]): row["batch"] for row in rows if row["batch"]},
    )


def advance_ledger(
    connection: sa.Connection, ledger: sa.Table, owner: Owner, offsets: Offsets, batch: str | None
) -> None:
    """Write the next offset of each partition, and which batch it comes from. The rows exist and are locked."""
    statement = (
        sa.update(ledger)
        .where(
            owner.rows(ledger),
            ledger.c.topic == sa.bindparam("of_topic"),
            ledger.c.partition == sa.bindparam("of_partition"),
        )
        .values(next_offset=sa.bindparam("to_offset"), batch=batch)
    )
    connection.execute(
        statement,
        [
            {"of_topic": topic, "of_partition": partition, "to_offset": offset}
            for (topic, partition), offset in sorted(offsets.items())
        ],
    )
