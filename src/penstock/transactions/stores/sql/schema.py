"""The tables of the SQL store. Times are by the database's clock: seconds since 1970, or milliseconds if named `ms`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from penstock.errors import ConfigurationError
from penstock.transactions.stores.sql.database import Database
from penstock.transactions.wire.half import Half, pack_halves
from penstock.transactions.wire.ops import Author, Verdict

#: The state of an undecided transaction. The other states are the verdicts' numbers.
PREPARED = 0
COMMIT, ROLLBACK, DISCARD = int(Verdict.COMMIT), int(Verdict.ROLLBACK), int(Verdict.DISCARD)

#: Seconds without a heartbeat after which a producer counts as dead.
_PRODUCER_DEAD_AFTER_S = 10.0

#: Most transactions in one statement, and in one Kafka transaction.
STATEMENT_LIMIT = 500

_VERSION = 5

#: The source of numbers, if the database needs one.
_NUMBERS = {
    "postgresql": "CREATE SEQUENCE IF NOT EXISTS penstock_seq",
    "mysql": "CREATE TABLE IF NOT EXISTS penstock_number (n BIGINT AUTO_INCREMENT PRIMARY KEY) ENGINE = InnoDB",
}

#: The numbers that were drawn on MySQL. Other databases have no such table.
drawn = sa.table("penstock_number", sa.column("n", sa.BigInteger))

metadata = sa.MetaData()

#: Types of key ids, key names and unlimited content. MariaDB and MySQL need lengths.
_ID = sa.Text().with_variant(mysql.VARCHAR(64, charset="ascii", collation="ascii_bin"), "mysql", "mariadb")
_NAME = sa.Text().with_variant(mysql.VARCHAR(255, charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb")
_LONG = sa.Text().with_variant(mysql.LONGTEXT(charset="utf8mb4"), "mysql", "mariadb")
_BYTES = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
#: Bytes of an order key in an index of MariaDB or MySQL.
_PREFIX = {"order_key": 255}


def _index_where(name: str, *columns: str, where: str) -> sa.Index:
    condition = sa.text(where)
    return sa.Index(name, *columns, postgresql_where=condition, sqlite_where=condition)


store = sa.Table(
    "penstock_store",
    metadata,
    sa.Column("one", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("version", sa.Integer, nullable=False),
    # Part of the transactional ids and of the done log's name: it identifies this store.
    sa.Column("uuid", sa.Text, nullable=False),
    sa.Column("shards", sa.Integer, nullable=False),
)

#: A row for each transaction.
tx = sa.Table(
    "penstock_tx",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    # The order in which halves were stored; `decided_seq`: in which they were decided.
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("shard", sa.Integer, nullable=False),
    sa.Column("producer_group", _NAME, nullable=False),
    sa.Column("state", sa.SmallInteger, nullable=False, server_default=str(PREPARED)),
    sa.Column("author", sa.SmallInteger),
    sa.Column("actor", sa.Text),
    sa.Column("decided_seq", sa.BigInteger),
    # Present with order="half", until the transaction is settled. A discarded one keeps it: it may be resumed.
    sa.Column("order_key", _BYTES),
    sa.Column("birth", sa.Double, nullable=False),
    sa.Column("immunity", sa.Double, nullable=False, server_default="0"),
    sa.Column("deliver_at_ms", sa.BigInteger),
    # Checks: how many were answered; when the next is due (null: after the transaction timeout or the immunity); since
    # when one waits for a producer to take it (null: none waits).
    sa.Column("check_count", sa.Integer, nullable=False, server_default="0"),
    sa.Column("check_at", sa.Double),
    sa.Column("asked_at", sa.Double),
    # Earliest time of publication, in milliseconds. Null: it is undecided, settled or set aside. It is set aside if
    # Kafka refuses it, or a transaction before it waits; `held_why` has the reason. `held` is 1 then, and 0 during a
    # trial. Only a relay that has read the done log since may release a transaction in a trial.
    sa.Column("publish_at_ms", sa.BigInteger),
    sa.Column("held", sa.SmallInteger, nullable=False, server_default="0"),
    sa.Column("held_why", sa.Text),
    sa.Column("settled_at", sa.Double),
    # The topics of its messages in their order, separated by spaces. Commands show them without reading the messages.
    sa.Column("topics", _LONG, nullable=False),
    # The messages as `pack_halves` encodes them; null once they are published or rolled back. The last column: SQLite
    # reads all of it on the way to a later one.
    sa.Column("halves", _BYTES),
    sa.Index("penstock_tx_open", "shard", "settled_at", "state"),
    # Partial indexes of ready transactions and of waiting checks: few of all rows.
    _index_where("penstock_tx_ready", "shard", "publish_at_ms", where="publish_at_ms IS NOT NULL"),
    _index_where("penstock_tx_asked", "producer_group", "asked_at", where="asked_at IS NOT NULL"),
    sa.Index("penstock_tx_keys", "order_key", "seq", mysql_length=_PREFIX, mariadb_length=_PREFIX),
    # For the next number, see `Database.next_number`.
    sa.Index("penstock_tx_seq", "seq").ddl_if(dialect="sqlite"),
    sa.Index("penstock_tx_decided", "decided_seq").ddl_if(dialect="sqlite"),
    sa.Index("penstock_tx_settled", "settled_at"),
)

#: The columns of a transaction without its messages.
without_messages = [column for column in tx.c if column is not tx.c.halves]
#: What identifies the line of a transaction with an ordering key.
line = (tx.c.shard, tx.c.producer_group, tx.c.order_key)
#: The condition that a transaction is decided and cannot be published with others.
is_set_aside = (tx.c.state != PREPARED) & tx.c.settled_at.is_(None) & tx.c.publish_at_ms.is_(None)
#: The number of a transaction's accepted check answers: those that were UNKNOWN, and one that decided.
answered_checks = tx.c.check_count + sa.case((tx.c.author == int(Author.CHECK), 1), else_=0)

#: The lease of each shard: its owner, and the end of the lease. The epoch rises with each owner.
shard = sa.Table(
    "penstock_shard",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("owner", sa.Text),
    sa.Column("lease_until", sa.Double, nullable=False, server_default="0"),
    sa.Column("epoch", sa.BigInteger, nullable=False, server_default="0"),
    # The transactional ids that may publish the shard, in one text. The next owner fences them.
    sa.Column("claim", sa.Text),
    # The call into the Kafka client that its coordinator waits for, and its start; null: none is slow.
    sa.Column("slow_call", sa.Text),
    sa.Column("slow_since", sa.Double),
)

#: Heartbeats of coordinators (kind `coordinator`) and of producers that answer checks (kind `producer`).
alive = sa.Table(
    "penstock_alive",
    metadata,
    sa.Column("name", _ID, primary_key=True),
    sa.Column("kind", _ID, nullable=False),
    sa.Column("producer_group", _NAME, nullable=False),
    sa.Column("seen", sa.Double, nullable=False),
)

#: Refused decisions, until a coordinator has counted them.
refusal = sa.Table(
    "penstock_refusal",
    metadata,
    sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("tx", _ID, nullable=False),
)

#: Acts of operators, kept forever.
audit = sa.Table(
    "penstock_audit",
    metadata,
    sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    # `commit`, `rollback`, `discard` or `resume`.
    sa.Column("what", sa.Text, nullable=False),
    sa.Column("tx", _ID, nullable=False),
)


def create(database: Database, shards: int) -> tuple[str, int]:
    """Create the tables if they are absent, and return the store's uuid and its number of shards.

    Raises `ConfigurationError` if they are of another version.
    """
    with ExitStack() as stack:
        # Two sessions that create the tables at once would fail.
        if database.kind == "mysql":
            lock = stack.enter_context(database.read())
            with suppress(sa.exc.DBAPIError):  # a Galera cluster may refuse such locks
                lock.exec_driver_sql("SELECT GET_LOCK('penstock store', @@lock_wait_timeout)")
            # The end of its session releases it, after the commit below.
            stack.callback(lock.invalidate)
        connection = stack.enter_context(database.begin())
        if database.kind == "postgresql":
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(hashtextextended('penstock store', 0))"))
        if database.kind in _NUMBERS:
            connection.exec_driver_sql(_NUMBERS[database.kind])
        metadata.create_all(connection)
        row = connection.execute(sa.select(store)).one_or_none()
        if row is None:
            store_uuid = uuid.uuid4().hex[:12]
            for insert in _first_rows(store_uuid, shards):
                connection.execute(insert)
            return store_uuid, shards
        if row.version != _VERSION:
            raise ConfigurationError(
                f"the tables of the SQL store are of version {row.version}, but this penstock knows {_VERSION}; settle "
                "the pending transactions with the penstock that made them, stop it, and drop the tables penstock_*"
            )
        return str(row.uuid), int(row.shards)


def _first_rows(store_uuid: str, shards: int) -> tuple[sa.Insert, sa.Insert]:
    rows = [{"number": number} for number in range(shards)]
    return store.insert().values(one=1, version=_VERSION, uuid=store_uuid, shards=shards), shard.insert().values(rows)


def statements(database: Database, shards: int) -> list[str]:
    """Return the statements of `create` for an empty database, for an administrator. Nothing is executed."""
    found = [_NUMBERS[database.kind]] if database.kind in _NUMBERS else []
    dialect = database.engine.dialect

    def take(statement: sa.schema.ExecutableDDLElement, *_: object) -> None:
        found.append(str(statement.compile(dialect=dialect)).strip())

    metadata.create_all(sa.create_mock_engine(database.engine.url, take), checkfirst=False)
    literal = {"literal_binds": True}
    inserts = _first_rows(uuid.uuid4().hex[:12], shards)
    return [*found, *(str(insert.compile(dialect=dialect, compile_kwargs=literal)) for insert in inserts)]


def is_living_producer(now: sa.ColumnElement[float]) -> sa.ColumnElement[bool]:
    """Return the condition that a row of `alive` is a producer with a recent heartbeat."""
    return sa.and_(alive.c.kind == "producer", alive.c.seen > now - _PRODUCER_DEAD_AFTER_S)


def write_heartbeat(database: Database, kind: str, name: str, group: str = "") -> None:
    """Write the heartbeat of a `coordinator` or a `producer` (the kind). Its name is unique."""
    seen = {"seen": database.now}
    with database.begin() as connection:
        if not connection.execute(alive.update().where(alive.c.name == name).values(seen)).rowcount:
            connection.execute(alive.insert().values(kind=kind, name=name, producer_group=group, **seen))


def remove_heartbeat(database: Database, name: str) -> None:
    """Remove a heartbeat, so that its writer counts as gone at once."""
    with database.begin() as connection:
        connection.execute(alive.delete().where(alive.c.name == name))


def is_delayed(database: Database) -> sa.ColumnElement[bool]:
    """Return the condition that a transaction is committed and waits for its delivery time, by the database's clock."""
    return sa.and_(tx.c.state == COMMIT, tx.c.publish_at_ms > database.now_ms)


def message_columns(halves: Sequence[Half]) -> dict[str, Any]:
    """Return the columns of a transaction's messages."""
    return {"topics": " ".join(half.topic for half in halves), "halves": pack_halves(halves)}


def in_groups(names: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield names in portions of one statement each."""
    return (names[start : start + STATEMENT_LIMIT] for start in range(0, len(names), STATEMENT_LIMIT))
