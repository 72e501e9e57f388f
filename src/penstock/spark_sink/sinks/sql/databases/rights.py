"""Which rights a sink lacks in PostgreSQL, and the GRANT that gives each.

The server names one object at a time, in its own language, and not always the one that the user thinks of: the ledger's
table is written before the target is. So it is asked for all that a sink needs, at the start and wherever it refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from penstock.clients.rights import MissingRightError

#: Rights that may be held on single columns as well: which those are is the administrator's affair.
_OF_COLUMNS = ("SELECT", "INSERT", "UPDATE")

_SCHEMA = """
SELECT quote_ident(nspname), has_schema_privilege(oid, 'USAGE'), has_schema_privilege(oid, 'CREATE')
FROM pg_namespace WHERE nspname = coalesce(:schema, current_schema(), 'public')
"""
_DATABASE = "SELECT quote_ident(current_database()), has_database_privilege(current_database(), 'TEMPORARY')"
_OWNED = "SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = to_regclass(:name)"


@dataclass(frozen=True, slots=True)
class SqlRight:
    """Rights on one TABLE, SCHEMA or DATABASE, as GRANT spells them; none for its ownership.

    The name is quoted where SQL wants it.
    """

    operations: tuple[str, ...]
    kind: str
    name: str

    def __str__(self) -> str:
        """Return them as they stand in a sentence: `SELECT, INSERT on table orders`."""
        what = ", ".join(self.operations) if self.operations else "of the owner, to add columns,"
        return f"{what} on {self.kind.lower()} {self.name}"

    def command(self, principal: str) -> str:
        """Return the statement that gives them to a role."""
        if not self.operations:
            return f"ALTER {self.kind} {self.name} OWNER TO {principal}"
        return f"GRANT {', '.join(self.operations)} ON {self.kind} {self.name} TO {principal}"


@dataclass(frozen=True, slots=True)
class NeededRights:
    """What a sink does in a database.

    Attributes:
        schema: schema of its tables; None for the connection's own.
        tables: what it does with each table.
        creates: whether it makes tables in the schema though its own are there: those of the staging.
        temporary: whether it makes temporary tables.
        adds_columns: whether it adds columns to the first of the tables.
    """

    schema: str | None
    tables: Sequence[tuple[str, tuple[str, ...]]]
    creates: bool
    temporary: bool
    adds_columns: bool

    def missing(self, connection: sa.Connection) -> list[SqlRight]:
        """Return those that this role lacks. In a transaction of the caller's."""
        found = connection.execute(sa.text(_SCHEMA), {"schema": self.schema}).one_or_none()
        if found is None:
            return []  # another error tells that there is no such schema
        schema, may_use, may_create = found
        if not may_use:
            # Of what is in it the server tells nothing.
            return [SqlRight(("USAGE", "CREATE") if self.creates else ("USAGE",), "SCHEMA", schema)]
        missing: list[SqlRight] = []
        creates = self.creates
        for table, operations in self.tables:
            name = _quoted(table, self.schema)
            if connection.execute(sa.select(sa.func.to_regclass(name))).scalar_one() is None:
                creates = True
            elif lacking := tuple(one for one in operations if not _may(connection, name, one)):
                missing.append(SqlRight(lacking, "TABLE", name))
        if creates and not may_create:
            missing.append(SqlRight(("CREATE",), "SCHEMA", schema))
        database, may_make = connection.execute(sa.text(_DATABASE)).one()
        if self.temporary and not may_make:
            missing.append(SqlRight(("TEMPORARY",), "DATABASE", database))
        return missing

    def ownership(self, connection: sa.Connection) -> list[SqlRight]:
        """Return the ownership that this role lacks and needs to add columns; those of a former ledger are added."""
        names = [_quoted(table, self.schema) for table, _ in self.tables[0 if self.adds_columns else 1 :]]
        owned = {name: connection.execute(sa.text(_OWNED), {"name": name}).scalar() for name in names}
        return [SqlRight((), "TABLE", name) for name in names if owned[name] is False]


def require_rights(connection: sa.Connection, what: str, needed: NeededRights, *, refused: bool = False) -> None:
    """Raise `MissingRightError` naming all rights that a sink lacks in PostgreSQL; see `Database.require_rights`."""
    missing = needed.missing(connection)
    if refused and not missing:
        missing = needed.ownership(connection)
    if missing:
        role = connection.execute(sa.text("SELECT quote_ident(current_user)")).scalar_one()
        raise MissingRightError(what, missing, role)


def _may(connection: sa.Connection, table: str, operation: str) -> bool:
    ask = sa.func.has_any_column_privilege if operation in _OF_COLUMNS else sa.func.has_table_privilege
    return bool(connection.execute(sa.select(ask(sa.func.to_regclass(table), operation))).scalar_one())


def _quoted(table: str, schema: str | None) -> str:
    preparer = postgresql.dialect().identifier_preparer  # type: ignore[no-untyped-call] # untyped in the library
    # What it doubles is for statements with parameters.
    return ".".join(preparer.quote(one).replace("%%", "%") for one in (schema, table) if one is not None)
