"""The barrier: a row in the user's database, by which a check knows, and never guesses, how a local transaction ended.

The local transaction writes COMMITTED for its id, and the check writes ROLLED_BACK for it where nothing stands: the
primary key lets one of them in. So a local transaction that is still running holds the check back until it ends, and
one that has not run yet when it is checked cannot run any more. Nothing is left to a waiting time.
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
from penstock.options import a_callable, positive
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

#: Seconds that another's write may take on SQLite, about: a check that finds somebody at it waits for no more.
_SHORT_WRITE_S = 0.1
#: Name of the barrier's table, where none is given.
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
    """Whatever knows the id of a transaction: a `Transaction`, a `HalfMessage`."""

    @property
    def transaction_id(self) -> str:
        """The id."""


def create_barrier_table(connection: object, *, table: str = DEFAULT_TABLE, schema: str | None = None) -> None:
    """Create the barrier's table where it is absent, and commit. Do so once, apart from any local transaction.

    Args:
        connection: as for `barrier`; what is open on it is committed with the table.
        table: the table's name.
        schema: the schema it is in; the connection's own where it is None.

    Raises:
        ConfigurationError: the connection or a name is of no known kind.
    """
    create_table(connection, _STATEMENTS, table, schema)


def barrier(connection: object, tx: HasId | str, *, table: str = DEFAULT_TABLE, schema: str | None = None) -> None:
    """Write COMMITTED for a transaction inside the user's own SQL transaction, so that `barrier_check` can tell.

    Call it first in the local transaction: what is refused has then done nothing yet. It commits nothing: the row
    stands if, and only if, the local transaction commits. An exception that leaves the transaction's block afterwards
    is no longer taken for a rollback: it may be the database's commit whose answer was lost, so a check finds out.

    Args:
        connection: the connection of the local transaction, of sqlite3, psycopg or PyMySQL, or a `Connection` or
            `Session` of SQLAlchemy, for SQLite, PostgreSQL, MariaDB or MySQL; not in autocommit mode.
        tx: the transaction, or its id.
        table: the table's name.
        schema: the schema it is in; the connection's own where it is None.

    Raises:
        TransactionRefusedError: a check came first, so the message is rolled back for good and the local transaction
            must not commit; or the barrier was passed before, by a local transaction that committed already or by
            this one, and must not be passed twice. In the latter case the message is left to the check.
        ConfigurationError: the connection would commit by itself, or is of no known kind, or `tx` is no id, or the
            table is not there.
    """
    user, name = with_table(connection, table, schema)
    transaction_id = tx if isinstance(tx, str) else tx.transaction_id
    if not is_id(transaction_id):
        raise ConfigurationError("tx is no transaction's id: give the Transaction, or its transaction_id")
    user.require_transaction()
    if _insert(user, name, transaction_id, "COMMITTED"):
        # The commit may raise though it took hold: the answer may be lost. From here on only the check knows.
        getattr(tx, "leave_errors_to_check", lambda: None)()
        return
    if not _committed(user, name, transaction_id):
        raise TransactionRefusedError(
            f"transaction {transaction_id} was rolled back by a check before its local transaction came to the "
            "barrier; roll the local transaction back, and send the message again if it is still wanted"
        )
    # Whatever becomes of this try, the first one may have committed: only the check knows.
    unknown = getattr(tx, "unknown", None)
    if unknown is not None:
        unknown()
    raise TransactionRefusedError(
        f"transaction {transaction_id} has passed the barrier before; roll this try of its local transaction back: a "
        "check finds out whether the first one committed"
    )


@dataclass(frozen=True, slots=True)
class BarrierCheck:
    """A check that finds the answer in the barrier's table, for `TransactionalProducer(check=...)`.

    It answers COMMIT where the local transaction committed, ROLLBACK where it did not and now cannot any more, and
    UNKNOWN while it runs. Every transaction of the producer group has to pass the barrier: one that does not is
    rolled back when it is checked. It may be called by several threads.

    Args:
        connect: opens a connection, of the kinds `barrier` takes, which the check closes; it must lead to the
            primary server, not to a replica. It is called by several threads.
        table: the table's name.
        schema: the schema it is in.
        lock_timeout: seconds to wait for a local transaction that is still running. None: half of the producer's
            `check_timeout`, and on SQLite, which has one lock for all who write, no longer than a short write takes.
            MariaDB and MySQL wait whole seconds, one at least. Give it where you call the check yourself, within
            another function.
        check_timeout: seconds that the check may take, as the producer says.

    Raises:
        ConfigurationError: an argument is wrong. The check itself raises what the database does, save that it answers
            UNKNOWN where only a lock was in the way.
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
            positive("lock_timeout", self.lock_timeout)
        table_name(Kind.SQLITE, self.table, self.schema)

    def within(self, check_timeout_s: float) -> BarrierCheck:
        """Return the same check for a producer whose checks may take so long."""
        return replace(self, check_timeout=check_timeout_s)

    def __call__(self, half: HalfMessage) -> TransactionState:
        """Say how the local transaction ended."""
        connection = self.connect()
        try:
            user, name = with_table(connection, self.table, self.schema)
            user.isolate()
            with _lock_timeout(user, self._wait_s(user.kind)):
                is_mine = _insert(user, name, half.transaction_id, "ROLLED_BACK")
                # What follows reads in a transaction of its own: it sees the row that was in the way, at any isolation
                # level.
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


#: The check, by the name that goes with `barrier`.
barrier_check = BarrierCheck


def clean_barrier(
    connection: object, older_than: timedelta, *, table: str = DEFAULT_TABLE, schema: str | None = None
) -> int:
    """Delete what the barrier knows of long settled transactions, and commit.

    Args:
        connection: as for `barrier`; what is open on it is committed, too.
        older_than: the age of what is deleted, by the database's clock. It must be longer than a message can stay
            undecided, with all its checks, its immunity and any time in which the producer group is down: a check that
            finds nothing rolls the message back.
        table: the table's name.
        schema: the schema it is in.

    Returns:
        How many rows were deleted.

    Raises:
        ConfigurationError: the age is no `timedelta` above zero, or the connection or a name is of no known kind.
    """
    age = age_s("older_than", older_than)
    user, name = with_table(connection, table, schema)
    answer = user.run(f"DELETE FROM {name} WHERE at < {NOW[user.kind]} - :age", age=age)  # noqa: S608 - the name is quoted
    user.commit()
    return answer.count


@contextlib.contextmanager
def _lock_timeout(user: UserConnection, seconds: float) -> Iterator[None]:
    """Bound the time the next statement waits for another's transaction. The connection may go back to a pool."""
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
    """Insert a row unless the id has one; wait for whoever is inserting one. Return whether it is this one."""
    rows = f"(:id, :state, {NOW[user.kind]})"
    return insert_absent(user, name, "id, state, at", rows, "create_barrier_table", id=transaction_id, state=state) == 1


def _committed(user: UserConnection, name: str, transaction_id: str) -> bool:
    # A plain read of a transaction of MariaDB or MySQL would show what was there at its begin.
    latest = "LOCK IN SHARE MODE" if user.kind is Kind.MYSQL else ""
    statement = f"SELECT 1 FROM {name} WHERE id = :id AND state = 'COMMITTED' {latest}"  # noqa: S608 - the name is quoted
    return bool(user.run(statement, id=transaction_id).rows)
