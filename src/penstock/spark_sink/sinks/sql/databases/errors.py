"""Kinds and texts of a database's errors, without the values that drivers quote."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from penstock.clients.rights import MissingRightError
from penstock.errors import PenstockError, SinkError
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.sql.databases.database import Database

#: Characters of a SQLSTATE; the numbers of MySQL have four.
_SQLSTATE = 5

_NEEDED = (
    "a sink needs SELECT, INSERT and UPDATE on its table and its ledger, with `delete` DELETE on the table, and CREATE "
    "in their schema; docs/spark-cluster.md lists what else, have an administrator GRANT it"
)


class TransientSinkError(SinkError):
    """The database cannot do it now: a batch may pass when it is tried again as it is."""


class ChangedValueError(sa.exc.SQLAlchemyError):
    """A column of the table would change the value of a row, which the text does not tell."""


def code_of(error: BaseException) -> str | None:
    """Return the number, name or SQLSTATE by which a database calls an error; None where only a driver raised it."""
    origin = getattr(error, "orig", None)
    number = next(iter(getattr(origin, "args", ())), None)
    found: str | None = getattr(origin, "sqlstate", None) or getattr(origin, "sqlite_errorname", None)
    return str(number) if isinstance(number, int) else found


def _is_among(code: str | None, codes: frozenset[str]) -> bool:
    return code is not None and (code in codes or (len(code) == _SQLSTATE and code[:2] in codes))


def _is_a(error: BaseException, *kinds: str) -> bool:
    """Tell whether a driver's error is of one of DB-API's kinds."""
    return not {kind.__name__ for kind in type(getattr(error, "orig", None)).__mro__}.isdisjoint(kinds)


def concerns_a_row(database: Database, error: sa.exc.SQLAlchemyError) -> bool:
    """Tell whether an answer of the database is about the values of a row, and not about the database or the table."""
    is_of_row = isinstance(error, ChangedValueError) or _is_a(error, "IntegrityError", "DataError")
    return is_of_row or _is_among(code_of(error), database.row_codes)


def concerns_a_right(database: Database, error: sa.exc.SQLAlchemyError) -> bool:
    """Tell whether a user lacks a permission."""
    return _is_among(code_of(error), database.forbidden_codes)


def is_transient(database: Database, error: BaseException) -> bool:
    """Tell whether a batch may pass when it is tried again as it is: by the type of an error and its code.

    An error of a driver's own has none where a connection cannot be made or is lost. So a wrong password of PostgreSQL
    looks like a server that is away.
    """
    if not isinstance(error, sa.exc.DBAPIError):
        return False
    if (code := code_of(error)) is not None:
        return _is_among(code, database.transient_codes)
    return error.connection_invalidated or _is_a(error, "OperationalError", "InterfaceError")


def facts_of(database: Database, error: sa.exc.SQLAlchemyError) -> list[str]:
    """Return the kind of an error, its code and the table, column and constraint it names: never a value."""
    if isinstance(error, ChangedValueError):
        return [str(error)]
    if (origin := getattr(error, "orig", None)) is None:  # SQLAlchemy's own, which has no value
        return [type(error).__name__, str(error)]
    code = code_of(error)
    facts = [type(origin).__name__, *filter(None, [code])]
    diagnosis = getattr(origin, "diag", None)
    if code in database.plain_codes:
        facts.append(_without_users(str(diagnosis.message_primary if diagnosis else origin.args[1]), None))
    named = {part: getattr(diagnosis, f"{part}_name", None) for part in ("table", "column", "constraint")}
    return facts + [f"{part} {name}" for part, name in named.items() if name]


def shown(url: sa.URL) -> str:
    """Return host, port and database of an address: names and settings in it may be secrets."""
    asked = url.normalized_query
    host = url.host or ",".join(asked.get("host", ()))
    port = f":{url.port}" if url.port else "".join(f":{ports}" for ports in asked.get("port", ()))
    return f"{url.drivername}://{host}{port}/{url.database or ''}"


def _without_users(text: str, url: sa.URL | None) -> str:
    """Return what a driver says without the names of users, which servers and libraries like to quote."""
    text = re.sub(r'\b(user|role) "[^"]*"', r'\1 "..."', text)
    text = re.sub(r"'[^']*'@'[^']*'", "'...'", text)
    for name in () if url is None else (url.username, *url.normalized_query.get("user", ())):
        if name:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "...", text)
    return text


@contextmanager
def without_values(database: Database, url: sa.URL, table: str, batch_id: int | None) -> Iterator[None]:
    """Have errors of the database, or of its driver, leave the block as the sink's; see `refused`."""
    try:
        yield
    except sa.exc.SQLAlchemyError as error:
        # Not chained: drivers quote keys and values in their texts, which end in Spark's log.
        raise refused(database, error, table, url, batch_id) from None


def refused(
    database: Database, error: sa.exc.SQLAlchemyError, table: str, url: sa.URL, batch_id: int | None
) -> PenstockError:
    """Return the sink's error for one of the database or its driver; no batch where the sink was being checked.

    The driver's own text stands in it only where the database as a whole refused (unreachable, locked, full):
    texts about rows quote keys and values.
    """
    facts, code = facts_of(database, error), code_of(error)
    if type(origin := getattr(error, "orig", None)).__name__ == "OperationalError" and not (code or "").isdigit():
        facts += [_without_users(line, url) for line in str(origin).strip().splitlines()[:1]]
    if code in database.misfit_codes:
        facts.append("the table does not fit the frame")
    what = "a look at the schema" if batch_id is None else f"batch {batch_id}"
    text = (
        f"{what} was refused by table {table} at {shown(url)}: "
        f"{', '.join(facts)}; nothing of the batch was stored, and Spark hands it over again when the query is "
        "started again"
    )
    if code in database.forbidden_codes:
        return MissingRightError.from_text(f"{text}; {_NEEDED}")
    if code in database.misfit_codes:
        return SchemaMismatchError(text)
    return (TransientSinkError if is_transient(database, error) else SinkError)(text)
