"""A member of a consumer group, as a process: writes down when each handler call begins and ends, as it happens.

usage: member.py OPTIONS, where OPTIONS is the JSON of `chaos.fleet.MemberOptions`

Each line of its file is written in one go, so that what it did survives SIGKILL. A message's value is the seconds its
handler takes. Between calls it writes down what it owns. It ends when its parent does.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback

from penstock.app import App
from penstock.message import Message

logging.basicConfig(level=logging.INFO, format="%(created).3f %(threadName)s %(name)s: %(message)s")
options = json.loads(sys.argv[1])
parent = os.getppid()
out = os.open(options["path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
serials = itertools.count()
app = App(
    options["group"],
    bootstrap_servers=options["bootstrap_servers"],
    workers=options["workers"],
    max_in_flight=options["max_in_flight"],
    commit_interval=options["commit_interval"],
    stop_timeout=options["stop_timeout"],
    config=options["config"],
)


def write_down(*parts: object) -> None:
    """Append one line; a single write is atomic."""
    os.write(out, json.dumps(parts).encode() + b"\n")


@app.handler(options["topic"])
def take_a_while(message: Message) -> None:
    """Take the time that the message asks for, at this member's pace."""
    serial = next(serials)
    key = (message.key or b"").decode()
    write_down("begin", time.monotonic(), serial, key, message.partition, message.offset)
    # A slow handler is what is tested.
    time.sleep(float(message.value or b"0") * options["pace"])
    write_down("end", time.monotonic(), serial)


running = app.start()


def poll_thread_stack() -> set[str]:
    """Return the function names of the poll thread's stack: the only way to see it inside a callback."""
    for thread in threading.enumerate():
        if thread.name.startswith("penstock-poll-"):
            frames = traceback.walk_stack(sys._current_frames().get(thread.ident or 0))
            return {frame.f_code.co_name for frame, _ in frames}
    return set()


def look() -> None:
    """Write this member's partitions and counts to its file."""
    now = running.statistics()
    counts = {
        "owned": sorted(partition.partition for partition in now.partitions),
        "assigned": now.assigned,
        "revoked": now.revoked,
        "lost": now.lost,
        "received": now.received,
        "commits": now.commits,
        "failed_commits": now.failed_commits,
        "revoking": "on_revoke" in poll_thread_stack(),
    }
    write_down("look", time.monotonic(), counts)


for one in (signal.SIGTERM, signal.SIGINT):
    signal.signal(one, running.on_signal)
look()
try:
    while not running.wait(0.2):
        look()
        if os.getppid() != parent:
            os._exit(1)
finally:
    running.stop()
    look()
