"""`App`: handlers and sinks by decorator, run as one. The face of penstock; the engines do the work."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from penstock import config as check
from penstock.config import ClientConfig
from penstock.consumer import (
    ConsumerSettings,
    ConsumerStatistics,
    Handler,
    Keyless,
    LitePushConsumer,
    Order,
    RetryPolicy,
    handler,
)
from penstock.errors import ConfigurationError, SinkError
from penstock.kafka import admin_client, require_topics
from penstock.transactions import Coordinator

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery


FunctionT = TypeVar("FunctionT", bound=Callable[..., object])
SinkFunction = Callable[["DataFrame", int], None]

#: Seconds between two looks at a running app, so that the main thread hears signals.
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """A decorated sink: what it reads, when, and what gets each batch."""

    topics: tuple[str, ...]
    function: SinkFunction
    trigger: str
    name: str
    checkpoint_location: str | None
    starting_offsets: str


class App:
    """A consumer group with its handlers and sinks.

    Nothing is connected before `run` or `start`. Registering is for one thread; everything else may be called from any.

    Args:
        name: name of the app: the consumer group and the threads are called by it.
        bootstrap_servers: addresses of brokers, `host:port` with commas in between.
        workers: worker threads.
        config: librdkafka's keys as they are.
        coordinator: whether this process also runs a transaction coordinator.
        prefix: prefix of the transaction topics, for that coordinator.
        pinned: one lane for each worker, which alone serves it.
        max_in_flight: messages of one partition taken in and not done, at most.
        max_in_flight_bytes: bytes of all messages taken in and not done, at most.
        commit_interval: seconds between commits.
        stop_timeout: seconds a stop may drain.

    Raises:
        ConfigurationError: an option is wrong.
    """

    def __init__(
        self,
        name: str,
        *,
        bootstrap_servers: str,
        workers: int = 16,
        config: ClientConfig | None = None,
        coordinator: bool = False,
        prefix: str = "penstock",
        pinned: bool = False,
        max_in_flight: int = 10_000,
        max_in_flight_bytes: int = 128 * 1024 * 1024,
        commit_interval: float = 1.0,
        stop_timeout: float = 30.0,
    ) -> None:
        check.not_empty("name", name)
        check.not_empty("bootstrap_servers", bootstrap_servers)
        self.name = name
        self.bootstrap_servers = bootstrap_servers
        self._settings = ConsumerSettings(
            workers=workers,
            pinned=pinned,
            max_in_flight=max_in_flight,
            max_in_flight_bytes=max_in_flight_bytes,
            commit_interval=commit_interval,
            stop_timeout=stop_timeout,
            config=config if config is not None else {},
        )
        self._coordinator = coordinator
        self._prefix = prefix
        self._handlers: dict[str, Handler] = {}
        self._sinks: list[SinkSpec] = []

    def handler(
        self,
        *topics: str,
        order: str | Order = Order.KEY,
        keyless: str | Keyless = Keyless.PARTITION,
        retry: RetryPolicy | None = None,
        dead_letter: bool | str = False,
        dead_letter_topic: str = "dlq.{topic}",
    ) -> Callable[[FunctionT], FunctionT]:
        """Register a function for the messages of one topic or several. The function itself is returned unchanged.

        Args:
            topics: names of the topics.
            order: "key" (default): messages with the same key are handled one at a time and in order, in all topics
                of the app. "partition": those of the same partition. "none": none wait.
            keyless: what stands for the key where there is none: "partition" (default), "together" or "spread".
            retry: made by `penstock.retry`; five tries with growing waits when left out.
            dead_letter: what becomes of a message whose retries are exhausted: True writes it to the dead-letter
                topic, "drop" logs and counts it, "stop" or False (default) stops the app and keeps the offset.
            dead_letter_topic: name of the dead-letter topic; created when absent.

        Raises:
            ConfigurationError: an option is wrong, the function cannot be called, or a topic has a handler already.
        """
        names = check.names("topic", topics)

        def register(function: FunctionT) -> FunctionT:
            one = handler(
                function,
                order=order,
                keyless=keyless,
                retry_policy=retry,
                dead_letter=dead_letter,
                dead_letter_topic=dead_letter_topic,
            )
            for topic in names:
                if topic in self._handlers:
                    raise ConfigurationError(
                        f"topic {topic} has the handler {self._handlers[topic].name} already; one topic has one "
                        "handler in an app: call both from one, or make a second App with another name"
                    )
                self._handlers[topic] = one
            return function

        return register

    def sink(
        self,
        *topics: str,
        trigger: str = "5 seconds",
        name: str | None = None,
        checkpoint_location: str | None = None,
        starting_offsets: str = "earliest",
    ) -> Callable[[SinkFunction], SinkFunction]:
        """Register a function for Spark's micro-batches of one topic or several: `function(batch, batch_id)`.

        The batches hold committed messages only, with the columns of Spark's Kafka source. They run in the Spark
        session that the process has, or in a new one; make your own before `start` to configure it.

        Args:
            topics: names of the topics.
            trigger: an interval such as "5 seconds", or "available now" to end when all is read.
            name: name of the query; the app's and the function's when left out.
            checkpoint_location: where Spark keeps its progress. Without one a restart reads from `starting_offsets`
                again, which a sink with a ledger, such as `SqlSink`, takes without storing rows twice.
            starting_offsets: "earliest" (default), "latest" or Spark's JSON, where there is no checkpoint yet.

        Raises:
            ConfigurationError: an option is wrong or the function cannot be called.
        """
        names = check.names("topic", topics)
        check.not_empty("trigger", trigger)

        def register(function: SinkFunction) -> SinkFunction:
            check.a_callable("sink", function)
            called = name or f"{self.name}-{getattr(function, '__name__', type(function).__name__)}"
            self._sinks.append(SinkSpec(names, function, trigger, called, checkpoint_location, starting_offsets))
            return function

        return register

    def start(self) -> RunningApp:
        """Start the handlers, the sinks, and the coordinator where asked for, and return at once.

        Raises:
            BrokerConnectionError: no broker answered.
            TopicNotFoundError: a topic does not exist.
            ConfigurationError: there is nothing to run, PySpark is missing for a sink, or the Kafka client refused
                its configuration.
        """
        if not self._handlers and not self._sinks:
            raise ConfigurationError(
                f"app {self.name} has no handler and no sink; register one with @app.handler(topic) or @app.sink(topic)"
            )
        running = RunningApp(
            Coordinator(bootstrap_servers=self.bootstrap_servers, prefix=self._prefix) if self._coordinator else None,
            LitePushConsumer(
                self.name, self._handlers, bootstrap_servers=self.bootstrap_servers, settings=self._settings
            )
            if self._handlers
            else None,
        )
        running.start(self._start_sinks)
        return running

    def _start_sinks(self) -> list[StreamingQuery]:
        if not self._sinks:
            return []
        from penstock.spark_sink import start_sink

        admin = admin_client(self.bootstrap_servers, self._settings.config)
        require_topics(admin, self.bootstrap_servers, {topic for one in self._sinks for topic in one.topics})
        from pyspark.sql import SparkSession

        spark = SparkSession.builder.appName(self.name).getOrCreate()
        return [
            start_sink(
                spark,
                one.topics,
                one.function,
                bootstrap_servers=self.bootstrap_servers,
                config=self._settings.config,
                trigger=one.trigger,
                name=one.name,
                checkpoint_location=one.checkpoint_location,
                starting_offsets=one.starting_offsets,
            )
            for one in self._sinks
        ]

    def run(self) -> None:
        """Run until SIGTERM or SIGINT: the first drains, commits and leaves the group, the second leaves at once.

        Call it from the main thread, for only that hears signals.

        Raises:
            PenstockError: what stopped the app, where it stopped by itself; and as `start`.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError("App.run() hears signals, so it needs the main thread; use App.start() elsewhere")
        running = self.start()
        former = {one: signal.signal(one, running.on_signal) for one in (signal.SIGTERM, signal.SIGINT)}
        try:
            while not running.wait(_LOOK_S):
                pass
        finally:
            try:
                running.stop()
            finally:
                for one, what in former.items():
                    signal.signal(one, what)


