"""`App`: handlers and sinks by decorator, run as one. The face of penstock; the engines do the work."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from penstock import config as check
from penstock.answering import answering
from penstock.cluster import Cluster
from penstock.config import PROCESS_VARIABLE, ClientConfig
from penstock.consumer import (
    ConsumerSettings,
    DeadLetterFormat,
    DeadLetterLimit,
    Handler,
    Keyless,
    LitePushConsumer,
    Middleware,
    Order,
    RetryPolicy,
    WorkerResource,
    handler,
)
from penstock.consumer.decoding import DecoderSpec
from penstock.consumer.handlers import Filter
from penstock.consumer.ordering import KeyFunction
from penstock.errors import ConfigurationError
from penstock.kafka import admin_client, require_topics
from penstock.running import LOOK_S, Lifespan, RunningApp
from penstock.transactions import Coordinator

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.telemetry import Telemetry

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])
ResourceT = TypeVar("ResourceT")
LifespanT = TypeVar("LifespanT", bound=Lifespan)
SinkFunction = Callable[["DataFrame", int], None]

_log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """A decorated sink: what it reads, when, and what gets each batch."""

    topics: tuple[str, ...]
    function: SinkFunction
    trigger: str
    name: str
    checkpoint_location: str | None
    starting_offsets: str
    options: Mapping[str, str]


class App:
    """A consumer group with its handlers and sinks.

    Nothing is connected before `run` or `start`. Registering is for one thread; everything else may be called from any.

    Args:
        name: name of the app: the consumer group and the threads are called by it.
        bootstrap_servers: addresses of brokers, `host:port` with commas in between.
        workers: worker threads.
        max_concurrency: `async def` handlers under way at once.
        config: librdkafka's keys as they are.
        coordinator: whether this process also runs a transaction coordinator.
        prefix: prefix of the transaction topics, for that coordinator.
        pinned: one lane for each worker, which alone serves it.
        max_in_flight: messages of one partition taken in and not done, at most, parked ones left out.
        max_in_flight_bytes: bytes of all messages taken in and not done, at most, parked ones left out.
        max_parked: messages of one partition that wait for a retry or behind one, at most.
        max_parked_bytes: bytes of all such messages, at most.
        commit_interval: seconds between commits.
        stop_timeout: seconds a stop may drain.
        revoke_timeout: seconds a revocation waits for running handlers.
        stall_after: seconds in a handler after which the watchdog reports a message.
        dead_letter_limit: when the app stops rather than write one more dead letter.
        middlewares: hooks around every handler, the first outermost.
        telemetry: spans and metrics by OpenTelemetry; None (default) for none, at no cost.

    Raises:
        ConfigurationError: an option is wrong.
    """

    def __init__(
        self,
        name: str,
        *,
        bootstrap_servers: str,
        workers: int = 16,
        max_concurrency: int = 1_000,
        config: ClientConfig | None = None,
        coordinator: bool = False,
        prefix: str = "penstock",
        pinned: bool = False,
        max_in_flight: int = 10_000,
        max_in_flight_bytes: int = 128 * 1024 * 1024,
        max_parked: int = 10_000,
        max_parked_bytes: int = 32 * 1024 * 1024,
        commit_interval: float = 1.0,
        stop_timeout: float = 30.0,
        revoke_timeout: float = 5.0,
        stall_after: float = 60.0,
        dead_letter_limit: DeadLetterLimit | None = None,
        middlewares: Sequence[Middleware] = (),
        telemetry: Telemetry | None = None,
    ) -> None:
        check.not_empty("name", name)
        check.not_empty("bootstrap_servers", bootstrap_servers)
        self.name = name
        self.bootstrap_servers = bootstrap_servers
        self._settings = ConsumerSettings(
            workers=workers,
            max_concurrency=max_concurrency,
            pinned=pinned,
            max_in_flight=max_in_flight,
            max_in_flight_bytes=max_in_flight_bytes,
            max_parked=max_parked,
            max_parked_bytes=max_parked_bytes,
            commit_interval=commit_interval,
            stop_timeout=stop_timeout,
            revoke_timeout=revoke_timeout,
            stall_after=stall_after,
            dead_letter_limit=dead_letter_limit or DeadLetterLimit(),
            telemetry=telemetry,
            config=config if config is not None else {},
        )
        self._coordinator = coordinator
        self._prefix = prefix
        self._middlewares = tuple(middlewares)
        for one in self._middlewares:
            if not isinstance(one, Middleware):
                raise ConfigurationError(
                    "middlewares must be objects of a subclass of penstock.Middleware, but one is a "
                    f"{type(one).__name__}"
                )
        self._lifespans: list[Lifespan] = []
        self._resources: list[WorkerResource[Any]] = []
        self._handlers: dict[str, Handler] = {}
        self._sinks: list[SinkSpec] = []

    def handler(
        self,
        *topics: str,
        order: str | Order = Order.KEY,
        keyless: str | Keyless = Keyless.PARTITION,
        key: str | KeyFunction | None = None,
        filter: Filter | None = None,  # noqa: A002 - the word of the field
        decoder: DecoderSpec = None,
        batch: int = 1,
        linger: float = 0.0,
        retry: RetryPolicy | None = None,
        retry_delays: Sequence[float] = (),
        dead_letter: bool | str = False,
        dead_letter_topic: str | None = None,
        dead_letter_format: str | DeadLetterFormat = DeadLetterFormat.KAFKA,
        rate: float | None = None,
        key_rate: float | None = None,
        deferred_timeout: float | None = None,
    ) -> Callable[[FunctionT], FunctionT]:
        """Register a function for the messages of one topic or several. The function itself is returned unchanged.

        A plain function runs on a worker thread, an `async def` on the app's event loop. Both may return a
        `DeferredCompletion` and finish later.

        Args:
            topics: names of the topics.
            order: "key" (default): messages with the same key are handled one at a time and in order, in all topics
                of the app. "partition": those of the same partition. "none": none wait.
            keyless: what stands for the key where there is none: "partition" (default), "together" or "spread".
            key: what stands for the record's key: "header:name", or a function of the message.
            filter: called with a message; where it returns false the message is done at once, and counted.
            decoder: "json", a pydantic model, a msgspec struct or a callable of bytes: makes `message.body`.
            batch: messages given at once, at most; more than 1 gives the function a list.
            linger: seconds that a batch which is not full waits for more, from the arrival of its first message.
            retry: made by `penstock.retry`; five tries with growing waits when left out.
            retry_delays: seconds; when the tries are exhausted the message waits in the topic
                `retry.<app>.<topic>`, once for each delay, and holds neither its key nor the watermark meanwhile.
            dead_letter: what becomes of a message whose retries are exhausted: True writes it to the dead-letter
                topic, "drop" logs and counts it, "stop" or False (default) stops the app and keeps the offset.
            dead_letter_topic: name of the dead-letter topic; created when absent. By the format, `dlq.{topic}` or
                `{topic}-dlt`.
            dead_letter_format: "kafka" (default, KIP-1191) or "spring".
            rate: messages/s that are begun, over all keys; 0 holds all; None (default) for no limit.
            key_rate: messages/s of each key; None (default) for no limit.
            deferred_timeout: seconds that a deferred completion may stay out before it counts as failed; None
                (default) for ever.

        Raises:
            ConfigurationError: an option is wrong, the function cannot be called, or a topic has a handler already.
        """
        names = check.names("topic", topics)

        def register(function: FunctionT) -> FunctionT:
            one = handler(
                function,
                order=order,
                keyless=keyless,
                key=key,
                filter=filter,
                decoder=decoder,
                batch=batch,
                linger=linger,
                retry_policy=retry,
                retry_delays=retry_delays,
                dead_letter=dead_letter,
                dead_letter_topic=dead_letter_topic,
                dead_letter_format=dead_letter_format,
                rate=rate,
                key_rate=key_rate,
                deferred_timeout=deferred_timeout,
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

    def lifespan(self, function: LifespanT) -> LifespanT:
        """Register a generator function that runs around the app: what stands before its `yield` at the start, the rest
        at the end. An `async def` runs on the event loop of the app's async handlers.

        Those registered first start first and end last. What fails at the start keeps the app from starting.
        """  # noqa: D205 - the first sentence needs the room
        if not (inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)):
            raise ConfigurationError(
                f"lifespan takes a function with one `yield`, but {getattr(function, '__qualname__', function)} is none"
            )
        self._lifespans.append(function)
        return function

    def worker_resource(self, function: Callable[[], Generator[ResourceT, Any, Any]]) -> WorkerResource[ResourceT]:
        """Register a generator function that makes what each worker has one of; handlers ask it with `.get()`.

        What stands before its `yield` runs on a worker at the first `get()` there, the rest when the worker ends.
        """
        if not inspect.isgeneratorfunction(function):
            raise ConfigurationError(
                "worker_resource takes a function with one `yield`, but "
                f"{getattr(function, '__qualname__', function)} is none"
            )
        resource = WorkerResource(function)
        self._resources.append(resource)
        return resource

    def sink(
        self,
        *topics: str,
        trigger: str = "5 seconds",
        name: str | None = None,
        checkpoint_location: str | None = None,
        starting_offsets: str = "earliest",
        options: Mapping[str, str] | None = None,
    ) -> Callable[[SinkFunction], SinkFunction]:
        """Register a function for Spark's micro-batches of one topic or several: `function(batch, batch_id)`.

        The batches hold committed messages only, with the columns of Spark's Kafka source. They run in the Spark
        session that the process has, or in a new one; make your own before `start` to configure it. With
        `penstock run --processes N` they run in the first process only.

        Args:
            topics: names of the topics.
            trigger: an interval such as "5 seconds", or "available now" to end when all is read.
            name: name of the query; the app's and the function's when left out.
            checkpoint_location: where Spark keeps its progress. Without one a restart reads from `starting_offsets`
                again, which a sink with a ledger, such as `SqlSink`, takes without storing rows twice.
            starting_offsets: "earliest" (default), "latest" or Spark's JSON, where there is no checkpoint yet.
            options: further options of the source by Spark's names: `maxOffsetsPerTrigger` bounds a batch, without it
                the first one holds all that is there.

        Raises:
            ConfigurationError: an option is wrong or the function cannot be called.
        """
        names = check.names("topic", topics)
        check.not_empty("trigger", trigger)

        def register(function: SinkFunction) -> SinkFunction:
            check.a_callable("sink", function)
            called = name or f"{self.name}-{getattr(function, '__name__', type(function).__name__)}"
            self._sinks.append(
                SinkSpec(names, function, trigger, called, checkpoint_location, starting_offsets, dict(options or {}))
            )
            return function

        return register

    def _new_coordinator(self) -> Coordinator:
        return Coordinator(
            bootstrap_servers=self.bootstrap_servers, prefix=self._prefix, telemetry=self._settings.telemetry
        )

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
            self._new_coordinator() if self._coordinator else None,
            self.consumer() if self._handlers else None,
            self._lifespans,
        )
        running.start(self._start_sinks)
        return running

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers by topic."""
        return dict(self._handlers)

    def consumer(self, cluster: Cluster | None = None) -> LitePushConsumer:
        """Return a consumer with the app's handlers, not started.

        Args:
            cluster: where its clients and the time come from; a real cluster at `bootstrap_servers` when left out.

        Raises:
            ConfigurationError: the app has no handler.
        """
        return LitePushConsumer(
            self.name,
            self._handlers,
            bootstrap_servers=self.bootstrap_servers,
            settings=self._settings,
            middlewares=self._middlewares,
            resources=self._resources,
            cluster=cluster,
        )

    def _start_sinks(self, started: list[StreamingQuery]) -> None:
        """Start the sinks' queries, each put down in `started` at once: where the next fails, somebody must stop it."""
        if not self._sinks:
            return
        if os.environ.get(PROCESS_VARIABLE, "1") != "1":
            # Several queries on one checkpoint would stop one another.
            if not self._handlers:
                raise ConfigurationError(
                    f"app {self.name} has sinks only, which run in one process; leave --processes out"
                )
            _log.info("the sinks of %s run in process 1 only", self.name)
            return
        from penstock.spark_sink import start_sink
        from penstock.spark_sink.query import source_config

        admin = admin_client(self.bootstrap_servers, self._settings.config)
        require_topics(admin, self.bootstrap_servers, {topic for one in self._sinks for topic in one.topics})
        from pyspark.sql import SparkSession

        spark = SparkSession.builder.appName(self.name).getOrCreate()
        for one in self._sinks:
            query = start_sink(
                spark,
                one.topics,
                one.function,
                bootstrap_servers=self.bootstrap_servers,
                config=source_config(self._settings.config),
                trigger=one.trigger,
                name=one.name,
                checkpoint_location=one.checkpoint_location,
                starting_offsets=one.starting_offsets,
                options=one.options,
            )
            started.append(query)

    def run(self) -> None:
        """Run until SIGTERM or SIGINT: the first drains, commits and leaves the group, the second leaves at once.

        Call it from the main thread, for only that hears signals.

        Raises:
            PenstockError: what stopped the app, where it stopped by itself; and as `start`.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError("App.run() hears signals, so it needs the main thread; use App.start() elsewhere")
        # Before the start, which may take seconds: a signal meanwhile must not end the process without a word.
        early: list[int] = []
        former = {one: signal.signal(one, lambda number, _: early.append(number)) for one in _STOP_SIGNALS}
        try:
            running = self.start()
            try:
                for one in _STOP_SIGNALS:
                    signal.signal(one, running.on_signal)
                if early:
                    running.on_signal(early[0], None)
                with answering(partial(_explanation, self.name, running)):
                    while not running.wait(LOOK_S):
                        pass
            finally:
                running.stop()
        finally:
            for one, what in former.items():
                signal.signal(one, what)


def _explanation(name: str, running: RunningApp) -> dict[str, object]:
    """Return what `penstock explain` shows, as JSON has it: a key that is no text with its bytes escaped."""
    partitions = []
    for one in running.explain():
        key = one.key.decode(errors="backslashreplace") if isinstance(one.key, bytes) else one.key
        partitions.append({**asdict(one), "key": None if key is None else str(key), "text": str(one)})
    return {"group": name, "partitions": partitions}


__all__ = ["App", "RunningApp"]
