"""What the tests of handlers share: a consumer of some topics, and an `async def` handler that watches itself."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from penstock.consumer import ConsumerSettings, Handler, LitePushConsumer, MiddlewareSpec, WorkerResource
from penstock.devbroker import DevBroker
from penstock.message import Message


def consumer_of(
    broker: DevBroker,
    handlers: Mapping[str, Handler],
    *,
    middlewares: Sequence[MiddlewareSpec] = (),
    resources: Sequence[WorkerResource[object]] = (),
    **settings: object,
) -> LitePushConsumer:
    """Return a consumer, not started, in a group named by its first topic."""
    return LitePushConsumer(
        f"group-{next(iter(handlers))}",
        handlers,
        bootstrap_servers=broker.bootstrap_servers,
        settings=ConsumerSettings(**{"workers": 4, "commit_interval": 0.1, **settings}),  # type: ignore[arg-type] # the tests name options
        middlewares=middlewares,
        resources=resources,
    )


async def event_set(event: threading.Event) -> None:
    """Wait on the loop for what a test sets on its own thread."""
    while not event.is_set():  # noqa: ASYNC110 - an event of the loop could not be set from there
        await asyncio.sleep(0.002)


class AsyncRecorder:
    """An `async def` handler that writes down its messages, finds overlaps of a key, and counts what is under way.

    Args:
        seconds: how long each call waits.
        hold: whether calls wait for `go`.
    """

    def __init__(self, seconds: float = 0.0, *, hold: bool = False) -> None:
        #: Key, partition and offset of each message that was done, in that order.
        self.done: list[tuple[bytes | None, int, int]] = []
        self.overlaps: list[bytes | None] = []
        self.running = 0
        self.peak = 0
        #: How many calls were cancelled.
        self.cancelled = 0
        #: Set by the test to let held calls go on.
        self.go = threading.Event()
        self._seconds = seconds
        self._hold = hold
        self._running: Counter[bytes | None] = Counter()

    async def __call__(self, message: Message) -> None:
        """Take the time asked for. Everything is on the loop's thread, so nothing needs a lock."""
        self._running[message.key] += 1
        if self._running[message.key] > 1:
            self.overlaps.append(message.key)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            if self._hold:
                await event_set(self.go)
            await asyncio.sleep(self._seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            self._running[message.key] -= 1
        self.done.append((message.key, message.partition, message.offset))

    def by_key(self) -> dict[bytes | None, list[int]]:
        """Return the offsets of each key in the order of handling."""
        found: dict[bytes | None, list[int]] = defaultdict(list)
        for key, _, offset in list(self.done):
            found[key].append(offset)
        return found
