"""The barrier: a row in the user's database that tells a check, without guessing, how a local transaction ended.

The local transaction writes COMMITTED for its id. The check writes ROLLED_BACK for the id if there is no row. The
primary key admits one of the two. So a running local transaction blocks the check until it ends, and one that has not
run before its check can no longer run. No answer depends on a time-out.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

from penstock.errors import ConfigurationError, TransactionRefusedError
from penstock.options import a_callable, seconds
from penstock.transactions.connections import (
    NOW,
    Kind,
    UserConnection,
    age_s,
    create_table,
    insert_absent,
    is_lock_error,
    table_name,
    with_table,
)
from penstock.transactions.model import HalfMessage, TransactionState
from penstock.transactions.producer.check_responder import CHECK_TIMEOUT_S
from penstock.transactions.wire.ids import is_id

_log = logging.getLogger("penstock.transactions")

#: About the seconds of a short write on SQLite: a check waits no longer for another writer.
_SHORT_WRITE_S = 0.1
#: The default name of the barrier's table.
DEFAULT_TABLE = "penstock_barrier"

_STATEMENTS = {
    **dict.fromkeys(
        (Kind.SQLITE, Kind.POSTGRESQL),
        "CREATE TABLE IF NOT EXISTS {} (id TEXT NOT NULL PRIMARY KEY, state TEXT NOT NULL, at BIGINT NOT NULL)",
    ),
    Kind.MYSQL: """
