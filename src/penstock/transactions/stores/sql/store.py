"""The store in a database: a row for each transaction, in SQLite, PostgreSQL, MariaDB or MySQL.

A conditional update lets the first decision win. A relay publishes exactly once into Kafka: coordinators share the
shards, and one coordinator at a time publishes a shard. The database and Kafka both fence the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

import sqlalchemy as sa
from xxhash import xxh3_64_intdigest

from penstock.errors import ConfigurationError, StoreConnectionError
from penstock.options import ClientConfig, positive_int, seconds
from penstock.outgoing import UserHeaders
from penstock.transactions.connections import Answer, adopt, cause_of, is_no_table_error
from penstock.transactions.messages import a_half, terms
from penstock.transactions.store import SettledCallback
from penstock.transactions.stores.relayed_store import GroupWriter, RelayedStore
from penstock.transactions.stores.shards import CheckTerms
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.administration import SqlAdministration
from penstock.transactions.stores.sql.database import STATEMENT_TIMEOUT_S, Database
from penstock.transactions.stores.sql.polling import SettledWatch, SqlCheckSource
from penstock.transactions.stores.sql.shards import SqlShards
from penstock.transactions.stores.sql.writing import BATCH, Writing
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author

#: Shards of a new store: the most coordinators that can share the work.
DEFAULT_SHARDS = 4
#: Time-out of an answer to a check, in statement time-outs: it waits for its batch, and twice for the database.
_ANSWER_STATEMENTS = 4
#: The producer group of outbox messages, which need no checks.
GROUP = "outbox"


class SqlStore(RelayedStore):
    """A store in a database, for `TransactionalProducer(store=...)`. Thread-safe.

    With SQLite, the store sets the file's journal to WAL. One object may serve the producers and the coordinator of a
    process. Other processes create their own with the same address. Publication is exactly once into Kafka for
    `read_committed` readers.

    Args:
        url: the database, as `sqlite:///file.db`, `postgresql+psycopg://user@host/database` or
            `mysql+pymysql://user@host/database`, which may be a MariaDB. The store creates its tables there,
            `penstock_...`.
            It may be the database of the user's own data; the outbox needs that. `?prepare_threshold=5` makes
            PostgreSQL
            prepare a statement on the server after five uses. The default is never, so that poolers in transaction mode
            work.
        bootstrap_servers: Kafka's addresses.
        prefix: what the names of the store's topics begin with.
        shards: number of parts that divide transactions by key. Used only if the tables have to be created.
        config: settings of the Kafka clients, by librdkafka's names.
        statement_timeout: seconds that a statement, a lock and a connection may take; MariaDB and MySQL wait whole
            seconds. A session that does not answer by then is dropped, and a new one is tried.

    Raises:
        ConfigurationError: an argument is wrong. Nothing was started.
    """

    #: The database may be unreachable, fail over, or abort one side of a deadlock.
    transient_errors = (sa.exc.SQLAlchemyError,)
    may_be_stored = True

    def __init__(
        self,
        url: str,
        *,
        bootstrap_servers: str,
        prefix: str = "penstock",
        shards: int = DEFAULT_SHARDS,
        config: ClientConfig | None = None,
        statement_timeout: float = STATEMENT_TIMEOUT_S,
    ) -> None:
        positive_int("shards", shards)
        seconds("statement_timeout", statement_timeout)
        self.database = Database(url, statement_timeout)
        super().__init__(
            "the SQL store",
            bootstrap_servers=bootstrap_servers,
            prefix=prefix,
            own=".sql-",
            config=config,
            answer_s=_ANSWER_STATEMENTS * statement_timeout,
        )
        # Set by start() before any other call.
        self.uuid = ""
        self._new_shards = shards
        #: The number of shards in the tables; 0 while it is unknown.
        self.shards = 0
        self._watch: SettledWatch | None = None

    def start(self) -> None:
        """Connect, and create the tables if they are absent.

        Raises:
            StoreConnectionError: the database did not answer.
            ConfigurationError: its tables are of another version.
        """
        super().start()

    def _open(self) -> GroupWriter:
        with _opening("opened", ", that it runs, and that its user may create tables"):
            self.uuid, self.shards = schema.create(self.database, self._new_shards)
        self._watch = SettledWatch(self.database, self.prefix)
        writing = Writing(self.database, self.shard_of, lambda: writer.is_late)
        writer = GroupWriter(writing.write, self.label, self.prefix, BATCH)
        return writer

    def _close(self, *, has_ended: bool) -> None:  # noqa: ARG002 - an unfinished transaction rolls back
        if self._watch is not None:
            self._watch.stop()
        self.database.close()

    def checks(self, group: str) -> SqlCheckSource:
        """Return the checks of a producer group."""
        return SqlCheckSource(self.database, group)

    def watch(self, transaction_id: str, callback: SettledCallback) -> None:
        """Call back once a transaction is settled."""
        if self._watch is not None:
            self._watch.add(transaction_id, callback)

    def forget(self, transaction_id: str) -> None:
        """Remove the callback of a transaction."""
        if self._watch is not None:
            self._watch.remove(transaction_id)

    def outbox(self, connection: object) -> Outbox:
        """Return an outbox: messages sent through it are published if, and only if, the user's SQL transaction commits.

        Args:
            connection: a connection to the store's own database, as `barrier` takes it; not in autocommit mode.
        """
        return Outbox(self, connection)

    def open_shards(self, checks: CheckTerms, wake: Callable[[], object]) -> SqlShards:  # noqa: ARG002 - it is polled
        """Return the shards of a started store. Raises `StoreConnectionError`."""
        name = f"{self.prefix}.sql-{self.uuid}"
        with _opening("read", ", and that it runs"):
            return SqlShards(self.database, name, self.shards, checks)

    def administration(self) -> SqlAdministration:
        """Return the operator commands. The tables exist after a first start of a store."""
        return SqlAdministration(self.database)

    def shard_of(self, half: Half, ordering_key: bytes | None = None) -> int:
        """Return the shard of a transaction by its first half."""
        key = half.key if ordering_key is None else ordering_key
        return int(xxh3_64_intdigest(half.transaction_id.encode() if key is None else key) % self.shards)


class Outbox:
    """Messages of one SQL transaction, published if, and only if, it commits. Used by one thread, like its connection.

    An outbox has no half and no check: the commit of the database is the decision.

    Messages of one key are published in the order of `send`: within one SQL transaction, and from a committed
    transaction to a transaction that began later. Between SQL transactions that were open at the same time there is no
    order.

    Args:
        store: the store, in the same database; started or not.
        connection: the user's connection.
    """

    def __init__(self, store: SqlStore, connection: object) -> None:
        self._store = store
        self._user = adopt(connection)
        if self._user.kind.value != store.database.kind:
            raise ConfigurationError(
                f"the connection leads to {self._user.kind.value}, but the store is in {store.database.kind}: an "
                "outbox needs both in one database"
            )

    def send(
        self,
        topic: str,
        *,
        key: bytes | str | None = None,
        value: bytes | str | None,
        headers: UserHeaders = (),
        partition: int | None = None,
        deliver_at: datetime | float | None = None,
    ) -> str:
        """Write a message into the user's transaction.

        Args:
            topic: the target topic; it must exist.
            key: its key; text is encoded as UTF-8.
            value: its value, or None for a tombstone.
            headers: its headers; names must not begin with `penstock-`.
            partition: the target partition; if None, Kafka's partitioner chooses.
            deliver_at: the earliest time of publication; a number is seconds since 1970.

        Returns:
            The id of the message's transaction.

        Raises:
            ConfigurationError: an argument is wrong, the connection is in autocommit mode, or the store's tables are
                absent.
            TopicNotFoundError: there is no such topic.
        """
        message_terms = terms(None, deliver_at, by_half=False)
        half = a_half(new_id(), GROUP, message_terms, topic, key, value, headers, partition)
        self._store.require_target(topic, partition)
        self._user.require_transaction()
        if not self._store.shards:
            # The store may not be started.
            ((self._store.shards,),) = self._run("SELECT shards FROM penstock_store").rows
        database = self._store.database
        number, now = database.next_number, database.now
        if database.kind == "mysql":
            self._run("INSERT INTO penstock_number VALUES (NULL)")
        # The text has constants only, nothing of the user's.
        self._run(
            "INSERT INTO penstock_tx "  # noqa: S608 - constants
            "(id, seq, shard, producer_group, state, author, decided_seq, birth, deliver_at_ms, publish_at_ms, topics, "
            f"halves) VALUES (:id, {number}, :shard, :group, :state, :author, {number}, {now}, :deliver_at, "
            ":publish_at, :topics, :halves)",
            id=half.transaction_id,
            shard=self._store.shard_of(half),
            group=GROUP,
            state=schema.COMMIT,
            author=int(Author.PRODUCER),
            deliver_at=half.deliver_at_ms,
            publish_at=half.deliver_at_ms or 0,
            **schema.message_columns([half]),
        )
        return half.transaction_id

    def _run(self, statement: str, **values: object) -> Answer:
        try:
            return self._user.run(statement, **values)
        except Exception as error:
            if not is_no_table_error(error):
                raise
            raise ConfigurationError(
                "the tables of the SQL store are not there, so an outbox has nowhere to write to: start the store, a "
                "producer or a coordinator on it, once, in the database of the connection; or run `penstock tx "
                "create-tables --sql URL`, which makes them; with --dry-run it prints the statements"
            ) from error


@contextmanager
def _opening(action: str, advice: str) -> Iterator[None]:
    """Raise `StoreConnectionError` if the tables cannot be opened or read."""
    try:
        yield
    except sa.exc.SQLAlchemyError as error:
        raise StoreConnectionError(
            f"the tables of the SQL store could not be {action}: {cause_of(error)}; check its address{advice}"
        ) from error
