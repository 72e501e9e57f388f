"""An exactly-once app whose messages end in every way: a process to be killed.

usage: publishing_child.py SERVERS PREFIX SECONDS [HELD]: seconds of a call, and the value of kind `plain` whose call
does not end; topics are PREFIX-<kind>, and results go to PREFIX-out, those of the kind `plain` to PREFIX-plain-out
"""

from __future__ import annotations

import sys
import time

import tenacity

import penstock

servers, prefix, seconds, *held = sys.argv[1:]
app = penstock.App(
    prefix,
    bootstrap_servers=servers,
    workers=4,
    commit_interval=0.2,
    exactly_once=True,
    config={"session.timeout.ms": 6000},
)
once = penstock.retry(attempts=1)


def number_of(message: penstock.Message) -> int:
    time.sleep(float(seconds))
    return int(message.value or b"")


def result(kind: str, message: penstock.Message) -> penstock.Outgoing:
    return penstock.Outgoing(f"{prefix}-out", b"%s/%s" % (kind.encode(), message.value or b""), message.key)


@app.handler(f"{prefix}-plain", to=f"{prefix}-plain-out")
def plain(message: penstock.Message) -> list[penstock.Outgoing]:
    """Return a message one to three times, numbered."""
    while (message.value or b"").decode() in held:  # until it is killed
        time.sleep(1)
    parts = range(1 + number_of(message) % 3)
    return [
        penstock.Outgoing(f"{prefix}-plain-out", b"%s/%d" % (message.value or b"", part), message.key) for part in parts
    ]


@app.handler(f"{prefix}-retried", retry=penstock.retry(attempts=3, wait=tenacity.wait_fixed(0.01)))
def retried(message: penstock.Message) -> penstock.Outgoing:
    """Fail twice where the number is even."""
    if number_of(message) % 2 == 0 and message.attempt < 3:
        raise ValueError("not yet")
    return result("retried", message)


@app.handler(f"{prefix}-given-up", retry=once, on_failure="dead_letter")
def given_up(message: penstock.Message) -> penstock.Outgoing:
    """Give every other one up."""
    if number_of(message) % 2 == 0:
        raise ValueError("never")
    return result("given-up", message)


@app.handler(f"{prefix}-later", retry=once, retry_delays=[0.1], on_failure="dead_letter")
def later(message: penstock.Message) -> penstock.Outgoing:
    """Let every other one wait in a retry topic, and every fourth become a dead letter then."""
    number = number_of(message)
    if (number % 2 == 0 and message.attempt == 1) or number % 4 == 0:
        raise ValueError("not here")
    return result("later", message)


app.run()
