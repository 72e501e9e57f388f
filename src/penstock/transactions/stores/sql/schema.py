"""The tables of the SQL store. Times are seconds since 1970 by the database's clock, save where a name says `ms`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from penstock.errors import ConfigurationError
from penstock.transactions.stores.sql.database import Database, create_numbers
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Verdict

#: A transaction that nobody decided. The other states are the verdicts' numbers.
PREPARED = 0
COMMIT, ROLLBACK, DISCARD = int(Verdict.COMMIT), int(Verdict.ROLLBACK), int(Verdict.DISCARD)

#: Seconds without a sign of life after which a producer counts as dead.
_PRODUCER_DEAD_AFTER_S = 10.0

#: `held`: it goes with the others; Kafka refuses it, or what it must stay behind; a trial has it, and only a relay that
#: has read the done log since lets it go.
FREE, HELD, TRIED = 0, 1, 2
#: The columns of what is held no more.
FREE_AGAIN: dict[str, Any] = {"held": FREE, "held_why": None, "publish_at_ms": 0}

_VERSION = 4

metadata = sa.MetaData()

#: Ids and names that are keys, and contents of any length: MariaDB and MySQL need their lengths.
_ID = sa.Text().with_variant(mysql.VARCHAR(64, charset="ascii", collation="ascii_bin"), "mysql", "mariadb")
_NAME = sa.Text().with_variant(mysql.VARCHAR(255, charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb")
_LONG = sa.Text().with_variant(mysql.LONGTEXT(charset="utf8mb4"), "mysql", "mariadb")
_BYTES = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
#: Bytes of an order key that are in an index there.
_PREFIX = {"order_key": 255}


def _index_where(name: str, *columns: str, where: str) -> sa.Index:
    condition = sa.text(where)
    return sa.Index(name, *columns, postgresql_where=condition, sqlite_where=condition)


store = sa.Table(
    "penstock_store",
    metadata,
    sa.Column("one", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("version", sa.Integer, nullable=False),
    # Part of the transactional ids and of the done log's name: it tells this store from any other.
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
    sa.Column("state", sa.SmallInteger, nullable=False),
    sa.Column("author", sa.SmallInteger),
    sa.Column("actor", sa.Text),
    sa.Column("decided_seq", sa.BigInteger),
    # Present with order="half".
    sa.Column("order_key", _BYTES),
    sa.Column("birth", sa.Double, nullable=False),
    sa.Column("immunity", sa.Double, nullable=False),
    sa.Column("deliver_at_ms", sa.BigInteger),
    # Checks: answered ones, when the last was, when the next is to be thought of (null: after the transaction timeout),
    # the number and the time of the question that is open (0: none), and until when a producer has it.
    sa.Column("check_count", sa.Integer, nullable=False),
    sa.Column("answered_at", sa.Double),
    sa.Column("check_at", sa.Double),
    sa.Column("question", sa.Integer, nullable=False),
    sa.Column("asked_at", sa.Double),
    sa.Column("taken_until", sa.Double, nullable=False),
    # When the main path takes what was decided, in milliseconds; null: it does not, or does not yet.
    sa.Column("publish_at_ms", sa.BigInteger),
    # While Kafka refuses it, and why.
    sa.Column("held", sa.SmallInteger, nullable=False),
    sa.Column("held_why", sa.Text),
    sa.Column("settled_at", sa.Double),
    sa.Index("penstock_tx_open", "shard", "settled_at", "state"),
    # Of what may be published, and of what producers are asked about: few of all rows.
    _index_where("penstock_tx_ready", "shard", "publish_at_ms", where="publish_at_ms IS NOT NULL"),
    _index_where("penstock_tx_asked", "producer_group", "question", where="question > 0"),
    sa.Index("penstock_tx_keys", "order_key", "seq", mysql_length=_PREFIX, mariadb_length=_PREFIX),
    # For the next number, see `Database.next`.
    sa.Index("penstock_tx_seq", "seq").ddl_if(dialect="sqlite"),
    sa.Index("penstock_tx_decided", "decided_seq").ddl_if(dialect="sqlite"),
    sa.Index("penstock_tx_settled", "settled_at"),
)

message = sa.Table(
    "penstock_message",
    metadata,
    sa.Column("tx", _ID, primary_key=True),
    sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("topic", _NAME, nullable=False),
    sa.Column("partition", sa.Integer),
    sa.Column("key", _BYTES),
    sa.Column("value", _BYTES),
    # A list of pairs in JSON: name, and value in hexadecimal digits or null.
    sa.Column("headers", _LONG, nullable=False),
)

#: Who publishes a shard, and until when nobody else may. The epoch rises with each owner.
shard = sa.Table(
    "penstock_shard",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("owner", sa.Text),
    sa.Column("lease_until", sa.Double, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    # The transactional ids under which it may be published, in one text: its next owner shuts them out.
    sa.Column("claim", sa.Text),
    # The call into the Kafka client that its coordinator waits for, and since when it has not gone on; null: none.
    sa.Column("slow_call", sa.Text),
    sa.Column("slow_since", sa.Double),
)

#: Who is alive: coordinators (kind `coordinator`) and producers that answer checks (kind `producer`).
alive = sa.Table(
    "penstock_alive",
    metadata,
    sa.Column("kind", _ID, primary_key=True),
    sa.Column("name", _ID, primary_key=True),
    sa.Column("producer_group", _NAME, nullable=False),
    sa.Column("seen", sa.Double, nullable=False),
)

#: Decisions that came too late, or for no transaction, until a coordinator has counted them.
refusal = sa.Table(
    "penstock_refusal",
    metadata,
    sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("tx", _ID, nullable=False),
)

#: Who did what by hand. Kept for ever.
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
    """Create the tables where they are absent, and return the store's uuid and its number of shards.

    Raises `ConfigurationError` where they are of another version.
    """
    with database.begin() as connection:
        if database.kind == "postgresql":
            # CREATE TABLE IF NOT EXISTS fails when two do it at once.
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(hashtextextended('penstock store', 0))"))
            connection.execute(sa.text("CREATE SEQUENCE IF NOT EXISTS penstock_seq"))
        if database.kind == "mysql":
            create_numbers(connection)
        metadata.create_all(connection)
        row = connection.execute(sa.select(store)).one_or_none()
        if row is None:
            own = uuid.uuid4().hex[:12]
            for insert in _first_rows(own, shards):
                connection.execute(insert)
            return own, shards
        if row.version != _VERSION:
            raise ConfigurationError(
                f"the tables of the SQL store are of version {row.version}, but this penstock knows {_VERSION}; settle "
                "what is pending with the penstock that made them, stop it, and drop the tables penstock_*"
            )
        return str(row.uuid), int(row.shards)


def _first_rows(own: str, shards: int) -> tuple[sa.Insert, sa.Insert]:
    rows = [{"number": number, "lease_until": 0.0, "epoch": 0} for number in range(shards)]
    return store.insert().values(one=1, version=_VERSION, uuid=own, shards=shards), shard.insert().values(rows)


def statements(database: Database, shards: int) -> list[str]:
    """Return what `create` does to an empty database, for somebody else who may; nothing is asked or changed."""
    found = ["CREATE SEQUENCE IF NOT EXISTS penstock_seq"] if database.kind == "postgresql" else []
    dialect = database.engine.dialect

    def take(statement: sa.schema.ExecutableDDLElement, *_: object) -> None:
        found.append(str(statement.compile(dialect=dialect)).strip())

    mock = sa.create_mock_engine(database.engine.url, take)
    if database.kind == "mysql":
        create_numbers(mock)  # type: ignore[arg-type] # it takes what a connection takes
    metadata.create_all(mock, checkfirst=False)
    literal = {"literal_binds": True}
    inserts = _first_rows(uuid.uuid4().hex[:12], shards)
    return [*found, *(str(it.compile(dialect=dialect, compile_kwargs=literal)) for it in inserts)]


def before_it(earlier: sa.FromClause) -> sa.ColumnElement[bool]:
    """Return the condition that a row of `earlier` stands before one of `tx` in its line, and is not settled.

    A line is of a producer group and an ordering key; the shard is that of the key.
    """
    return sa.and_(
        earlier.c.order_key == tx.c.order_key,
        earlier.c.producer_group == tx.c.producer_group,
        earlier.c.shard == tx.c.shard,
        earlier.c.seq < tx.c.seq,
        earlier.c.settled_at.is_(None),
    )


def is_living_producer(now: sa.ColumnElement[float]) -> sa.ColumnElement[bool]:
    """Return the condition that a row of `alive` is a producer that answers checks."""
    return sa.and_(alive.c.kind == "producer", alive.c.seen > now - _PRODUCER_DEAD_AFTER_S)


def write_heartbeat(database: Database, kind: str, name: str, group: str = "") -> None:
    """Write down that a `coordinator` or a `producer` (the kind) is alive. No other has its name."""
    row = {"kind": kind, "name": name, "producer_group": group, "seen": database.now}
    with database.begin() as connection:
        connection.execute(database.insert(alive, row, "seen"))


def remove_heartbeat(database: Database, name: str) -> None:
    """Let somebody count as gone at once."""
    with database.begin() as connection:
        connection.execute(alive.delete().where(alive.c.name == name))


def is_delayed(database: Database) -> sa.ColumnElement[bool]:
    """Return the condition that a transaction is committed and waits for its time, by the database's clock."""
    return sa.and_(tx.c.state == COMMIT, tx.c.publish_at_ms > database.now_ms)


