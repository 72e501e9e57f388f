"""Kinds and texts of a database's errors, without the values that drivers quote."""

from __future__ import annotations

import re

import sqlalchemy as sa

from penstock.errors import SinkError
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.sql.databases.database import Database

#: Characters of a SQLSTATE; the numbers of MySQL have four.
_SQLSTATE = 5


class LostTaskError(Exception):
    """A task met what is transient; the text is what `refused` says of it."""


class ChangedValueError(sa.exc.SQLAlchemyError):
    """A column of the table would change the value of a row, which the text does not tell."""


def code_of(error: BaseException) -> str | None:
    """Return the number, or the SQLSTATE, by which a database calls an error; None where only a driver raised it."""
    origin = getattr(error, "orig", None)
    number = next(iter(getattr(origin, "args", ())), None)
    return str(number) if isinstance(number, int) else getattr(origin, "sqlstate", None)


def _is_among(code: str | None, codes: frozenset[str]) -> bool:
    return code is not None and (code in codes or (len(code) == _SQLSTATE and code[:2] in codes))


def _is_a(error: BaseException, *kinds: str) -> bool:
    """Tell whether a driver's error is of one of DB-API's kinds."""
    return not {kind.__name__ for kind in type(getattr(error, "orig", None)).__mro__}.isdisjoint(kinds)


def concerns_a_row(database: Database, error: sa.exc.SQLAlchemyError) -> bool:
    """Tell whether an answer of the database is about the values of a row, and not about the database or the table."""
    is_of_row = isinstance(error, ChangedValueError) or _is_a(error, "IntegrityError", "DataError")
    return is_of_row or _is_among(code_of(error), database.row_codes)


def is_transient(database: Database, error: BaseException) -> bool:
    """Tell whether a batch may pass when it is tried again as it is: by the type of an error and its code.

    Where a connection to PostgreSQL cannot be made there is no SQLSTATE, so a wrong password looks like a server that
    is away.
    """
    if not isinstance(error, sa.exc.DBAPIError):
        return isinstance(error, LostTaskError)
    if (code := code_of(error)) is not None:
        return _is_among(code, database.transient_codes)
    is_of_connection = _is_a(error, "OperationalError", "InterfaceError")
    return error.connection_invalidated or (database.connection_errors_have_no_code and is_of_connection)


def is_forbidden(database: Database, error: BaseException) -> bool:
    """Tell whether a database refused for want of a right."""
    return code_of(error) in database.forbidden_codes


def facts_of(database: Database, error: sa.exc.SQLAlchemyError) -> list[str]:
    """Return the kind of an error, its code and the table, column and constraint it names: never a value."""
    if isinstance(error, ChangedValueError):
        return [str(error)]
    origin, code = getattr(error, "orig", None) or error, code_of(error)
    facts = [type(origin).__name__, *filter(None, [code or getattr(origin, "sqlite_errorname", None)])]
    diagnosis = getattr(origin, "diag", None)
    if code in database.plain_codes:
        facts.append(_without_users(str(diagnosis.message_primary if diagnosis else origin.args[1]), None))
    named = {part: getattr(diagnosis, f"{part}_name", None) for part in ("table", "column", "constraint")}
    return facts + [f"{part} {name}" for part, name in named.items() if name]


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


def refused(
    database: Database, error: sa.exc.SQLAlchemyError, table: str, url: sa.URL, batch_id: int | None
) -> SinkError:
    """Return the sink's error for one of the database or its driver; no batch where the sink was being checked.

    The driver's own text stands in it only where the database as a whole refused (unreachable, locked, full):
    texts about rows quote keys and values.
    """
    facts, code = facts_of(database, error), code_of(error)
    if type(origin := getattr(error, "orig", None)).__name__ == "OperationalError" and not (code or "").isdigit():
        facts += [_without_users(line, url) for line in str(origin).strip().splitlines()[:1]]
    is_misfit = code in database.misfit_codes
    if is_misfit:
        facts.append("the table does not fit the frame")
    what = "a look at the schema" if batch_id is None else f"batch {batch_id}"
    return (SchemaMismatchError if is_misfit else SinkError)(
        f"{what} was refused by table {table} at {shown(url)}: "
        f"{', '.join(facts)}; nothing of the batch was stored, and Spark hands it over again when the query is "
        "started again"
    )
