"""An order service process, for a test that kills it between its local commit and its decision.

Arguments: bootstrap servers, prefix, topic, the file of its SQLite database.
"""

from __future__ import annotations

import sqlite3
import sys
import threading

from penstock.transactions import TransactionalProducer


def main() -> None:
    servers, prefix, topic, file = sys.argv[1:]
    database = sqlite3.connect(file)
    with (
        TransactionalProducer("orders", bootstrap_servers=servers, prefix=prefix) as producer,
        producer.transaction(topic, key=b"42", value=b"order") as tx,
    ):
        with database:
            database.execute("INSERT INTO orders VALUES (?)", (tx.transaction_id,))
        print(tx.transaction_id, flush=True)  # noqa: T201 - the test reads it
        threading.Event().wait()


if __name__ == "__main__":
    main()
