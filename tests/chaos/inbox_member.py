"""A member whose handlers count in PostgreSQL by the inbox, and which kills itself at their steps.

usage: inbox_member.py OPTIONS, where OPTIONS is the JSON of `chaos.counting.CountingOptions`
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

import psycopg
import tenacity

import penstock

logging.basicConfig(level=logging.INFO, format="%(created).3f %(threadName)s %(name)s: %(message)s")
options = json.loads(sys.argv[1])
chance = random.Random(options["seed"])  # noqa: S311 - chance, not secrecy
out = os.open(options["path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
passed: Counter[str] = Counter()
app = penstock.App(
    options["group"],
    bootstrap_servers=options["bootstrap_servers"],
    workers=4,
    commit_interval=0.5,
    config=options["config"],
)


@app.worker_resource
def database() -> Iterator[psycopg.Connection]:
    """Return a connection of the worker's own."""
    with psycopg.connect(options["database"]) as connection:
        yield connection


def step(name: str, attempt: int = 9) -> None:
    """Pass a step of a handler: or be killed there, or fail, which an early try may."""
    passed[name] += 1
    if passed[name] == options["dies_at"].get(name):
        os.write(out, f"killed {name}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt <= 3 and chance.random() < options["failures"]:
        raise RuntimeError(f"failed when {name}")


def count(messages: Sequence[penstock.Message], attempt: int) -> None:
    """Count messages by their keys, exactly once."""
    connection = database.get()
    try:
        step("begun", attempt)
        new = penstock.inbox(connection, messages)
        if len(new) < len(messages):
            os.write(out, b"known\n")
        step("recorded", attempt)
        for message in new:
            connection.execute(
                "INSERT INTO counters VALUES (%s, 1) ON CONFLICT (key) DO UPDATE SET n = counters.n + 1",
                ((message.key or b"").decode(),),
            )
        step("written", attempt)
        connection.commit()
        step("committed", attempt)
    except BaseException:
        connection.rollback()
        raise


OFTEN = penstock.retry(attempts=2, wait=tenacity.wait_fixed(0.05))


@app.handler(options["singles"], retry=OFTEN, retry_delays=[0.2] * 9)
def one_by_one(message: penstock.Message) -> None:
    """Count a message."""
    count([message], message.attempt)


@app.handler(options["batched"], batch=20, retry=penstock.retry(attempts=20, wait=tenacity.wait_fixed(0.05)))
def in_batches(messages: list[penstock.Message]) -> None:
    """Count a batch."""
    count(messages, max(message.attempt for message in messages))


app.run()
