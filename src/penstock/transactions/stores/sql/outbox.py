"""The outbox: messages written in the user's own SQL transaction, published if, and only if, it commits.

There is no half and no check: the database's commit is the decision.
"""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from penstock.errors import ConfigurationError
from penstock.outgoing import UserHeaders
from penstock.transactions.connections import adopt, is_no_table_error
from penstock.transactions.messages import a_half, terms
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import Database
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author

#: The producer group of such messages: nobody checks them.
GROUP = "outbox"


class OutboxStore(Protocol):
    """The store of an outbox, started or not."""

    @property
    def database(self) -> Database:
        """Where its tables are."""

    def require_target(self, topic: str, partition: int | None) -> None:
        """Raise unless a message can be published to the topic."""

    def require_shards(self) -> None:
        """Find out how many shards the tables have."""

    def shard_of(self, half: Half, ordering_key: bytes | None = None) -> int:
        """Return the shard of a transaction whose first half this is."""


class Outbox:
    """Messages of one SQL transaction. Used by one thread, as its connection.

    Messages of one key are published in the order of `send`, within one SQL transaction and from one that had
    committed to one that began later. Those of SQL transactions that were open at the same time have no order.

    Args:
        store: the store, in the same database.
        connection: the user's connection.
    """

    def __init__(self, store: OutboxStore, connection: object) -> None:
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
            topic: where it is published; it must exist.
            key: its key; text is encoded as UTF-8.
            value: its value, or None for a tombstone.
            headers: its headers; names must not begin with `penstock-`.
            partition: the partition to publish to; Kafka's partitioner chooses where it is None.
            deliver_at: it is published then, and not before; a number is seconds since 1970.

        Returns:
            The id of the message's transaction.

        Raises:
            ConfigurationError: an argument is wrong, the connection would commit by itself, or the store's tables are
                not there.
            TopicNotFoundError: there is no such topic.
        """
        under = terms(None, deliver_at, by_half=False)
        half = a_half(new_id(), GROUP, under, topic, key, value, headers, partition)
        self._store.require_target(topic, partition)
        self._user.require_transaction()
        self._store.require_shards()
        database = self._store.database
        number, now, quote = database.next, database.now, database.engine.dialect.identifier_preparer.quote
        if database.kind == "mysql":
            self._write("INSERT INTO penstock_number VALUES (NULL)")
        # Constants and our own words: nothing of the user's is in the text.
        self._write(
            "INSERT INTO penstock_tx (id, seq, shard, producer_group, state, author, decided_seq, birth, immunity, "  # noqa: S608 - constants
            "deliver_at_ms, publish_at_ms, check_count, question, taken_until, held) VALUES (:id, "
            f"{number}, :shard, :group, :state, :author, {number}, {now}, 0, :deliver_at, :publish_at, 0, 0, 0, 0)",
            id=half.transaction_id,
            shard=self._store.shard_of(half),
            group=GROUP,
            state=schema.COMMIT,
            author=int(Author.PRODUCER),
            deliver_at=half.deliver_at_ms,
            publish_at=half.deliver_at_ms or 0,
        )
        (row,) = schema.message_rows([half])
        self._write(
            f"INSERT INTO penstock_message ({', '.join(map(quote, row))}) "  # noqa: S608 - our own words
            f"VALUES ({', '.join(f':{name}' for name in row)})",
            **row,
        )
        return half.transaction_id

    def _write(self, statement: str, **values: object) -> None:
        try:
            self._user.run(statement, **values)
        except Exception as error:
            if not is_no_table_error(error):
                raise
            raise ConfigurationError(
                "the tables of the SQL store are not there, so an outbox has nowhere to write to: start the store, a "
                "producer or a coordinator on it, once, in the database of the connection"
            ) from error
