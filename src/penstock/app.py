"""`App`: handlers and sinks by decorator, run as one. The face of penstock; the engines do the work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from penstock import options as check
from penstock.clients.cluster import Cluster
from penstock.consumer import (
    ConsumerSettings,
    DeadLetterLimit,
    Handler,
    LitePushConsumer,
    MiddlewareSpec,
    WorkerResource,
)
from penstock.consumer.handlers.environment import Lifespan, middlewares_of
from penstock.consumer.handlers.registry import HandlerRegistry
from penstock.errors import ConfigurationError
from penstock.fleet_member import (
    CommandSettings,
    FleetMember,
    ReportSettings,
    command_settings,
    report_settings,
    sender_of,
)
from penstock.option_list import noting_stated, refusing_removed
from penstock.options import ClientConfig
from penstock.running import RunningApp, coordinator_of, run_until_signal
from penstock.settings import effective
from penstock.spark_sink.queries.app_sinks import AppSinks
from penstock.spark_sink.queries.sink_specs import SinkRegistry, in_first_process
from penstock.transactions import Coordinator
from penstock.transactions.wire.topics import StoreTopics

if TYPE_CHECKING:
    from penstock.spark_sink.sinks.handlers.sink import HandlerSink
    from penstock.telemetry import Telemetry
    from penstock.transactions.inboxes import InboxTrimmer


class App(HandlerRegistry, SinkRegistry):
    """A consumer group with its handlers and sinks.

    Nothing is connected before `run` or `start`. Registering is for one thread; everything else may be called from any.

    Args:
        name: name of the app: the consumer group and the threads are called by it.
        bootstrap_servers: addresses of brokers, `host:port` with commas in between; left out where they stand outside
            of the code: see `penstock.settings`.
        workers: worker threads.
        max_concurrency: `async def` handlers under way at once.
        config: librdkafka's keys as they are.
        coordinator: whether this process also runs a transaction coordinator; or one of your own, not started.
        prefix: prefix of the transaction topics, for the coordinator that `True` makes.
        pinned: one lane for each worker, which alone serves it.
        max_in_flight: messages of one partition taken in and not done, at most; and as many that are set aside, for a
            retry or behind one.
        max_in_flight_bytes: bytes of all messages taken in and not done, at most; and a quarter of that of those that
            are set aside.
        commit_interval: seconds between commits.
        stop_timeout: seconds a stop may drain, and a sink's batch may take meanwhile.
        revoke_timeout: seconds a revocation waits for running handlers, and for its commit.
        stall_after: seconds in a handler after which the watchdog reports a message.
        time_limit: seconds that a handler may take which states no `time_limit`; None (default) for ever.
        dead_letter_limit: when the app stops rather than give up one more message.
        middlewares: functions `(message, call_next)` around every handler, the first outermost; see `Middleware`.
        telemetry: spans and metrics by OpenTelemetry; None (default) for none, at no cost.
        exactly_once: whether what handlers return and the offsets of their messages are committed in one Kafka
            transaction, so that readers of committed messages see each result once; effects outside Kafka are at
            least once all the same.
        transaction_interval: seconds between two such transactions.
        report: whether each process tells the topic `penstock.reports` how it does, for `penstock status`; or how.
        commands: whether each process carries out commands in the topic `penstock.commands`, as by the dashboard: who
            may write there commands it; or which topic, and with which token.

    Raises:
        ConfigurationError: an option is wrong, here or where it stands instead of this: see `penstock.settings`.
    """

    #: The names of the options that the program has stated.
    stated: frozenset[str]

    @refusing_removed
    @noting_stated
    def __init__(
        self,
        name: str,
        *,
        bootstrap_servers: str | None = None,
        workers: int = 16,
        max_concurrency: int = 1_000,
        config: ClientConfig | None = None,
        coordinator: bool | Coordinator = False,
        prefix: str = "penstock",
        pinned: bool = False,
        max_in_flight: int = 10_000,
        max_in_flight_bytes: int = 128 * 1024 * 1024,
        commit_interval: float = 1.0,
        stop_timeout: float = 25.0,
        revoke_timeout: float = 5.0,
        stall_after: float = 60.0,
        time_limit: float | None = None,
        dead_letter_limit: DeadLetterLimit | None = None,
        middlewares: Sequence[MiddlewareSpec] = (),
        telemetry: Telemetry | None = None,
        exactly_once: bool = False,
        transaction_interval: float = 0.1,
        report: bool | ReportSettings = False,
        commands: bool | CommandSettings = False,
    ) -> None:
        check.not_empty("name", name)
        self.name = name
        self.effective = found = effective(
            self.stated,
            bootstrap_servers=bootstrap_servers,
            coordinator=coordinator,
            prefix=prefix,
            workers=workers,
            max_concurrency=max_concurrency,
            pinned=pinned,
            max_in_flight=max_in_flight,
            max_in_flight_bytes=max_in_flight_bytes,
            commit_interval=commit_interval,
            stop_timeout=stop_timeout,
            revoke_timeout=revoke_timeout,
            stall_after=stall_after,
            time_limit=time_limit,
            exactly_once=exactly_once,
            transaction_interval=transaction_interval,
            report=report,
            commands=commands,
            config=config if config is not None else {},
        )
        with found.naming_origins():
            if found["bootstrap_servers"] is None:
                raise ConfigurationError(
                    f"bootstrap_servers of app {name} are given nowhere; give App(..., bootstrap_servers='host:9092'), "
                    "or set PENSTOCK_BOOTSTRAP_SERVERS"
                )
            check.not_empty("bootstrap_servers", found["bootstrap_servers"])
            own = found.without("bootstrap_servers", "coordinator", "prefix", "report", "commands")
            self._settings = ConsumerSettings(**own, dead_letter_limit=dead_letter_limit, telemetry=telemetry)
        self.bootstrap_servers: str = found["bootstrap_servers"]
        self._coordinator: bool | Coordinator = found["coordinator"]
        self.report = report_settings(found["report"])
        self.commands = command_settings(found["commands"])
        self._prefix: str = found["prefix"]
        self._middlewares = middlewares_of(middlewares)
        self._lifespans: list[Lifespan] = []
        self._resources: list[WorkerResource[Any]] = []
        self._handlers: dict[str, Handler] = {}
        self._spark_topics: set[str] = set()
        self._patterns: dict[str, Handler] = {}
        self._sinks = []
        self._inboxes: list[InboxTrimmer] = []

    def handler_sink(
        self,
        *topics: str,
        parallelism: int,
        headers: bool = True,
        name: str | None = None,
        ledger_topic: str | None = None,
        overlap: Literal["refused", "allowed"] = "refused",
    ) -> HandlerSink:
        """Return a sink that calls this app's handlers on Spark's executors, for `sink` or `foreachBatch`.

        Args:
            topics: topics whose handlers to take; those of all, when left out. `start` leaves them to Spark from then
                on, so that no message is handled by both.
            parallelism: tasks that a batch is spread over.
            headers: whether frames have the column `headers`, which the source's option `includeHeaders` adds.
            name: of the query, under which it remembers what it has published; needed where handlers publish or have
                dead letters.
            ledger_topic: where it remembers that, `penstock.spark-ledger` when left out.
            overlap: whether handlers of one key may run at once, in which case no setting of Spark is refused.

        Raises:
            ConfigurationError: a topic has no handler, or a handler cannot be kept on executors: see `HandlerSink`.
        """
        from penstock.spark_sink.sinks.handlers.sink import HandlerSink

        wanted = check.names("topic", topics or self._handlers)
        missing = sorted(set(wanted) - self._handlers.keys())
        if missing:
            raise ConfigurationError(
                f"app {self.name} has no handler for {', '.join(missing)}; register it with @app.handler before the "
                "sink is made"
            )
        chosen, settings = {topic: self._handlers[topic] for topic in wanted}, self._settings
        sink = HandlerSink(
            chosen,
            group=self.name,
            parallelism=parallelism,
            bootstrap_servers=self.bootstrap_servers,
            config=settings.config,
            middlewares=self._middlewares,
            lifespans=self._lifespans,
            resources=self._resources,
            max_concurrency=settings.max_concurrency,
            max_in_flight=settings.max_in_flight,
            max_in_flight_bytes=settings.max_in_flight_bytes,
            dead_letter_limit=settings.dead_letter_limit,
            headers=headers,
            telemetry=settings.telemetry,
            name=name,
            **({} if ledger_topic is None else {"ledger_topic": ledger_topic}),
            overlap=overlap,
        )
        self._spark_topics.update(chosen)
        return sink

    def inbox_database(
        self,
        connect: Callable[[], Any],
        *,
        keep: timedelta = timedelta(days=1),
        table: str = "penstock_inbox",
        schema: str | None = None,
    ) -> None:
        """Have the app trim the inbox that its handlers have in a database: see `penstock.inbox`.

        Once a minute each process deletes the old records of its partitions' messages, below the committed offsets.

        Args:
            connect: opens a connection, of the kinds `inbox` takes, which the app closes; called on a thread of its
                own.
            keep: how long records stay in any case, in addition to the handlers' `retry_delays`. It must be longer than
                a process can be cut off from its group in the middle of a handler and come back, and than messages of
                retry topics wait when they are due: what is handled then counts as new where the record is gone.
            table: the table's name.
            schema: the schema it is in; the connection's own where it is None.

        Raises:
            ConfigurationError: an argument is wrong.
        """
        from penstock.transactions.inboxes import InboxTrimmer

        self._inboxes.append(InboxTrimmer(connect, keep, table, schema))

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
        if not self.consumes and not self._sinks:
            what = "register one with @app.handler(topic) or @app.sink(topic)"
            raise ConfigurationError(f"app {self.name} has no handler and no sink; {what}")
        config, handlers = self._settings.config, (*self._handlers.values(), *self._patterns.values())
        # A message that waits in retry topics is below the committed offset, and the one that it was.
        retry_s = math.ceil(max((sum(handler.retry_delays) for handler in handlers), default=0))
        for inbox in self._inboxes:
            inbox.retry_s = retry_s
        running = RunningApp(
            coordinator_of(self._coordinator, self.bootstrap_servers, self._prefix, self._settings.telemetry),
            self.consumer() if self.consumes else None,
            self._lifespans,
            self._new_sinks(),
            fleet=FleetMember(sender_of(self.name, config), self.bootstrap_servers, config, self.report, self.commands),
            inboxes=self._inboxes,
        )
        running.start(self.name)
        return running

    @property
    def config(self) -> ClientConfig:
        """Its client settings, by librdkafka's names."""
        return self._settings.config

    def report_to(self, telemetry: Telemetry) -> Telemetry:
        """Report to it where the app was given no telemetry; return where it reports. Before the start."""
        self._settings = replace(self._settings, telemetry=self._settings.telemetry or telemetry)
        return self._settings.telemetry or telemetry

    @property
    def _left_out(self) -> frozenset[str]:
        """Topics that no pattern takes: those left to Spark, and the store's own."""
        commands, reports = self.commands or CommandSettings(), self.report or ReportSettings()
        ours = {reports.topic, commands.topic, commands.audit_topic}
        return frozenset(self._handlers) | StoreTopics(self._prefix).all | ours

    def consumer(self, cluster: Cluster | None = None) -> LitePushConsumer:
        """Return a consumer with the app's handlers, save those left to Spark, not started.

        Args:
            cluster: where its clients and the time come from; a real cluster at `bootstrap_servers` when left out.

        Raises:
            ConfigurationError: the app has no handler.
        """
        return LitePushConsumer(
            self.name,
            self.consumed,
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
        if not self._sinks or not in_first_process(self.name, alone=not self.consumes):
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
