"""A consumer in the caller's thread: the engine that runs on threads elsewhere, its poll loop one step at a time.

Nothing here decides when anything happens, and time moves only when the driver moves it: where the engine would wait,
the driver is asked. Who calls the handlers is the driver's to say, too: `TestApp` does, until the app is quiet.
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
    """The broker's clock, but for waiting: that is the driver's to decide, in `wait`."""

    def __init__(self, clock: TestClock, wait: Callable[[float], None]) -> None:
        self.monotonic, self.time = clock.monotonic, clock.time
        self.sleep = wait


class SteppedClient(MemoryConsumer):
    """The consumer client in memory, which never waits for a message: the driver moves the clock."""

    #: Whether a rebalance callback is being called.
    in_callback = False

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[ClientMessage]:  # noqa: ARG002 - see above
        """Return what is there."""
        return super().consume(num_messages, 0)

    def call_back(self, name: str, callback: RebalanceCallback, partitions: list[TopicPartition]) -> None:
        """Call a rebalance callback, in which the engine may wait for handlers."""
        self.in_callback = True
        try:
            super().call_back(name, callback, partitions)
        finally:
            self.in_callback = False


class SteppedConsumer:
    """One consumer: its engine, its poll loop and its client; and the cluster that its engine sees.

    `wait` is called where a rebalance callback waits for handlers, with the seconds it would sleep: to let somebody
    work, or to move the clock.
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
        #: The engine's clock. Who runs it without waiting has no use for `sleep`, save in a rebalance callback.
        self.clock = SteppedClock(broker.clock, self._sleep)
        self.engine = Engine(group, handlers, settings, self.clock, middlewares, context=context, patterns=patterns)
        self.loop = PollLoop(self.engine)

    def consumer(self, config: Mapping[str, Any]) -> SteppedClient:
        """Make the client, as the engine asks its cluster for one."""
        self.client = self.client_type(config, self._broker)
        self.is_connected = True
        return self.client

    def __getattr__(self, name: str) -> Any:
        """Return the broker's: all of the cluster but its consumers and its clock."""
        return getattr(self._broker, name)

    def _sleep(self, seconds: float) -> None:
        if self.is_connected and self.client.in_callback:
            self._wait(seconds)

    def connect(self) -> PollLoop:
        """Check the topics, make the clients and ask to join; errors as `PollLoop.connect`."""
        self.loop.connect(cast("Cluster", self))
        self.loop.membership.join()
        return self.loop

    def step(self, take: Callable[[], object]) -> None:
        """Take a step of the poll loop; what it raises stops the consumer, as it does on the poll thread."""
        try:
            take()
        except PenstockError as error:
            self.engine.fail(error)

    def next_due(self) -> float:
        """Return when the engine next does something by the clock alone, or infinity."""
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
