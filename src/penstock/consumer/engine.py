"""The engine: the parts of a consumer put together, without a thread of their own.

`LitePushConsumer` runs an engine on threads; `penstock.testing` runs the same engine step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from penstock.clients.cluster import Clock, Cluster
from penstock.consumer.assignments import Assignment, Assignments, ConsumerLane, Fetch
from penstock.consumer.handlers.environment import MiddlewareSpec
from penstock.consumer.handlers.functions import ContextFactory
from penstock.consumer.handlers.handler import Handler
from penstock.consumer.handlers.registry import TopicPatterns
from penstock.consumer.handlers.route import Routes
from penstock.consumer.inspect.explain import Causes, Explanation, explain, no_partition, no_topic, shut_out
from penstock.consumer.inspect.statistics import ConsumerStatistics, longest_in_handler, partition_statistics
from penstock.consumer.inspect.watchdog import Watchdog, stack_of
from penstock.consumer.lanes.plan import LanePlan
from penstock.consumer.lanes.processor import LaneProcessor
from penstock.consumer.lanes.slot import ExecutionSlot, complete_finished
from penstock.consumer.outbox.dead_letters import DeadLetterLimits, DeadLetterPublisher
from penstock.consumer.outbox.outbox import HandlerResults, Outbox, RefusedResults, Submits
from penstock.consumer.outbox.plain_outbox import PlainOutbox
from penstock.consumer.outbox.transactional_outbox import TransactionalOutbox
from penstock.consumer.poll.back_pressure import AppPauses, BackPressure
from penstock.consumer.poll.commits import Commits, ConsumerCommits, TransactionalCommits
from penstock.consumer.poll.fetcher import Fetcher, FetchErrors
from penstock.consumer.poll.loop import DrainLog, PollLoop
from penstock.consumer.poll.membership import Membership
from penstock.consumer.poll.positions import LogEnds, LostPositions, OpenTransactions
from penstock.consumer.poll.rebalance import Rebalance
from penstock.consumer.poll.refusals import Refusals
from penstock.consumer.poll.router import Router
from penstock.consumer.poll.stop_request import StopRequest
from penstock.consumer.poll.topics import TopicSearch, TopicWatch, output_topics, prepare_topics
from penstock.consumer.run.executor import Executor
from penstock.consumer.run.time_limits import TimeLimits
from penstock.consumer.settings import ConsumerSettings
from penstock.consumer.timers import Timers
from penstock.message import Record
from penstock.offsets import decode, owner_of
from penstock.routing import KeyState, Scheduler

if TYPE_CHECKING:
    from penstock.telemetry.consumer import ConsumerTelemetry


class Engine:
    """The parts of one consumer, by the clock of its cluster. Nothing runs or is connected before `connect`.

    A task of Spark puts rows on its lanes, `most_lanes` for each group of handlers, and never connects it. It gives an
    `outbox` of its own, which takes results and dead letters, and `fail`, which is called with an error after which
    nothing more is to be handled.
    """

    def __init__(
        self,
        group: str,
        handlers: Mapping[str, Handler],
        settings: ConsumerSettings,
        clock: Clock,
        middlewares: Sequence[MiddlewareSpec] = (),
        *,
        contexts: ContextFactory | None = None,
        patterns: TopicPatterns | None = None,
        outbox: Submits | None = None,
        fail: Callable[[BaseException], None] | None = None,
        most_lanes: int | None = None,
    ) -> None:
        self.group = group
        self.patterns = TopicPatterns({}, handlers) if patterns is None else patterns
        #: Those of topics by name, and of patterns.
        self.all_handlers = [*handlers.values(), *self.patterns.patterns.values()]
        self.settings = settings
        self.clock = clock
        #: What calls the handlers. Replaced before `connect`, by who runs the engine.
        self.executor: Executor = Executor()
        self.stop_request = StopRequest(settings, clock)
        self.fail: Callable[[BaseException], None] = fail or self.stop_request.fail
        self.lane_plan = LanePlan(self.all_handlers, settings, most_lanes)
        self.scheduler: Scheduler[Fetch, Record] = Scheduler(self.lane_plan.queues)
        self.telemetry = self._telemetry()
        self.assignments = Assignments()
        self.timers = Timers()
        self.outbox: Outbox
        self.commits: Commits
        self.refusals = Refusals(group)
        when = settings.commit_interval, clock, self.refusals
        if settings.exactly_once:
            self.outbox = transactional = TransactionalOutbox(
                group,
                settings.transaction_interval,
                clock,
                assignments=self.assignments,
                complete_finished=self._complete_finished,
                fail=self.fail,
            )
            self.commits = TransactionalCommits(self.assignments, *when, transactional)
        else:
            self.outbox = PlainOutbox()
            self.commits = ConsumerCommits(self.assignments, *when, self._complete_finished)
        submits = self.outbox if outbox is None else outbox
        self.results = HandlerResults(submits, self._wake_lane_for)
        self.dead_letter_publisher = DeadLetterPublisher(
            group,
            clock,
            self.timers,
            DeadLetterLimits(settings.dead_letter_limit, self._handled),
            submits,
            fail=self.fail,
        )
        self.processor = LaneProcessor(
            clock,
            settings.run_seconds,
            scheduler=self.scheduler,
            timers=self.timers,
            publisher=self.dead_letter_publisher,
            results=self.results,
            wake=self._wake,
            fail=self.fail,
            # A transaction has results of a batch as a whole only with the offsets of all its messages.
            one_partition=settings.exactly_once,
        )
        self.routes = Routes(
            group,
            clock,
            partial(self.lane_plan.lanes_of, self.scheduler.lanes),
            middlewares=middlewares,
            contexts=contexts or ContextFactory(group),
            telemetry=self.telemetry,
            time_limit=settings.time_limit,
        )
        for topic, handler in handlers.items():
            self.routes.add(topic, handler)
        self.router = Router(
            group,
            clock,
            self.assignments,
            self.scheduler,
            wake=self._wake,
            on_dropped=self.processor.wake_all,
            # Which topics there will be is not known where patterns find them.
            topics=() if self.patterns else self.routes,
            slow_keys_s=settings.commit_interval,
        )
        self.app_pauses = AppPauses(group, clock, lambda: self.handlers)
        self.back_pressure = BackPressure(
            settings.max_in_flight,
            settings.max_in_flight_bytes,
            fetch_size=settings.fetch_size,
            is_paused_by_app=lambda handler: self.app_pauses.of(handler) is not None,
        )
        self.rebalance = Rebalance(
            assignments=self.assignments,
            commits=self.commits,
            clock=clock,
            busy=self._busy,
            on_dropped=self.processor.wake_all,
            make_assignment=self._assignment,
            back_pressure=self.back_pressure,
            revoke_timeout=settings.revoke_timeout,
            stop_request=self.stop_request,
            begins_at_first=self.routes.begins_at_first,
            offset_reset=settings.offset_reset,
        )
        self.watchdog = Watchdog(settings.stall_after, self.slots, lambda: self.executor.loop_lag())  # noqa: PLW0108 - it is replaced
        self.time_limits = TimeLimits(
            group,
            is_used=self.lane_plan.has_threads
            and (
                settings.time_limit is not None or any(handler.time_limit is not None for handler in self.all_handlers)
            ),
            slots=self.slots,
            executor=lambda: self.executor,
            give_ups=self.processor.give_ups,
            stack_of=stack_of,
            restart=partial(self.stop_request.fail, drains=True),
        )
        self.loop: PollLoop | None = None

    def _wake(self, queues: Sequence[int]) -> None:
        self.executor.wake(queues)

    def _wake_lane_for(self, lane: ConsumerLane, refused: RefusedResults) -> None:
        self._wake(self.scheduler.wake(lane, refused))

    def _handled(self) -> int:
        return self.results.handled + sum(slot.handled for slot in self.slots())

    def _busy(self, assignments: Sequence[Assignment]) -> list[str]:
        # Asked by the poll thread in a revocation: nobody else would learn of what brokers acknowledge meanwhile.
        self.time_limits.check(self.clock.monotonic())
        self._complete_finished()
        busy = self.processor.busy_with(self.slots(), assignments)
        self.outbox.serve()
        self.outbox.expedite()
        return [*busy, "the outbox"] if self.outbox.has_any_of(assignments) else busy

    def _complete_finished(self) -> None:
        complete_finished(self.slots())

    def slots(self) -> list[ExecutionSlot]:
        """Return where messages may be in a user's function. Any thread."""
        return [*self.executor.slots, self.router.slot]

    def _telemetry(self) -> ConsumerTelemetry | None:
        if self.settings.telemetry is None:
            return None
        from penstock.telemetry.consumer import ConsumerTelemetry

        return ConsumerTelemetry(self.settings.telemetry, self.group, clock=self.clock.monotonic)

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

    def connect(self, cluster: Cluster) -> PollLoop:
        """Check the topics, make the clients and return the loop that uses them. Raises as `LitePushConsumer.start`."""
        partitions = cluster.require_topics(self.handlers)
        if any(handler.retry_delays for handler in self.handlers.values()):
            self.routes.add_former_delays(cluster.topics())
        outputs = output_topics(self.group, self.handlers)
        prepare_topics(self.group, self.routes.topics, self.handlers, cluster, partitions)
        cluster.require_topics({handler.to for handler in self.all_handlers if handler.to is not None} - outputs.keys())
        search = TopicSearch(
            group=self.group,
            patterns=self.patterns,
            routes=self.routes,
            cluster=cluster,
            every_s=self.settings.topic_search_interval,
        )
        search.begin(self.clock.monotonic())
        self.refusals.principal = self.dead_letter_publisher.principal = self.results.principal = cluster.principal
        topics = TopicWatch(self.routes.topics, cluster.ask_topic_ids, self.refusals.of_topic)
        producing = self.settings.config
        if not self.settings.exactly_once:
            producing = self.settings.producer_config()
            # Dropped at once: a setting that the client refuses ends the start, and not the first result.
            cluster.producer(producing)
        self.outbox.connect(cluster, producing)
        if self.telemetry is not None:
            self.dead_letter_publisher.trace = self.telemetry.sending
            self.commits.on_result = partial(_report_commit, self.telemetry)
        config = {**self.settings.client_config(self.group), "on_commit": self.commits.on_commit}
        membership = Membership(
            make_client=lambda: cluster.consumer(config),
            topics=self.routes.topics,
            group=self.group,
            clock=self.clock,
            assignments=self.assignments,
            rebalance=self.rebalance,
            commits=self.commits,
            stop_request=self.stop_request,
            revoke_timeout=self.settings.revoke_timeout,
            leaves_its_name="group.instance.id" in config and "group.instance.id" not in self.settings.config,
        )
        search.absent = lambda: topics.absent
        search.changed = partial(self._topics_changed, membership, topics)
        lost_positions = LostPositions(
            assignments=self.assignments,
            router=self.router,
            begin=self.rebalance.begin,
            offset_reset=self._offset_reset,
            is_allowed=self.settings.offset_reset is not None,
        )
        self.loop = PollLoop(
            clock=self.clock,
            membership=membership,
            no_partition=no_partition(config),
            stop_request=self.stop_request,
            token_buckets=self.routes.token_buckets,
            executor=self.executor,
            timers=self.timers,
            outbox=self.outbox,
            assignments=self.assignments,
            router=self.router,
            fetcher=Fetcher(
                membership=membership,
                clock=self.clock,
                assignments=self.assignments,
                back_pressure=self.back_pressure,
                router=self.router,
                errors=FetchErrors(topics, self.refusals, lost_positions, self.clock),
                polled=None if self.telemetry is None else self.telemetry.polled,
                gather_s=min(0.005, self.settings.transaction_interval / 20) if self.settings.exactly_once else 0.0,
            ),
            commits=self.commits,
            back_pressure=self.back_pressure,
            processor=self.processor,
            publisher=self.dead_letter_publisher,
            drain_log=DrainLog(self.group),
            topic_search=search,
            topic_watch=topics,
            log_ends=LogEnds(self.assignments),
            open_transactions=OpenTransactions(self.assignments, cluster.ask_readable_ends, self.settings),
            lost_positions=lost_positions,
            time_limits=self.time_limits,
            watchdog=self.watchdog,
        )
        return self.loop

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers of the topics that are consumed now, without retry topics. Any thread."""
        return self.routes.handlers

    def _topics_changed(self, membership: Membership, topics: TopicWatch) -> None:
        """Subscribe to what is consumed now, and watch that. On the poll thread."""
        topics.watch(self.routes.topics)
        membership.consume(self.routes.topics)

    def _offset_reset(self, topic: str) -> int | None:
        """Return where a topic that was made again begins; one that a pattern matches is a new topic."""
        return self.settings.offset_reset if topic in self.patterns.named else OFFSET_BEGINNING

    def statistics(self, workers: int) -> ConsumerStatistics:
        """Return the counts of this moment, from live state, with so many worker threads. Any thread."""
        slots, scheduler, publisher = self.slots(), self.scheduler, self.dead_letter_publisher
        complete_finished(slots)
        now, abandoned = self.clock.monotonic(), self.time_limits.abandoned
        longest = longest_in_handler(slots, now)
        partitions = tuple(partition_statistics(assignment) for assignment in self.assignments.all())
        return ConsumerStatistics(
            received=self.router.received,
            restored=self.router.restored,
            handled=sum(slot.handled for slot in slots) + self.results.handled,
            failed=sum(slot.failed for slot in slots),
            over_time_limit=sum(slot.over_time_limit for slot in slots),
            abandoned_calls=len(abandoned),
            oldest_call=max((*(now - call.since for call in abandoned), 0.0 if longest is None else longest.seconds)),
            retried=sum(slot.retried for slot in slots),
            dead_letters=publisher.dead_letters,
            dead_letter_failures=publisher.failures,
            retry_topic=publisher.retries,
            published=self.results.published,
            dropped=sum(slot.dropped for slot in slots),
            filtered=sum(slot.filtered for slot in slots),
            in_flight=sum(partition.in_flight for partition in partitions),
            parked_keys=sum(len(lane.parked) for lane in scheduler.lanes),
            held_keys=sum(
                parked.state is KeyState.HELD
                for lane in scheduler.lanes
                if lane.parked
                for parked in lane.parked.copy().values()  # in one step: the holder changes the dictionary meanwhile
            ),
            deferred=len(self.processor.deferred),
            stalls=self.watchdog.stalls,
            commits=self.commits.succeeded,
            failed_commits=self.commits.failed,
            pauses={reason.value: count for reason, count in self.back_pressure.pauses.items()},
            assigned=self.rebalance.assigned,
            revoked=self.rebalance.revoked,
            lost=self.rebalance.lost,
            stale=self.router.stale,
            workers=workers,
            busy_workers=sum(slot.record is not None for slot in slots),
            lanes=len(scheduler.lanes),
            ready_lanes=sum(scheduler.waiting(queue) for queue in range(scheduler.queues)),
            partitions=partitions,
        )

    def explain(self) -> list[Explanation]:
        """Return why each assigned partition does not move, or each topic where this member has none. Any thread."""
        loop = self.loop
        if loop is None:
            return []
        causes = Causes(
            self.dead_letter_publisher.states,
            loop.topic_watch.trouble,
            self.refusals.of_group,
            self.outbox.state_of,
            loop.open_transactions.trouble,
            self.app_pauses.of,
        )
        waiting = no_topic(loop.topic_search.without_topic(), loop.topic_search.when(), loop.topic_search.failures)
        assigned = self.assignments.all()
        if not assigned and not loop.membership.leaving.is_set():
            why = loop.shut_out()
            state = "shut out" if why else "no partition"
            return waiting + shut_out(self.handlers, why or loop.no_partition, causes, state)
        return waiting + explain(assigned, self.slots(), self.scheduler, self.clock.monotonic(), causes)


def _report_commit(telemetry: ConsumerTelemetry, partitions: Sequence[TopicPartition], error: str | None) -> None:
    topics = [partition.topic for partition in partitions]
    for topic in dict.fromkeys(topics):
        telemetry.committed(topic, topics.count(topic), error)
