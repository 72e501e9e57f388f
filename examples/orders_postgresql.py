"""An order service with PostgreSQL and a barrier: no message without its order, no order without its message.

    python examples/orders_postgresql.py postgresql://USER@HOST/DATABASE [BOOTSTRAP_SERVERS]

Without an address of Kafka it starts an embedded one. Four orders meet four fates: one commits; one breaks a rule of
the database; of one the service dies right after its commit; and one is so late that a check was faster: it is refused,
for the message is rolled back already. What the database holds and what a reader of the topic sees is the same.
"""

from __future__ import annotations

import contextlib
import sys
import time
import uuid

import psycopg
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic

from penstock import Coordinator, TransactionalProducer, TransactionRefusedError
from penstock.devbroker import DevBroker
from penstock.transactions import Transaction, barrier, barrier_check, create_barrier_table


class Orders:
    """The service's own database. Each call opens a connection; a service of the real world has a pool."""

    def __init__(self, url: str) -> None:
        self._url = url
        with self.connect() as connection:
            create_barrier_table(connection)
            connection.execute("CREATE TABLE orders (number INT PRIMARY KEY, customer TEXT)")

    def connect(self) -> psycopg.Connection:
        """Open a connection, as the check does."""
        return psycopg.connect(self._url)

    def insert(self, number: int, customer: str, tx: Transaction) -> None:
        """The local transaction: first the barrier, then the order, both or none."""
        with self.connect() as connection:
            barrier(connection, tx)
            connection.execute("INSERT INTO orders VALUES (%s, %s)", (number, customer))

    def stored(self) -> list[str]:
        """Return what the database holds."""
        with self.connect() as connection:
            rows = connection.execute("SELECT customer, number FROM orders ORDER BY number")
            return [f"{customer}: order {number}" for customer, number in rows]

    def wait_for_check(self, tx: Transaction) -> None:
        """Wait, as a process that stands still does, until a check has asked about a transaction."""
        with self.connect() as connection:
            connection.autocommit = True
            query = "SELECT 1 FROM penstock_barrier WHERE id = %s"
            while not connection.execute(query, (tx.transaction_id,)).fetchall():
                time.sleep(0.1)


def send_orders(producer: TransactionalProducer, orders: Orders, topic: str) -> None:
    """Send four orders, each with another fate."""
    with producer.transaction(topic, key="alice", value="order 1") as tx:
        orders.insert(1, "alice", tx)

    with (
        contextlib.suppress(psycopg.errors.UniqueViolation),
        producer.transaction(topic, key="bob", value="order 1") as tx,
    ):
        orders.insert(1, "bob", tx)

    with producer.transaction(topic, key="carol", value="order 2") as tx:
        orders.insert(2, "carol", tx)
        tx.unknown()  # as if the process had died here: nobody decides, so a check asks the barrier

    with producer.transaction(topic, key="dave", value="order 3") as tx:
        tx.unknown()
        orders.wait_for_check(tx)
        try:
            orders.insert(3, "dave", tx)
        except TransactionRefusedError:
            print("dave's order came too late")


def read(servers: str, topic: str, count: int) -> list[str]:
    """Return the first messages that a reader of committed messages sees."""
    settings = {"group.id": topic, "auto.offset.reset": "earliest", "isolation.level": "read_committed"}
    consumer = Consumer({"bootstrap.servers": servers, **settings})
    consumer.subscribe([topic])
    with contextlib.closing(consumer):
        seen: list[str] = []
        while len(seen) < count:
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                seen.append(f"{message.key().decode()}: {message.value().decode()}")
    return seen


def main(url: str, servers: str) -> None:
    """Run the service, a coordinator and a reader."""
    topic, prefix = f"orders-{uuid.uuid4().hex[:8]}", f"example-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(topic, 1)])[topic].result()
    orders = Orders(url)
    with (
        Coordinator(bootstrap_servers=servers, prefix=prefix, transaction_timeout=1.0),
        TransactionalProducer(
            "orders", bootstrap_servers=servers, prefix=prefix, check=barrier_check(orders.connect)
        ) as producer,
    ):
        send_orders(producer, orders, topic)
        seen = read(servers, topic, 2)
    print("in the topic:   ", *sorted(seen), sep="\n  ")
    print("in the database:", *orders.stored(), sep="\n  ")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [url, servers]:
            main(url, servers)
        case [url]:
            with DevBroker() as broker:
                main(url, broker.bootstrap_servers)
        case _:
            sys.exit(__doc__)
