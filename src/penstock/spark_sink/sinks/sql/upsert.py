"""The steps of one batch inside its database transaction, in SQLAlchemy Core.

    lock the ledger's rows -> merge what is staged -> advance the ledger

A second copy of a query, started by mistake, meets the first at the ledger's rows: it waits for the first to
commit, and then finds its own rows applied. Queries of other names have rows of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from penstock.spark_sink.ledger.sql_ledger import Standing
from penstock.spark_sink.sinks.sql.databases import Database
from penstock.spark_sink.sinks.sql.schema import POSITION, ROW, Named
from penstock.spark_sink.source.planning import Offsets, TopicPartition

#: Number of a staged row in the order in which a plain loop would apply it.
NUMBER = "penstock_number"

_RANK = "penstock_rank"


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose the rows of a ledger are.

    Attributes:
        query: name of the query; empty for one that has none.
        target: table that the query fills.
    """

    query: str
    target: str

    def rows(self, ledger: sa.Table) -> sa.ColumnElement[bool]:
        """Return the condition that is true for them."""
        return sa.and_(ledger.c.query == self.query, ledger.c.target == self.target)


def read_ledger(connection: sa.Connection, ledger: sa.Table, owner: Owner) -> Standing:
    """Return the ledger of a query and table as it stands, without locking it."""
    return _standing(connection, sa.select(ledger).where(owner.rows(ledger)))


def lock_ledger(
    connection: sa.Connection,
    database: Database,
    ledger: sa.Table,
    owner: Owner,
    parts: Iterable[TopicPartition],
) -> Standing:
    """Lock the ledger's rows of a query and table and return them.

    A row that is absent is made first: there must be something to lock. The order is fixed, so that two
    transactions cannot wait for each other.
    """
    rows = [
        {"query": owner.query, "target": owner.target, "topic": topic, "partition": partition, "next_offset": 0}
        for topic, partition in sorted(parts)
    ]
    connection.execute(database.insert(ledger).on_conflict_do_nothing(), rows)
    return _standing(
        connection,
        sa.select(ledger)
        .where(owner.rows(ledger), ledger.c.topic.in_({row["topic"] for row in rows}))
        .order_by(ledger.c.topic, ledger.c.partition)
        .with_for_update(),
    )


def _standing(connection: sa.Connection, statement: sa.Select[Any]) -> Standing:
    rows = connection.execute(statement).mappings().all()
    return Standing(
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


@dataclass(frozen=True, slots=True)
class Merge:
    """How staged rows get into the target table.

    Attributes:
        database: whose SQL is spoken.
        target: the table, with the columns that are written.
        key: columns that identify a row; empty to append.
        add: columns that are summed.
        delete: column that says whether a row's key is deleted, or None.
        casts: columns whose texts are read as another type, with its name.
    """

    database: Database
    target: sa.Table
    key: Sequence[str]
    add: Sequence[str]
    delete: str | None
    casts: Mapping[str, str] = field(default_factory=dict)

    def apply(self, connection: sa.Connection, staged: sa.FromClause) -> None:
        """Apply staged rows: append them, or of each key the newest."""
        if self.key:
            self._upsert(connection, staged)
        else:
            names = _names(self.target)
            rows = sa.select(*(self._value(staged, name) for name in names))
            connection.execute(sa.insert(self.target).from_select(names, rows))

    def _upsert(self, connection: sa.Connection, staged: sa.FromClause) -> None:
        """Insert one row per key, change the one that stands there, or delete it.

        The newest staged row of a key wins, by offset; rows of one offset, or of several partitions, are told
        apart by topic, partition and arrival so that the outcome does not hang on chance. Columns of `add` are
        summed over the staged rows of a key and added to what stands; a NULL adds nothing.
        """
        names = _names(self.target)
        newest = self._newest(staged)
        living = sa.select(*(newest.c[name] for name in names)).where(newest.c[_RANK] == 1)
        if self.delete is not None:
            gone = sa.func.coalesce(newest.c[self.delete], sa.false())
            dead = sa.select(*(newest.c[name] for name in self.key)).where(newest.c[_RANK] == 1, gone)
            keys = sa.tuple_(*(self.target.c[name] for name in self.key))
            connection.execute(sa.delete(self.target).where(keys.in_(dead)))
            living = living.where(sa.not_(gone))
        # In the order of the keys, so that two queries with keys in common do not wait for each other crosswise.
        living = living.order_by(*(newest.c[name] for name in self.key))
        statement = self.database.insert(self.target).from_select(names, living)
        changes = {
            name: _sum(self.target.c[name], statement.excluded[name]) if name in self.add else statement.excluded[name]
            for name in names
            if name not in self.key
        }
        conflict = [self.target.c[name] for name in self.key]
        connection.execute(
            statement.on_conflict_do_update(index_elements=conflict, set_=changes)
            if changes
            else statement.on_conflict_do_nothing(index_elements=conflict)
        )

    def _newest(self, staged: sa.FromClause) -> sa.Subquery:
        """Return the staged rows with their sums and with their rank in their key, 1 for the newest."""
        keys = [self._value(staged, name) for name in self.key]
        order = [staged.c[name].desc() for name in ("offset", "partition", "topic", ROW)]
        values = [
            sa.func.sum(staged.c[name]).over(partition_by=keys).label(name)
            if name in self.add
            else self._value(staged, name).label(name)
            for name in [*_names(self.target), *([self.delete] if self.delete is not None else [])]
        ]
        rank = sa.func.row_number().over(partition_by=keys, order_by=order).label(_RANK)
        return sa.select(*values, rank).subquery()

    def _value(self, staged: sa.FromClause, name: str) -> sa.ColumnElement[Any]:
        return sa.cast(staged.c[name], Named(self.casts[name])) if name in self.casts else staged.c[name]


def numbered(connection: sa.Connection, staged: sa.FromClause, name: str) -> tuple[sa.Table, int]:
    """Put staged rows into a temporary table in the order in which a plain loop would apply them.

    Returns:
        The table, with the rows numbered from 1 on in the column `NUMBER`, and the number of rows.
    """
    ordered = sa.Table(
        name,
        sa.MetaData(),
        sa.Column(NUMBER, sa.BigInteger, primary_key=True, autoincrement=False),
        *(sa.Column(column.name, column.type) for column in staged.c),
        prefixes=["TEMPORARY"],
        postgresql_on_commit="DROP",  # SQLite's ends with the connection
    )
    ordered.create(connection, checkfirst=False)
    number = sa.func.row_number().over(order_by=[staged.c[one] for one in ("offset", "partition", "topic", ROW)])
    rows = sa.select(number, *staged.c)
    connection.execute(sa.insert(ordered).from_select(_names(ordered), rows))
    return ordered, connection.execute(sa.select(sa.func.count()).select_from(ordered)).scalar_one()


def remove_messages(connection: sa.Connection, ordered: sa.Table, places: Collection[tuple[str, int, int]]) -> int:
    """Remove all rows of some messages, by topic, partition and offset, and return how many there were."""
    if not places:
        return 0
    message = sa.tuple_(*(ordered.c[name] for name in POSITION))
    return connection.execute(sa.delete(ordered).where(message.in_(list(places)))).rowcount


def _sum(standing: sa.ColumnElement[Any], arriving: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.func.coalesce(standing + arriving, standing, arriving)


def _names(table: sa.Table) -> list[str]:
    return [str(column.name) for column in table.columns]


__all__ = ["NUMBER", "Merge", "Owner", "advance_ledger", "lock_ledger", "numbered", "read_ledger", "remove_messages"]
