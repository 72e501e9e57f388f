"""Batches: up to a hundred readings are stored in one SQLite transaction; the bad ones become dead letters.

Each worker has its own connection. Each row has the place of its message, so a batch that comes again changes nothing.

`python examples/feed.py readings` writes messages (see there for the broker); then, in this folder:

    penstock run sqlite_batches:app
    penstock dlq ls dlq.readings
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from contextlib import closing
from typing import cast

import tenacity

import penstock

SERVERS = os.environ.get("PENSTOCK_BOOTSTRAP_SERVERS", "127.0.0.1:9092")
app = penstock.App("sqlite-batches", bootstrap_servers=SERVERS, workers=2)


@app.worker_resource
def database() -> Generator[sqlite3.Connection, None, None]:
    """Open a worker's connection at its first use, and close it when the worker ends."""
    with closing(sqlite3.connect(os.environ.get("READINGS_DB", "readings.db"), timeout=30)) as connection:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS readings"
            " (sensor TEXT, celsius REAL NOT NULL, part INT, place INT, PRIMARY KEY (part, place))"
        )
        yield connection


not_the_rows_fault = tenacity.retry_if_not_exception_type(sqlite3.IntegrityError)


@app.handler(
    "readings",
    decoder="json",
    batch=100,
    linger=0.2,
    retry=penstock.retry(retry=not_the_rows_fault),
    on_failure="dead_letter",
)
def store(readings: list[penstock.Message]) -> None:
    """Store the good readings, then name the bad ones: the others are done."""
    failed: dict[int, BaseException] = {}
    with database.get() as connection:  # commits at its end
        for number, reading in enumerate(readings):
            celsius = cast("dict[str, float]", reading.body)["celsius"]
            row = ((reading.key or b"").decode(), celsius, reading.partition, reading.offset)
            try:
                connection.execute("INSERT INTO readings VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", row)
            except sqlite3.IntegrityError as error:
                failed[number] = error
    if failed:
        raise penstock.BatchError(failed)
