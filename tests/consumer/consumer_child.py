"""A consumer process for the tests that kill it: appends each handled message to a file."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from pathlib import Path

from penstock.app import App
from penstock.message import Message

parser = argparse.ArgumentParser()
parser.add_argument("bootstrap")
parser.add_argument("topic")
parser.add_argument("file", type=Path)
parser.add_argument("--seconds", type=float, default=0.0, help="how long a handler takes")
parser.add_argument("--commit-interval", type=float, default=0.2)
parser.add_argument("--hold-after", type=int, help="handlers after so many wait until a file FILE.go is there")
options = parser.parse_args()

out = os.open(options.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
go = options.file.with_suffix(".go")
begun = itertools.count(1)  # its steps are whole between threads
app = App(
    f"group-{options.topic}",
    bootstrap_servers=options.bootstrap,
    workers=8,
    commit_interval=options.commit_interval,
    config={"session.timeout.ms": 6000},
)


@app.handler(options.topic)
def write_down(message: Message) -> None:
    """Take a while, then write one line; a single write of a short line is atomic."""
    held = options.hold_after is not None and next(begun) > options.hold_after
    while held and not go.exists():  # the test says when
        time.sleep(0.01)
    # A slow handler is what is tested.
    time.sleep(options.seconds)
    os.write(out, b"%s %d %d\n" % (message.key, message.partition, message.offset))


app.run()
