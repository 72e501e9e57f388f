"""Kinds and texts of a database's errors, without the values that drivers quote."""

from __future__ import annotations

import re

import sqlalchemy as sa

from penstock.errors import SinkError
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.sql.databases.databases import DATABASES
from penstock.spark_sink.sinks.sql.databases.rights import is_forbidden

#: SQLSTATE of a type that a column does not take.
_DATATYPE_MISMATCH = "42804"

#: Class of SQLSTATE that speaks of connections.
_CONNECTION_CLASS = "08"
#: Serialization failure, deadlock, a lock not to be had, too many connections, a server that goes, fell or is not ready
#: yet, and one that takes no changes, as it is in the middle of a failover.
_TRANSIENT = frozenset({"40001", "40P01", "55P03", "53300", "57P01", "57P02", "57P03", "25006"})
#: Classes of SQLSTATE that speak of a row's values: data, constraints, a view's check.
_ROW_CLASSES = ("22", "23", "44")
#: A trigger's RAISE, two rows that the table holds for one key though the frame does not, which pass one by one, and a
#: row that is too long for the table or for an index.
_ROW_STATES = ("P0001", "21000", "54000")

#: What drivers raise without a SQLSTATE: for a row, and where a connection cannot be made or is lost.
_ROW_ERRORS = frozenset[str]().union(*(one.row_errors for one in DATABASES.values()))
_CONNECTION_ERRORS = frozenset[str]().union(*(one.connection_errors for one in DATABASES.values()))

#: How PostgreSQL says that a column does not take a type; the text names no value.
_MISMATCH = re.compile(r'column "(.+)" is of type (.+) but expression is of type (.+)')


def facts_of(error: sa.exc.SQLAlchemyError) -> list[str]:
    """Return the kind of an error, its SQLSTATE and the table, column and constraint it names: never a value."""
    origin = error.orig if isinstance(error, sa.exc.DBAPIError) and error.orig is not None else error
    facts = [type(origin).__name__]
    state = getattr(origin, "sqlstate", None) or getattr(origin, "sqlite_errorname", None)
    if state:
        facts.append(str(state))
    diagnosis = getattr(origin, "diag", None)
    for part in ("table_name", "column_name", "constraint_name"):
        named = getattr(diagnosis, part, None)
        if named:
            facts.append(f"{part.removesuffix('_name')} {named}")
    return facts


def is_transient(error: BaseException) -> bool:
    """Tell whether a batch may pass when it is tried again as it is: by the type of an error and its SQLSTATE.

    Where a connection cannot be made there is no SQLSTATE, so a wrong password looks like a server that is away.
    """
    if isinstance(error, LostTaskError):
        return True
    if not isinstance(error, sa.exc.DBAPIError):
        return False
    state = getattr(error.orig, "sqlstate", None)
    if state is not None:
        return str(state).startswith(_CONNECTION_CLASS) or state in _TRANSIENT
    kinds = {_name_of(kind) for kind in type(error.orig).__mro__}
    return error.connection_invalidated or not kinds.isdisjoint(_CONNECTION_ERRORS)


def concerns_a_row(error: sa.exc.SQLAlchemyError) -> bool:
    """Tell whether an answer of the database is about the values of a row, and not about the database or the table."""
    origin = getattr(error, "orig", None)
    state = getattr(origin, "sqlstate", None)
    if state is not None:
        return str(state).startswith(_ROW_CLASSES) or state in _ROW_STATES
    return _name_of(type(origin)) in _ROW_ERRORS


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class LostTaskError(Exception):
    """A task met what is transient; the text is what `refused` says of it."""


def _mismatch(origin: object) -> str:
    """Return the column that does not take a type, where the server speaks English."""
    found = _MISMATCH.match(str(getattr(getattr(origin, "diag", None), "message_primary", "")))
    return f": column {found[1]} is {found[2]} in the table and {found[3]} in the frame" if found else ""


def shown(url: sa.URL) -> str:
    """Return host, port and database of an address: names and settings in it may be secrets."""
    asked = url.normalized_query
    host = url.host or ",".join(asked.get("host", ()))
    port = f":{url.port}" if url.port else "".join(f":{one}" for one in asked.get("port", ()))
    return f"{url.drivername}://{host}{port}/{url.database or ''}"


def _without_users(text: str, url: sa.URL) -> str:
    """Return what a driver says without the names of users, which servers and libraries like to quote."""
    text = re.sub(r'\b(user|role) "[^"]*"', r'\1 "..."', text)
    for name in (url.username, *url.normalized_query.get("user", ())):
        if name:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "...", text)
    return text


def refused(error: sa.exc.SQLAlchemyError, table: str, url: sa.URL, batch_id: int | None) -> SinkError:
    """Return the sink's error for one of the database or its driver; no batch where the sink was being checked.

    The driver's own text stands in it only where the database as a whole refused (unreachable, locked, full):
    texts about rows quote keys and values.
    """
    origin = error.orig if isinstance(error, sa.exc.DBAPIError) and error.orig is not None else error
    facts = facts_of(error)
    if type(origin).__name__ == "OperationalError":
        facts += [_without_users(line, url) for line in str(origin).strip().splitlines()[:1]]
    if is_forbidden(error):
        # It names objects of the database, never a value.
        facts.append(str(getattr(getattr(origin, "diag", None), "message_primary", "")))
    is_mismatch = getattr(origin, "sqlstate", None) == _DATATYPE_MISMATCH
    if is_mismatch:
        facts.append("the table does not fit the frame" + _mismatch(origin))
    what = "a look at the schema" if batch_id is None else f"batch {batch_id}"
    return (SchemaMismatchError if is_mismatch else SinkError)(
        f"{what} was refused by table {table} at {shown(url)}: "
        f"{', '.join(facts)}; nothing of the batch was stored, and Spark hands it over again when the query is "
        "started anew"
    )
