"""An order service: a message is published if, and only if, its order is in the database.

    python examples/transactions_orders.py [BOOTSTRAP_SERVERS]

Without an address it starts an embedded Kafka. It sends three orders: one commits, one fails and rolls back, and for
one the service reports no outcome, as if it had been killed: the check reads the outcome from the database.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import tempfile
import uuid
from pathlib import Path

from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.devbroker import DevBroker
from penstock.transactions import Coordinator, HalfMessage, Transaction, TransactionalProducer, TransactionState


class Orders:
    """The service's own database. Each call opens a connection, because checks run on other threads."""

    def __init__(self, file: Path) -> None:
        self._file = file
        with self._connection() as connection:
            connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, tx TEXT NOT NULL UNIQUE)")

    @contextlib.contextmanager
    def _connection(self):  # noqa: ANN202 - an example reads better without
        with contextlib.closing(sqlite3.connect(self._file)) as connection, connection:
            yield connection

    def insert(self, order: int, tx: Transaction) -> None:
        """The local transaction: the order, and the id of the message's transaction."""
        with self._connection() as connection:
            connection.execute("INSERT INTO orders VALUES (?, ?)", (order, tx.transaction_id))

    def check(self, half: HalfMessage) -> TransactionState:
        """Return the outcome of this message's local transaction."""
        with self._connection() as connection:
            found = connection.execute("SELECT 1 FROM orders WHERE tx = ?", (half.transaction_id,)).fetchone()
        return TransactionState.COMMIT if found else TransactionState.ROLLBACK


def send_orders(producer: TransactionalProducer, orders: Orders, topic: str) -> None:
    """Send three orders with different outcomes."""
    with producer.transaction(topic, key="alice", value="order 1") as tx:
        orders.insert(1, tx)

    with (
        contextlib.suppress(sqlite3.IntegrityError),
        producer.transaction(topic, key="bob", value="order 1 again") as tx,
    ):
        orders.insert(1, tx)

    with producer.transaction(topic, key="carol", value="order 2") as tx:
        orders.insert(2, tx)
        tx.unknown()


def read(servers: str, topic: str, count: int) -> list[str]:
    """Return the first messages for a read_committed consumer."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": topic,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe([topic])
    with contextlib.closing(consumer):
        seen: list[str] = []
        while len(seen) < count:
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                seen.append(f"{message.key().decode()}: {message.value().decode()}")
    return seen


def main(servers: str) -> None:
    """Run the service, a coordinator and a reader."""
    topic, prefix = f"orders-{uuid.uuid4().hex[:8]}", f"example-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(topic, 1)])[topic].result()
    with (
        tempfile.TemporaryDirectory() as folder,
        Coordinator(bootstrap_servers=servers, prefix=prefix, transaction_timeout=1.0),
    ):
        orders = Orders(Path(folder) / "orders.db")
        with TransactionalProducer("orders", bootstrap_servers=servers, prefix=prefix, check=orders.check) as producer:
            send_orders(producer, orders, topic)
            for line in read(servers, topic, 2):
                print(line)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with DevBroker() as broker:
            main(broker.bootstrap_servers)
