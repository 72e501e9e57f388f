"""An engine driven by hand, in the caller's thread: the same engine that runs on threads, one step at a time.

`TestApp` lets it run until it is quiet, `Simulation` takes its steps in an order left to chance. Nothing here decides
when anything happens, and time moves only when the driver moves it: where the engine would wait, the driver is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, cast

from confluent_kafka import Message as ClientMessage
from confluent_kafka import TopicPartition

from penstock.clients.cluster import Cluster, RebalanceCallback
from penstock.consumer.assignments import Assignment, ConsumerLane
from penstock.consumer.engine import Engine
from penstock.consumer.handlers.call_guard import AbandonedCall
from penstock.consumer.handlers.environment import MiddlewareSpec
from penstock.consumer.handlers.functions import Context
from penstock.consumer.handlers.handler import Handler, Kind
from penstock.consumer.handlers.registry import TopicPatterns
from penstock.consumer.handlers.results import Results
from penstock.consumer.handlers.route import Failed, failure_of
from penstock.consumer.inspect.statistics import ConsumerStatistics
from penstock.consumer.lanes.slot import ExecutionSlot, LaneProcessing, Outcome, SeenCall, Slice, Work
from penstock.consumer.poll.back_pressure import GRACE_S
from penstock.consumer.poll.explain import Explanation
from penstock.consumer.poll.loop import PollLoop
from penstock.consumer.run.executor import Executor
from penstock.consumer.settings import ConsumerSettings
from penstock.errors import PenstockError, raised
from penstock.testing.memory.broker import TestBroker
from penstock.testing.memory.client.consumer_client import MemoryConsumer
from penstock.testing.memory.clock import TestClock
from penstock.testing.memory.log.log import Place


def _nothing(_client: object, _partitions: list[TopicPartition]) -> None:
    """Leave a callback to the client."""


class SteppedClock:
    """The broker's clock, but for waiting: that is the driver's to decide, in `wait`."""

    def __init__(self, clock: TestClock, wait: Callable[[float], None]) -> None:
        self.monotonic, self.time = clock.monotonic, clock.time
        self.sleep = wait


class SteppedClient:
    """The consumer client in memory, with a driver that listens. It never waits for a message."""

    def __init__(self, inner: MemoryConsumer) -> None:
        self.inner = inner
        #: Told of a commit before it is sent.
        self.on_commit: Callable[[Sequence[TopicPartition]], None] = lambda _: None
        #: Told of each rebalance callback, before and after: its name, the partitions, whether it is over.
        self.on_change: Callable[[str, Sequence[Place], bool], None] = lambda _name, _places, _over: None
        #: Whether a rebalance callback is being called.
        self.in_callback = False
        # The rest is the client's own.
        self.committed, self.position, self.seek = inner.committed, inner.position, inner.seek
        self.incremental_assign, self.incremental_unassign = inner.incremental_assign, inner.incremental_unassign
        self.get_watermark_offsets = inner.get_watermark_offsets
        self.consumer_group_metadata, self.memberid = inner.consumer_group_metadata, inner.memberid
        self.pause, self.resume, self.close = inner.pause, inner.resume, inner.close
        self.unsubscribe = inner.unsubscribe

    def subscribe(
        self,
        topics: list[str],
        on_assign: RebalanceCallback = _nothing,
        on_revoke: RebalanceCallback = _nothing,
        on_lost: RebalanceCallback = _nothing,
    ) -> None:
        """Join the group."""
        self.inner.subscribe(
            topics,
            on_assign=self._heard("assign", on_assign),
            on_revoke=self._heard("revoke", on_revoke),
            on_lost=self._heard("lost", on_lost),
        )

    def _heard(self, name: str, callback: RebalanceCallback) -> RebalanceCallback:
        def call(_client: object, partitions: list[TopicPartition]) -> None:
            places = [(partition.topic, partition.partition) for partition in partitions]
            self.in_callback = True
            self.on_change(name, places, False)  # noqa: FBT003 - a callback's arguments have no names
            try:
                callback(self, partitions)
            finally:
                self.in_callback = False
            self.on_change(name, places, True)  # noqa: FBT003 - as above

        return call

    def poll(self, timeout: float = -1) -> ClientMessage | None:  # noqa: ARG002 - the driver moves the clock
        """Return the next message of what is there."""
        return self.inner.poll(0)

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[ClientMessage]:  # noqa: ARG002 - as above
        """Return what is there."""
        return self.inner.consume(num_messages, 0)

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> list[TopicPartition] | None:
        """Commit, after telling."""
        self.on_commit(offsets)
        return self.inner.commit(offsets=offsets, asynchronous=asynchronous)


#: What the lane processor yields, message by message.
SteppedProcessing = Generator[Work, Outcome, None]


def message_by_message(processing: LaneProcessing, slot: ExecutionSlot, now: Callable[[], float]) -> SteppedProcessing:
    """Yield what the lane processor yields, the messages of a slice one at a time: for who takes steps."""
    outcome: Outcome = None
    while True:
        try:
            work = processing.send(outcome)
        except StopIteration:
            return
        if not isinstance(work, Slice):
            outcome = yield work
            continue
        for record in work:
            slot.record = record
            try:
                message = slot.prepare(record)
            except:  # noqa: E722 - see `raised`; the user's code: it is this message's failure
                outcome = failure_of(raised())
                break
            outcome = None if message is None else (yield message)
            if message is None:
                slot.refused.append(record.offset())
            elif isinstance(outcome, Results):
                slot.results.append((record, outcome))
                outcome = None
            if outcome is not None or not work.assignment.active:
                break
            slot.started = now()
            if slot.started >= slot.deadline:
                break


class SteppedWorker:
    """What a worker thread or a task does, step by step: it serves the lanes of a queue of the engine's scheduler."""

    __slots__ = ("_engine", "_processing", "abandoned", "lane", "queue", "slot", "work")

    def __init__(self, engine: Engine, slot: ExecutionSlot, queue: int) -> None:
        self._engine = engine
        self.slot = slot
        self.queue = queue
        self._processing: SteppedProcessing | None = None
        #: The lane it holds, and what its handler is given now; None in between.
        self.lane: ConsumerLane | None = None
        self.work: Work | None = None
        #: Its call, where that was abandoned: then it has no lane any more, and only the call's end is left to tell.
        self.abandoned: AbandonedCall | None = None

    @property
    def assignments(self) -> list[Assignment]:
        """What it was given belongs to, each once."""
        fetches = self.slot.fetches or ([] if self.slot.fetch is None else [self.slot.fetch])
        return list(dict.fromkeys(fetch.assignment for fetch in fetches))

    def take(self) -> bool:
        """Take a ready lane and begin with it. Returns whether there was one."""
        lane = self._engine.scheduler.take(self.queue, self.slot.owed_s)
        if lane is None:
            return False
        self.lane = lane
        self._processing = message_by_message(
            self._engine.processor.process(lane, self.slot), self.slot, self._engine.clock.monotonic
        )
        self.go_on(None)
        return True

    def go_on(self, outcome: Outcome) -> None:
        """End the call that is under way, if any, with an outcome; go on to the next, or give the lane back."""
        processing, lane = self._processing, self.lane
        if processing is None or lane is None:
            raise AssertionError("a worker without a lane has nothing to go on with")
        self.work = None
        ended = True
        try:
            self.work = processing.send(outcome)
            ended = False
        except StopIteration:
            pass
        finally:
            if ended:
                self._processing = self.lane = None
                self.slot.leave()
                self._engine.scheduler.give_back(lane)

    def abandon(self, failure: Failed) -> SteppedWorker:
        """Leave all but the call under way to a successor, which goes on with a failure."""
        successor = SteppedWorker(self._engine, self.slot, self.queue)
        successor.lane, successor._processing = self.lane, self._processing
        self.lane = self._processing = None
        self.abandoned = failure.call
        successor.go_on(failure)
        return successor


