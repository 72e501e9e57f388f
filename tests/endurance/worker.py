"""A worker of the endurance campaign: three handlers in one app that publishes exactly once.

`singles` has an `async def` handler with failures, retries and dead letters; `keyed` a plain one on threads; `batched`
one of batches, which counts in PostgreSQL by the inbox. Each writes down when a call of a message began and ended.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence

import tenacity
from child import begin, connect, options, write_down

import penstock

#: Of so many messages, which are poison, and which fail the first time.
POISON, FAILS = 400, 40
ATTEMPTS = 3

begin(signals=False)
serials = itertools.count()
app = penstock.App(
    "endurance",
    bootstrap_servers=options["bootstrap_servers"],
    workers=8,
    exactly_once=True,
    config=options["config"],
)


class OnPurposeError(Exception):
    """An error that the campaign's own handlers raise."""


def begun(messages: Sequence[penstock.Message]) -> list[int]:
    """Write down that calls begin; return what `ended` takes."""
    now, mine = time.monotonic(), [next(serials) for _ in messages]
    write_down(
        *(
            ("begin", now, serial, message.topic, (message.key or b"").decode(), message.partition, message.offset)
            for serial, message in zip(mine, messages, strict=True)
        )
    )
    return mine


def ended(serials: Sequence[int], kind: str = "end") -> None:
    """Write down that calls ended, or `failed` and will be made again."""
    now = time.monotonic()
    write_down(*((kind, now, serial) for serial in serials))


def result(message: penstock.Message) -> penstock.Outgoing:
    """Return the result of a message."""
    value = {"of": message.topic, "number": number(message), "by": options["instance"]}
    return penstock.Outgoing("results", json.dumps(value), message.key)


def number(message: penstock.Message) -> int:
    """Return the number that a message says."""
    return int(message.value or b"")


@app.handler(
    "singles", retry=penstock.retry(attempts=ATTEMPTS, wait=tenacity.wait_fixed(0.1)), on_failure="dead_letter"
)
async def one_by_one(message: penstock.Message) -> penstock.Outgoing:
    """Take a few milliseconds; some messages fail the first time, and poison always."""
    mine = begun([message])
    await asyncio.sleep(0.003)
    if number(message) % POISON == POISON - 1:
        # The last failure is the end of a message, as a dead letter.
        ended(mine, "end" if message.attempt >= ATTEMPTS else "failed")
        raise OnPurposeError("it is poison")
    if number(message) % FAILS == 1 and message.attempt == 1:
        ended(mine, "failed")
        raise OnPurposeError("it fails the first time")
    ended(mine)
    return result(message)


@app.handler("keyed")
def by_key(message: penstock.Message) -> penstock.Outgoing:
    """Take a millisecond."""
    mine = begun([message])
    # Work that waits, as for a database.
    time.sleep(0.001)
    ended(mine)
    return result(message)


@app.handler("batched", batch=50, linger=0.2, retry=penstock.retry(attempts=100_000, wait=tenacity.wait_fixed(0.5)))
def in_batches(messages: list[penstock.Message]) -> list[penstock.Outgoing]:
    """Count messages in PostgreSQL exactly once; while it is away the batch fails, and is tried again."""
    mine = begun(messages)
    try:
        with connect() as connection:
            new = penstock.inbox(connection, messages)
            with connection.cursor() as cursor:
                cursor.executemany("INSERT INTO counted VALUES (%s)", [(number(message),) for message in new])
    except BaseException:
        ended(mine, "failed")
        raise
    ended(mine)
    return [result(message) for message in messages]


app.run()
