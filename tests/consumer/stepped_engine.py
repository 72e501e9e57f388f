"""A consumer's engine without threads or a broker: lanes are served when a test says so, and the clock stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tenacity

from penstock.clients.renewal import ClientRenewal
from penstock.consumer import ConsumerSettings, Handler, Kind, MiddlewareSpec, retry
from penstock.consumer.assignments import Assignment
from penstock.consumer.engine import Engine
from penstock.consumer.lanes.slot import ExecutionSlot
from penstock.consumer.poll.explain import Explanation
from penstock.consumer.poll.loop import PollLoop
from penstock.consumer.run.executor import Executor
from penstock.consumer.run.handler_calls import call
from penstock.dead_letters.headers import HeaderList
from penstock.message import FixedRecord
from penstock.testing import TestClock
from support.stepped_workers import SteppedWorker

#: Three tries, with a second in between.
ONCE_A_SECOND = retry(attempts=3, wait=tenacity.wait_fixed(1))


class Deliveries:
    """Replaces the producer: keeps messages, and acknowledges them when the test says so."""

    def __init__(self) -> None:
        #: Topic and value of each message it was given.
        self.sent: list[tuple[str, bytes | None]] = []
        self._callbacks: list[Callable[[None, object], None]] = []

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        *,
        partition: int,
        headers: HeaderList,
        on_delivery: Callable[[None, object], None],
    ) -> None:
        """Take a message."""
        assert headers is not None
        assert partition == -1
        assert key is None or isinstance(key, bytes)
        self.sent.append((topic, value))
        self._callbacks.append(on_delivery)

    def poll(self, _timeout: float) -> int:
        """Hear nothing: see `acknowledge`."""
        return 0

    def acknowledge(self) -> None:
        """Tell that the broker has all that was sent."""
        callbacks, self._callbacks = self._callbacks, []
        for delivered in callbacks:
            delivered(None, None)


class Incomparable(FixedRecord):
    """A record as the client makes it: comparing two of them looks at all they hold, and may end the process."""

    __hash__ = None  # type: ignore[assignment] # as the client's

    def __eq__(self, other: object) -> bool:
        raise AssertionError("records are not to be compared")


class SteppedEngine:
    """An engine with one lane, so that all keys share it."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        middlewares: Sequence[MiddlewareSpec] = (),
        *,
        run_seconds: float = 3600,
    ) -> None:
        self.clock = TestClock()
        settings = ConsumerSettings(workers=1, pinned=True, run_seconds=run_seconds)
        self.engine = Engine("group", handlers, settings, self.clock, middlewares)
        self._loop = PollLoop(self.engine)
        self._fetcher = self._loop.fetcher
        self.deliveries = Deliveries()
        self.engine.outbox._clients = ClientRenewal(  # type: ignore[attr-defined] # the outbox is not connected
            lambda: self.deliveries, lambda _: None, 1.0, self.clock.monotonic, at_once=False
        )
        self.slots: list[ExecutionSlot] = []
        self.engine.executor = executor = Executor()
        executor.slots = self.slots
        self._ends: dict[tuple[str, int], int] = {}
        for topic in handlers:
            self.assign(topic)

    @property
    def failures(self) -> list[BaseException]:
        """What would have stopped the consumer."""
        failure = self.engine.stop_request.failure
        return [] if failure is None else [failure]

    def assign(self, topic: str, start: int = 0, partition: int = 0) -> Assignment:
        """Begin a new incarnation of a partition; the former becomes inactive."""
        assignment = Assignment(topic, partition, self.engine.routes[topic], start=start)
        self.engine.assignments.put(assignment)
        self._ends[topic, partition] = start
        return assignment

    def revoke(self, topic: str, partition: int = 0) -> None:
        """Drop a partition, as a rebalance does, without waiting for handlers."""
        gone = self.engine.assignments.deactivate([(topic, partition)])
        self.engine.assignments.remove(gone)
        self.engine.processor.wake_all()

    def of(self, topic: str, partition: int = 0) -> Assignment:
        """Return the present incarnation of a partition."""
        found = self.engine.assignments.get(topic, partition)
        assert found is not None
        return found

    def feed(
        self,
        topic: str,
        *messages: tuple[bytes | None, bytes | None],
        headers: tuple[tuple[str, bytes], ...] = (),
        partition: int = 0,
    ) -> None:
        """Let a fetch bring keys and values."""
        first = self._ends[topic, partition]
        records = [
            Incomparable(topic, partition, first + place, key, value, headers, None)
            for place, (key, value) in enumerate(messages)
        ]
        self._ends[topic, partition] += len(messages)
        self._fetcher.put_on_lanes(records, self.clock.monotonic())

    def serve(self, slot: ExecutionSlot | None = None) -> None:
        """Serve all lanes that are ready, each time at a slot that never handled anything unless one is given."""
        scheduler = self.engine.scheduler
        while ready := [queue for queue in range(scheduler.queues) if scheduler.waiting(queue)]:
            at = slot or ExecutionSlot(Kind.THREAD, f"slot-{len(self.slots)}")
            self.slots.append(at)
            worker = SteppedWorker(self.engine, at, ready[0])
            worker.take()
            while worker.work is not None:
                worker.go_on(call(at, worker.work))

    def pass_time(self, seconds: float) -> None:
        """Move the clock, run what is due, and serve the lanes that became ready."""
        self.clock.advance(seconds)
        self.engine.timers.serve(self.clock.monotonic())
        self.serve()

    def send_out(self) -> None:
        """Let the outbox send its submissions; nothing is acknowledged yet."""
        self.engine.outbox.serve()

    def write_out(self) -> None:
        """Send and acknowledge all submissions, and serve the lanes that waited for that."""
        self.send_out()
        self.deliveries.acknowledge()
        self.serve()

    def explain(self, topic: str) -> list[Explanation]:
        """Return why a topic's partition does not move."""
        return self._loop._explainer.of([self.of(topic)])

    def count(self, what: str) -> int:
        """Return the sum of one of the slots' counts."""
        return sum(getattr(slot, what) for slot in set(self.slots))
