"""The engine: builds and connects the parts of a consumer that handle messages. It has no thread of its own.

Its driver puts messages on its lanes: a poll loop (`poll/loop.py`) or a task of Spark. `LitePushConsumer` runs the poll
loop on a thread, `penstock.testing` runs it step by step.
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
    """The counts of the poll thread, as `ConsumerStatistics` shows them."""

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
    """The parts of one consumer that handle messages, with one clock. It opens no connection.

    The last three arguments are for a task of Spark, which puts rows on the lanes: its own `outbox` for results and
    dead letters, `fail`, called with an error that ends all handling, and `most_lanes` for each group of handlers.
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
        #: The handlers of topics by name, and of patterns.
        self.all_handlers = [*handlers.values(), *self.patterns.patterns.values()]
        self.settings = settings
        self.clock = clock
        #: The user that the brokers see behind this client.
        self.principal = principal_of(settings.config)
        #: Calls the handlers. The driver of the engine replaces it before the start.
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
        #: Abandoned calls that have not returned. The poll thread replaces the whole tuple; any thread reads it.
        self.abandoned: tuple[AbandonedCall, ...] = ()
        #: The slot in which the poll thread calls key functions. The poll thread writes it.
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
            # A transaction may have results of a whole batch only together with the offsets of all its messages.
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
        """The handlers of the consumed topics, without retry topics. Any thread."""
        return self.routes.handlers

    def slots(self) -> list[ExecutionSlot]:
        """Return all slots in which a user's function may be running. Any thread."""
        return [*self.executor.slots, self.poll_slot]

    def complete_finished(self) -> None:
        """Complete the finished messages of runs under way, so that a handler that hangs does not hold them back."""
        for slot in self.slots():
            slot.complete_finished()

    def _handled(self) -> int:
        return self.results.handled + sum(slot.handled for slot in self.slots())

    def wake(self, queues: Sequence[int]) -> None:
        """Wake workers for ready lanes, given the ready queue of each lane."""
        self.executor.wake(queues)

    def _wake_lane_for(self, lane: ConsumerLane, refused: RefusedResults) -> None:
        self.wake(self.scheduler.wake(lane, refused))

    def begin_again(self, former: Assignment, start: int | None) -> Assignment:
        """Replace a partition's incarnation by a new one, and drop the messages of the former.

        `start` is the offset at which reading starts, or None if the first message will show it. On the poll thread.
        """
        assignment = Assignment(former.topic, former.partition, former.route, start=start, owner=former.owner)
        assignment.paused, assignment.is_sought = former.paused, start is None
        self.assignments.put(assignment)
        self.processor.wake_all()
        return assignment

    def statistics(self, workers: int) -> ConsumerStatistics:
        """Return the current counts, from live state. `workers` is the number of worker threads. Any thread."""
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
                for parked in lane.parked.copy().values()  # copied in one step: the holder changes it meanwhile
            ),
            deferred=len(self.processor.deferred),
            workers=workers,
            busy_workers=sum(slot.record is not None for slot in slots),
            lanes=len(scheduler.lanes),
            ready_lanes=sum(scheduler.waiting(queue) for queue in range(scheduler.queues)),
            partitions=partitions,
        )


#: Counts of `ConsumerStatistics` that are sums over slots.
_COUNTED_IN_SLOTS = ("failed", "over_time_limit", "retried", "dropped", "filtered")