def answered() -> sa.ColumnElement[int]:
    """Return how many answers of checks counted for a transaction: those that were UNKNOWN, and one that decided."""
    return tx.c.check_count + sa.case((tx.c.author == int(Author.CHECK), 1), else_=0)


def message_rows(halves: Iterable[Half]) -> list[dict[str, Any]]:
    """Return the rows of a transaction's messages."""
    return [
        {
            "tx": half.transaction_id,
            "part": part,
            "topic": half.topic,
            "partition": half.partition,
            "key": half.key,
            "value": half.value,
            "headers": encode_headers(half.headers),
        }
        for part, half in enumerate(halves)
    ]


def encode_headers(headers: Iterable[tuple[str, bytes | None]]) -> str:
    """Return headers as text."""
    return json.dumps([[name, None if content is None else content.hex()] for name, content in headers])


def decode_headers(text: str) -> tuple[tuple[str, bytes | None], ...]:
    """Read headers."""
    return tuple((name, None if content is None else bytes.fromhex(content)) for name, content in json.loads(text))


def half_of(row: Any, part: Any, parts: int) -> Half:
    """Return the half of a transaction's row and of the row of one of its messages, which may be one, joined."""
    return Half(
        transaction_id=row.id,
        group=row.producer_group,
        topic=part.topic,
        partition=part.partition,
        key=None if part.key is None else bytes(part.key),
        value=None if part.value is None else bytes(part.value),
        headers=decode_headers(part.headers),
        immunity_ms=int(row.immunity * 1000) or None,
        deliver_at_ms=row.deliver_at_ms,
        part=(part.part + 1, parts) if parts > 1 else None,
        order_key=None if row.order_key is None else bytes(row.order_key),
    )
