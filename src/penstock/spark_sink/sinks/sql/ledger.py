"""A ledger in a table of the target database: rows and ledger change in one transaction.

If a second copy of a query is started by mistake, the ledger's row locks order both: the second waits for the first to
commit, and then finds its own rows applied. Queries of other names have their own rows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.ledger.rules import LedgerEntry
from penstock.spark_sink.sinks.sink import Changes, Entries
from penstock.spark_sink.sinks.sql.databases.database import Database, ExactText, named_table
from penstock.spark_sink.source.plan import TopicPartition

#: The offset of a row that was made only for its lock, or whose entry was removed.
_ABSENT = -1
#: Most characters of names in MySQL: an index has 3072 bytes, and a character four.
_NAME = 255


def ledger_table(name: str, schema: str | None = None) -> sa.Table:
    """Return the ledger's table: a row for each query, target table, topic and partition; see `rules.LedgerEntry`."""
    return named_table(
        name,
        schema,
        sa.Column("query", ExactText(_NAME), primary_key=True),
        sa.Column("target", ExactText(_NAME), primary_key=True),
        sa.Column("topic", ExactText(_NAME), primary_key=True),
        sa.Column("partition", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("next_offset", sa.BigInteger, nullable=False),
        # Tables of earlier versions lack the columns below; they had a column `batch` instead.
        sa.Column("start_offset", sa.BigInteger),
        sa.Column("topic_id", sa.Text),
        sa.Column("query_id", sa.Text),
        sa.Column("batch_id", sa.BigInteger),
    )


def ledger_exists(connection: sa.Connection, ledger: sa.Table) -> bool:
    """Tell whether there is a ledger; `SchemaMismatchError` for a table that does not distinguish queries."""
    inspector = sa.inspect(connection)
    if not inspector.has_table(ledger.name, schema=ledger.schema):
        return False
    if all(column["name"] != "query" for column in inspector.get_columns(ledger.name, schema=ledger.schema)):
        raise SchemaMismatchError(
            f"table {ledger.name} lacks the column query, so it is no ledger, or that of an earlier version, and does "
            "not fit what the frame needs; name another ledger_table, or make this one again: rename it, let a sink's "
            "check make the new one, and insert the old rows with the name of the query that they belong to"
        )
    return True


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of rows in a ledger: a query, by its name if it has one, and the table that it fills."""

    query: str
    target: str

    def rows(self, ledger: sa.Table) -> sa.ColumnElement[bool]:
        """Return the condition for the owner's rows."""
        return sa.and_(ledger.c.query == self.query, ledger.c.target == self.target)


def read_ledger(connection: sa.Connection, ledger: sa.Table, owner: Owner | None = None) -> dict[Owner, Entries]:
    """Return the entries of one owner, or of all, without a lock; also from ledgers of earlier versions."""
    every = sa.select(sa.text("*")).select_from(ledger)
    return _entries(connection, every if owner is None else every.where(owner.rows(ledger)))


def lock_ledger(
    connection: sa.Connection,
    database: Database,
    ledger: sa.Table,
    owner: Owner,
    parts: Collection[TopicPartition],
    *,
    known: Collection[TopicPartition] = (),
) -> Entries:
    """Lock an owner's rows in the ledger and return their entries.

    Rows that are not `known` to exist are inserted first, so that they can be locked. The order is fixed, so that two
    transactions cannot wait for each other.
    """
    new = [
        {"query": owner.query, "target": owner.target, "topic": topic, "partition": partition, "next_offset": _ABSENT}
        for topic, partition in sorted(set(parts) - set(known))
    ]
    if new:
        key = [column.name for column in ledger.primary_key]
        connection.execute(database.changing(database.insert(ledger), ledger, key, lambda _arriving: {}), new)
    locked = (
        sa.select(ledger)
        .where(owner.rows(ledger), ledger.c.topic.in_({topic for topic, _ in parts}))
        .order_by(ledger.c.topic, ledger.c.partition)
        .with_for_update()
    )
    return _entries(connection, locked).get(owner, {})


def _entries(connection: sa.Connection, statement: sa.Select[Any]) -> dict[Owner, Entries]:
    found: dict[Owner, Entries] = {}
    for row in connection.execute(statement).mappings():
        if row["next_offset"] != _ABSENT:
            known = (row.get(name) for name in ("start_offset", "topic_id", "query_id", "batch_id"))
            entries = found.setdefault(Owner(row["query"], row["target"]), {})
            entries[row["topic"], row["partition"]] = LedgerEntry(row["next_offset"], *known)
    return found


def write_ledger(connection: sa.Connection, ledger: sa.Table, owner: Owner, entries: Changes) -> None:
    """Write the entries of partitions, whose rows exist and are locked; None removes one, without more permissions."""
    names = {"next_offset": "end", "start_offset": "start"} | {n: n for n in ("topic_id", "query_id", "batch_id")}
    statement = (
        sa.update(ledger)
        .where(
            owner.rows(ledger),
            ledger.c.topic == sa.bindparam("of_topic"),
            ledger.c.partition == sa.bindparam("of_partition"),
        )
        .values({column: sa.bindparam(f"to_{column}") for column in names})
    )
    connection.execute(
        statement,
        [
            {"of_topic": topic, "of_partition": partition}
            | {f"to_{column}": getattr(entry or LedgerEntry(_ABSENT), name) for column, name in names.items()}
            for (topic, partition), entry in sorted(entries.items())
        ],
    )
