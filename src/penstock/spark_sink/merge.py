"""The steps of one batch inside its database transaction, in SQLAlchemy Core.

    lock the ledger's rows -> stage the batch -> drop what is applied already -> merge -> advance the ledger

Two queries that feed one table by mistake meet at the ledger's rows: the second waits for the first to
commit, and then finds its own rows applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from penstock.spark_sink.databases import Database
from penstock.spark_sink.planning import Offsets, TopicPartition

#: Name of the temporary table that holds a batch; it ends with its transaction or connection.
STAGING = "penstock_stage"

_RANK = "penstock_rank"


def lock_ledger(
    connection: sa.Connection,
    database: Database,
    ledger: sa.Table,
    target: str,
    parts: Iterable[TopicPartition],
) -> Offsets:
    """Lock the ledger's rows of a target table and return the next offset of each partition.

    A row that is absent is made first: there must be something to lock. The order is fixed, so that two
    transactions cannot wait for each other.
    """
    rows = [
        {"target": target, "topic": topic, "partition": partition, "next_offset": 0}
        for topic, partition in sorted(parts)
    ]
    connection.execute(database.insert(ledger).on_conflict_do_nothing(), rows)
    found = connection.execute(
        sa.select(ledger.c.topic, ledger.c.partition, ledger.c.next_offset)
        .where(ledger.c.target == target, ledger.c.topic.in_({row["topic"] for row in rows}))
        .order_by(ledger.c.topic, ledger.c.partition)
        .with_for_update()
    )
    return {(topic, partition): next_offset for topic, partition, next_offset in found}


def advance_ledger(connection: sa.Connection, ledger: sa.Table, target: str, offsets: Offsets) -> None:
    """Write the next offset of each partition. The rows exist and are locked."""
    statement = (
        sa.update(ledger)
        .where(
            ledger.c.target == target,
            ledger.c.topic == sa.bindparam("of_topic"),
            ledger.c.partition == sa.bindparam("of_partition"),
        )
        .values(next_offset=sa.bindparam("to_offset"))
    )
    connection.execute(
        statement,
        [
            {"of_topic": topic, "of_partition": partition, "to_offset": offset}
            for (topic, partition), offset in sorted(offsets.items())
        ],
    )


def drop_applied(connection: sa.Connection, staged: sa.Table, ledger: sa.Table, target: str) -> int:
    """Remove from the staging table the rows below the ledger, and return how many there were."""
    applied = sa.exists().where(
        ledger.c.target == target,
        ledger.c.topic == staged.c.topic,
        ledger.c.partition == staged.c.partition,
        ledger.c.next_offset > staged.c.offset,
    )
    return connection.execute(sa.delete(staged).where(applied)).rowcount


def append(connection: sa.Connection, staged: sa.Table, target: sa.Table) -> None:
    """Insert every staged row."""
    names = _names(target)
    rows = sa.select(*(staged.c[name] for name in names))
    connection.execute(sa.insert(target).from_select(names, rows))


def upsert(
    connection: sa.Connection,
    database: Database,
    staged: sa.Table,
    target: sa.Table,
    *,
    key: Sequence[str],
    add: Sequence[str],
) -> None:
    """Insert one row per key, or change the one that stands there.

    The newest staged row of a key wins, by offset; rows of one offset, or of several partitions, are told
    apart by topic and partition so that the outcome does not hang on chance. Columns of `add` are summed over
    the staged rows of a key and added to what stands; a NULL adds nothing.
    """
    names = _names(target)
    keys = [staged.c[name] for name in key]
    rank = sa.func.row_number().over(
        partition_by=keys, order_by=[staged.c.offset.desc(), staged.c.partition.desc(), staged.c.topic.desc()]
    )
    ranked = sa.select(
        *(
            sa.func.sum(staged.c[name]).over(partition_by=keys).label(name) if name in add else staged.c[name]
            for name in names
        ),
        rank.label(_RANK),
    ).subquery()
    newest = sa.select(*(ranked.c[name] for name in names)).where(ranked.c[_RANK] == 1)
    statement = database.insert(target).from_select(names, newest)
    changes = {
        name: _sum(target.c[name], statement.excluded[name]) if name in add else statement.excluded[name]
        for name in names
        if name not in key
    }
    conflict = [target.c[name] for name in key]
    connection.execute(
        statement.on_conflict_do_update(index_elements=conflict, set_=changes)
        if changes
        else statement.on_conflict_do_nothing(index_elements=conflict)
    )


def _sum(standing: sa.ColumnElement[Any], arriving: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.func.coalesce(standing + arriving, standing, arriving)


def _names(table: sa.Table) -> list[str]:
    return [str(column.name) for column in table.columns]


__all__ = ["STAGING", "advance_ledger", "append", "drop_applied", "lock_ledger", "upsert"]
