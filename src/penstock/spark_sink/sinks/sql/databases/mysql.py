"""What a sink does differently on MySQL and MariaDB: InnoDB, sessions in strict mode, `ON DUPLICATE KEY UPDATE`.

DDL commits what is open, so all of it comes before the first row of a batch; temporary tables commit nothing. Locks by
name belong to a session, not to a transaction. `mysql_types` says which values a column keeps.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.sql.databases.database import Changes, Conversion, Needs, Server, Type, new_engine
from penstock.spark_sink.sinks.sql.databases.mysql_types import conversions, keeps
from penstock.spark_sink.sinks.sql.ledger import ExactText

#: Seconds to wait for a connection, and for the server's answer to one statement; an address may set others.
_BOUNDS = {"connect_timeout": 15, "read_timeout": 600, "write_timeout": 600}
#: Seconds to wait for another transaction's lock.
_LOCK_WAIT_S = 60

#: What a session is to keep whatever the server's defaults: values out of range are errors, times are in UTC, tables
#: have transactions, and keys are sorted by all that an index holds of them (3072 bytes, of 4 for a character in ours).
_SESSION = (
    f"SET SESSION sql_mode = 'TRADITIONAL', time_zone = '+00:00', innodb_lock_wait_timeout = {_LOCK_WAIT_S}, "
    f"lock_wait_timeout = {_LOCK_WAIT_S}, default_storage_engine = InnoDB, default_tmp_storage_engine = InnoDB, "
    "max_sort_length = 12288"
)

#: Rows that are Python objects at one time.
_ROWS_AT_ONCE = 10_000

#: Bytes of an index, and of a character; most characters of a key's column.
_INDEX_BYTES, _CHARACTER_BYTES, _KEY_SIZE = 3072, 4, 255

_ENGINE = """
SELECT COALESCE(engine, table_type) FROM information_schema.tables
WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :name
"""
#: Columns that hold texts for equal which are not, of another case say, or that lack characters.
_LOOSE = """
SELECT column_name, collation_name FROM information_schema.columns
WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :name AND collation_name NOT LIKE 'utf8mb4%\\_bin'
"""
_FINGERPRINT = """
SELECT CONCAT_WS(' ', table_name, column_name, ordinal_position, column_type, collation_name, is_nullable,
    column_default, extra)
