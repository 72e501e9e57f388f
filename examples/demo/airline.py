"""The airline: a process that sends flights in transactions. A row in its database and a message: both or neither.

    python -m demo.airline BOOTSTRAP_SERVERS NUMBER [DIES_AT]

A departed flight commits and a cancelled one rolls back. Every fiftieth stays undecided. At the flight DIES_AT the
process is killed between its local commit and its decision. Then a check decides: any process of the group `airline`
looks into the database. With `order="half"`, later flights of that aircraft wait for the decision in Kafka.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

from tenacity import retry, retry_if_exception_type, stop_after_attempt

from demo.flights import Flight, read_schedule
from demo.plan import SENDERS, left_unknown, share_of
from penstock import DecisionNotStoredError, HalfNotStoredError, TransactionalProducer, TransactionRefusedError
from penstock.transactions import barrier, barrier_check, create_barrier_table

TOPIC = "departures"

#: Sender threads of one process. While a transaction waits for its two acknowledgements, others run.
_THREADS = 16

#: Seconds to wait for the database lock, while other threads and processes write.
_BUSY_TIMEOUT_S = 30.0

#: Number of transactions to try for a flight before its sender gives up.
_ATTEMPTS = 10

_TABLES = """
PRAGMA journal_mode = WAL;
CREATE TABLE flights (sequence INTEGER PRIMARY KEY, tail TEXT NOT NULL, transaction_id TEXT NOT NULL UNIQUE);
"""


def connect(folder: Path) -> sqlite3.Connection:
    """Open a connection to the airline's database, an SQLite file. Every thread has its own connection."""
    connection = sqlite3.connect(folder / "airline.sqlite", timeout=_BUSY_TIMEOUT_S)
    connection.execute("PRAGMA synchronous = NORMAL")  # survives a killed process, not a power failure: enough here
    return connection


def create_database(folder: Path) -> None:
    """Create the database with its tables."""
    with closing(connect(folder)) as connection:
        connection.executescript(_TABLES)
        create_barrier_table(connection)


def new_producer(bootstrap_servers: str, folder: Path) -> TransactionalProducer:
    """Return a producer of the airline, not started. While it runs, it also answers checks for the whole group."""
    check = barrier_check(partial(connect, folder))
    return TransactionalProducer("airline", bootstrap_servers=bootstrap_servers, check=check, order="half")


# In both cases nothing was recorded: the half was not stored, or a check was faster and rolled it back.
@retry(
    retry=retry_if_exception_type((HalfNotStoredError, TransactionRefusedError)),
    stop=stop_after_attempt(_ATTEMPTS),
    reraise=True,
)
def _send(producer: TransactionalProducer, connection: sqlite3.Connection, flight: Flight, *, dies: bool) -> None:
    """Send one flight. Its message is in Kafka inside the block, and visible only if the decision is COMMIT."""
    with producer.transaction(TOPIC, key=flight.tail, value=flight.to_json()) as tx:
        with connection:  # commits at its end; an exception rolls back
            barrier(connection, tx)
            row = (flight.sequence, flight.tail or "", tx.transaction_id)
            connection.execute("INSERT INTO flights VALUES (?, ?, ?)", row)
            if not flight.departed:
                connection.rollback()
                tx.rollback()
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if left_unknown(flight):
            tx.unknown()


def main(bootstrap_servers: str, number: int, dies_at: int | None) -> None:
    """Send this process's share of the schedule, without the flights that a former process has recorded."""
    folder = Path.cwd()
    with closing(connect(folder)) as connection:
        recorded = dict(connection.execute("SELECT tail, MAX(sequence) FROM flights GROUP BY tail"))
    shares: list[list[Flight]] = [[] for _ in range(_THREADS)]
    for flight in read_schedule(folder):
        share, sender = divmod(share_of(flight, SENDERS * _THREADS), SENDERS)
        if sender == number and flight.sequence > recorded.get(flight.tail or "", -1):
            shares[share].append(flight)

    def send_all(flights: Sequence[Flight]) -> None:
        with closing(connect(folder)) as connection:
            for flight in flights:
                try:
                    _send(producer, connection, flight, dies=flight.sequence == dies_at)
                except DecisionNotStoredError:
                    continue  # a check will look for the row

    with new_producer(bootstrap_servers, folder) as producer, ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(send_all, shares))  # raises the exception of a thread


if __name__ == "__main__":
    servers, own_number, *death = sys.argv[1:]
    main(servers, int(own_number), int(death[0]) if death else None)
