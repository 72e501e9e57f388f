"""The measurements that a consumer's process makes, the same for penstock and for its peers in Python.

It imports only the standard library, because it runs in their environments.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass
from operator import length_hint


@dataclass(frozen=True)
class Task:
    """The task of a consumer, from its command line."""

    servers: str
    topic: str
    #: Messages after which it ends.
    count: int
    #: Handlers at once.
    width: int
    #: Seconds of a handler; 0: an empty one.
    handler_s: float
    #: Seconds after which it ends, even if messages are left.
    limit_s: float

    @classmethod
    def parse(cls, arguments: list[str]) -> Task:
        """Parse the result of `arguments`."""
        servers, topic, count, width, handler_s, limit_s = arguments
        return cls(servers, topic, int(count), int(width), float(handler_s), float(limit_s))

    def arguments(self) -> list[str]:
        """Return the task as a command line."""
        return [self.servers, self.topic, *map(str, (self.count, self.width, self.handler_s, self.limit_s))]


class Measurement:
    """Records the beginning of the first handler and the end of the last one. For any thread."""

    def __init__(self, task: Task) -> None:
        self._limit_s = task.limit_s
        self._count = task.count
        # `next` on an iterator is one step under the GIL, and cheap.
        self._left = iter(range(1, task.count + 1))
        self._first, self._last = threading.Event(), threading.Event()
        self._begun = self._ended = self._cpu_begun = 0.0

    def begin(self) -> None:
        """Record that a handler begins."""
        if not self._begun:
            self._cpu_begun = time.process_time()
            self._begun = time.perf_counter()
            self._first.set()

    def end(self) -> None:
        """Record that a handler has ended."""
        if next(self._left, None) == self._count:
            self._ended = time.perf_counter()
            self._last.set()

    def wait(self) -> None:
        """Wait until all is handled or the time is over, and print the measurements as one line of JSON."""
        if not self._first.wait(60):
            sys.exit("no message came within a minute")
        if not self._last.wait(self._limit_s):
            self._ended = time.perf_counter()
        figures = {
            "handled": self._count - length_hint(self._left),
            "seconds": self._ended - self._begun,
            "cpu_s": time.process_time() - self._cpu_begun,
        }
        print(json.dumps(figures), flush=True)
