"""An app that returns what it is given, one to three messages for each: run as a process of its own, to be killed.

usage: publishing_child.py SERVERS SOURCE TARGET SECONDS, the last what a call of the handler takes
"""

from __future__ import annotations

import sys
import time

import penstock

servers, source, target, seconds = sys.argv[1:]
app = penstock.App(
    f"group-{source}",
    bootstrap_servers=servers,
    workers=4,
    commit_interval=0.2,
    exactly_once=True,
    config={"session.timeout.ms": 6000},
)


@app.handler(source, to=target)
def copy(message: penstock.Message) -> list[penstock.Outgoing]:
    """Return a message one to three times, numbered."""
    value = message.value or b""
    time.sleep(float(seconds))
    return [penstock.Outgoing(target, b"%s/%d" % (value, part), message.key) for part in range(1 + int(value) % 3)]


app.run()
