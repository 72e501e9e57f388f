"""Transfers between accounts: readers see the transfers of an account in the order in which they began.

    python examples/bank_transfer.py [BOOTSTRAP_SERVERS]

Without an address it starts an embedded Kafka. Each transfer is a transaction of two messages, one for each account:
both become visible, or neither. With `order="half"` the transfers of an account are published in the order in which
they began, though some are decided late: a check decides one, and the bank refuses one, which rolls back. So a reader
that adds up the messages never finds an account below zero. In the order of decisions it would.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic

from penstock import Coordinator, HalfMessage, TransactionalProducer, TransactionState
from penstock.devbroker import DevBroker
from penstock.transactions import Outgoing, Transaction


class Bank:
    """Balances, and the transfers that happened. Each call opens its own connection."""

    def __init__(self, file: Path) -> None:
        self._file = file
        with self._connection() as connection:
            connection.execute("CREATE TABLE transfers (tx TEXT PRIMARY KEY)")
            connection.execute("CREATE TABLE accounts (name TEXT PRIMARY KEY, cents INTEGER CHECK (cents >= 0))")
            connection.executemany("INSERT INTO accounts VALUES (?, ?)", [("bank", 10_000), ("ann", 0), ("bob", 0)])

    @contextlib.contextmanager
    def _connection(self):  # noqa: ANN202 - an example reads better without
        with contextlib.closing(sqlite3.connect(self._file, timeout=30)) as connection, connection:
            yield connection

    def transfer(self, tx: Transaction, source: str, target: str, cents: int) -> None:
        """The local transaction. The database refuses an account below zero."""
        with self._connection() as connection:
            connection.execute("INSERT INTO transfers VALUES (?)", (tx.transaction_id,))
            connection.execute("UPDATE accounts SET cents = cents - ? WHERE name = ?", (cents, source))
            connection.execute("UPDATE accounts SET cents = cents + ? WHERE name = ?", (cents, target))

    def check(self, half: HalfMessage) -> TransactionState:
        """Return whether this transfer happened."""
        with self._connection() as connection:
            found = connection.execute("SELECT 1 FROM transfers WHERE tx = ?", (half.transaction_id,)).fetchone()
        return TransactionState.COMMIT if found else TransactionState.ROLLBACK

    def balances(self) -> dict[str, int]:
        """Return the balance of each account."""
        with self._connection() as connection:
            return dict(connection.execute("SELECT name, cents FROM accounts"))


class Transfers:
    """Moves money and sends a message for each transfer."""

    def __init__(self, producer: TransactionalProducer, bank: Bank, topic: str) -> None:
        self._producer = producer
        self._bank = bank
        self._topic = topic

    @contextlib.contextmanager
    def begun(self, source: str, target: str, cents: int) -> Iterator[Transaction]:
        """Store a transfer's halves and carry it out; the block runs before the decision."""
        # All transfers have one order: incoming money must be visible before it is spent. A bank with many customers
        # would order transfers by the account that pays.
        taken, given = Outgoing(self._topic, str(-cents), source), Outgoing(self._topic, str(cents), target)
        with self._producer.transaction_of([taken, given], ordering_key="accounts") as tx:
            self._bank.transfer(tx, source, target, cents)
            yield tx


def move_money(transfers: Transfers) -> None:
    """Carry out four transfers that do not end in the order in which they began."""
    began, spent = threading.Event(), threading.Event()

    def slow() -> None:
        with transfers.begun("bank", "ann", 5_000):
            began.set()
            spent.wait()  # the money has moved, and is spent before this thread comes to its decision

    thread = threading.Thread(target=slow)
    thread.start()
    began.wait()
    with transfers.begun("ann", "bob", 4_000) as tx:
        tx.unknown()  # as if the process had died here: a check decides
    with contextlib.suppress(sqlite3.IntegrityError), transfers.begun("ann", "bob", 2_000):
        pass  # never reached: Ann has 1,000 left
    with transfers.begun("bob", "bank", 3_500):
        pass
    spent.set()
    thread.join()


def read(servers: str, topic: str, count: int) -> list[tuple[str, int]]:
    """Return account and cents of the first messages for a reader of committed messages."""
    settings = {"group.id": topic, "auto.offset.reset": "earliest", "isolation.level": "read_committed"}
    consumer = Consumer({"bootstrap.servers": servers, **settings})
    consumer.subscribe([topic])
    with contextlib.closing(consumer):
        seen: list[tuple[str, int]] = []
        while len(seen) < count:
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                seen.append((message.key().decode(), int(message.value())))
    return seen


def main(servers: str) -> None:
    """Run the bank, a coordinator and a reader."""
    topic, prefix = f"accounts-{uuid.uuid4().hex[:8]}", f"example-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(topic, 1)])[topic].result()
    with (
        tempfile.TemporaryDirectory() as folder,
        Coordinator(bootstrap_servers=servers, prefix=prefix, transaction_timeout=1.0),
    ):
        bank = Bank(Path(folder) / "bank.db")
        with TransactionalProducer(
            "bank", bootstrap_servers=servers, prefix=prefix, check=bank.check, order="half"
        ) as producer:
            move_money(Transfers(producer, bank, topic))
            seen = read(servers, topic, 6)
        held = Counter({"bank": 10_000})
        for account, cents in seen:
            held[account] += cents
            print(f"{account:<5}{cents:>7}{held[account]:>8}{'  overdrawn' if held[account] < 0 else ''}")
        print("the same in the bank:", "yes" if held == bank.balances() else "no")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with DevBroker() as broker:
            main(broker.bootstrap_servers)
