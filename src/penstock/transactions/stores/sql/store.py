"""The store in a database: a row for each transaction, SQLite or PostgreSQL.

The first decision wins by a conditional update. Publication is exactly once into Kafka, by a relay: the coordinators
share the shards, and each shard is published by one of them at a time, fenced in the database and in Kafka.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

import sqlalchemy as sa
from xxhash import xxh3_64_intdigest

from penstock import clients
from penstock.clients.bounded_calls import BriefQuestion
from penstock.errors import (
    DecisionNotStoredError,
    HalfNotStoredError,
    StoppedError,
    StoreConnectionError,
    TransactionError,
    TransactionRefusedError,
)
from penstock.options import ClientConfig, positive_int, seconds
from penstock.transactions.connections import cause_of
from penstock.transactions.core.decisions import not_cancelled, not_pending
from penstock.transactions.store import DecidedCallback, Prepared, PreparedCallback, SettledCallback
from penstock.transactions.stores.relay.relayed_store import CheckTerms
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.administration import SqlAdministration
from penstock.transactions.stores.sql.check_source import SqlCheckSource
from penstock.transactions.stores.sql.database import STATEMENT_TIMEOUT_S, Database
from penstock.transactions.stores.sql.outbox import Outbox
from penstock.transactions.stores.sql.settled_watch import SettledWatch
from penstock.transactions.stores.sql.shards.shards import SqlShards
from penstock.transactions.stores.sql.writer import Decision, NewTransaction, Request, Writer
from penstock.transactions.stores.target_topics import TargetTopics
from penstock.transactions.wire.check_request import CheckRequest
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Verdict
from penstock.transactions.wire.topics import StoreTopics, require_prefix

_log = logging.getLogger("penstock.transactions")

#: Shards of a new store. So many coordinators can share the work.
DEFAULT_SHARDS = 4
#: Seconds that an error waits for the database to say more.
_MOMENT_S = 1.0


@dataclass(frozen=True, slots=True)
class _Preparing(NewTransaction):
    """A transaction on its way into the database, and its callback."""

    callback: PreparedCallback
    store: SqlStore

    def complete(self, error: Exception | None) -> None:
        half = self.halves[0]
        if error is None:
            self.callback(NewTransaction(self.halves, self.shard))
            return
        # Should its transaction have been committed all the same.
        self.store.submit(_Deciding(half.transaction_id, half.group, Verdict.ROLLBACK, Author.PRODUCER))
        self.callback(
            HalfNotStoredError(
                f"transaction {half.transaction_id} for {half.topic}: its half is not known to be stored in the "
                f"database: {cause_of(error)}; the local transaction did not run, send it again"
            )
        )


@dataclass(slots=True)
class _Deciding(Decision):
    """A decision on its way into the database, and its callback."""

    callback: DecidedCallback | None = None

    def complete(self, error: Exception | None) -> None:
        answer: TransactionError | None = None
        if error is not None:
            answer = DecisionNotStoredError(
                f"transaction {self.transaction_id}: its {self.verdict.name} is not known to be stored in the "
                f"database: {cause_of(error)}"
            )
        elif (refusal := self.refusal()) is not None:
            _log.warning("%s", refusal)
            # One that says the same and came first does no harm.
            answer = None if self.refused_by == self.verdict else TransactionRefusedError(refusal)
        if self.callback is not None:
            self.callback(answer)


class SqlStore:
    """A store in a database, for `TransactionalProducer(store=...)`. Thread-safe.

    With SQLite the file's journal is set to WAL. The same object may serve producers and a coordinator of one process;
    other processes make their own with the same address. Publication is exactly once into Kafka for readers of
    committed messages.

    Args:
        url: the database, as `sqlite:///file.db` or `postgresql+psycopg://user@host/database`. The store makes its
            tables there, `penstock_...`; it may be the database of the user's own data, and is for the outbox. With
            `?prepare_threshold=5` PostgreSQL's statements are prepared on the server after five uses; else never, so
            that a pooler in transaction mode takes them.
        bootstrap_servers: Kafka's addresses.
        prefix: what the names of the store's topics begin with.
        shards: into how many parts transactions are divided by key, if the tables have to be created.
        config: settings of the Kafka clients, by librdkafka's names.
        statement_timeout: seconds that a statement, a lock and a connection may take. A session of PostgreSQL that does
            not answer by then is dropped, and a new one is tried.

    Raises:
        ConfigurationError: an argument is wrong. Nothing was started.
    """

    #: What it is called in messages.
    label = "the SQL store"

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
        require_prefix(prefix, f".sql-{'0' * 36}.done")
        self.database = Database(url, statement_timeout)
        self.bootstrap_servers = bootstrap_servers
        self.config: ClientConfig = config or {}
        self.prefix = prefix
        self.topics = StoreTopics(prefix)
        self._wanted_shards = shards
        admin = clients.admin(bootstrap_servers, self.config)
        #: Raises unless a message can be published to a topic: `TargetTopics.require`.
        self.require_target = TargetTopics(admin, bootstrap_servers, self.config, self._may_publish_to).require
        # Guards starting, stopping and the watch.
        self._lock = threading.Lock()
        self._starts = 0
        self._writer: Writer | None = None
        self._watch: SettledWatch | None = None
        # The process that started it.
        self._pid = 0
        # Set by start(), before any other call.
        self.uuid = ""
        self.shards = shards
        # Whether `shards` is what the tables have. Set once.
        self._knows_shards = False
        self._question = BriefQuestion("look into the SQL store")

    def _may_publish_to(self, topic: str) -> bool:
        return self.topics.may_publish_to(topic) and not topic.startswith(f"{self.prefix}.sql-")

    def start(self) -> None:
        """Connect, and create the tables where they are absent.

        Raises:
            StoreConnectionError: the database did not answer.
            ConfigurationError: its tables are of another version.
        """
        with self._lock:
            if self._starts:
                self._starts += 1
                return
            with _opening("opened", ", that it runs, and that its user may create tables"):
                self.uuid, self.shards = schema.create(self.database, self._wanted_shards)
            self._knows_shards, self._pid = True, os.getpid()
            self._writer = Writer(self.database, self.topics.prefix)
            self._writer.start()
            self._starts = 1

    def stop(self, timeout_s: float) -> None:
        """Finish what is being written, at most `timeout_s` seconds, and disconnect, once for each start."""
        with self._lock:
            self._starts = max(0, self._starts - 1)
            if self._starts:
                return
            writer, self._writer = self._writer, None
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop(timeout_s)
        if writer is not None:
            writer.stop(timeout_s)
        self.database.close()

    def prepare(self, halves: Sequence[Half], callback: PreparedCallback, ordering_key: bytes | None = None) -> None:
        """Store the halves of one transaction, and call back once they are durable."""
        self.submit(_Preparing(halves, self.shard_of(halves[0], ordering_key), callback, self))

    def decide(self, prepared: Prepared, verdict: Verdict, callback: DecidedCallback) -> None:
        """Store the producer's decision, and call back once it is durable."""
        half = prepared.halves[0]
        self.submit(_Deciding(half.transaction_id, half.group, verdict, Author.PRODUCER, callback=callback))

    def answer(self, request: CheckRequest, verdict: Verdict, author: Author) -> None:
        """Store the answer to a check and return once it is durable, or raise `DecisionNotStoredError`."""
        half = request.half
        if verdict is Verdict.UNKNOWN:
            self._count_check(half, request.check_number)
        else:
            answers: SimpleQueue[TransactionError | None] = SimpleQueue()
            self.submit(_Deciding(half.transaction_id, half.group, verdict, author, callback=answers.put))
            error = answers.get()
            # An answer that came second is counted as refused, and nothing is wrong with it.
            if isinstance(error, DecisionNotStoredError):
                raise error

    def cancel(self, transaction_id: str, group: str, wait_s: float) -> None:  # noqa: ARG002 - nobody is waited for
        """Take a committed message back that is not due yet, by the database's clock; see `Store.cancel`."""
        tx = schema.tx
        named = (tx.c.id == transaction_id) & (tx.c.producer_group == group)
        with self.database.storing(f"transaction {transaction_id}: that it is cancelled", "try again") as connection:
            done = connection.execute(
                tx.update()
                .where(named, schema.is_delayed(self.database))
                .values(state=schema.ROLLBACK, author=int(Author.PRODUCER), decided_seq=self.database.next)
            )
            state = connection.execute(sa.select(tx.c.state).where(named)).scalar()
        if state is None:
            raise not_pending(transaction_id, group)
        if not done.rowcount and state != schema.ROLLBACK:
            raise not_cancelled(transaction_id, None if state == schema.PREPARED else Verdict(state))

    def checks(self, group: str) -> SqlCheckSource:
        """Return the checks of a producer group."""
        return SqlCheckSource(self.database, group)

    def watch(self, transaction_id: str, callback: SettledCallback) -> None:
        """Call back once a transaction is settled."""
        with self._lock:
            if self._watch is None:
                self._watch = SettledWatch(self.database, self.topics.prefix)
            self._watch.add(transaction_id, callback)

    def forget(self, transaction_id: str) -> None:
        """Give a watch up."""
        watch = self._watch
        if watch is not None:
            watch.remove(transaction_id)

    def waits_for(self, transaction_id: str, topics: Sequence[str]) -> str:  # noqa: ARG002 - the database tells
        """Say what a committed transaction waits for; see `Store.waits_for`."""
        try:
            shown = self._question.ask(lambda: self.administration().show(transaction_id), _MOMENT_S)
        except sa.exc.SQLAlchemyError:
            return ""
        return "" if shown is None else shown.waits_for

    def outbox(self, connection: object) -> Outbox:
        """Return what sends messages within the user's own SQL transaction: they are published iff it commits.

        Args:
            connection: a connection to the store's own database, as `barrier` takes it; not in autocommit mode.
        """
        return Outbox(self, connection)

    def open_shards(self, checks: CheckTerms, wake: Callable[[], object]) -> SqlShards:  # noqa: ARG002 - it is looked into
        """Return what a coordinator works on, once the store was started. Raises `StoreConnectionError`."""
        name = f"{self.prefix}.sql-{self.uuid}"
        with _opening("read", ", and that it runs"):
            return SqlShards(self.database, name, self.shards, self.topics.discarded, checks)

    def administration(self) -> SqlAdministration:
        """Return what an operator may do. The tables exist once a store was started."""
        return SqlAdministration(self.database)

    def shard_of(self, half: Half, ordering_key: bytes | None = None) -> int:
        """Return the shard of a transaction whose first half this is."""
        key = half.key if ordering_key is None else ordering_key
        return int(xxh3_64_intdigest(half.transaction_id.encode() if key is None else key) % self.shards)

    def require_shards(self) -> None:
        """Find out how many shards the tables have, where the store was not started.

        Raises:
            ConfigurationError: there are no tables.
            StoreConnectionError: the database did not answer.
        """
        if self._knows_shards:
            return
        with _opening("read", ", and that it runs"):
            self.shards = schema.shards_of(self.database)
        self._knows_shards = True

    def _count_check(self, half: Half, number: int) -> None:
        tx, now = schema.tx, self.database.now
        asked = (tx.c.id == half.transaction_id) & (tx.c.producer_group == half.group)
        what = f"transaction {half.transaction_id}: the answer to its check {number}"
        with self.database.storing(what, "it is asked again") as connection:
            connection.execute(
                tx.update()
                .where(asked, tx.c.state == schema.PREPARED, tx.c.check_count == number - 1)
                .values(check_count=number, answered_at=now, question=0, taken_until=0.0)
            )

    def submit(self, request: Request) -> None:
        """Have a request written. One to a store that is not running is completed with `StoppedError`."""
        writer = self._writer
        if writer is None:
            request.complete(StoppedError("the SQL store is not started, or was stopped"))
        elif self._pid != os.getpid():
            request.complete(
                StoppedError(
                    f"the SQL store was started in process {self._pid}, from which this one was forked: its threads "
                    "and connections are not here; make a store in this process"
                )
            )
        else:
            writer.submit(request)


@contextmanager
def _opening(what: str, look: str) -> Iterator[None]:
    """Raise `StoreConnectionError` where the database does not let its tables be opened or read."""
    try:
        yield
    except sa.exc.SQLAlchemyError as error:
        raise StoreConnectionError(
            f"the tables of the SQL store could not be {what}: {cause_of(error)}; check its address{look}"
        ) from error
