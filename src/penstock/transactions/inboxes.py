"""The inbox: a row in the user's database, by which a handler knows that it has handled a message before.

The row is written in the handler's own SQL transaction, so it stands if, and only if, what the handler wrote stands.
A message that comes again, after a crash, a rebalance or a replay, finds it. Two handlers of one message at once, as
when a member that was replaced is still at work, meet at the primary key: one waits for the other, or fails.

A message is identified by the group, its topic, partition and offset, and its timestamp. The timestamp tells the
messages of a topic that was deleted and made again from those of the former one, and it travels with the message: a
topic id is known only some time after the first messages were read. A message of a retry topic is the one that it was.
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

#: Name of the inbox's table, where none is given.
DEFAULT_TABLE = "penstock_inbox"
#: Rows that one statement writes or looks for: SQLite takes 999 parameters.
_ROWS = 100
#: Records that one transaction deletes at most, so that it holds few locks.
_DELETED_AT_ONCE = 1_000
#: Characters that a group's name may have: it is part of the primary key, which MariaDB and MySQL limit to 3,072 bytes.
_MOST_GROUP_CHARS = 255
#: Seconds between two rounds of trimming. The first waits as long: what was handled before a crash and comes again,
#: comes first.
_TRIM_INTERVAL_S = 60.0
#: Seconds that the end of an app waits for a round under way.
_STOP_BUDGET_S = 2.0
#: Stands for the timestamp of a message that has none; as in Kafka.
_NO_TIME = -1

_KEY = "consumer_group, topic, partition_number, message_offset, message_time"
_COLUMNS = f"{_KEY}, call_id, at"
_TABLE = f"""
CREATE TABLE IF NOT EXISTS {{}} (
    consumer_group TEXT NOT NULL, topic TEXT NOT NULL, partition_number INTEGER NOT NULL,
    message_offset BIGINT NOT NULL, message_time BIGINT NOT NULL, call_id BIGINT NOT NULL, at BIGINT NOT NULL,
    PRIMARY KEY ({_KEY})
)"""
#: What makes the table, with its name in braces; docs/exactly-once-database.md shows the same.
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

#: What tells a message from others of its group: topic, partition, offset and timestamp.
_Identity = tuple[str, int, int, int]


def create_inbox_table(connection: object, *, table: str = DEFAULT_TABLE, schema: str | None = None) -> None:
    """Create the inbox's table where it is absent, and commit. Do so once, outside of any handler.

    Args:
        connection: as for `inbox`; what is open on it is committed with the table.
        table: the table's name.
        schema: the schema it is in; the connection's own where it is None.

    Raises:
        ConfigurationError: the connection or a name is of no known kind.
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

    Call it first in the transaction. It commits nothing: the record stands if, and only if, the transaction commits. So
    what is written with it is written exactly once, however often the message comes. While another transaction handles
    the same message, this one waits for its end, as long as the connection's own lock time-out lets it.

    Args:
        connection: the connection of the handler's transaction, of sqlite3, psycopg or PyMySQL, or a `Connection` or
            `Session` of SQLAlchemy, for SQLite, PostgreSQL, MariaDB or MySQL; not in autocommit mode. With an
            asynchronous one of SQLAlchemy: `await connection.run_sync(penstock.inbox, message)`.
        message: the message, or the list of them that a handler with `batch` gets.
        group: in whose name it is recorded; the consumer group of the handler where it is None. Give it on threads of
            your own, as `Context.group`.
        table: the table's name.
        schema: the schema it is in; the connection's own where it is None.

    Returns:
        Of a message, whether it is new: False where it was handled before, and the handler has nothing more to do in
        this database. Of a list, the messages that are new, in their order, each once.

    Raises:
        ConfigurationError: the connection would commit by itself, or is of no known kind, or the group is not known, or
            the table is not there. Where a lock was not got in time, the database's own error: the handler fails, and
            is tried again.
    """
    user, name = with_table(connection, table, schema)
    group = _named(group)
    messages: Sequence[Message] = message if isinstance(message, Sequence) else (message,)
    # Copies of one message, as a retry topic may hold, count once.
    wanted: dict[_Identity, Message] = {}
    for each in messages:
        wanted.setdefault(_identity(each), each)
    user.require_transaction()
    new = set[_Identity]()
    # All transactions take their keys in one order: two batches that overlap wait for each other, and not in a circle.
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
            "inbox() was called on a thread that calls no handlers, so it does not know the consumer group; give "
            "group=context.group there, of the handler's penstock.Context"
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
    """Insert the records that are not there; return of which messages."""
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
    # Some of them were there. Which ones this call has written, their `call_id` says.
    found = user.run(
        f"SELECT topic, partition_number, message_offset, message_time FROM {name} "  # noqa: S608 - the name is quoted
        f"WHERE consumer_group = :group AND call_id = :call AND (({') OR ('.join(places)}))",
        **values,
    )
    return {(_text(topic), partition, offset, time) for topic, partition, offset, time in found.rows}


def _text(value: str | bytes) -> str:
    """Return a text, whatever the user's connection returns texts as."""
    return value if isinstance(value, str) else value.decode()


class InboxTrimmer:
    """Trims an inbox of an app now and then, on a thread of its own. `start` and `stop` are for one thread.

    Nobody waits for it: what fails is logged, and tried again at the next round. Arguments are those of
    `App.inbox_database`; `ConfigurationError` where one is wrong.
    """

    def __init__(self, connect: Callable[[], Any], keep: timedelta, table: str, schema: str | None) -> None:
        a_callable("connect", connect)
        table_name(Kind.SQLITE, table, schema)
        self._connect = connect
        self._keep_s = age_s("keep", keep)
        #: Seconds that a message may wait in retry topics, for which its record stays in addition. Before the start.
        self.retry_s = 0
        self._table = table
        self._schema = schema
        # Made by start().
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, group: str, committed: Callable[[], Mapping[tuple[str, int], int]]) -> None:
        """Begin; returns at once.

        Args:
            group: the consumer group.
            committed: returns the offsets that the group is known to have committed of this member's partitions.
        """
        self._stopping = threading.Event()
        name = f"penstock-inbox-{group}"
        self._thread = threading.Thread(target=self._run, args=(group, committed), name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End. A statement that hangs is abandoned with the thread, which is a daemon."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_BUDGET_S)

    def _run(self, group: str, committed: Callable[[], Mapping[tuple[str, int], int]]) -> None:
        while not self._stopping.wait(_TRIM_INTERVAL_S):
            try:
                deleted = self.trim(group, committed())
            except Exception as error:  # noqa: BLE001 - a driver may raise anything; it must end neither this thread nor the app
                _log.warning(
                    "records of %s in the inbox %s stay for now, trimming failed: %s; it is tried again in %g s",
                    group,
                    self._table,
                    cause_of(error),
                    _TRIM_INTERVAL_S,
                )
            else:
                _log.debug("%d records of %s were trimmed from the inbox %s", deleted, group, self._table)

    def trim(self, group: str, committed: Mapping[tuple[str, int], int]) -> int:
        """Delete the old records of messages below the committed offsets; return how many there were.

        Args:
            group: the consumer group.
            committed: an offset for each topic and partition: what is below it does not come again.
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
