"""A consumer in the caller's thread: the usual engine, with its poll loop run one step at a time.

The driver decides when a step runs and when the time moves. If the engine would wait, it calls the driver instead. The
driver also calls the handlers. `TestApp` is such a driver and calls them until the app is at rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

from confluent_kafka import Message as ClientMessage
from confluent_kafka import TopicPartition

from penstock.clients.cluster import Cluster, RebalanceCallback
from penstock.consumer.engine import Engine
from penstock.consumer.handlers.environment import MiddlewareSpec
from penstock.consumer.handlers.functions import Context
from penstock.consumer.handlers.handler import Handler
from penstock.consumer.handlers.registry import TopicPatterns
from penstock.consumer.poll.back_pressure import GRACE_S
from penstock.consumer.poll.loop import PollLoop
from penstock.consumer.settings import ConsumerSettings
from penstock.errors import PenstockError
from penstock.testing.memory.broker import TestBroker
from penstock.testing.memory.client.consumer_client import MemoryConsumer
from penstock.testing.memory.clock import TestClock


class SteppedClock:
    """The broker's clock, except that `sleep` calls the driver's `wait`."""

    def __init__(self, clock: TestClock, wait: Callable[[float], None]) -> None:
        self.monotonic, self.time = clock.monotonic, clock.time
        self.sleep = wait


class SteppedClient(MemoryConsumer):
    """A consumer client in memory that never waits for a message: the driver moves the clock."""

    #: Whether a rebalance callback is running.
    in_callback = False

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[ClientMessage]:  # noqa: ARG002 - see above
        """Return the messages that are available now."""
        return super().consume(num_messages, 0)

    def call_back(self, name: str, callback: RebalanceCallback, partitions: list[TopicPartition]) -> None:
        """Call a rebalance callback. The engine may wait for handlers in it."""
        self.in_callback = True
        try:
            super().call_back(name, callback, partitions)
        finally:
            self.in_callback = False


class SteppedConsumer:
    """One consumer: its engine, its poll loop and its client. It is also the cluster of its engine.

    If a rebalance callback waits for handlers, it calls `wait` with the seconds to sleep. `wait` runs handlers or moves
    the clock.
    """

    client_type: ClassVar[type[SteppedClient]] = SteppedClient
    #: Its client, once it is connected.
    client: SteppedClient
    is_connected = False

    def __init__(
        self,
        group: str,
        handlers: Mapping[str, Handler],
        settings: ConsumerSettings,
        broker: TestBroker,
        middlewares: Sequence[MiddlewareSpec] = (),
        *,
        context: Context | None = None,
        patterns: TopicPatterns | None = None,
        wait: Callable[[float], None],
    ) -> None:
        self._broker = broker
        self._wait = wait
        #: The engine's clock. Its `sleep` does nothing, except in a rebalance callback.
        self.clock = SteppedClock(broker.clock, self._sleep)
        self.engine = Engine(group, handlers, settings, self.clock, middlewares, context=context, patterns=patterns)
        self.loop = PollLoop(self.engine)

    def consumer(self, config: Mapping[str, Any]) -> SteppedClient:
        """Make the client: the engine calls this on its cluster."""
        self.client = self.client_type(config, self._broker)
        self.is_connected = True
        return self.client

    def __getattr__(self, name: str) -> Any:
        """Return the broker's attribute: all of the cluster except its consumers and its clock."""
        return getattr(self._broker, name)

    def _sleep(self, seconds: float) -> None:
        if self.is_connected and self.client.in_callback:
            self._wait(seconds)

    def connect(self) -> PollLoop:
        """Check the topics, make the clients and join the group; errors as `PollLoop.connect`."""
        self.loop.connect(cast("Cluster", self))
        self.loop.membership.join()
        return self.loop

    def step(self, step_once: Callable[[], object]) -> None:
        """Run a step of the poll loop. Its errors stop the consumer, as on the poll thread."""
        try:
            step_once()
        except PenstockError as error:
            self.engine.fail(error)

    def next_due(self) -> float:
        """Return the time of the engine's next action that only needs the clock, or infinity."""
        engine = self.engine
        now = self.clock.monotonic()
        times = [engine.timers.next_due()]
        times += [token_bucket.next_release(now) for token_bucket in engine.routes.token_buckets]
        for assignment in engine.assignments.all():
            if assignment.full_since is not None and assignment.paused is None:
                times.append(assignment.full_since + GRACE_S)
            if not assignment.acknowledged or assignment.tracker.commit_point() != assignment.committed:
                times.append(now + self.loop.commits.interval_s)
        return min((time for time in times if time is not None), default=float("inf"))