class RunningApp:
    """A started app. Made by `App.start`. All methods may be called from any thread."""

    def __init__(self, coordinator: Coordinator | None, consumer: LitePushConsumer | None) -> None:
        self._coordinator = coordinator
        self._consumer = consumer
        self._signals = 0
        self._stop_asked = threading.Event()
        #: Spark's queries of the app's sinks.
        self.queries: list[StreamingQuery] = []

    def start(self, start_sinks: Callable[[], list[StreamingQuery]]) -> None:
        """Start the parts; where one fails, stop those before it. Called once, by `App.start`."""
        try:
            if self._coordinator is not None:
                self._coordinator.start()
            if self._consumer is not None:
                self._consumer.start()
            self.queries = start_sinks()
        except BaseException:
            self.stop()
            raise

    def statistics(self) -> ConsumerStatistics:
        """Return the consumer's counts of this moment.

        Raises:
            ConfigurationError: the app has sinks only; ask its `queries` for their progress.
        """
        if self._consumer is None:
            raise ConfigurationError("the app has no handler to count for; its sinks' progress is in `queries`")
        return self._consumer.statistics()

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Stop with a drain at the first signal, at once at the second."""
        self._signals += 1
        self._stop_asked.set()
        if self._consumer is not None:
            self._consumer.request_stop(now=self._signals > 1)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the app has ended or was told to; return whether that is so.

        Args:
            timeout: seconds; for ever when left out.

        Raises:
            PenstockError: what stopped the app, where it stopped by itself.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            # Looked at first: a query that ends after this is found with its failure in the next turn.
            ended = not any(query.isActive for query in self.queries)
            self._raise_failed_query()
            step = _LOOK_S if deadline is None else min(_LOOK_S, max(0.0, deadline - time.monotonic()))
            if self._consumer is not None:
                if self._consumer.wait(step):
                    return True
            elif ended or self._stop_asked.wait(step):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def _raise_failed_query(self) -> None:
        for query in self.queries:
            failure = None if query.isActive else query.exception()
            if failure is not None:
                raise SinkError(
                    f"the query {query.name} ended: {str(failure).splitlines()[0]}; what it stored stands, "
                    "mend the cause and start again"
                ) from failure

    def stop(self, timeout: float | None = None) -> bool:
        """Drain, commit, leave the group; stop the sinks. Returns whether everything taken in was done.

        Args:
            timeout: seconds the drain may take; the app's `stop_timeout` when left out.

        Raises:
            PenstockError: what stopped the consumer before, where it stopped by itself.
        """
        self._stop_asked.set()
        try:
            return self._consumer is None or self._consumer.stop(timeout)
        finally:
            for query in self.queries:
                query.stop()
            if self._coordinator is not None:
                self._coordinator.stop()

    def __enter__(self) -> Self:
        """Return itself, running."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; without draining when an exception passes through."""
        if self._consumer is not None:
            self._consumer.request_stop(now=kind is not None)
        self.stop()


__all__ = ["App", "RunningApp"]
