"""A member process that publishes. Its results name the member and the call.

usage: publishing_member.py OPTIONS, where OPTIONS is the JSON of `chaos.publishing.PublisherOptions`
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time

import penstock

logging.basicConfig(level=logging.INFO, format="%(created).3f %(threadName)s %(name)s: %(message)s")
options = json.loads(sys.argv[1])
name = options["name"]
calls = itertools.count()
app = penstock.App(
    options["group"],
    bootstrap_servers=options["bootstrap_servers"],
    workers=options["workers"],
    commit_interval=0.2,
    exactly_once=options["exactly_once"],
    config=options["config"],
)


def number_and_parts(message: penstock.Message) -> tuple[int, int]:
    """Return the content of a message."""
    number, parts = (message.value or b"").split()
    return int(number), int(parts)


def results(message: penstock.Message, call: int) -> list[penstock.Outgoing]:
    """Return as many results of a message as it asks for."""
    number, parts = number_and_parts(message)
    return [
        penstock.Outgoing(options["results"], f"{number}/{part}/{name}/{call}", message.key) for part in range(parts)
    ]


@app.handler(options["singles"])
def one_by_one(message: penstock.Message) -> list[penstock.Outgoing]:
    """Return the results of a message."""
    # A handler that takes its time is what is tested.
    time.sleep(options["seconds"])
    return results(message, next(calls))


@app.handler(options["batched"], batch=20)
def in_batches(messages: list[penstock.Message]) -> list[penstock.Outgoing]:
    """Return the results of a batch as a whole, with its messages."""
    time.sleep(options["seconds"])
    call = next(calls)
    inside = ",".join(str(number_and_parts(message)[0]) for message in messages)
    of_messages = [result for message in messages for result in results(message, call)]
    return [*of_messages, penstock.Outgoing(options["batches"], f"{name}/{call}/{inside}")]


app.run()
