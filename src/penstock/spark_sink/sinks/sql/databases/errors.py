"""Kinds and texts of a database's errors, without the values that drivers quote in them."""

from __future__ import annotations

import re

import sqlalchemy as sa

from penstock.clients.rights import MissingRightError
from penstock.errors import PenstockError, SinkError
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.sql.databases.database import Database, ErrorKind

#: Characters of a SQLSTATE; the numbers of MySQL have four.
_SQLSTATE = 5

_NEEDED = (
    "a sink needs SELECT, INSERT and UPDATE on its table and its ledger, with `delete` DELETE on the table, and CREATE "
    "in their schema; docs/spark-cluster.md lists what else, have an administrator GRANT it"
)


class TransientSinkError(SinkError):
    """The database cannot do it now: the same batch may succeed at a retry."""


class RefusedRowError(SinkError):
    """The table refuses a row, or would change a value in it. The text gives the reason without the value."""


def code_of(error: BaseException) -> str | None:
    """Return the database's number, name or SQLSTATE of an error; None if the driver itself raised it."""
    origin = getattr(error, "orig", None)
    number = next(iter(getattr(origin, "args", ())), None)
    found: str | None = getattr(origin, "sqlstate", None) or getattr(origin, "sqlite_errorname", None)
    return str(number) if isinstance(number, int) else found


def error_kind(database: Database, error: BaseException) -> ErrorKind:
    """Return the kind of an error, by its code and its type, never by its text.

    A driver's own error about a failed or lost connection has no code. So a wrong password of PostgreSQL looks like a
    server that is down.
    """
    if not isinstance(error, sa.exc.DBAPIError):
        return ErrorKind.OTHER
    if (code := code_of(error)) is not None:
        for kind, codes in database.codes.items():
            if code in codes or (len(code) == _SQLSTATE and code[:2] in codes):
                return kind
    types = {base.__name__ for base in type(error.orig).__mro__}
    if types & {"IntegrityError", "DataError"}:
        return ErrorKind.ROW
    is_lost = error.connection_invalidated or types & {"OperationalError", "InterfaceError"}
    return ErrorKind.TRANSIENT if code is None and is_lost else ErrorKind.OTHER


def facts_of(database: Database, error: sa.exc.SQLAlchemyError) -> list[str]:
    """Return the type of an error, its code, and the names of its table, column and constraint, but never a value."""
    if (origin := getattr(error, "orig", None)) is None:  # SQLAlchemy's own error, which quotes no value
        return [type(error).__name__, str(error)]
    code = code_of(error)
    facts = [type(origin).__name__, *filter(None, [code])]
    diagnosis = getattr(origin, "diag", None)
    if code in database.plain_codes:
        facts.append(_without_users(str(diagnosis.message_primary if diagnosis else origin.args[1]), None))
    named = {part: getattr(diagnosis, f"{part}_name", None) for part in ("table", "column", "constraint")}
    return facts + [f"{part} {name}" for part, name in named.items() if name]


def shown(url: sa.URL) -> str:
    """Return driver, host, port and database of an address. User names and settings in it may be secrets."""
    query = url.normalized_query
    host = url.host or ",".join(query.get("host", ()))
    port = f":{url.port}" if url.port else "".join(f":{ports}" for ports in query.get("port", ()))
    return f"{url.drivername}://{host}{port}/{url.database or ''}"


def _without_users(text: str, url: sa.URL | None) -> str:
    """Return a driver's text without the names of users, which servers and libraries often quote."""
    text = re.sub(r'\b(user|role) "[^"]*"', r'\1 "..."', text)
    text = re.sub(r"'[^']*'@'[^']*'", "'...'", text)
    for name in () if url is None else (url.username, *url.normalized_query.get("user", ())):
        if name:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "...", text)
    return text


def refused(
    database: Database, error: sa.exc.SQLAlchemyError, table: str, url: sa.URL, batch_id: int | None
) -> PenstockError:
    """Return the sink's error for an error of the database or its driver. `batch_id` is None in a check of the sink.

    It contains the driver's text only if the whole database refused (unreachable, locked, full): texts about rows
    quote keys and values.
    """
    facts, code, kind = facts_of(database, error), code_of(error), error_kind(database, error)
    if type(origin := getattr(error, "orig", None)).__name__ == "OperationalError" and not (code or "").isdigit():
        facts += [_without_users(line, url) for line in str(origin).strip().splitlines()[:1]]
    if kind is ErrorKind.MISFIT:
        facts.append("the table does not fit the frame")
    what = f"table {table} at {shown(url)}: {', '.join(facts)}"
    if batch_id is not None:
        text = f"batch {batch_id} was refused by {what}; nothing of it was stored, and the next start repeats it"
    else:
        # The sink is being checked, or its ledger read.
        advice = "; see whether the database answers, and try again" if kind is ErrorKind.TRANSIENT else ""
        text = f"access was refused by {what}; nothing was changed{advice}"
    if kind is ErrorKind.RIGHT:
        return MissingRightError.from_text(f"{text}; {_NEEDED}")
    return {ErrorKind.MISFIT: SchemaMismatchError, ErrorKind.TRANSIENT: TransientSinkError}.get(kind, SinkError)(text)
