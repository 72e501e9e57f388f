"""Kinds and texts of a database's errors, without the values that drivers quote."""

from __future__ import annotations

import re
from typing import Any

import sqlalchemy as sa

from penstock.errors import SinkError
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.sql.databases.databases import DATABASES

#: SQLSTATE of a type that a column does not take.
_DATATYPE_MISMATCH = "42804"
#: Characters of a SQLSTATE.
_SQLSTATE = 5


def _of_all(kind: str) -> frozenset[str]:
    return frozenset[str]().union(*(getattr(one, kind) for one in DATABASES.values()))


#: What the databases say of their errors: SQLSTATEs have five characters, the numbers of MySQL four, so none is of two.
_ROW_CODES, _TRANSIENT_CODES, _FORBIDDEN_CODES, _PLAIN_CODES = map(
    _of_all, ("row_codes", "transient_codes", "forbidden_codes", "plain_codes")
)
_ROW_ERRORS, _CONNECTION_ERRORS = map(_of_all, ("row_errors", "connection_errors"))

#: How PostgreSQL says that a column does not take a type; the text names no value.
_MISMATCH = re.compile(r'column "(.+)" is of type (.+) but expression is of type (.+)')


def code_of(origin: Any) -> str | None:
    """Return the number, or the SQLSTATE, by which a database calls an error; None where only a driver raised it."""
    if _has_number(origin):
        return str(origin.args[0])
    state = getattr(origin, "sqlstate", None)
    return None if state is None else str(state)


def _has_number(origin: Any) -> bool:
    """Tell whether it is an error of MySQL, which has the number and the text as its arguments."""
    return isinstance(next(iter(getattr(origin, "args", ())), None), int)


def _is_among(code: str, codes: frozenset[str]) -> bool:
    return code in codes or (len(code) == _SQLSTATE and code[:2] in codes)


def facts_of(error: sa.exc.SQLAlchemyError) -> list[str]:
    """Return the kind of an error, its code and the table, column and constraint it names: never a value."""
    origin = error.orig if isinstance(error, sa.exc.DBAPIError) and error.orig is not None else error
    facts = [type(origin).__name__]
    code = code_of(origin) or getattr(origin, "sqlite_errorname", None)
    if code:
        facts.append(str(code))
    if code in _PLAIN_CODES:
        facts.append(_without_users(str(origin.args[1]), None))
    diagnosis = getattr(origin, "diag", None)
    for part in ("table_name", "column_name", "constraint_name"):
        named = getattr(diagnosis, part, None)
        if named:
            facts.append(f"{part.removesuffix('_name')} {named}")
    return facts


def is_transient(error: BaseException) -> bool:
    """Tell whether a batch may pass when it is tried again as it is: by the type of an error and its code.

    Where a connection to PostgreSQL cannot be made there is no SQLSTATE, so a wrong password looks like a server that
    is away.
    """
    if isinstance(error, LostTaskError):
        return True
    if not isinstance(error, sa.exc.DBAPIError):
        return False
    code = code_of(error.orig)
    if code is not None:
        return _is_among(code, _TRANSIENT_CODES)
    kinds = {_name_of(kind) for kind in type(error.orig).__mro__}
    return error.connection_invalidated or not kinds.isdisjoint(_CONNECTION_ERRORS)


def concerns_a_row(error: sa.exc.SQLAlchemyError) -> bool:
    """Tell whether an answer of the database is about the values of a row, and not about the database or the table."""
    origin = getattr(error, "orig", None)
    code = code_of(origin)
    if code is not None:
        return _is_among(code, _ROW_CODES)
    return _name_of(type(origin)) in _ROW_ERRORS


def is_forbidden(error: sa.exc.SQLAlchemyError) -> bool:
    """Tell whether a database refused for want of a right."""
    return code_of(getattr(error, "orig", None)) in _FORBIDDEN_CODES


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


def _without_users(text: str, url: sa.URL | None) -> str:
    """Return what a driver says without the names of users, which servers and libraries like to quote."""
    text = re.sub(r'\b(user|role) "[^"]*"', r'\1 "..."', text)
    text = re.sub(r"'[^']*'@'[^']*'", "'...'", text)
    for name in () if url is None else (url.username, *url.normalized_query.get("user", ())):
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
    if type(origin).__name__ == "OperationalError" and not _has_number(origin):
        facts += [_without_users(line, url) for line in str(origin).strip().splitlines()[:1]]
    if is_forbidden(error) and hasattr(origin, "diag"):
        # It names objects of the database, never a value.
        facts.append(str(origin.diag.message_primary))
    is_mismatch = code_of(origin) == _DATATYPE_MISMATCH
    if is_mismatch:
        facts.append("the table does not fit the frame" + _mismatch(origin))
    what = "a look at the schema" if batch_id is None else f"batch {batch_id}"
    return (SchemaMismatchError if is_mismatch else SinkError)(
        f"{what} was refused by table {table} at {shown(url)}: "
        f"{', '.join(facts)}; nothing of the batch was stored, and Spark hands it over again when the query is "
        "started again"
    )
