"""The engine: the parts of a consumer put together, without a thread of their own.

`LitePushConsumer` runs an engine on threads; `penstock.testing` runs the same engine step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from confluent_kafka import TopicPartition

from penstock.clients.cluster import Clock, Cluster
from penstock.clients.kafka import TopicSpec
from penstock.clients.lasting_producer import LastingProducer
from penstock.clients.rights import Right
from penstock.consumer.assignments import Assignment, Assignments, Fetch
from penstock.consumer.execution.key_resolver import KeyResolver
from penstock.consumer.execution.lane_processor import LaneProcessor
from penstock.consumer.execution_slot import ExecutionSlot, complete_finished
from penstock.consumer.failures.dead_letter_publisher import DeadLetterPublisher
from penstock.consumer.failures.limits import DeadLetterLimits
from penstock.consumer.failures.timers import Timers
from penstock.consumer.handlers.handler import Handler, Kind, OnFailure, orderings_of
from penstock.consumer.handlers.middleware import MiddlewareSpec, wrap
from penstock.consumer.handlers.route import Invoke, Route
from penstock.consumer.inspection.causes import Context
from penstock.consumer.inspection.watchdog import Watchdog
from penstock.consumer.polling.back_pressure import BackPressure
from penstock.consumer.polling.commits import Commits
from penstock.consumer.polling.poll_loop import PollLoop
from penstock.consumer.polling.rebalance import Rebalance
from penstock.consumer.polling.rights_watch import RightsWatch, needed_rights
from penstock.consumer.polling.router import Router
from penstock.consumer.polling.topic_watch import TopicWatch
from penstock.consumer.retry_topics import RetryHeaders, former_retry_topics, retry_topics
from penstock.consumer.settings import ConsumerSettings
from penstock.message import Record
from penstock.offsets import decode, owner_of
from penstock.routing import Scheduler

if TYPE_CHECKING:
    from penstock.consumer.assignments import ConsumerLane
    from penstock.telemetry import ConsumerTelemetry

#: Bytes that the headers of a dead letter may take, beside those that the message had.
_HEADERS_BYTES = 65_536
#: Lanes for each handler that may be under way on the event loop: fewer than for a thread, for there are many more.
_LANES_PER_TASK = 4
#: Lanes for each worker or task where all handlers take batches. A batch comes from one lane: the fewer, the fuller.
_LANES_PER_BATCH = 2


class Engine:
    """The parts of one consumer. Nothing runs, and nothing is connected before `connect`.

    Args:
        group: the consumer group.
        handlers: a handler for each topic.
        settings: the options.
        clock: the clock of the cluster it will be connected to.
        middlewares: functions around every handler.
    """

    def __init__(
        self,
        group: str,
        handlers: Mapping[str, Handler],
        settings: ConsumerSettings,
        clock: Clock,
        middlewares: Sequence[MiddlewareSpec] = (),
    ) -> None:
        self.group = group
        self.handlers = dict(handlers)
        self.settings = settings
        self.clock = clock
        kinds = {one.kind for one in handlers.values()}
        #: Whether there are handlers for threads, and for tasks.
        self.has_threads, self.has_tasks = Kind.THREAD in kinds, Kind.TASK in kinds
        thread_queues = settings.workers if settings.pinned else 1
        #: The scheduler's queue of lanes whose head is for a task.
        self.task_queue = thread_queues if self.has_threads else 0
        self.scheduler: Scheduler[Fetch, Record] = Scheduler(
            self._lane_count(),
            queues=self.task_queue + 1 if self.has_tasks else thread_queues,
            queue_of=self._queue_of if self.has_threads and (self.has_tasks or settings.pinned) else None,
        )
        self.telemetry = self._telemetry()
        self.assignments = Assignments()
        self.timers = Timers()
        self.limits = DeadLetterLimits(settings.dead_letter_limit, self._handled)
        self.dead_letter_publisher = DeadLetterPublisher(group, clock, self.timers, self.limits)
        self.dead_letter_publisher.fail = self.fail
        self.dead_letter_publisher.exception_texts = settings.exception_texts
        #: Set by who runs the engine: called with the queues of ready lanes, and to have stuck workers relieved.
        self.on_ready: Callable[[Sequence[int]], None] = lambda _: None
        self.relieve: Callable[[], bool] = lambda: False
        #: Set by who runs the engine: where handlers are called, and how long the event loop has not come round.
        self.slots: Callable[[], Iterable[ExecutionSlot]] = lambda: ()
        self.loop_behind: Callable[[], tuple[float, int | None]] = lambda: (0.0, None)
        self.processor = LaneProcessor(
            clock,
            settings.run_seconds,
            scheduler=self.scheduler,
            timers=self.timers,
            publisher=self.dead_letter_publisher,
            wake=self._ready,
            fail=self.fail,
        )
        self.routes = self._make_routes(middlewares)
        #: Where users' key functions are called, where there are any; who runs the engine may start its thread.
        self.key_resolver: KeyResolver | None = None
        if any(route.ordering.has_key_function for route in self.routes.values()):
            self.key_resolver = KeyResolver(group, clock, self.scheduler, wake=self._ready, fail=self.fail)
        self.router = Router(
            self.assignments, self.scheduler, self._ready, self.look_again, self.routes, key_resolver=self.key_resolver
        )
        self.back_pressure = BackPressure(
            settings.max_in_flight,
            settings.max_in_flight_bytes,
            settings.max_parked,
            settings.max_parked_bytes,
            fetch_size=settings.fetch_size,
        )
        self.commits = Commits(
            self.assignments, settings.commit_interval, clock, lambda: complete_finished(self.slots())
        )
        self.rebalance = Rebalance(
            self.assignments,
            self.commits,
            clock=clock,
            busy=self._busy,
            let_go=self.look_again,
            make=self._assignment,
            pause_if_full=self.back_pressure.pause_if_full,
            revoke_timeout=settings.revoke_timeout,
            end_by=self.end_by,
        )
        self.watchdog = Watchdog(settings.stall_after, self._all_slots, self._behind)
        self.loop: PollLoop | None = None

    def _ready(self, queues: Sequence[int]) -> None:
        self.on_ready(queues)

    def _all_slots(self) -> Iterable[ExecutionSlot]:
        return self.slots()

    def _behind(self) -> tuple[float, int | None]:
        return self.loop_behind()

    def _busy(self, assignments: Sequence[Assignment]) -> list[str]:
        return self.processor.busy_with(self.slots(), assignments)

    def _lane_count(self) -> int:
        settings = self.settings
        if settings.pinned:
            return settings.workers
        batches = all(one.batch > 1 for one in self.handlers.values())
        per_worker = min(settings.lanes_per_worker, _LANES_PER_BATCH) if batches else settings.lanes_per_worker
        per_task = _LANES_PER_BATCH if batches else _LANES_PER_TASK
        return max(
            settings.workers * per_worker,
            settings.max_concurrency * per_task if self.has_tasks else 1,
        )

    def _queue_of(self, lane: ConsumerLane) -> int:
        """Return which workers serve a lane, by its head. By who has just claimed it."""
        if self.has_tasks:
            fetch = lane.due_owner() if lane.serves_due else None
            if fetch is None and lane.runs:
                fetch = lane.runs[0].owner
            if fetch is not None and fetch.assignment.route.kind is Kind.TASK:
                return self.task_queue
        return lane.number if self.settings.pinned else 0

    def _telemetry(self) -> ConsumerTelemetry | None:
        if self.settings.telemetry is None:
            return None
        from penstock.telemetry import ConsumerTelemetry

        return ConsumerTelemetry(self.settings.telemetry, self.group, clock=self.clock.monotonic)

    def _make_routes(self, middlewares: Sequence[MiddlewareSpec]) -> dict[str, Route]:
        orderings = orderings_of(self.handlers, len(self.scheduler.lanes), batches=True)
        routes: dict[str, Route] = {}
        for topic, one in self.handlers.items():
            invoke = self._traced(one, wrap(one, middlewares))
            routes[topic] = Route(
                one,
                orderings[topic],
                invoke,
                shares=next((route for route in routes.values() if route.handler is one), None),
            )
            for name, delay in retry_topics(self.group, topic, one.retry_delays).items():
                routes[name] = self._retry_route(routes[topic], topic, delay)
        return routes

    def _retry_route(self, shares: Route, topic: str, delay: float) -> Route:
        headers = RetryHeaders(delay, len(shares.handler.retry_delays))
        return Route(
            shares.handler,
            shares.ordering,
            shares.invoke,
            source=topic,
            shares=shares,
            not_before=partial(self._due_at, headers),
            retried=headers.rounds,
        )

    def _take_former_delays(self, existing: Iterable[str]) -> None:
        """Read the retry topics of delays that handlers have no more, so that what waits there is not forgotten."""
        for topic, one in self.handlers.items():
            # A handler without delays reads its own topics alone: with the last one goes what waits for it.
            for name, delay in former_retry_topics(self.group, topic, existing if one.retry_delays else ()).items():
                if name not in self.routes:
                    self.routes[name] = self._retry_route(self.routes[topic], topic, delay)

    def _due_at(self, headers: RetryHeaders, record: Record) -> float:
        wait = headers.wait(record, self.clock.time())
        return self.clock.monotonic() + wait if wait > 0 else 0.0

    def _traced(self, one: Handler, invoke: Invoke) -> Invoke:
        if self.telemetry is None:
            return invoke
        if one.kind is Kind.TASK:
            around = self.telemetry.around_async_batch if one.batch > 1 else self.telemetry.around_async
        else:
            around = self.telemetry.around_batch if one.batch > 1 else self.telemetry.around
        return around(invoke)  # type: ignore[arg-type] # the handler's kind was asked above

    def _assignment(self, committed: TopicPartition) -> Assignment:
        # Below 0: the group has none, or was not heard of.
        start = committed.offset if committed.offset >= 0 else None
        owner = owner_of(self.group, committed.topic, committed.partition)
        return Assignment(
            committed.topic,
            committed.partition,
            self.routes[committed.topic],
            start=start,
            restored=None if start is None else decode(start, committed.metadata, owner),
            owner=owner,
        )

    def _handled(self) -> int:
        return sum(slot.handled for slot in self.slots())

    def look_again(self) -> None:
        """Have all that waits in lanes looked at: what is of dropped assignments goes, what waits for a limit asks."""
        self.processor.throttling.dropped += 1
        for lane in self.scheduler.lanes:
            # A copy, made in one step: the holder changes the dictionary meanwhile. Waking is a hint, so none is wrong.
            for key in list(lane.parked) if lane.parked else ():
                self.processor.wake_key(lane, key)
            for token_bucket in list(lane.throttled) if lane.throttled else ():
                self.processor.wake_key(lane, token_bucket)

    def fail(self, error: BaseException) -> None:
        """Stop the consumer because of an error. Any thread."""
        if self.loop is not None:
            self.loop.fail(error)

    def context(self) -> Context:
        """Return what is known beside the messages, for explanations. Any thread."""
        if self.loop is None:
            return Context(self.dead_letter_publisher.words, lambda _topic: None)
        return Context(self.dead_letter_publisher.words, self.loop.topic_watch.trouble, self.loop.rights_watch.trouble)

    def end_by(self) -> float:
        """Return when a stop waits for handlers no longer, on the engine's clock; infinity while none is asked for."""
        return inf if self.loop is None else self.loop.end_by

    def connect(self, cluster: Cluster) -> PollLoop:
        """Check the topics, make the clients and return the loop that uses them.

        Raises:
            BrokerConnectionError: no broker answered.
            TopicNotFoundError: a topic does not exist.
            MissingRightError: the brokers refuse what the consumer will need; all that is missing is named.
            ConfigurationError: the Kafka client refused its configuration.
        """
        partitions = cluster.require_topics(self.handlers)
        if any(one.retry_delays for one in self.handlers.values()):
            self._take_former_delays(cluster.topics())
        made = self._made_topics()
        rights = RightsWatch(self.group, self.needed_rights(), cluster.principal, cluster.ask_rights)
        untold = rights.require()
        limits = cluster.message_limits({topic for sources in made.values() for topic in sources})
        cluster.ensure_topics(_spec(name, sources, partitions, limits) for name, sources in made.items())
        if untold:
            # On what was just created.
            rights.require(untold)
        self.commits.refused = rights.hurry
        config = {**self.settings.client_config(self.group), "on_commit": self.commits.on_commit}
        if made:
            producing = self.settings.producer_config()
            self.dead_letter_publisher.connect(
                LastingProducer(lambda: cluster.producer(producing), self.clock), cluster.principal
            )
        if self.telemetry is not None:
            self.dead_letter_publisher.trace = self.telemetry.sending
            self.commits.told = partial(self._tell_commit, self.telemetry)
        self.loop = PollLoop(
            lambda: cluster.consumer(config),
            list(self.routes),
            self.settings,
            group=self.group,
            clock=self.clock,
            routes=list(self.routes.values()),
            assignments=self.assignments,
            scheduler=self.scheduler,
            processor=self.processor,
            router=self.router,
            back_pressure=self.back_pressure,
            commits=self.commits,
            rebalance=self.rebalance,
            timers=self.timers,
            publisher=self.dead_letter_publisher,
            watchdog=self.watchdog,
            topic_watch=TopicWatch(list(self.routes), cluster.ask_topic_ids),
            rights_watch=rights,
            relieve=self.relieve,
            polled=None if self.telemetry is None else self.telemetry.polled,
        )
        return self.loop

    def needed_rights(self) -> dict[Right, list[str]]:
        """Return what the brokers must allow, and of each right which topics come to a halt without it."""
        return needed_rights(self.group, self.routes, self._made_topics())

    def _made_topics(self) -> dict[str, tuple[str, ...]]:
        """Return the topics for dead letters and retries, each with those whose messages it takes."""
        made: dict[str, tuple[str, ...]] = {}
        for topic, one in self.handlers.items():
            if one.on_failure is OnFailure.DEAD_LETTER:
                name = one.dead_letter_topic.replace("{topic}", topic)
                made[name] = (*made.get(name, ()), topic)
            made |= dict.fromkeys(retry_topics(self.group, topic, one.retry_delays), (topic,))
        return made

    @staticmethod
    def _tell_commit(telemetry: ConsumerTelemetry, partitions: Sequence[TopicPartition], error: str | None) -> None:
        topics = [one.topic for one in partitions]
        for topic in dict.fromkeys(topics):
            telemetry.committed(topic, topics.count(topic), error)


def _spec(name: str, sources: Sequence[str], partitions: Mapping[str, int], limits: Mapping[str, int]) -> TopicSpec:
    """Return a topic for what is given up of others: it takes what they take, with our headers beside."""
    known = [limits[topic] for topic in sources if topic in limits]
    config = {"max.message.bytes": str(max(known) + _HEADERS_BYTES)} if known else {}
    return TopicSpec(name, max(partitions[topic] for topic in sources), config)


__all__ = ["Engine"]
