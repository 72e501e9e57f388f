"""The inbox: a row in the user's database that tells a handler whether it has handled a message before.

The handler writes the row in its own SQL transaction, so row and effects are kept together or not at all. A message
that comes again, after a crash, a rebalance or a replay, finds the row. Two handlers may have the same message at once,
for example while a replaced member still works. They meet at the primary key: one waits for the other, or fails.

The group, topic, partition, offset and timestamp identify a message. If a topic was deleted and created again, the
timestamp distinguishes its messages from the former ones. A topic id would be known only some time after the first
messages were read; the timestamp comes with the message. A message of a retry topic keeps its original identity.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any, overload

from penstock.errors import ConfigurationError
from penstock.message import Message, handler_thread
from penstock.options import a_callable, not_empty
from penstock.transactions.connections import (
    NOW,
    Kind,
    UserConnection,
    age_s,
    cause_of,
    create_table,
    insert_absent,
    table_name,
    with_table,
)

_log = logging.getLogger("penstock.transactions")

#: The default name of the inbox's table.
DEFAULT_TABLE = "penstock_inbox"
#: Rows that one statement writes or reads: SQLite takes 999 parameters.
_ROWS = 100
#: Rows that one transaction deletes at most, so that it holds few locks.
_DELETED_AT_ONCE = 1_000
#: The longest group name, in characters: MariaDB and MySQL limit the primary key to 3,072 bytes.
_MOST_GROUP_CHARS = 255
#: Seconds before each round of trimming, also the first: after a crash, messages that were handled come again first.
_TRIM_INTERVAL_S = 60.0
#: Seconds that a stop waits for a round under way.
_STOP_BUDGET_S = 2.0
#: The timestamp of a message without one, as in Kafka.
_NO_TIME = -1

_KEY = "consumer_group, topic, partition_number, message_offset, message_time"
_COLUMNS = f"{_KEY}, call_id, at"
_TABLE = f"""
CREATE TABLE IF NOT EXISTS {{}} (
    consumer_group TEXT NOT NULL, topic TEXT NOT NULL, partition_number INTEGER NOT NULL,
    message_offset BIGINT NOT NULL, message_time BIGINT NOT NULL, call_id BIGINT NOT NULL, at BIGINT NOT NULL,
    PRIMARY KEY ({_KEY})
)"""
#: Creates the table; the braces are for its name. docs/exactly-once-database.md shows the same statements.
STATEMENTS = {
    Kind.SQLITE: f"{_TABLE} WITHOUT ROWID",
    Kind.POSTGRESQL: _TABLE,
    Kind.MYSQL: f"""
