"""The engine: the parts of a consumer that handle messages, put together, without a thread of their own.

Whoever puts messages on its lanes runs it: a poll loop (`poll/loop.py`), on threads by `LitePushConsumer` and step by
step by `penstock.testing`, or a task of Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.clients.cluster import Clock
from penstock.clients.rights import principal_of
from penstock.consumer.assignments import Assignment, Assignments, ConsumerLane, Fetch
from penstock.consumer.handlers.call_guard import AbandonedCall
from penstock.consumer.handlers.environment import MiddlewareSpec
from penstock.consumer.handlers.functions import Context
from penstock.consumer.handlers.handler import Handler, Kind
from penstock.consumer.handlers.registry import TopicPatterns
from penstock.consumer.handlers.route import Routes
from penstock.consumer.inspect.statistics import ConsumerStatistics, longest_in_handler, partition_statistics
from penstock.consumer.lanes.plan import LanePlan
from penstock.consumer.lanes.processor import LaneProcessor
from penstock.consumer.lanes.slot import ExecutionSlot
from penstock.consumer.outbox.dead_letters import DeadLetterLimits, DeadLetterPublisher
from penstock.consumer.outbox.outbox import HandlerResults, Outbox, RefusedResults, Submits
from penstock.consumer.outbox.plain_outbox import PlainOutbox
from penstock.consumer.outbox.transactional_outbox import TransactionalOutbox
from penstock.consumer.run.executor import Executor
from penstock.consumer.settings import ConsumerSettings
from penstock.consumer.stop_request import StopRequest
from penstock.consumer.timers import Timers
from penstock.message import Record
from penstock.routing import KeyState, Scheduler

if TYPE_CHECKING:
    from penstock.telemetry.consumer import ConsumerTelemetry


@dataclass(slots=True)
class PollCounts:
    """What the poll thread counts, as `ConsumerStatistics` shows it."""

    received: int = 0
    restored: int = 0
    stale: int = 0
    assigned: int = 0
    revoked: int = 0
    lost: int = 0
    commits: int = 0
    failed_commits: int = 0
    stalls: int = 0
    #: By reason.
    pauses: dict[str, int] = field(default_factory=dict)


class Engine:
    """The parts of one consumer that handle messages, by one clock. Nothing is connected here.

    A task of Spark puts rows on its lanes, `most_lanes` for each group of handlers. It gives an `outbox` of its own,
    which takes results and dead letters, and `fail`, which is called with an error after which nothing more is to be
    handled.
    """

    def __init__(
        self,
        group: str,
        handlers: Mapping[str, Handler],
        settings: ConsumerSettings,
        clock: Clock,
        middlewares: Sequence[MiddlewareSpec] = (),
        *,
        context: Context | None = None,
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
        #: Whom the brokers take this client for.
        self.principal = principal_of(settings.config)
        #: What calls the handlers. Replaced before the start, by who runs the engine.
        self.executor: Executor = Executor()
        self.stop_request = StopRequest(settings, clock)
        self.fail: Callable[[BaseException], None] = fail or self.stop_request.fail
        self.lane_plan = LanePlan(self.all_handlers, settings, most_lanes)
        self.scheduler: Scheduler[Fetch, Record] = Scheduler(self.lane_plan.queues)
        self.telemetry: ConsumerTelemetry | None = None
        if settings.telemetry is not None:
            from penstock.telemetry.consumer import ConsumerTelemetry

            self.telemetry = ConsumerTelemetry(settings.telemetry, group, clock=clock.monotonic)
        self.assignments = Assignments()
        self.timers = Timers()
        self.counts = PollCounts()
        #: Calls that were abandoned and have not returned. Replaced as a whole by the poll thread: any thread reads it.
        self.abandoned: tuple[AbandonedCall, ...] = ()
        #: Where a key function is being called. Written by the poll thread.
        self.poll_slot = ExecutionSlot(Kind.THREAD, f"penstock-poll-{group}")
        self.outbox: Outbox = PlainOutbox()
        if settings.exactly_once:
            self.outbox = TransactionalOutbox(
                group,
                settings.transaction_interval,
                clock,
                assignments=self.assignments,
                complete_finished=self.complete_finished,
            )
        submits = self.outbox if outbox is None else outbox
        self.results = HandlerResults(submits, self._wake_lane_for, self.principal)
        self.dead_letter_publisher = DeadLetterPublisher(
            group,
            clock,
            self.timers,
            DeadLetterLimits(settings.dead_letter_limit, self._handled),
            submits,
            principal=self.principal,
            fail=self.fail,
        )
        self.processor = LaneProcessor(
            clock,
            settings.run_seconds,
            scheduler=self.scheduler,
            timers=self.timers,
            publisher=self.dead_letter_publisher,
            results=self.results,
            wake=self.wake,
            fail=self.fail,
            # A transaction has results of a batch as a whole only with the offsets of all its messages.
            one_partition=settings.exactly_once,
        )
        self.routes = Routes(
            group,
            clock,
            partial(self.lane_plan.lanes_of, self.scheduler.lanes),
            middlewares=middlewares,
            context=context or Context(group=group),
            telemetry=self.telemetry,
            time_limit=settings.time_limit,
        )
        for topic, handler in handlers.items():
            self.routes.add(topic, handler)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers of the topics that are consumed now, without retry topics. Any thread."""
        return self.routes.handlers

    def slots(self) -> list[ExecutionSlot]:
        """Return where messages may be in a user's function. Any thread."""
        return [*self.executor.slots, self.poll_slot]

    def complete_finished(self) -> None:
        """Complete what handlers finished of the runs they are still at, so that one that hangs keeps none of it."""
        for slot in self.slots():
            slot.complete_finished()

    def _handled(self) -> int:
        return self.results.handled + sum(slot.handled for slot in self.slots())

    def wake(self, queues: Sequence[int]) -> None:
        """Have ready lanes served, given the ready queue of each."""
        self.executor.wake(queues)

    def _wake_lane_for(self, lane: ConsumerLane, refused: RefusedResults) -> None:
        self.wake(self.scheduler.wake(lane, refused))

    def begin_again(self, former: Assignment, start: int | None) -> Assignment:
        """Put a new incarnation of a partition in the place of the former, whose messages are dropped.

        `start` is the offset at which reading starts, or None where the first message will show it. On the poll thread.
        """
        assignment = Assignment(former.topic, former.partition, former.route, start=start, owner=former.owner)
        assignment.paused, assignment.is_sought = former.paused, start is None
        self.assignments.put(assignment)
        self.processor.wake_all()
        return assignment

    def statistics(self, workers: int) -> ConsumerStatistics:
        """Return the counts of this moment, from live state, with so many worker threads. Any thread."""
        self.complete_finished()
        slots, scheduler, publisher = self.slots(), self.scheduler, self.dead_letter_publisher
        now, abandoned = self.clock.monotonic(), self.abandoned
        longest = longest_in_handler(slots, now)
        partitions = tuple(partition_statistics(assignment) for assignment in self.assignments.all())
        of_slots: dict[str, Any] = {name: sum(getattr(slot, name) for slot in slots) for name in _COUNTED_IN_SLOTS}
        return ConsumerStatistics(
            **asdict(self.counts),
            **of_slots,
            handled=self._handled(),
            abandoned_calls=len(abandoned),
            oldest_call=max((*(now - call.since for call in abandoned), 0.0 if longest is None else longest.seconds)),
            dead_letters=publisher.dead_letters,
            dead_letter_failures=publisher.failures,
            retry_topic=publisher.retries,
            published=self.results.published,
            in_flight=sum(partition.in_flight for partition in partitions),
            parked_keys=sum(len(lane.parked) for lane in scheduler.lanes),
            held_keys=sum(
                parked.state is KeyState.HELD
                for lane in scheduler.lanes
                if lane.parked
                for parked in lane.parked.copy().values()  # in one step: the holder changes the dictionary meanwhile
            ),
            deferred=len(self.processor.deferred),
            workers=workers,
            busy_workers=sum(slot.record is not None for slot in slots),
            lanes=len(scheduler.lanes),
            ready_lanes=sum(scheduler.waiting(queue) for queue in range(scheduler.queues)),
            partitions=partitions,
        )


#: Counts of `ConsumerStatistics` that slots have.
_COUNTED_IN_SLOTS = ("failed", "over_time_limit", "retried", "dropped", "filtered")