CREATE TABLE IF NOT EXISTS {} (
    id VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY, state VARCHAR(16) NOT NULL,
    at BIGINT NOT NULL
) ENGINE = InnoDB""",
}


class HasId(Protocol):
    """An object with the id of a transaction: a `Transaction` or a `HalfMessage`."""

    @property
    def transaction_id(self) -> str:
        """The id."""


def create_barrier_table(connection: object, *, table: str = DEFAULT_TABLE, schema: str | None = None) -> None:
    """Create the barrier's table if it is absent, and commit. Call it once, outside of any local transaction.

    Args:
        connection: as for `barrier`; an open transaction is committed with the table.
        table: the table's name.
        schema: the table's schema; None: the connection's own.

    Raises:
        ConfigurationError: the connection is of no known kind, or a name is invalid.
    """
    create_table(connection, _STATEMENTS, table, schema)


def barrier(connection: object, tx: HasId | str, *, table: str = DEFAULT_TABLE, schema: str | None = None) -> None:
    """Write COMMITTED for a transaction inside the user's own SQL transaction, so that `barrier_check` finds it.

    Call it first in the local transaction: a refused transaction has then done nothing yet. It does not commit: the row
    is kept if, and only if, the local transaction commits. After this call an exception in the transaction's block no
    longer means ROLLBACK: the database may have committed and its answer may be lost, so a check decides.

    Args:
        connection: the connection of the local transaction: of sqlite3, psycopg or PyMySQL, or a `Connection` or
            `Session` of SQLAlchemy, for SQLite, PostgreSQL, MariaDB or MySQL; not in autocommit mode.
        tx: the transaction, or its id.
        table: the table's name.
        schema: the table's schema; None: the connection's own.

    Raises:
        TransactionRefusedError: a check came first, so the message is rolled back for good and the local transaction
            must not commit. Or this or another local transaction with the id passed the barrier before: then a check
            decides about the message.
        ConfigurationError: the connection would commit by itself or is of no known kind, or `tx` is no id, or the
            table is absent.
    """
    user, name = with_table(connection, table, schema)
    transaction_id = tx if isinstance(tx, str) else tx.transaction_id
    if not is_id(transaction_id):
        raise ConfigurationError("tx is no transaction's id: give the Transaction, or its transaction_id")
    user.require_transaction()
    if _insert(user, name, transaction_id, "COMMITTED"):
        # The commit may succeed and raise all the same, when its answer is lost. Only the check can know that.
        getattr(tx, "leave_errors_to_check", lambda: None)()
        return
    if not _committed(user, name, transaction_id):
        raise TransactionRefusedError(
            f"transaction {transaction_id} was rolled back by a check before its local transaction came to the "
            "barrier; roll the local transaction back, and send the message again if it is still wanted"
        )
    # The earlier local transaction may have committed. Only the check can know that.
    unknown = getattr(tx, "unknown", None)
    if unknown is not None:
        unknown()
    raise TransactionRefusedError(
        f"transaction {transaction_id} has passed the barrier before; roll this try of its local transaction back: a "
        "check finds out whether the first one committed"
    )


@dataclass(frozen=True, slots=True)
class BarrierCheck:
    """A check that reads its answer from the barrier's table, for `TransactionalProducer(check=...)`.

    The answer is COMMIT if the local transaction committed, ROLLBACK if it did not and no longer can, and UNKNOWN while
    it runs. Every transaction of the producer group must pass the barrier: the check rolls back all others. Several
    threads may call it.

    Args:
        connect: opens a connection of a kind that `barrier` accepts; the check closes it. It must lead to the primary
            server, not to a replica. Several threads call it.
        table: the table's name.
        schema: the table's schema.
        lock_timeout: seconds to wait for a local transaction that is still running. None: half of the producer's
            `check_timeout`; on SQLite, which has one lock for all writers, no longer than a short write. MariaDB and
            MySQL wait whole seconds, at least one. Set it if your own function calls the check.
        check_timeout: seconds that the check may take; the producer sets it.

    Raises:
        ConfigurationError: an argument is wrong. The check itself raises the database's errors, except for a lock that
            it did not get: then it answers UNKNOWN.
    """

    connect: Callable[[], Any]
    _: KW_ONLY
    table: str = DEFAULT_TABLE
    schema: str | None = None
    lock_timeout: float | None = None
    check_timeout: float = CHECK_TIMEOUT_S

    def __post_init__(self) -> None:
        a_callable("connect", self.connect)
        if self.lock_timeout is not None:
            seconds("lock_timeout", self.lock_timeout)
        table_name(Kind.SQLITE, self.table, self.schema)

    def within(self, check_timeout_s: float) -> BarrierCheck:
        """Return the same check with the time limit of a producer."""
        return replace(self, check_timeout=check_timeout_s)

    def __call__(self, half: HalfMessage) -> TransactionState:
        """Return the outcome of the local transaction."""
        connection = self.connect()
        try:
            user, name = with_table(connection, self.table, self.schema)
            user.isolate()
            with _lock_timeout(user, self._wait_s(user.kind)):
                is_mine = _insert(user, name, half.transaction_id, "ROLLED_BACK")
                # The next read has a transaction of its own, so it sees the other row at any isolation level.
                user.commit()
            has_committed = not is_mine and _committed(user, name, half.transaction_id)
        except Exception as error:
            if not is_lock_error(error):
                raise
            _log.info("transaction %s: its local transaction is still running; asked again later", half.transaction_id)
            return TransactionState.UNKNOWN
        else:
            return TransactionState.COMMIT if has_committed else TransactionState.ROLLBACK
        finally:
            connection.close()

    def _wait_s(self, kind: Kind) -> float:
        if self.lock_timeout is not None:
            return self.lock_timeout
        half_s = self.check_timeout / 2
        return min(_SHORT_WRITE_S, half_s) if kind is Kind.SQLITE else half_s


#: Another name of `BarrierCheck`, which fits to `barrier`.
barrier_check = BarrierCheck


def clean_barrier(
    connection: object, older_than: timedelta, *, table: str = DEFAULT_TABLE, schema: str | None = None
) -> int:
    """Delete the barrier's rows of long settled transactions, and commit.

    Args:
        connection: as for `barrier`; an open transaction is committed, too.
        older_than: the age from which rows are deleted, by the database's clock. A message must never stay undecided
            for so long, with all its checks, its immunity and any time without a producer of its group: a check that
            finds no row rolls the message back.
        table: the table's name.
        schema: the table's schema.

    Returns:
        The number of deleted rows.

    Raises:
        ConfigurationError: the age is no `timedelta` above zero, the connection is of no known kind, or a name is
            invalid.
    """
    age = age_s("older_than", older_than)
    user, name = with_table(connection, table, schema)
    answer = user.run(f"DELETE FROM {name} WHERE at < {NOW[user.kind]} - :age", age=age)  # noqa: S608 - the name is quoted
    user.commit()
    return answer.count


@contextlib.contextmanager
def _lock_timeout(user: UserConnection, seconds: float) -> Iterator[None]:
    """Limit the time that statements wait for a lock, and restore it: the connection may go back to a pool."""
    milliseconds = max(1, int(seconds * 1000))
    if user.kind is Kind.POSTGRESQL:
        user.run("SELECT set_config('lock_timeout', :value, true)", value=f"{milliseconds}ms")
        yield
        return
    if user.kind is Kind.MYSQL:
        read, write = "SELECT @@innodb_lock_wait_timeout", "SET SESSION innodb_lock_wait_timeout = {}"
        wait = math.ceil(seconds)
    else:
        read, write, wait = "PRAGMA busy_timeout", "PRAGMA busy_timeout = {}", milliseconds
    before = user.run(read).rows[0][0]
    user.run(write.format(wait))
    try:
        yield
    finally:
        user.run(write.format(int(before)))


def _insert(user: UserConnection, name: str, transaction_id: str, state: str) -> bool:
    """Insert a row unless the id has one; return whether it was inserted. Waits for another transaction's insert."""
    rows = f"(:id, :state, {NOW[user.kind]})"
    return insert_absent(user, name, "id, state, at", rows, "create_barrier_table", id=transaction_id, state=state) == 1


def _committed(user: UserConnection, name: str, transaction_id: str) -> bool:
    # On MariaDB and MySQL a plain read shows the state at the begin of its transaction.
    latest = "LOCK IN SHARE MODE" if user.kind is Kind.MYSQL else ""
    statement = f"SELECT 1 FROM {name} WHERE id = :id AND state = 'COMMITTED' {latest}"  # noqa: S608 - the name is quoted
    return bool(user.run(statement, id=transaction_id).rows)
