"""Apps and consumers of tests: in the test's thread, on threads and a broker in memory, and on a real broker."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import penstock
from kafka_tools import committed, ends
from penstock.consumer import ConsumerSettings, Handler, LitePushConsumer, MiddlewareSpec, WorkerResource, retry
from penstock.message import Message
from penstock.testing import TestBroker

NewTopic = Callable[..., str]

#: A retry policy without a retry.
ONCE = retry(attempts=1)


def every(seconds: float, attempts: int = 3) -> penstock.RetryPolicy:
    """Return a policy of so many tries, so many seconds apart."""
    return retry(attempts=attempts, wait=lambda _: seconds)


class PoisonError(Exception):
    """The error of a poison message."""


class Broker(Protocol):
    """A real broker."""

    bootstrap_servers: str


def app_of(**options: Any) -> penstock.App:
    """Return an app for `TestApp`."""
    return penstock.App("app", bootstrap_servers="memory:0", **options)


def consumer_of(
    broker: Broker | TestBroker,
    handlers: Mapping[str, Handler],
    *,
    middlewares: Sequence[MiddlewareSpec] = (),
    resources: Sequence[WorkerResource[Any]] = (),
    **settings: object,
) -> LitePushConsumer:
    """Return a consumer on threads, not started, in the group of its first topic.

    On a broker in memory, absent topics are created with one partition, and its clock goes on whenever the poll thread
    waits.
    """
    in_memory = broker if isinstance(broker, TestBroker) else None
    for topic in handlers if in_memory is not None else ():
        if topic not in in_memory.topics():
            in_memory.create_topic(topic, 1)
    return LitePushConsumer(
        group_of(next(iter(handlers))),
        handlers,
        bootstrap_servers="memory:0" if in_memory is not None else broker.bootstrap_servers,
        settings=ConsumerSettings(**{"workers": 4, "commit_interval": 0.1, **settings}),  # type: ignore[arg-type] # the tests name options
        middlewares=middlewares,
        resources=resources,
        cluster=in_memory,
    )


def all_committed(servers: str, group: str, topic: str, partitions: int = 1) -> bool:
    """Return whether a group's committed offsets are the ends of a topic on a real broker."""
    offsets = {number: found.offset for number, found in committed(servers, group, topic, partitions).items()}
    return offsets == ends(servers, topic, partitions, "read_uncommitted")


@contextmanager
def child(script: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program of the tests; it is killed at the end."""
    process = subprocess.Popen([sys.executable, script, *map(str, arguments)], stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def fed(count: int, keys: int, partitions: int = 1) -> TestBroker:
    """Return a broker in memory with so many messages in topic "t", with the keys "k0", "k1" and so on in turn."""
    broker = TestBroker()
    broker.create_topic("t", partitions)
    for number in range(count):
        broker.produce("t", b"x", key=b"k%d" % (number % keys))
    return broker


def nothing(_message: Message) -> None:
    """Do nothing, as a handler."""


def group_of(topic: str) -> str:
    """Return the group of a consumer whose first topic is this."""
    return f"group-{topic}"


class Handled:
    """A handler that records its calls, finds overlaps of a key, and fails for the value `poison`.

    For threads as well: what it keeps is complete once a call has ended.
    """

    def __init__(self) -> None:
        #: The value of each call, in their order; and the messages that it was done with.
        self.calls: list[str] = []
        self.done: list[Message] = []
        #: Keys with two calls at once (I1).
        self.overlaps: list[bytes | None] = []
        #: Set by a test to let poison pass.
        self.fixed = False
        self._running: dict[bytes | None, int] = defaultdict(int)
        self._lock = threading.Lock()

    def __call__(self, message: Message) -> None:
        """Take a message."""
        with self._lock:
            self.calls.append((message.value or b"").decode())
            self._running[message.key] += 1
            if self._running[message.key] > 1:
                self.overlaps.append(message.key)
        try:
            if message.value == b"poison" and not self.fixed:
                raise PoisonError("it is poison")
            self.done.append(message)
        finally:
            with self._lock:
                self._running[message.key] -= 1

    def offsets(self) -> dict[bytes | None, list[int]]:
        """Return the offsets that each key was done with, in that order."""
        found: dict[bytes | None, list[int]] = defaultdict(list)
        for message in list(self.done):
            found[message.key].append(message.offset)
        return found
