"""A consumer on the broker in memory whose workers take a step when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from penstock.consumer import ConsumerSettings, Handler, Kind
from penstock.consumer.assignments import Assignment, Fetch, Item
from penstock.consumer.handlers.route import Failed
from penstock.consumer.run.handler_calls import call
from penstock.message import FixedRecord
from penstock.testing import TestBroker
from support.stepped_workers import SteppedWorker, WorkedConsumer


def new_item() -> Item:
    """Return a message in flight of a partition without a consumer, for submissions."""
    assignment = Assignment("in", 0, cast("Any", None), start=0)
    fetch = Fetch(assignment, assignment.tracker.register([0]), 0.0)
    return fetch, 0, FixedRecord("in", 0, 0, b"k", b"v", (), None)


#: Polls in which a group of one has its partitions, and what is there is fetched.
_POLLS = 10


class Stepped:
    """A connected consumer, on topics with one partition each."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        broker: TestBroker | None = None,
        wait: Callable[[float], None] | None = None,
        **settings: object,
    ) -> None:
        self.broker = broker or TestBroker()
        for topic in handlers:
            if topic not in self.broker.topics():
                self.broker.create_topic(topic, 1)
        self.consumer = WorkedConsumer(
            "g",
            handlers,
            ConsumerSettings(**{"workers": 1, **settings}),  # type: ignore[arg-type] # the tests name options
            self.broker,
            wait=wait or self.broker.advance,
        )
        if self.consumer.engine.lane_plan.has_tasks:
            self.consumer.resize(self.consumer.engine.settings.max_concurrency, Kind.TASK)
        self.loop = self.consumer.connect()
        self.poll(_POLLS)

    def feed(self, topic: str, messages: Iterable[tuple[bytes | None, bytes]]) -> None:
        """Write keys and values, and fetch them."""
        for key, value in messages:
            self.broker.produce(topic, value, key=key)
        self.poll(_POLLS)

    def poll(self, times: int = 1) -> None:
        """Let the poll loop take steps."""
        for _ in range(times):
            self.consumer.step(self.loop.step)

    def take(self) -> SteppedWorker:
        """Let the first idle worker take a lane that is ready."""
        worker = next(candidate for candidate in self.consumer.workers if candidate.lane is None)
        assert worker.take(), "no lane is ready"
        return worker

    @staticmethod
    def finish(worker: SteppedWorker, error: BaseException | None = None) -> None:
        """End a worker's call as the handler ends it, or with an error in its place."""
        worker.go_on(call(worker.slot, worker.work) if error is None else Failed(error))

    def serve(self) -> None:
        """Let the workers finish their messages and all that is ready."""
        for worker in self.consumer.workers:
            while worker.lane is not None or worker.take():
                if worker.work is not None:
                    self.finish(worker)

    def committed(self, topic: str) -> int:
        """Return the group's offset of a topic's only partition."""
        return self.broker.committed("g")[topic, 0].offset
