"""How staged rows get into the target table, in SQLAlchemy Core: appended, or of each key the newest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from penstock.spark_sink.sinks.position import POSITION
from penstock.spark_sink.sinks.sql.databases.database import ROW, Conversion, Database
from penstock.spark_sink.sinks.sql.databases.errors import ChangedValueError
from penstock.spark_sink.sinks.sql.settings import ORDERED, SqlSinkSettings

#: Number of a staged message in the order in which a plain loop would apply it, and that of each of its rows.
NUMBER, _PLACE = "penstock_number", "penstock_place"

_RANK = "penstock_rank"


@dataclass(frozen=True, slots=True)
class Tables:
    """Where a batch goes, and how: the target, of the columns that are written, the ledger, and their settings.

    Attributes:
        conversions: how staged values get into the target's columns.
    """

    settings: SqlSinkSettings
    target: sa.Table
    ledger: sa.Table
    conversions: Mapping[str, Conversion]

    def apply(self, connection: sa.Connection, staged: sa.FromClause) -> None:
        """Apply staged rows: append them, or of each key the newest.

        Raises `ChangedValueError` for one whose value a column would change, and what the database says of others.
        """
        self._require_kept(connection, staged)
        if self.settings.key:
            self._upsert(connection, staged)
        else:
            names = _names(self.target)
            rows = sa.select(*(self._value(staged, name) for name in names))
            connection.execute(sa.insert(self.target).from_select(names, rows))
        self.settings.database.check_constraints(connection)

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

        The newest staged row of a key wins, by offset; rows of one offset, or of several partitions, are ordered by
        topic, partition and arrival so that the outcome does not hang on chance. Columns of `sum_columns` are summed
        over the staged rows of a key and added to what stands; a NULL adds nothing.
        """
        names, key, database = _names(self.target), self.settings.key, self.settings.database
        newest = self._newest(staged)
        living = sa.select(*(newest.c[name] for name in names)).where(newest.c[_RANK] == 1)
        if self.settings.delete is not None:
            gone = sa.func.coalesce(newest.c[self.settings.delete], sa.false())
            dead = sa.select(*(newest.c[name] for name in key)).where(newest.c[_RANK] == 1, gone)
            connection.execute(database.delete_keys(self.target, key, dead))
            living = living.where(sa.not_(gone))
        # In the order of the keys, so that two queries with keys in common do not wait for each other crosswise.
        living = living.order_by(*(newest.c[name] for name in key))
        held, summed = self.target.c, self.settings.sum_columns

        def changes(arriving: Callable[[str], sa.ColumnElement[Any]]) -> dict[str, sa.ColumnElement[Any]]:
            new = {name: arriving(name) for name in names if name not in key}
            return new | {name: sa.func.coalesce(held[name] + new[name], held[name], new[name]) for name in summed}

        insert = database.insert(self.target).from_select(names, living)
        connection.execute(database.changing(insert, self.target, key, changes))

    def _newest(self, staged: sa.FromClause) -> sa.Subquery:
        """Return the staged rows with their sums and with their rank in their key, 1 for the newest."""
        keys = [self._value(staged, name) for name in self.settings.key]
        order = [staged.c[name].desc() for name in ("offset", "partition", "topic", ROW)]
        values = [
            sa.func.sum(staged.c[name]).over(partition_by=keys).label(name)
            if name in self.settings.sum_columns
            else self._value(staged, name).label(name)
            for name in [*_names(self.target), *filter(None, [self.settings.delete])]
        ]
        rank = sa.func.row_number().over(partition_by=keys, order_by=order).label(_RANK)
        return sa.select(*values, rank).subquery()

    def _value(self, staged: sa.FromClause, name: str) -> sa.ColumnElement[Any]:
        value: sa.ColumnElement[Any] = staged.c[name]
        read = self.conversions[name].read if name in self.conversions else None
        return value if read is None else read(value)


def numbered(
    database: Database, connection: sa.Connection, staged: sa.FromClause, without: Collection[tuple[str, int, int]] = ()
) -> tuple[sa.Table, int]:
    """Put staged rows into a temporary table in the order in which a plain loop would apply them.

    Rows of the messages `without` are left out. Returns the table, with the messages of the rows numbered from 1 on in
    the column `NUMBER`, and the last number.
    """
    ordered = database.create_temporary(
        connection,
        ORDERED,
        *(sa.Column(own, sa.BigInteger, primary_key=True, autoincrement=False) for own in (NUMBER, _PLACE)),
        *(sa.Column(column.name, column.type) for column in staged.c),
    )
    message = [staged.c[part] for part in ("offset", "partition", "topic")]
    number = sa.func.dense_rank().over(order_by=message)
    place = sa.func.row_number().over(order_by=[*message, staged.c[ROW]])
    rows = sa.select(number, place, *staged.c)
    if without:
        rows = rows.where(sa.tuple_(*(staged.c[name] for name in POSITION)).not_in(list(without)))
    connection.execute(sa.insert(ordered).from_select(_names(ordered), rows))
    return ordered, connection.execute(sa.select(sa.func.coalesce(sa.func.max(ordered.c[NUMBER]), 0))).scalar_one()


def _names(table: sa.Table) -> list[str]:
    return [str(column.name) for column in table.columns]