CREATE TABLE IF NOT EXISTS {{}} (
    consumer_group VARCHAR({_MOST_GROUP_CHARS}) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    topic VARCHAR(249) CHARACTER SET ascii COLLATE ascii_bin NOT NULL, partition_number INTEGER NOT NULL,
    message_offset BIGINT NOT NULL, message_time BIGINT NOT NULL, call_id BIGINT NOT NULL, at BIGINT NOT NULL,
    PRIMARY KEY ({_KEY})
) ENGINE = InnoDB""",
}

#: Topic, partition, offset and timestamp: they identify a message within its group.
_Identity = tuple[str, int, int, int]


def create_inbox_table(connection: object, *, table: str = DEFAULT_TABLE, schema: str | None = None) -> None:
    """Create the inbox's table if it is absent, and commit. Call it once, outside of any handler.

    Args:
        connection: as for `inbox`; an open transaction is committed with the table.
        table: the table's name.
        schema: the table's schema; None: the connection's own.

    Raises:
        ConfigurationError: the connection is of no known kind, or a name is invalid.
    """
    create_table(connection, STATEMENTS, table, schema)


@overload
def inbox(
    connection: object,
    message: Sequence[Message],
    *,
    group: str | None = ...,
    table: str = ...,
    schema: str | None = ...,
) -> list[Message]: ...
@overload
def inbox(
    connection: object, message: Message, *, group: str | None = ..., table: str = ..., schema: str | None = ...
) -> bool: ...
def inbox(
    connection: object,
    message: Message | Sequence[Message],
    *,
    group: str | None = None,
    table: str = DEFAULT_TABLE,
    schema: str | None = None,
) -> bool | list[Message]:
    """Record in the handler's own SQL transaction that a message is handled, and tell whether it is new.

    Call it first in the transaction. It does not commit: the record is kept if, and only if, the transaction commits.
    So the writes of the transaction take effect exactly once, however often the message comes. If another transaction
    handles the same message, this call waits for its end, at most the connection's own lock time-out.

    Args:
        connection: the connection of the handler's transaction: of sqlite3, psycopg or PyMySQL, or a `Connection` or
            `Session` of SQLAlchemy, for SQLite, PostgreSQL, MariaDB or MySQL; not in autocommit mode. With an
            asynchronous one of SQLAlchemy: `await connection.run_sync(penstock.inbox, message)`.
        message: the message, or the list of messages of a handler with `batch`.
        group: the group of the record; None: the consumer group of the handler. On threads of your own pass
            `Context.group`.
        table: the table's name.
        schema: the table's schema; None: the connection's own.

    Returns:
        For a message, whether it is new: if False, it was handled before, and the handler has nothing more to do in
        this database. For a list, the new messages in their order, each once.

    Raises:
        ConfigurationError: the connection would commit by itself or is of no known kind, the group is unknown, or the
            table is absent. If a lock was not granted in time, the database's own error is raised: the handler fails
            and is tried again.
    """
    user, name = with_table(connection, table, schema)
    group = _named(group)
    messages: Sequence[Message] = message if isinstance(message, Sequence) else (message,)
    # Copies of one message, for example in a retry topic, count once.
    wanted: dict[_Identity, Message] = {}
    for each in messages:
        wanted.setdefault(_identity(each), each)
    user.require_transaction()
    new = set[_Identity]()
    # All transactions lock their keys in one order, so that overlapping batches cannot deadlock.
    ordered = sorted(wanted)
    for start in range(0, len(ordered), _ROWS):
        new |= _record(user, name, group, ordered[start : start + _ROWS])
    if not isinstance(message, Sequence):
        return bool(new)
    return [each for identity, each in wanted.items() if identity in new]


def _named(group: str | None) -> str:
    named = handler_thread.group if group is None else group
    if named is None:
        raise ConfigurationError(
            "inbox() was called outside of a handler's thread, so it does not know the consumer group; pass "
            "group=context.group, from the handler's penstock.Context"
        )
    not_empty("group", named)
    if len(named) > _MOST_GROUP_CHARS:
        raise ConfigurationError(
            f"group has {len(named)} characters, and the inbox takes {_MOST_GROUP_CHARS}; give a shorter one as group="
        )
    return named


def _identity(message: Message) -> _Identity:
    if not hasattr(message, "timestamp"):
        raise ConfigurationError(
            f"message must be a penstock.Message or a list of them, but is a {type(message).__name__}"
        )
    time = message.timestamp
    return message.topic, message.partition, message.offset, _NO_TIME if time is None else time


def _record(user: UserConnection, name: str, group: str, identities: Sequence[_Identity]) -> set[_Identity]:
    """Insert the absent records; return the identities of their messages."""
    values: dict[str, object] = {"group": group, "call": secrets.randbits(63)}
    rows, places = [], []
    for number, (topic, partition, offset, time) in enumerate(identities):
        values |= {f"t{number}": topic, f"p{number}": partition, f"o{number}": offset, f"m{number}": time}
        rows.append(f"(:group, :t{number}, :p{number}, :o{number}, :m{number}, :call, {NOW[user.kind]})")
        places.append(
            f"topic = :t{number} AND partition_number = :p{number} AND message_offset = :o{number} "
            f"AND message_time = :m{number}"
        )
    count = insert_absent(user, name, _COLUMNS, ", ".join(rows), "create_inbox_table", **values)
    if count in (0, len(identities)):
        return set(identities if count else ())
    # Some records existed. The `call_id` marks those that this call has written.
    written = user.run(
        f"SELECT topic, partition_number, message_offset, message_time FROM {name} "  # noqa: S608 - the name is quoted
        f"WHERE consumer_group = :group AND call_id = :call AND (({') OR ('.join(places)}))",
        **values,
    )
    return {(_text(topic), partition, offset, time) for topic, partition, offset, time in written.rows}


def _text(value: str | bytes) -> str:
    """Return a text as `str`: some connections return bytes."""
    return value if isinstance(value, str) else value.decode()


class InboxTrimmer:
    """Trims the inbox of an app from time to time, on a thread of its own. `start` and `stop` are for one thread.

    A failure is logged, and the next round tries again. The arguments are those of `App.inbox_database`; a wrong one
    raises `ConfigurationError`.
    """

    def __init__(self, connect: Callable[[], Any], keep: timedelta, table: str, schema: str | None) -> None:
        a_callable("connect", connect)
        table_name(Kind.SQLITE, table, schema)
        self._connect = connect
        self._keep_s = age_s("keep", keep)
        #: Seconds that a message may wait in retry topics: records stay longer by this time. Set it before `start`.
        self.retry_s = 0
        self._table = table
        self._schema = schema
        # Made by start().
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, group: str, committed: Callable[[], Mapping[tuple[str, int], int]]) -> None:
        """Start the thread.

        Args:
            group: the consumer group.
            committed: returns the known committed offsets of this member's partitions.
        """
        self._stopping = threading.Event()
        name = f"penstock-inbox-{group}"
        self._thread = threading.Thread(target=self._run, args=(group, committed), name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. A hanging statement is abandoned with the thread, which is a daemon."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_BUDGET_S)

    def _run(self, group: str, committed: Callable[[], Mapping[tuple[str, int], int]]) -> None:
        while not self._stopping.wait(_TRIM_INTERVAL_S):
            try:
                deleted = self.trim(group, committed())
            except Exception as error:  # noqa: BLE001 - a driver may raise anything; it must end neither this thread nor the app
                _log.warning(
                    "records of %s in the inbox %s are kept for now, trimming failed: %s; it is tried again in %g s",
                    group,
                    self._table,
                    cause_of(error),
                    _TRIM_INTERVAL_S,
                )
            else:
                _log.debug("%d records of %s were trimmed from the inbox %s", deleted, group, self._table)

    def trim(self, group: str, committed: Mapping[tuple[str, int], int]) -> int:
        """Delete old records below the committed offsets; return how many.

        Args:
            group: the consumer group.
            committed: an offset for each topic and partition: messages below it do not come again.
        """
        deleted = 0
        with closing(self._connect()) as connection:
            user, name = with_table(connection, self._table, self._schema)
            user.isolate()
            shared: dict[str, object] = {"group": group, "keep": self._keep_s + self.retry_s}
            for (topic, partition), offset in committed.items():
                values = shared | {"topic": topic, "partition": partition, "below": offset}
                while count := _trim_some(user, name, values):
                    deleted += count
        return deleted


def _trim_some(user: UserConnection, name: str, values: Mapping[str, object]) -> int:
    """Delete old records among the first ones of a partition, and commit; return how many."""
    in_partition = "consumer_group = :group AND topic = :topic AND partition_number = :partition"
    count = user.run(
        # Only the first ones: a scan of the young records behind them, of a whole day maybe, would be expensive.
        f"DELETE FROM {name} WHERE {in_partition} AND at < {NOW[user.kind]} - :keep AND message_offset <= ("  # noqa: S608 - the name is quoted
        f"SELECT max(message_offset) FROM (SELECT message_offset FROM {name} WHERE {in_partition} "
        f"AND message_offset < :below ORDER BY message_offset LIMIT {_DELETED_AT_ONCE}) first_ones)",
        **values,
    ).count
    user.commit()
    return count