class SteppedExecutor(Executor):
    """Abandons the calls of threads; to be interrupted is nothing that a driver's call would heed."""

    def __init__(self) -> None:
        self.workers: list[SteppedWorker] = []
        #: Told of a worker whose call was abandoned, and of its successor.
        self.on_abandoned: Callable[[SteppedWorker, SteppedWorker], None] = lambda _worker, _successor: None

    @property
    def worker_count(self) -> int:
        """How many workers stand for threads."""
        return sum(worker.slot.kind is Kind.THREAD for worker in self.workers)

    def interrupt(self, seen: SeenCall) -> bool:
        """Tell that the call goes on."""
        return seen.slot.kind is Kind.THREAD and seen.holds()

    def abandon(self, seen: SeenCall, failure: Failed) -> bool:
        """Give a call up, with its worker."""
        for place, worker in enumerate(self.workers):
            if worker.slot is seen.slot and worker.work is not None and seen.holds():
                self.workers[place] = successor = worker.abandon(failure)
                self.on_abandoned(worker, successor)
                return True
        return False


class SteppedConsumer:
    """One consumer: its engine, its client and its workers; and the cluster that its engine sees.

    `wait` is called where a rebalance callback waits for handlers, with the seconds it would sleep: to let somebody
    work, or to move the clock.
    """

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
        self.engine.executor = self.executor = SteppedExecutor()
        self.workers = self.executor.workers
        self._past: list[ExecutionSlot] = []
        self.loop = PollLoop(self.engine)
        self._client: SteppedClient | None = None
        # All of the cluster but its consumers and its clock is the broker's own.
        self.principal, self.producer, self.topics = broker.principal, broker.producer, broker.topics
        self.require_topics, self.ensure_topics = broker.require_topics, broker.ensure_topics
        self.message_limits = broker.message_limits
        self.ask_topic_ids, self.ask_rights = broker.ask_topic_ids, broker.ask_rights
        self.in_background, self.ask_readable_ends = broker.in_background, broker.ask_readable_ends
        self.transactional_writer, self.stable_offsets = broker.transactional_writer, broker.stable_offsets
        self.disposable = broker.disposable
        if self.engine.lane_plan.has_threads:
            self.resize(settings.workers, Kind.THREAD)

    def consumer(self, config: Mapping[str, Any]) -> SteppedClient:
        """Make the client, as the engine asks its cluster for one."""
        self._client = SteppedClient(self._broker.consumer(config))
        return self._client

    def _sleep(self, seconds: float) -> None:
        if self._client is not None and self._client.in_callback:
            self._wait(seconds)

    # The driver's side

    @property
    def is_connected(self) -> bool:
        """Whether it has a client."""
        return self._client is not None

    @property
    def client(self) -> SteppedClient:
        """The client, once connected."""
        if self._client is None:
            raise AssertionError("a consumer has a client once it is connected")
        return self._client

    def resize(self, count: int, kind: Kind) -> None:
        """Have so many workers of a kind; those too many go when they are between lanes, at the next call of this."""
        engine, mine = self.engine, [worker for worker in self.workers if worker.slot.kind is kind]
        for number in range(len(mine), count):
            queue = engine.lane_plan.task_queue if kind is Kind.TASK else number if engine.settings.pinned else 0
            slot = ExecutionSlot(kind, f"penstock-stepped-{kind.value}-{engine.group}-{number}")
            self.workers.append(SteppedWorker(engine, slot, queue))
        for worker in mine[count:]:
            if worker.lane is None:
                self.workers.remove(worker)
                self._past.append(worker.slot)
        self.executor.slots = [*(worker.slot for worker in self.workers), *self._past]

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

    def statistics(self) -> ConsumerStatistics:
        """Return the counts of this moment, taken from live state."""
        return self.engine.statistics(len(self.workers))

    def explain(self) -> list[Explanation]:
        """Return, for every assigned partition, what holds its watermark, where that message is, and since when."""
        return self.loop.explain()
