"""A consumer process for the tests that kill it: appends each handled message to a file.

usage: consumer_child.py BOOTSTRAP TOPIC GROUP FILE HANDLER_SECONDS
"""

from __future__ import annotations

import os
import sys
import time

from penstock.app import App
from penstock.message import Message

bootstrap, topic, group, path = sys.argv[1:5]
seconds = float(sys.argv[5])
out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
app = App(group, bootstrap_servers=bootstrap, workers=8, commit_interval=0.2, config={"session.timeout.ms": 6000})


@app.handler(topic)
def write_down(message: Message) -> None:
    """Take a while, then write one line; a single write of a short line is atomic."""
    time.sleep(seconds)
    os.write(out, b"%s %d %d\n" % (message.key, message.partition, message.offset))


app.run()
