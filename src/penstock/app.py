"""`App`: handlers and sinks by decorator, run as one. The face of penstock; the engines do the work."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from penstock import options as check
from penstock.clients.cluster import Cluster
from penstock.consumer import (
    ConsumerSettings,
    DeadLetterFormat,
    DeadLetterLimit,
    Handler,
    Keyless,
    LitePushConsumer,
    MiddlewareSpec,
    OnFailure,
    Order,
    RetryPolicy,
    WorkerResource,
    handler,
)
from penstock.consumer.handlers.decoding import DecoderSpec
from penstock.consumer.handlers.encoding import EncoderSpec
from penstock.consumer.handlers.functions import require_yield
from penstock.consumer.handlers.handler import Filter
from penstock.consumer.handlers.lifespan import Lifespan
from penstock.consumer.handlers.middleware import middlewares_of, wrap
from penstock.consumer.handlers.ordering import KeyFunction
from penstock.consumer.handlers.patterns import register_pattern, topics_or_pattern
from penstock.errors import ConfigurationError
from penstock.options import ClientConfig
from penstock.reports.reporter import reporter_maker
from penstock.reports.settings import ReportSettings, report_settings
from penstock.running import RunningApp, coordinator_of, run_until_signal
from penstock.spark_sink.queries.app_sinks import AppSinks
from penstock.spark_sink.queries.sink_registry import SinkRegistry
from penstock.spark_sink.queries.sink_specs import in_first_process
from penstock.transactions import Coordinator
from penstock.transactions.wire.topics import StoreTopics

if TYPE_CHECKING:
    from penstock.spark_sink.sinks.handlers.sink import HandlerSink
    from penstock.telemetry import Telemetry

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])
ResourceT = TypeVar("ResourceT")
LifespanT = TypeVar("LifespanT", bound=Lifespan)


class App(SinkRegistry):
    """A consumer group with its handlers and sinks.

    Nothing is connected before `run` or `start`. Registering is for one thread; everything else may be called from any.

    Args:
        name: name of the app: the consumer group and the threads are called by it.
        bootstrap_servers: addresses of brokers, `host:port` with commas in between.
        workers: worker threads.
        max_concurrency: `async def` handlers under way at once.
        config: librdkafka's keys as they are.
        coordinator: whether this process also runs a transaction coordinator; or one with arguments of your own, made
            and not started, which this app starts and stops.
        prefix: prefix of the transaction topics, for the coordinator that `True` makes.
        pinned: one lane for each worker, which alone serves it.
        max_in_flight: messages of one partition taken in and not done, at most, parked ones left out.
        max_in_flight_bytes: bytes of all messages taken in and not done, at most, parked ones left out.
        max_parked: messages of one partition that wait for a retry or behind one, at most.
        max_parked_bytes: bytes of all such messages, at most.
        commit_interval: seconds between commits.
        stop_timeout: seconds a stop may drain, and a sink's batch may take meanwhile.
        revoke_timeout: seconds a revocation waits for running handlers, and for its commit.
        stall_after: seconds in a handler after which the watchdog reports a message.
        dead_letter_limit: when the app stops rather than give up one more message.
        middlewares: functions `(message, call_next)` around every handler, the first outermost; see `Middleware`.
        telemetry: spans and metrics by OpenTelemetry; None (default) for none, at no cost.
        exactly_once: whether what handlers return and the offsets of their messages are committed in one Kafka
            transaction, so that readers of committed messages see each result once; effects outside Kafka are at
            least once all the same.
        transaction_interval: seconds between two such transactions.
        exception_texts: whether the log shows the texts of what handlers raise; they often quote the message.
        report: whether each process tells the topic `penstock.reports` how it does, for `penstock status`; or how.

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
        coordinator: bool | Coordinator = False,
        prefix: str = "penstock",
        pinned: bool = False,
        max_in_flight: int = 10_000,
        max_in_flight_bytes: int = 128 * 1024 * 1024,
        max_parked: int = 10_000,
        max_parked_bytes: int = 32 * 1024 * 1024,
        commit_interval: float = 1.0,
        stop_timeout: float = 25.0,
        revoke_timeout: float = 5.0,
        stall_after: float = 60.0,
        dead_letter_limit: DeadLetterLimit | None = None,
        middlewares: Sequence[MiddlewareSpec] = (),
        telemetry: Telemetry | None = None,
        exactly_once: bool = False,
        transaction_interval: float = 0.1,
        exception_texts: bool = False,
        report: bool | ReportSettings = False,
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
            dead_letter_limit=dead_letter_limit,
            telemetry=telemetry,
            exactly_once=exactly_once,
            transaction_interval=transaction_interval,
            exception_texts=exception_texts,
            config=config if config is not None else {},
        )
        self._coordinator = coordinator
        self.report = report_settings(report)
        self._prefix = prefix
        self._middlewares = middlewares_of(middlewares)
        self._lifespans: list[Lifespan] = []
        self._resources: list[WorkerResource[Any]] = []
        self._handlers: dict[str, Handler] = {}
        self._consumed: dict[str, Handler] = {}  # those that are not left to Spark
        self._patterns: dict[str, Handler] = {}
        self._sinks = []

    def handler(
        self,
        *topics: str,
        pattern: str | None = None,
        order: str | Order = Order.KEY,
        keyless: str | Keyless = Keyless.PARTITION,
        key: str | KeyFunction | None = None,
        key_space: str | None = None,
        filter: Filter | None = None,  # noqa: A002 - the word of the field
        decoder: DecoderSpec = None,
        to: str | None = None,
        encoder: EncoderSpec = None,
        batch: int = 1,
        linger: float = 0.0,
        retry: RetryPolicy | None = None,
        retry_delays: Sequence[float] = (),
        on_failure: str | OnFailure = OnFailure.STOP,
        dead_letter_topic: str | None = None,
        dead_letter_format: str | DeadLetterFormat = DeadLetterFormat.KAFKA,
        rate: float | None = None,
        key_rate: float | None = None,
        deferred_timeout: float | None = None,
    ) -> Callable[[FunctionT], FunctionT]:
        """Register a function for the messages of one topic or several. The function itself is returned unchanged.

        A plain function runs on a worker thread, an `async def` on the app's event loop. What it raises is a failure.
        What it returns is published, an `Outgoing` or several in a list or by `yield`, and then its message is done;
        what brokers refuse of it is a failure of that message. It may return a `DeferredCompletion` and finish later.
        It may have a second parameter, annotated `penstock.Context`: see there.

        Args:
            topics: names of the topics.
            pattern: in place of them, a regular expression: topics that match as a whole, also those that come up
                while the app runs. A topic that a handler names is that handler's.
            order: "key" (default): messages with the same key are handled one at a time and in order, in all topics
                of the handler. "partition": those of the same partition. "none": none wait.
            keyless: what stands for the key where there is none: "partition" (default), "together" or "spread".
            key: what stands for the record's key: "header:name", or a function of the message.
            key_space: name that handlers share whose keys mean the same, such as "customer": their messages of one key
                wait for each other too. None (default): the keys are the handler's own.
            filter: called with a message; where it returns false the message is done at once, and counted.
            decoder: "json", a pydantic model, a msgspec struct, a deserializer of confluent-kafka or a callable of
                bytes: makes `message.body`.
            to: topic of what the function returns, where that is no `Outgoing`: one value, with the message's key; a
                handler of batches returns a list with one for each message. None (default): only `Outgoing` is
                published.
            encoder: "json", a pydantic model, a msgspec struct, a serializer of confluent-kafka or a callable: makes
                bytes of the values that it returns and that are no bytes.
            batch: messages given at once, at most; more than 1 gives the function a list. What fails comes in batches
                again, and each message alone before it is given up; see `BatchError`.
            linger: seconds that a batch which is not full waits for more, from the arrival of its first message.
            retry: made by `penstock.retry`; five tries with growing waits when left out.
            retry_delays: seconds; when the tries are exhausted the message waits in the topic
                `retry.<app>.<topic>.<delay>` of one after the other, such as `retry.sms.orders.60s`, and holds neither
                its key nor the watermark meanwhile.
            on_failure: what becomes of a message whose retries are exhausted. "stop" (default): the app stops and keeps
                the offset. "dead_letter": it is written to the dead-letter topic. "drop": it is logged and counted.
                "hold": its key stays parked, everything else goes on, and log, statistics and `explain` say so.
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
        names = topics_or_pattern(topics, pattern)

        def register(function: FunctionT) -> FunctionT:
            one = handler(
                function,
                order=order,
                keyless=keyless,
                key=key,
                key_space=key_space,
                filter=filter,
                decoder=decoder,
                to=to,
                encoder=encoder,
                batch=batch,
                linger=linger,
                retry_policy=retry,
                retry_delays=retry_delays,
                on_failure=on_failure,
                dead_letter_topic=dead_letter_topic,
                dead_letter_format=dead_letter_format,
                rate=rate,
                key_rate=key_rate,
                deferred_timeout=deferred_timeout,
            )
            wrap(one, self._middlewares)  # to refuse what does not fit where it is written
            if pattern is not None:
                register_pattern(self._patterns, pattern, one)
            for topic in names:
                if topic in self._handlers:
                    raise ConfigurationError(
                        f"topic {topic} has the handler {self._handlers[topic].name} already; one topic has one "
                        "handler in an app: call both from one, or make a second App with another name"
                    )
                self._handlers[topic] = self._consumed[topic] = one
            return function

        return register

    def lifespan(self, function: LifespanT) -> LifespanT:
        """Register a generator function that runs around the app: up to its `yield` at the start, the rest at the end.

        Those registered first start first and end last. What fails at the start keeps the app from starting. An
        `async def` runs on the event loop of the app's async handlers. What one of them yields is `Context.state`.
        """
        require_yield("lifespan", function, may_be_async=True)
        self._lifespans.append(function)
        return function

    def worker_resource(self, function: Callable[[], Generator[ResourceT, Any, Any]]) -> WorkerResource[ResourceT]:
        """Register a generator function that makes what each worker has one of; handlers ask it with `.get()`.

        What stands before its `yield` runs on a worker at the first `get()` there, the rest when the worker ends.
        """
        require_yield("worker_resource", function)
        resource = WorkerResource(function)
        self._resources.append(resource)
        return resource

    def handler_sink(
        self,
        *topics: str,
        parallelism: int,
        headers: bool = True,
        name: str | None = None,
        ledger_topic: str | None = None,
        atomic_batches: bool = False,
    ) -> HandlerSink:
        """Return a sink that calls this app's handlers on Spark's executors, for `sink` or `foreachBatch`.

        Args:
            topics: topics whose handlers to take; those of all, when left out. `start` leaves them to Spark from then
                on, so that no message is handled by both.
            parallelism: tasks that a batch is spread over.
            headers: whether frames have the column `headers`, which the source's option `includeHeaders` adds.
            name: of the query, under which it remembers what it has published; needed where handlers publish.
            ledger_topic: where it remembers that, `penstock.spark-ledger` when left out.
            atomic_batches: whether what a batch publishes is one transaction.

        Raises:
            ConfigurationError: a topic has no handler, or a handler cannot be kept on executors: see `HandlerSink`.
        """
        from penstock.spark_sink.sinks.handlers.from_app import sink_of

        chosen = {topic: self._handlers.get(topic) for topic in check.names("topic", topics or self._handlers)}
        around = (self._middlewares, self._lifespans, self._resources)
        made_of = (self.name, chosen, self._settings, self.bootstrap_servers, around)
        sink = sink_of(
            *made_of,
            parallelism=parallelism,
            headers=headers,
            name=name,
            ledger_topic=ledger_topic,
            atomic_batches=atomic_batches,
        )
        self._consumed = {topic: one for topic, one in self._consumed.items() if topic not in chosen}
        return sink

    def start(self) -> RunningApp:
        """Start the handlers, the sinks, and the coordinator where asked for, and return at once.

        Raises:
            BrokerConnectionError: no broker answered.
            TopicNotFoundError: a topic does not exist.
            MissingRightError: the brokers do not allow what it needs; the message says what gives it.
            ConfigurationError: there is nothing to run, `coordinator` is none, PySpark or Java is missing for a sink,
                a sink has neither a checkpoint nor a ledger, or the Kafka client refused its configuration.
            SinkError: a sink cannot store what its query gives it.
        """
        has_consumer = bool(self._consumed or self._patterns)
        if not has_consumer and not self._sinks:
            what = "register one with @app.handler(topic) or @app.sink(topic)"
            raise ConfigurationError(f"app {self.name} has no handler and no sink; {what}")
        running = RunningApp(
            coordinator_of(self._coordinator, self.bootstrap_servers, self._prefix, self._settings.telemetry),
            self.consumer() if has_consumer else None,
            self._lifespans,
            self._new_sinks(),
            reporter_maker(self.report, self.name, self.bootstrap_servers, self._settings.config),
        )
        running.start(self.name)
        return running

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers by topic."""
        return dict(self._handlers)

    @property
    def patterns(self) -> Mapping[str, Handler]:
        """The handlers by pattern."""
        return dict(self._patterns)

    @property
    def _left_out(self) -> frozenset[str]:
        """Topics that no pattern takes: those left to Spark, and the store's own."""
        return frozenset(self._handlers) | StoreTopics(self._prefix).all | {(self.report or ReportSettings()).topic}

    def consumer(self, cluster: Cluster | None = None) -> LitePushConsumer:
        """Return a consumer with the app's handlers, save those left to Spark, not started.

        Args:
            cluster: where its clients and the time come from; a real cluster at `bootstrap_servers` when left out.

        Raises:
            ConfigurationError: the app has no handler.
        """
        return LitePushConsumer(
            self.name,
            self._consumed,
            bootstrap_servers=self.bootstrap_servers,
            patterns=self._patterns,
            left_out=self._left_out,
            settings=self._settings,
            middlewares=self._middlewares,
            resources=self._resources,
            cluster=cluster,
            app=self,
        )

    def _new_sinks(self) -> AppSinks | None:
        if not self._sinks or not in_first_process(self.name, alone=not (self._consumed or self._patterns)):
            return None
        return AppSinks(
            self.name,
            self._sinks,
            bootstrap_servers=self.bootstrap_servers,
            config=self._settings.config,
            telemetry=self._settings.telemetry,
            stop_timeout=self._settings.stop_timeout,
        )

    def run(self) -> None:
        """Run until SIGTERM or SIGINT: the first drains, commits and leaves the group, the second leaves at once.

        Call it from the main thread, for only that hears signals.

        Raises:
            PenstockError: what stopped the app, where it stopped by itself; and as `start`.
            StoppedError: messages that were taken in were not done in time, or a second signal did not wait for them.
        """
        run_until_signal(self.name, self.start)
