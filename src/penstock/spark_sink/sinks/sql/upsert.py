"""How staged rows get into the target table, in SQLAlchemy Core: appended, or of each key the newest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from penstock.spark_sink.sinks.position import POSITION
from penstock.spark_sink.sinks.sql.databases.database import ROW, Conversion, Database
from penstock.spark_sink.sinks.sql.databases.errors import ChangedValueError

#: Number of a staged message in the order in which a plain loop would apply it, and that of each of its rows.
NUMBER, _PLACE = "penstock_number", "penstock_place"

_RANK = "penstock_rank"


@dataclass(frozen=True, slots=True)
class Upsert:
    """How staged rows get into the target table, of the columns that are written.

    Attributes:
        key: columns that identify a row; empty to append.
        delete: column that says whether a row's key is deleted, or None.
        conversions: how staged values get into the columns.
    """

    database: Database
    target: sa.Table
    key: Sequence[str]
    sum_columns: Sequence[str]
    delete: str | None
    conversions: Mapping[str, Conversion] = field(default_factory=dict)

    def apply(self, connection: sa.Connection, staged: sa.FromClause) -> None:
        """Apply staged rows: append them, or of each key the newest.

        Raises `ChangedValueError` for one whose value a column would change, and what the database says of others.
        """
        self._require_kept(connection, staged)
        if self.key:
            self._upsert(connection, staged)
        else:
            names = _names(self.target)
            rows = sa.select(*(self._value(staged, name) for name in names))
            connection.execute(sa.insert(self.target).from_select(names, rows))
        self.database.check_constraints(connection)

    def _require_kept(self, connection: sa.Connection, staged: sa.FromClause) -> None:
        changes = [
            (sa.not_(conversion.kept), f"column {name} would not be kept as {conversion.written}")
            for name, conversion in self.conversions.items()
            if conversion.kept is not None
        ]
        if changes:
            reason = sa.case(*changes)
            first = sa.select(reason).select_from(staged).where(reason.is_not(None)).limit(1)
            if (found := connection.execute(first).scalar()) is not None:
                raise ChangedValueError(found)

    def _upsert(self, connection: sa.Connection, staged: sa.FromClause) -> None:
        """Insert one row per key, change the one that stands there, or delete it.

        The newest staged row of a key wins, by offset; rows of one offset, or of several partitions, are told
        apart by topic, partition and arrival so that the outcome does not hang on chance. Columns of `sum_columns` are
        summed over the staged rows of a key and added to what stands; a NULL adds nothing.
        """
        names = _names(self.target)
        newest = self._newest(staged)
        living = sa.select(*(newest.c[name] for name in names)).where(newest.c[_RANK] == 1)
        if self.delete is not None:
            gone = sa.func.coalesce(newest.c[self.delete], sa.false())
            dead = sa.select(*(newest.c[name] for name in self.key)).where(newest.c[_RANK] == 1, gone)
            connection.execute(self.database.delete_keys(self.target, self.key, dead))
            living = living.where(sa.not_(gone))
        # In the order of the keys, so that two queries with keys in common do not wait for each other crosswise.
        living = living.order_by(*(newest.c[name] for name in self.key))

        def changes(arriving: Callable[[str], sa.ColumnElement[Any]]) -> dict[str, sa.ColumnElement[Any]]:
            return {
                name: _sum(self.target.c[name], arriving(name)) if name in self.sum_columns else arriving(name)
                for name in names
                if name not in self.key
            }

        connection.execute(self.database.insert_or_update(self.target, names, living, self.key, changes))

    def _newest(self, staged: sa.FromClause) -> sa.Subquery:
        """Return the staged rows with their sums and with their rank in their key, 1 for the newest."""
        keys = [self._value(staged, name) for name in self.key]
        order = [staged.c[name].desc() for name in ("offset", "partition", "topic", ROW)]
        values = [
            sa.func.sum(staged.c[name]).over(partition_by=keys).label(name)
            if name in self.sum_columns
            else self._value(staged, name).label(name)
            for name in [*_names(self.target), *([self.delete] if self.delete is not None else [])]
        ]
        rank = sa.func.row_number().over(partition_by=keys, order_by=order).label(_RANK)
        return sa.select(*values, rank).subquery()

    def _value(self, staged: sa.FromClause, name: str) -> sa.ColumnElement[Any]:
        value: sa.ColumnElement[Any] = staged.c[name]
        read = self.conversions[name].read if name in self.conversions else None
        return value if read is None else read(value)


def numbered(database: Database, connection: sa.Connection, staged: sa.FromClause, name: str) -> tuple[sa.Table, int]:
    """Put staged rows into a temporary table in the order in which a plain loop would apply them.

    Returns it, with the messages of the rows numbered from 1 on in the column `NUMBER`, and the last number.
    """
    ordered = database.create_temporary(
        connection,
        name,
        *(sa.Column(own, sa.BigInteger, primary_key=True, autoincrement=False) for own in (NUMBER, _PLACE)),
        *(sa.Column(column.name, column.type) for column in staged.c),
    )
    message = [staged.c[part] for part in ("offset", "partition", "topic")]
    number = sa.func.dense_rank().over(order_by=message)
    place = sa.func.row_number().over(order_by=[*message, staged.c[ROW]])
    rows = sa.select(number, place, *staged.c)
    connection.execute(sa.insert(ordered).from_select(_names(ordered), rows))
    return ordered, connection.execute(sa.select(sa.func.coalesce(sa.func.max(ordered.c[NUMBER]), 0))).scalar_one()


def remove_messages(connection: sa.Connection, ordered: sa.Table, places: Collection[tuple[str, int, int]]) -> None:
    """Remove all rows of some messages, by topic, partition and offset."""
    if places:
        message = sa.tuple_(*(ordered.c[name] for name in POSITION))
        connection.execute(sa.delete(ordered).where(message.in_(list(places))))


def _sum(held: sa.ColumnElement[Any], arriving: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.func.coalesce(held + arriving, held, arriving)


def _names(table: sa.Table) -> list[str]:
    return [str(column.name) for column in table.columns]