FROM information_schema.columns WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name IN :names
UNION ALL
SELECT CONCAT_WS(' ', table_name, index_name, non_unique, seq_in_index, column_name, sub_part)
FROM information_schema.statistics WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name IN :names
ORDER BY 1
"""


class MySql(Server):
    """MySQL and MariaDB, by PyMySQL."""

    name = "mysql"
    title = "MySQL"
    unknown = frozenset({"NaN", "infinity"})
    booleans_are_numbers = True
    #: Other duplicates, values that are unreadable or divided by zero, a view's or a column's check, no partition for a
    #: row, a trigger's SIGNAL, bad JSON, and a row that is too long for the table.
    row_codes = frozenset({
        "1022", "1118", "1292", "1365", "1369", "1411", "1525", "1526", "1557", "1586", "1644", "1690", "1748", "1761",
        "1762", "1916", "1918", "1977", "3140", "3141", "3156", "3157", "3819", "3854", "4025",
    })  # fmt: skip
    #: Connections (2xxx, and 0 where one is closed), too many of them, a server that goes or cannot answer, locks and
    #: deadlocks (1305: a savepoint that a deadlock took along), a table or row that has changed, and servers that take
    #: no changes, as in the middle of a failover.
    transient_codes = frozenset({
        "0", "1020", "1040", "1043", "1047", "1053", "1077", "1079", "1080", "1152", "1158", "1159", "1160", "1161",
        "1203", "1205", "1206", "1213", "1290", "1305", "1412", "1637", "1792", "1836", "1927", "2002", "2003", "2006",
        "2013", "2014", "2045", "2055", "4031",
    })  # fmt: skip
    forbidden_codes = frozenset({"1044", "1142", "1143", "1227", "1370"})
    #: Names that are too long, or that no column, table or database has, and decimals of more digits than it has.
    misfit_codes = frozenset({"1059", "1102", "1103", "1166", "1300", "1425", "1426"})
    #: Texts with names of columns, tables, constraints, servers and users; those of users are taken out.
    plain_codes = frozenset({
        "1045", "1046", "1048", "1049", "1054", "1071", "1118", "1146", "1153", "1264", "1267", "1364", "1406", "1698",
        "2058", "2059", "3819", "4025", *(transient_codes - {"1203"}), *forbidden_codes, *misfit_codes,
    })  # fmt: skip

    def engine(self, url: sa.URL) -> sa.Engine:
        """Return an engine whose transactions are at READ COMMITTED, see `PostgreSql.engine`."""
        bounds = {name: seconds for name, seconds in _BOUNDS.items() if name not in url.query}
        session = {"charset": "utf8mb4", "init_command": _SESSION}
        engine = new_engine(url, {**bounds, **session}, isolation_level="READ COMMITTED")
        sa.event.listen(engine, "do_connect", lambda _dialect, _record, given, named: _connection()(*given, **named))
        return engine

    @contextmanager
    def schema_lock(self, connection: sa.Connection) -> Iterator[None]:
        """Let one session at a time create tables."""
        taken = connection.execute(sa.select(sa.func.get_lock("penstock schema", _LOCK_WAIT_S))).scalar_one()
        if not taken:
            late = connection.dialect.loaded_dbapi.OperationalError(1205, "another session makes tables")
            raise sa.exc.DBAPIError("GET_LOCK", None, late, hide_parameters=True)
        yield
        self.release_lock(connection, "penstock schema")

    def insert(self, table: sa.Table) -> mysql.Insert:
        """Return an `INSERT` that may have `ON DUPLICATE KEY UPDATE`."""
        return mysql.insert(table)

    def insert_new(self, table: sa.Table) -> mysql.Insert:
        """Return an `INSERT` that changes nothing of a row that is there; IGNORE would let bad values pass as well."""
        name = next(iter(table.primary_key)).name
        return mysql.insert(table).on_duplicate_key_update({name: table.c[name]})

    def insert_or_update(
        self, table: sa.Table, names: Sequence[str], rows: sa.Select[Any], key: Sequence[str], changes: Changes
    ) -> mysql.Insert:
        """Return an `INSERT ... ON DUPLICATE KEY UPDATE`; see `differences`."""
        changed = changes(lambda name: sa.func.values(table.c[name], type_=table.c[name].type))
        statement = mysql.insert(table).from_select(names, rows)
        return statement.on_duplicate_key_update({key[0]: table.c[key[0]], **changed})

    def delete_keys(self, table: sa.Table, key: Sequence[str], keys: sa.Select[Any]) -> sa.Delete:
        """Return a `DELETE` by a join: it would look for each row of the table in a subquery."""
        gone = keys.subquery()
        return sa.delete(table).where(*(table.c[name] == gone.c[name] for name in key))

    def stage(self, connection: sa.Connection, table: sa.Table, rows: pa.Table) -> None:
        """Insert rows through the driver's `executemany`, which sends many in one statement."""
        quoted = connection.dialect.identifier_preparer
        names = ", ".join(map(quoted.format_column, table.columns))
        marks = ", ".join(["%s"] * len(table.columns))
        statement = f"INSERT INTO {quoted.format_table(table)} ({names}) VALUES ({marks})"  # noqa: S608 - names
        for chunk in rows.select([str(column.name) for column in table.columns]).to_batches(_ROWS_AT_ONCE):
            values = [_without_zone(column).to_pylist() for column in chunk.columns]
            connection.exec_driver_sql(statement, list(zip(*values, strict=True)))

    def create_temporary(self, connection: sa.Connection, name: str, *items: sa.schema.SchemaItem) -> sa.Table:
        """Make a table that ends with the connection, after that of an earlier batch."""
        connection.exec_driver_sql(f"DROP TEMPORARY TABLE IF EXISTS {name}")
        return super().create_temporary(connection, name, *items)

    def column_type(self, kind: Type, key_columns: int = 0) -> Type:
        """Return a type that is not bounded at 64 KiB or whole seconds; of a key, one that fits into an index."""
        size = min(_KEY_SIZE, _INDEX_BYTES // _CHARACTER_BYTES // key_columns) if key_columns else None
        if isinstance(kind, sa.Text):
            return ExactText(size)
        if isinstance(kind, sa.LargeBinary):
            return mysql.LONGBLOB() if size is None else sa.VARBINARY(size * _CHARACTER_BYTES)
        return mysql.DATETIME(timezone=kind.timezone, fsp=6) if isinstance(kind, sa.DateTime) else kind

    def conversions(self, connection: sa.Connection, table: sa.Table) -> dict[str, Conversion]:
        """Return how values of the frame get into the columns of a table."""
        return conversions(connection, table)

    def fits(self, stored: Type, arriving: Type, *, is_sum: bool) -> bool:
        """Tell whether a column takes values of a type: a truth value also into BIT.

        A set is put in order, and what SQLAlchemy does not know, such as a geometry, has texts of many spellings.
        """
        if isinstance(stored, mysql.BIT):
            return isinstance(arriving, sa.Boolean)
        is_known = not isinstance(stored, mysql.SET | sa.types.NullType)
        return is_known and super().fits(stored, arriving, is_sum=is_sum)

    def keeps(self, stored: Type, arriving: Type, *, is_sum: bool) -> bool:
        """Tell whether a number may be kept; of single values that would be rounded, a CHECK tells."""
        return keeps(stored, arriving, is_sum=is_sum)

    def numbered_column(self, _connection: sa.Connection, inspector: sa.Inspector, table: sa.Table) -> str | None:
        """Return the column that is AUTO_INCREMENT."""
        columns = inspector.get_columns(table.name, schema=table.schema)
        return next((column["name"] for column in columns if column.get("autoincrement") is True), None)

    def differences(
        self, connection: sa.Connection, inspector: sa.Inspector, table: sa.Table, key: Sequence[str]
    ) -> list[str]:
        """Return other unique indexes, a row of which `ON DUPLICATE KEY UPDATE` would change, and keys of loose texts.

        An index on a number that the table gives each row meets no other row.
        """
        if not key:
            return []
        numbered = self.numbered_column(connection, inspector, table)
        own = {numbered} - {None, *(str(column.name) for column in table.columns)}
        found = [
            f"the table has another unique index{f' on ({columns})' if columns else ''}, and ON DUPLICATE KEY UPDATE "
            "would change the row that it finds by that; make it an index that is not unique"
            for columns in (
                ", ".join(sorted(map(str, unique)))
                for unique in self.unique_columns(connection, inspector, table)
                if unique != set(key) and not own & unique
            )
        ]
        names = {"schema": table.schema, "name": table.name}
        found += [
            f"column {name} of the key has the collation {collation}, by which texts are equal that differ, in case "
            "say, or that lacks characters; give it a binary one of utf8mb4, such as utf8mb4_bin"
            for name, collation in connection.execute(sa.text(_LOOSE), names)
            if name in key
        ]
        return found

    def require_transactions(self, connection: sa.Connection, table: sa.Table) -> None:
        """Raise `SchemaMismatchError` unless a table is one of InnoDB."""
        engine = connection.execute(sa.text(_ENGINE), {"schema": table.schema, "name": table.name}).scalar()
        if engine != "InnoDB":
            raise SchemaMismatchError(
                f"table {table.name} does not fit: it is of {engine}, and only InnoDB stores rows and ledger in one "
                f"transaction; ALTER TABLE {table.name} ENGINE=InnoDB"
            )

    def grants(self, connection: sa.Connection, needs: Needs) -> list[str]:
        """Return the statements: what it makes for the staging is of the database, or of that of the connection."""
        user, _, host = connection.execute(sa.select(sa.func.current_user())).scalar_one().rpartition("@")
        own = _quoted(connection.engine.url.database or "")
        schema, role = own if needs.schema is None else _quoted(needs.schema), f"'{user}'@'{host}'"
        found = [f"GRANT SELECT, INSERT, CREATE, DROP ON {schema}.* TO {role}"] * needs.staging
        found += [f"GRANT CREATE TEMPORARY TABLES ON {own}.* TO {role}"] * needs.temporary
        alter = ["ALTER"] * needs.adds_columns
        return found + [
            f"GRANT {', '.join(dict.fromkeys(['SELECT', *operations, 'CREATE', *alter]))} "
            f"ON {schema}.{_quoted(name)} TO {role}"
            for name, operations in needs.tables.items()
        ]

    def take_lock(self, connection: sa.Connection, name: str) -> bool:
        """Take a lock by name, which is the server's and not of one database."""
        return bool(connection.execute(sa.select(sa.func.get_lock(name, 0))).scalar_one())

    def release_lock(self, connection: sa.Connection, name: str) -> None:
        """Give back a lock by name."""
        connection.execute(sa.select(sa.func.release_lock(name)))

    @contextmanager
    def lock_waits(self, connection: sa.Connection, seconds: int) -> Iterator[None]:
        """Set the bound for the session meanwhile."""
        connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {seconds}")
        try:
            yield
        finally:
            connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {_LOCK_WAIT_S}")

    def fingerprint(self, connection: sa.Connection, tables: Sequence[sa.Table]) -> str:
        """Ask the catalogue, in one question."""
        statement = sa.text(_FINGERPRINT).bindparams(sa.bindparam("names", expanding=True))
        named = {"schema": tables[0].schema, "names": [table.name for table in tables]}
        return str(connection.execute(statement, named).all())


@cache
def _connection() -> Any:
    """Return PyMySQL's connection, but without the system's certificates.

    PyMySQL loads them for each connection, in some 50 ms, and verifies nothing with them unless the address names a CA.
    """
    from pymysql.connections import Connection  # type: ignore[import-untyped] # the library has no types

    class Unverified(Connection):  # type: ignore[misc] # the same
        def _create_ssl_ctx(self, named: Any) -> Any:
            if named:
                return super()._create_ssl_ctx(named)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return context

    return Unverified


def _without_zone(column: pa.Array) -> pa.Array:
    """Return times as they are in UTC."""
    kind = column.type
    return column.cast(pa.timestamp("us", kind.tz)).cast(pa.timestamp("us")) if pa.types.is_timestamp(kind) else column


def _quoted(name: str) -> str:
    doubled = name.replace("`", "``")
    return f"`{doubled}`"
