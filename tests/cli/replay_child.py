"""A replay that is killed: all was acknowledged by the broker, the last batch was not written down yet.

usage: replay_child.py BOOTSTRAP TOPIC BATCHES_WRITTEN_DOWN
"""

from __future__ import annotations

import os
import signal
import sys

from penstock.cli import main
from penstock.dead_letters.reader import DeadLetterLog
from penstock.offsets import CommitPoint

bootstrap, topic, batches = sys.argv[1:4]
remember = DeadLetterLog.remember
left = int(batches)


def remember_some(self: DeadLetterLog, topic: str, partition: int, point: CommitPoint) -> None:
    """Write down so many batches, then die."""
    global left  # noqa: PLW0603 - a program of a few lines
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    remember(self, topic, partition, point)


DeadLetterLog.remember = remember_some  # type: ignore[method-assign] # the fault
sys.argv = ["penstock", "dlq", "replay", topic, "--bootstrap-servers", bootstrap]
main()
