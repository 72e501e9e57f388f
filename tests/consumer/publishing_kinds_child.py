"""An app whose messages are retried, given up, and wait in a retry topic, exactly once: run as a process of its own.

usage: publishing_kinds_child.py SERVERS PREFIX; topics are PREFIX-<kind>, and results go to PREFIX-out
"""

from __future__ import annotations

import sys
import time

import tenacity

import penstock

servers, prefix = sys.argv[1:]
app = penstock.App(
    prefix,
    bootstrap_servers=servers,
    workers=4,
    commit_interval=0.2,
    exactly_once=True,
    config={"session.timeout.ms": 6000},
)
once = penstock.retry(attempts=1)
OUT = f"{prefix}-out"


def number_of(message: penstock.Message) -> int:
    # Else all may be over before somebody can kill it.
    time.sleep(0.002)
    return int(message.value or b"")


def result(kind: str, message: penstock.Message) -> penstock.Outgoing:
    return penstock.Outgoing(OUT, b"%s/%s" % (kind.encode(), message.value or b""), message.key)


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
