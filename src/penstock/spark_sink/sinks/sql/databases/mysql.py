"""SQL sinks on MySQL and MariaDB: InnoDB, sessions in strict mode, `ON DUPLICATE KEY UPDATE`.

DDL commits the open transaction, so all DDL runs before the first row of a batch. Temporary tables commit nothing.

Even in strict mode these databases round fractions, drop trailing spaces and read texts as times, without an error. If
the column's type changes some values of the frame's type, a condition refuses such rows. Only the conversions below
are allowed; other pairs of types are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.ext.compiler import compiles

from penstock.spark_sink.sinks.sql.databases.database import (
    WIDER,
    Changes,
    Conversion,
    Database,
    ErrorKind,
    ExactText,
    Held,
    Type,
)

#: Settings of a session that override the server's defaults. Values out of range are errors, times are in UTC, a
#: session waits 60 s for a lock, and tables have transactions. Keys are sorted by all that an index holds of them (3072
#: bytes; a character in ours takes 4).
_SESSION = (
    "SET SESSION sql_mode = 'TRADITIONAL', time_zone = '+00:00', innodb_lock_wait_timeout = 60, "
    "lock_wait_timeout = 60, default_storage_engine = InnoDB, default_tmp_storage_engine = InnoDB, "
    "max_sort_length = 12288"
)

#: Bytes of an index, bytes of a character, and the maximum number of characters of a key's column.
_INDEX_BYTES, _CHARACTER_BYTES, _KEY_SIZE = 3072, 4, 255

#: Maximum bytes of text types without a length.
_BYTES = {mysql.TINYTEXT: 2**8 - 1, mysql.TEXT: 2**16 - 1, mysql.MEDIUMTEXT: 2**24 - 1}

#: Digits of a second in a time of the frame.
_MICROSECONDS = 6

#: Numbers outside of quotes that MySQL's JSON would round to a float.
_QUOTED_IN_JSON = r'"([^"\\]|\\.)*"'
_LONG_IN_JSON = "(?=[0-9.]{17})[0-9]+[.]|[0-9]{16,}[eE]|[0-9]{19}"


@compiles(ExactText, "mysql")
def _exact_text(kind: ExactText, compiler: Any, **_options: Any) -> str:
    written = "LONGTEXT" if kind.size is None else f"VARCHAR({kind.size})"
    collation = "utf8mb4_nopad_bin" if compiler.dialect.is_mariadb else "utf8mb4_0900_bin"
    return f"{written} CHARACTER SET utf8mb4 COLLATE {collation}"


class MySql(Database):
    """MySQL and MariaDB, by PyMySQL."""

    name = "mysql"
    unknown = frozenset({"NaN", "infinity"})
    wider = WIDER | {("boolean", "whole")}
    codes: ClassVar[Mapping[ErrorKind, frozenset[str]]] = {
        # Other duplicates, unreadable values, divisions by zero, a view's or a column's check, no partition for a row,
        # a trigger's SIGNAL, bad JSON, and a row that is too long for the table.
        ErrorKind.ROW: frozenset({
            "1022", "1118", "1292", "1365", "1369", "1411", "1525", "1526", "1557", "1586", "1644", "1690", "1748",
            "1761", "1762", "1916", "1918", "1977", "3140", "3141", "3156", "3157", "3819", "3854", "4025",
        }),
        # Connections (2xxx, and 0 for a closed one), too many connections, a server that shuts down or cannot answer,
        # locks and deadlocks (1305: a savepoint that a deadlock removed), a table or row that has changed, and
        # read-only servers, as during a failover.
        ErrorKind.TRANSIENT: frozenset({
            "0", "1020", "1040", "1043", "1047", "1053", "1077", "1079", "1080", "1152", "1158", "1159", "1160", "1161",
            "1203", "1205", "1206", "1213", "1290", "1305", "1412", "1637", "1792", "1836", "1927", "2002", "2003",
            "2006", "2013", "2014", "2045", "2055", "4031",
        }),
        ErrorKind.RIGHT: frozenset({"1044", "1142", "1143", "1227", "1370"}),
        # Names that are too long or invalid for a column, table or database, and decimals with too many digits.
        ErrorKind.MISFIT: frozenset({"1059", "1102", "1103", "1166", "1300", "1425", "1426"}),
    }  # fmt: skip
    #: Their texts name columns, tables, constraints, servers and users; names of users are removed.
    plain_codes = frozenset({
        "1045", "1046", "1048", "1049", "1054", "1071", "1118", "1146", "1153", "1264", "1267", "1364", "1406", "1698",
        "2058", "2059", "3819", "4025", *(codes[ErrorKind.TRANSIENT] - {"1203"}), *codes[ErrorKind.RIGHT],
        *codes[ErrorKind.MISFIT],
    })  # fmt: skip
    #: Seconds to wait for a connection, and for the server's answer to one statement.
    connect_args: ClassVar[Mapping[str, Any]] = {
        "connect_timeout": 15, "read_timeout": 600, "write_timeout": 600, "charset": "utf8mb4", "init_command": _SESSION
    }  # fmt: skip
    #: As in `PostgreSql.begin`.
    isolation = "READ COMMITTED"
    insert = staticmethod(mysql.insert)

    def changing(self, insert: Any, table: sa.Table, key: Sequence[str], changes: Changes) -> mysql.Insert:
        """Return an `INSERT ... ON DUPLICATE KEY UPDATE`, see `differences`. IGNORE would accept bad values."""
        changed = changes(lambda name: sa.func.values(table.c[name], type_=table.c[name].type))
        found: mysql.Insert = insert.on_duplicate_key_update({key[0]: table.c[key[0]], **changed})
        return found

    def delete_keys(self, table: sa.Table, key: Sequence[str], keys: sa.Select[Any]) -> sa.Delete:
        """Return a `DELETE` with a join: with a subquery, the database would scan the whole table."""
        gone = keys.subquery()
        return sa.delete(table).where(*(table.c[name] == gone.c[name] for name in key))

    def create_temporary(self, connection: sa.Connection, name: str, *items: sa.schema.SchemaItem) -> sa.Table:
        """Create a temporary table that ends with the connection, and drop an earlier batch's first."""
        connection.exec_driver_sql(f"DROP TEMPORARY TABLE IF EXISTS {name}")
        return super().create_temporary(connection, name, *items)

    def column_type(self, kind: Type, key_columns: int = 0) -> Type:
        """Return a type that is not limited to 64 KiB or whole seconds; for a key, a type that fits into an index."""
        size = min(_KEY_SIZE, _INDEX_BYTES // _CHARACTER_BYTES // key_columns) if key_columns else None
        if isinstance(kind, sa.Text):
            return ExactText(size)
        if isinstance(kind, sa.LargeBinary):
            return mysql.LONGBLOB() if size is None else sa.VARBINARY(size * _CHARACTER_BYTES)
        return mysql.DATETIME(timezone=kind.timezone, fsp=6) if isinstance(kind, sa.DateTime) else kind

    def conversions(self, connection: sa.Connection, table: sa.Table, held: Held) -> dict[str, Conversion]:
        """Return the conversions of the frame's values to the columns of a table."""
        options = sa.inspect(connection).get_table_options(table.name, table.schema)
        return {name: _conversion(column, held[name]["type"], options) for name, column in table.columns.items()}

    def fits(self, stored: Type, arriving: Type) -> bool:
        """Return whether a column stores values of a type. BIT also stores booleans.

        FLOAT(7, 2) rounds in its own way, and a SET reorders its members. Texts of times, years and types that
        SQLAlchemy does not know, such as a geometry, have many spellings.
        """
        if isinstance(stored, mysql.BIT):
            return isinstance(arriving, sa.Boolean)
        is_cut = isinstance(stored, sa.Float) and getattr(stored, "scale", None) is not None
        is_odd = isinstance(stored, mysql.SET | mysql.TIME | mysql.YEAR | sa.types.NullType)
        return not is_cut and not is_odd and super().fits(stored, arriving)

    def differences(self, connection: sa.Connection, table: sa.Table, key: Sequence[str], held: Held) -> list[str]:
        """Return a wrong engine; with a key, also other unique indexes and loose collations of texts.

        `ON DUPLICATE KEY UPDATE` would change a row that it finds by another index. An index that contains a number
        generated by the table never matches another row.
        """
        inspector, place, found = sa.inspect(connection), (table.name, table.schema), []
        options = inspector.get_table_options(*place)
        if (engine := options.get("mysql_engine")) != "InnoDB":
            found.append(
                f"it is of {engine}, and only InnoDB stores rows and ledger in one transaction; "
                f"ALTER TABLE {table.name} ENGINE=InnoDB"
            )
        if not key:
            return found
        primary = inspector.get_pk_constraint(*place)["constrained_columns"]
        # An index of the first characters of a column counts as an index of no columns here.
        unique: list[set[str | None]] = [set(primary)] if primary else []
        unique += [
            set() if index.get("dialect_options", {}).get("mysql_length") else set(index["column_names"])
            for index in inspector.get_indexes(*place)
            if index["unique"]
        ]
        if set(key) not in unique:
            found.append(f"it has no primary key or unique index on ({', '.join(key)})")
        numbered = {name for name, column in held.items() if column.get("autoincrement") and name not in table.c}
        others = [", ".join(sorted(map(str, index))) for index in unique if index != set(key) and not index & numbered]
        found += [
            f"it has another unique index{f' on ({columns})' if columns else ''}, and ON DUPLICATE KEY UPDATE would "
            "change the row that it finds by that; make it an index that is not unique"
            for columns in others
        ]
        collations = {name: _collation_of(held[name]["type"], options) for name in key if name in held}
        return found + [
            f"column {name} of the key has the collation {collation}, which regards different texts as equal, such as "
            "A and a, or lacks characters; give it a binary one of utf8mb4, such as utf8mb4_bin"
            for name, collation in collations.items()
            if collation is not None and not re.fullmatch("utf8mb4.*_bin", collation)
        ]

    def fingerprint(self, connection: sa.Connection, table: sa.Table) -> str:
        """Return the statement that would create the table, without the next number of its rows."""
        name = connection.dialect.identifier_preparer.format_table(table)
        return re.sub("AUTO_INCREMENT=[0-9]+", "", connection.exec_driver_sql(f"SHOW CREATE TABLE {name}").one()[1])


def _collation_of(stored: Any, options: Mapping[str, Any]) -> str | None:
    """Return the collation of a column, from the column or else from its table; None if it holds no texts."""
    if not isinstance(stored, sa.String):
        return None
    inherited = None if getattr(stored, "charset", None) else options.get("mysql_collate")
    return stored.collation or inherited or "that is its character set's default"


def _conversion(column: sa.Column[Any], stored: Any, options: Mapping[str, Any]) -> Conversion:
    """Return the conversion of values to a column. The database itself refuses other values that do not fit."""
    value: sa.ColumnElement[Any] = sa.column(str(column.name), column.type)
    kept: list[sa.ColumnElement[bool]] = []
    digits = getattr(column.type, "scale", None) or 0
    if isinstance(stored, mysql.DECIMAL) and (stored.scale or 0) < digits:
        kept.append(sa.func.truncate(value, stored.scale or 0) == value)
    if isinstance(stored, mysql.DATETIME | mysql.TIMESTAMP) and (fraction := stored.fsp or 0) < _MICROSECONDS:
        kept.append(sa.func.mod(sa.func.microsecond(value), 10 ** (_MICROSECONDS - fraction)) == 0)
    if isinstance(stored, sa.BINARY):
        kept.append(sa.func.length(value) == stored.length)
    if isinstance(stored, mysql.CHAR | mysql.VARCHAR):
        kept.append(sa.func.char_length(value) <= stored.length)
    if (most := _BYTES.get(type(stored))) is not None:
        charset = stored.charset or options.get("mysql_default charset")
        text = value if charset == "utf8mb4" else sa.cast(value, mysql.CHAR(charset=charset))
        kept.append(sa.func.octet_length(text) <= most)
    collation = _collation_of(stored, options) if column.primary_key else None
    # Such a collation compares texts without trailing spaces, also in a key.
    pads = collation is not None and not re.search("nopad|_0900_", collation)
    if pads or isinstance(stored, mysql.CHAR):
        kept.append(sa.func.char_length(sa.func.rtrim(value)) == sa.func.char_length(value))
    if isinstance(stored, mysql.ENUM):
        kept.append(sa.func.hex(value).in_([member.encode().hex().upper() for member in stored.enums]))
    if isinstance(stored, sa.JSON):
        unquoted = sa.func.regexp_replace(value, _QUOTED_IN_JSON, "")
        kept.append(sa.not_(unquoted.regexp_match(_LONG_IN_JSON)))
    # Compare keys as the table does.
    read = None if collation is None else partial(sa.collate, collation=collation)
    written = str(stored).partition(" C")[0]  # without character set and collation
    return Conversion(written, read, sa.and_(*kept) if kept else None)
