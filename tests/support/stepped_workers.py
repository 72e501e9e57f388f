"""Workers that take a step when a test or a simulation says so: one message at a time, in any order of the workers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from confluent_kafka import TopicPartition

from penstock.clients.cluster import RebalanceCallback
from penstock.consumer import ConsumerStatistics, Explanation
from penstock.consumer.assignments import Assignment, ConsumerLane
from penstock.consumer.engine import Engine
from penstock.consumer.handlers.call_guard import AbandonedCall
from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.results import Results
from penstock.consumer.handlers.route import Failed, failure_of
from penstock.consumer.lanes.slot import ExecutionSlot, LaneProcessing, Outcome, SeenCall, Slice, Work
from penstock.consumer.run.executor import Executor
from penstock.errors import raised
from penstock.testing.stepped_consumer import SteppedClient, SteppedConsumer


def message_by_message(processing: LaneProcessing, slot: ExecutionSlot) -> Generator[Work, Outcome, None]:
    """Yield the steps of the lane processor, of each slice only the first message: the next slice has the others."""
    outcome: Outcome = None
    while True:
        try:
            work = processing.send(outcome)
        except StopIteration:
            return
        if not isinstance(work, Slice):
            outcome = yield work
            continue
        work.cut()
        (slot.record,) = work
        try:
            message = slot.route.prepare(work[0])
        except:  # noqa: E722 - see `raised`; the user's code: it is this message's failure
            outcome = failure_of(raised())
            continue
        outcome = None if message is None else (yield message)
        if message is None:
            slot.refused.append(work[0].offset())
        elif isinstance(outcome, Results):
            slot.results.append((work[0], outcome))
            outcome = None


class SteppedWorker:
    """A worker thread or a task, step by step: it serves the lanes of a queue of the engine's scheduler."""

    def __init__(self, engine: Engine, slot: ExecutionSlot, queue: int) -> None:
        self._engine = engine
        self.slot = slot
        self.queue = queue
        self._processing: Generator[Work, Outcome, None] | None = None
        #: The lane it holds, and what its handler is given now; None in between.
        self.lane: ConsumerLane | None = None
        self.work: Work | None = None
        #: Its call, where that was abandoned: then it has no lane any more, and only the call's end is left to tell.
        self.abandoned: AbandonedCall | None = None

    @property
    def assignments(self) -> list[Assignment]:
        """The assignments of its messages, each once."""
        fetches = self.slot.fetches or ([] if self.slot.fetch is None else [self.slot.fetch])
        return list(dict.fromkeys(fetch.assignment for fetch in fetches))

    def take(self) -> bool:
        """Take a ready lane and begin with it. Returns whether there was one."""
        lane = self._engine.scheduler.take(self.queue, self.slot.owed_s)
        if lane is None:
            return False
        self.lane = lane
        self._processing = message_by_message(self._engine.processor.process(lane, self.slot), self.slot)
        self.go_on(None)
        return True

    def go_on(self, outcome: Outcome) -> None:
        """End the call that is under way, if any, with an outcome; go on to the next, or give the lane back."""
        processing, lane = self._processing, self.lane
        assert processing is not None
        assert lane is not None
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
        #: Called with a worker whose call was abandoned, and its successor.
        self.on_abandoned: Callable[[SteppedWorker, SteppedWorker], None] = lambda _worker, _successor: None

    def room(self, kind: Kind) -> int:
        """Return the number of workers for threads, or for tasks."""
        return sum(worker.slot.kind is kind for worker in self.workers)

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


class WatchedClient(SteppedClient):
    """A client that calls who listens."""

    #: Called before a commit is sent.
    on_commit: Callable[[Sequence[TopicPartition]], None] = staticmethod(lambda _: None)
    #: Called before and after each rebalance callback, with its name, the partitions, and whether it is over.
    on_change: Callable[[str, Sequence[tuple[str, int]], bool], None] = staticmethod(lambda _name, _places, _over: None)

    def call_back(self, name: str, callback: RebalanceCallback, partitions: list[TopicPartition]) -> None:
        """Call a rebalance callback."""
        places = [(partition.topic, partition.partition) for partition in partitions]
        self.on_change(name, places, False)  # noqa: FBT003 - a callback's arguments have no names
        super().call_back(name, callback, partitions)
        self.on_change(name, places, True)  # noqa: FBT003 - a callback's arguments have no names

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> list[TopicPartition] | None:
        """Commit."""
        self.on_commit(offsets)
        return super().commit(offsets=offsets, asynchronous=asynchronous)


class WorkedConsumer(SteppedConsumer):
    """A consumer with workers: threads from its beginning, tasks with `resize`."""

    client: WatchedClient
    client_type = WatchedClient

    def __init__(self, *of: Any, **options: Any) -> None:
        super().__init__(*of, **options)
        self.engine.executor = self.executor = SteppedExecutor()
        self.workers = self.executor.workers
        self._past: list[ExecutionSlot] = []
        if self.engine.lane_plan.has_threads:
            self.resize(self.engine.settings.workers, Kind.THREAD)

    def resize(self, count: int, kind: Kind) -> None:
        """Set the number of workers of a kind; surplus ones go between lanes, at the next call."""
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

    def statistics(self) -> ConsumerStatistics:
        """Return the counts of this moment."""
        return self.engine.statistics(len(self.workers))

    def explain(self) -> list[Explanation]:
        """Return what holds each watermark."""
        return self.loop.explain()
