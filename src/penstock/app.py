"""`App`: registers handlers and sinks by decorator, and runs them together. The engines do the work."""

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

    Nothing connects before `run` or `start`. Register from one thread; call everything else from any thread.

    Args:
        name: name of the app, of its consumer group and of its threads.
        bootstrap_servers: addresses of brokers, `host:port` separated by commas. Leave it out if a settings file or the
            environment has them: see `penstock.settings`.
        workers: worker threads.
        max_concurrency: most `async def` handlers that run at once.
        config: librdkafka's keys, unchanged.
        coordinator: True: this process also runs a transaction coordinator; or give your own, not started.
        prefix: prefix of the transaction topics, for the coordinator that `True` makes.
        pinned: one lane for each worker. Only that worker serves it.
        max_in_flight: most messages of one partition that are fetched and not done; and as many more that are parked
            for a retry or behind one.
        max_in_flight_bytes: most bytes of all messages that are fetched and not done; parked messages may take a
            quarter of that.
        commit_interval: seconds between commits.
        stop_timeout: seconds that a stop may drain, and a sink's batch may take meanwhile.
        revoke_timeout: seconds that a revocation waits for running handlers and for its commit.
        stall_after: seconds in a handler after which the watchdog reports a message.
        time_limit: seconds that a handler without its own `time_limit` may take; None (default): no limit.
        dead_letter_limit: when the app stops instead of giving up one more message, as a dead letter or dropped.
        middlewares: functions `(message, call_next)` around every handler, the first outermost; see `Middleware`.
        telemetry: spans and metrics by OpenTelemetry; None (default): none, at no cost.
        exactly_once: True: the results of handlers and the offsets of their messages are committed in one Kafka
            transaction, so readers of committed messages see each result once. Effects outside Kafka stay at least
            once.
        transaction_interval: seconds between two such transactions.
        report: True: each process reports its state to the topic `penstock.reports`, for `penstock status`; or give
            `ReportSettings`.
        commands: True: each process executes commands of the topic `penstock.commands`, for example of the dashboard.
            Anyone with write permission on the topic can command it. Or give `CommandSettings`, with a token.

    Raises:
        ConfigurationError: an option is wrong, in the code, a settings file or the environment.
    """

    #: The names of the options that the program states.
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
            topics: topics whose handlers to take; default: all. `start` leaves these topics to Spark, so that no
                message is handled twice.
            parallelism: number of tasks of a batch.
            headers: whether frames have the column `headers`, which the source's option `includeHeaders` adds.
            name: name of the query, under which the sink records its published results. Required if handlers publish
                or have dead letters.
            ledger_topic: the topic of these records; default: `penstock.spark-ledger`.
            overlap: "allowed": handlers of one key may run at once, and no setting of Spark is refused.

        Raises:
            ConfigurationError: a topic has no handler, or a handler cannot run on executors: see `HandlerSink`.
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
        """Trim the inbox table of the handlers regularly: see `penstock.inbox`.

        Once a minute, each process deletes the old records of its partitions below the committed offsets.

        Args:
            connect: opens a connection of a kind that `inbox` accepts; the app closes it. Called on its own thread.
            keep: how long records stay at least, in addition to the handlers' `retry_delays`. It must be longer than a
                process can be cut off from its group during a handler, and than due messages wait in retry topics: a
                message whose record is gone counts as new.
            table: the table's name.
            schema: the table's schema; None: the connection's own.

        Raises:
            ConfigurationError: an argument is wrong.
        """
        from penstock.transactions.inboxes import InboxTrimmer

        self._inboxes.append(InboxTrimmer(connect, keep, table, schema))

    def start(self) -> RunningApp:
        """Start the handlers, the sinks and the coordinator, if there is one, and return at once.

        Raises:
            BrokerConnectionError: no broker answered.
            TopicNotFoundError: a topic does not exist.
            MissingRightError: a permission is missing; the message has the command that gives it.
            ConfigurationError: there is nothing to run, `coordinator` is invalid, PySpark or Java is missing for a
                sink, a sink has neither a checkpoint nor a ledger, or the Kafka client refused its configuration.
            SinkError: a sink cannot store the frames of its query.
        """
        if not self.consumes and not self._sinks:
            what = "register one with @app.handler(topic) or @app.sink(topic)"
            raise ConfigurationError(f"app {self.name} has no handler and no sink; {what}")
        config, handlers = self._settings.config, (*self._handlers.values(), *self._patterns.values())
        # A message in a retry topic keeps its inbox record, which is below the committed offset.
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
        """The client settings, by librdkafka's names."""
        return self._settings.config

    def report_to(self, telemetry: Telemetry) -> Telemetry:
        """Use this telemetry if the app has none; return the one in use. Call it before the start."""
        self._settings = replace(self._settings, telemetry=self._settings.telemetry or telemetry)
        return self._settings.telemetry or telemetry

    @property
    def _left_out(self) -> frozenset[str]:
        """Topics that no pattern matches: those of Spark, of the transaction store and of the fleet."""
        commands, reports = self.commands or CommandSettings(), self.report or ReportSettings()
        ours = {reports.topic, commands.topic, commands.audit_topic}
        return frozenset(self._handlers) | StoreTopics(self._prefix).all | ours

    def consumer(self, cluster: Cluster | None = None) -> LitePushConsumer:
        """Return a consumer with the app's handlers, without those left to Spark. It is not started.

        Args:
            cluster: source of clients and time; default: the Kafka cluster at `bootstrap_servers`.

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
        """Run until SIGTERM or SIGINT. The first drains, commits and leaves the group; the second leaves at once.

        The third interrupts what still hangs, such as the end of a lifespan; during the start, the second does.

        Call it from the main thread: only that receives signals.

        Raises:
            PenstockError: the error that stopped the app, and the errors of `start`.
            StoppedError: fetched messages were not done in time, or a second signal did not wait for them.
            KeyboardInterrupt: after the signal that interrupts.
        """
        run_until_signal(self.name, self.start)
