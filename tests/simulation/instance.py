"""An instance of a simulation: one process of the group, its running calls, and its possible steps."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from enum import Enum
from typing import cast

from confluent_kafka import TopicPartition

from penstock.app import App
from penstock.consumer.assignments import Assignment
from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.results import DeferredCompletion, Results
from penstock.consumer.handlers.route import Failed
from penstock.consumer.lanes.slot import Outcome
from penstock.consumer.poll.loop import PollLoop
from penstock.consumer.retry_topics import RetriedRecord
from penstock.consumer.run.handler_calls import call
from penstock.consumer.settings import ConsumerSettings
from penstock.errors import ConfigurationError
from penstock.message import Message
from penstock.testing.memory.broker import TestBroker
from penstock.testing.memory.log import Place
from simulation.invariant_checker import HandlerCall, InvariantBroken, InvariantChecker
from support.stepped_workers import SteppedWorker, WorkedConsumer

#: By how much the clock's sums may be off.
_ROUNDING_S = 1e-6


class State(Enum):
    """The state of an instance."""

    RUNNING = "running"
    #: Suspended, and unheard of by the group: it does nothing.
    FROZEN = "frozen"
    #: It runs, but nothing of it reaches the brokers.
    CUT_OFF = "cut off"
    #: It was asked to stop.
    DRAINING = "draining"
    GONE = "gone"


class Instance:
    """One member of the group.

    Args:
        name: its name in reports.
        app: the app it runs.
        settings: the options.
        broker: where it runs.
        checker: gets a report of each step.
        wait: called with the instance and seconds where it waits for handlers in a rebalance callback.
        prepare: called with the instance before it is connected.
    """

    #: The call that is ending, while its handler is called: its number, its messages as they were fetched, and the
    #: assignment. Results name their call.
    ending: tuple[int, HandlerCall] | None = None

    def __init__(
        self,
        name: str,
        app: App,
        settings: ConsumerSettings,
        broker: TestBroker,
        checker: InvariantChecker,
        *,
        wait: Callable[[Instance, float], None],
        prepare: Callable[[Instance], None] = lambda _: None,
    ) -> None:
        self.name = name
        self.state = State.RUNNING
        self._checker = checker
        self._broker = broker
        self._clock = broker.clock
        middlewares = app._middlewares
        self.consumer = WorkedConsumer(
            app.name, app.handlers, settings, broker, middlewares, wait=lambda seconds: wait(self, seconds)
        )
        if self.consumer.engine.lane_plan.has_tasks:
            self.consumer.resize(settings.max_concurrency, Kind.TASK)
        #: Which partitions it has, by its callbacks.
        self.owned: set[Place] = set()
        #: Calls under way, and completions that are out, with what they are for.
        self.calls: dict[SteppedWorker, HandlerCall] = {}
        self.deferred: dict[DeferredCompletion, HandlerCall] = {}
        #: Of the calls, those that do not end by themselves. One that is abandoned stays under way for I1.
        self.hanging: set[SteppedWorker] = set()
        self.consumer.executor.on_abandoned = self._abandoned
        #: Whether a poll step is under way: what is done meanwhile is done inside a rebalance callback.
        self.polling = False
        self._sent: dict[Assignment, int] = {}
        # All assignments there were, those of a batch together, by what results say of them.
        self._writers: dict[tuple[Assignment, ...], str] = {}
        self._revoking: tuple[float, list[Assignment]] = (0.0, [])
        prepare(self)
        self.loop: PollLoop = self.consumer.connect()
        self.client = self.consumer.client
        self.client.on_commit = self._commits
        self.client.on_change = self._changed

    def __repr__(self) -> str:
        """Name it."""
        return f"{self.name} ({self.state.value})"

    @property
    def is_member(self) -> bool:
        """Whether the group takes it for a member, and it can know if not."""
        if self.state in (State.FROZEN, State.CUT_OFF, State.GONE):
            return False
        return self.client.memberid() in self._broker.members(self.consumer.engine.group)

    # What its client tells

    def _changed(self, name: str, places: Sequence[Place], over: bool) -> None:
        assignments = self.consumer.engine.assignments
        if name == "assign":
            self.owned.update(places if over else ())
            return
        self.owned.difference_update(places)
        if name != "revoke":
            return
        if not over:
            mine = [assignments.get(*place) for place in places]
            self._revoking = self._clock.monotonic(), [one for one in mine if one is not None]
            return
        begun, revoked = self._revoking
        waited = self._clock.monotonic() - begun
        held = [one for one in self._busy() if any(mine in revoked for mine in one.assignments)]
        # A drain whose time is over has waited before.
        due = min(self.consumer.engine.settings.revoke_timeout, max(0.0, self.loop.stop_request.end_by - begun))
        if held and waited < due - _ROUNDING_S:
            raise InvariantBroken(f"{self} gave {places} back after {waited:g} s while {held[0].messages} is under way")

    def _commits(self, points: Sequence[TopicPartition]) -> None:
        self._checker.may_commit(self.name, points)
        for point in points:
            assignment = self.consumer.engine.assignments.get(point.topic, point.partition)
            if assignment is None:
                raise InvariantBroken(f"{self} commits {point}, of a partition that it does not have")
            former = self._sent.get(assignment, 0)
            if point.offset < former:
                raise InvariantBroken(f"I3: {self} commits {point} after {former}")
            self._sent[assignment] = point.offset

    # Its poll thread

    def poll(self) -> None:
        """Take a step of the poll loop, or of the drain; leave where that is over."""
        if self.polling or self.state in (State.FROZEN, State.GONE):
            return
        self.polling = True
        over = False

        def drain() -> None:
            nonlocal over
            over = self.loop.drain_step()

        try:
            self.consumer.step(drain if self.state is State.DRAINING else self.loop.step)
            if over or self.loop.stop_request.failure is not None:
                self.loop.leave()
                self.state = State.GONE
        finally:
            self.polling = False

    def stop(self) -> None:
        """Begin to drain."""
        if self.state is State.RUNNING:
            self.loop.begin_drain()
            self.state = State.DRAINING

    # Its workers

    def idle_workers(self) -> list[SteppedWorker]:
        """Return the workers that may take a lane."""
        return [worker for worker in self.consumer.workers if worker.lane is None]

    def _busy(self) -> Iterator[HandlerCall]:
        yield from (one for worker, one in self.calls.items() if worker.abandoned is None)
        for completion, one in self.deferred.items():
            if not completion.decided and one.assignment.active:
                yield one

    def take(self, worker: SteppedWorker) -> bool:
        """Let a worker take a lane. Returns whether there was one."""
        found = worker.take()
        self._note(worker)
        return found

    def _note(self, worker: SteppedWorker) -> None:
        work = worker.work
        assignments = tuple(worker.assignments)
        if work is None or not assignments:
            return
        messages = tuple(_as_fetched(one) for one in (work if isinstance(work, list) else (work,)))
        identities: frozenset[Hashable] = frozenset(self._checker.identity(message) for message in messages)
        writer = self._writers.setdefault(assignments, f"{self.name}-{len(self._writers)}")
        made = HandlerCall(messages, identities, assignments, writer)
        retried = made.assignment.route.source is not None
        # A message of a retry topic blocks others only while it is in its handler.
        busy = self.calls.values() if retried else (*self.calls.values(), *self._waiting())
        self._checker.may_begin(self.name, made, self.owned, busy)
        self.calls[worker] = made

    def _waiting(self) -> Iterator[HandlerCall]:
        for completion, one in self.deferred.items():
            retried = one.assignment.route.source is not None
            if not completion.decided and one.assignment.active and not retried:
                yield one

    def _abandoned(self, worker: SteppedWorker, successor: SteppedWorker) -> None:
        self._checker.given_up(self.calls[worker].messages)
        self._note(successor)

    def come_back(self, worker: SteppedWorker) -> None:
        """Let a call end that was abandoned."""
        assert worker.abandoned is not None
        self.hanging.discard(worker)
        del self.calls[worker]
        worker.abandoned.ended.set_result(None)

    def finish(self, worker: SteppedWorker) -> None:
        """Let a call end as the app's handler ends it."""
        made = self.calls[worker]
        Instance.ending = self._checker.number(), made
        outcome = _run(worker) if worker.slot.kind is Kind.TASK else call(worker.slot, worker.work)
        Instance.ending = None
        if isinstance(outcome, DeferredCompletion):
            self.deferred[outcome] = made
        elif isinstance(outcome, Results):
            self._return(outcome, made)
        elif outcome is None:
            self._checker.done(made.messages)
        self._end(worker, outcome, made.messages if isinstance(outcome, Failed) else ())

    def _return(self, results: Results, made: HandlerCall) -> None:
        each = results.each or [results.messages] * len(made.messages)
        for message, mine in zip(made.messages, each, strict=True):
            if mine:
                self._checker.returned((message,))
            else:
                self._checker.done((message,))

    def fail(self, worker: SteppedWorker, error: BaseException, done: Sequence[Message] = ()) -> None:
        """Let a call fail; of a batch some messages may be done all the same."""
        self._checker.done(done)
        self._end(worker, Failed(error), [message for message in self.calls[worker].messages if message not in done])

    def put_off(self, worker: SteppedWorker, timeout: float | None) -> None:
        """End a call with a deferred completion, which fails by itself after so many seconds."""
        completion = DeferredCompletion(timeout)
        made = self.deferred[completion] = self.calls[worker]
        # One that may fail by its own time is given up without another word.
        self._end(worker, completion, made.messages if timeout else ())

    def _end(self, worker: SteppedWorker, outcome: Outcome, failed: Sequence[Message] = ()) -> None:
        self._checker.given_up(failed)
        self.hanging.discard(worker)
        del self.calls[worker]
        worker.go_on(outcome)
        self._note(worker)

    def settle(self, completion: DeferredCompletion, error: BaseException | None) -> None:
        """Let a completion come that was put off."""
        made = self.deferred.pop(completion)
        if completion.decided:
            return
        if error is None:
            self._checker.done(made.messages)
            completion.complete()
        else:
            self._checker.given_up(made.messages)
            completion.fail(error)


def _as_fetched(message: Message) -> Message:
    """Return a message with the place that it was fetched from, where it is shown with that of its origin."""
    record = message._record
    return Message(record.fetched) if isinstance(record, RetriedRecord) else message


def _run(worker: SteppedWorker) -> Outcome:
    try:
        coroutine = cast("Coroutine[object, None, object]", worker.slot.route.invoke(worker.work))
        coroutine.send(None)
    except StopIteration as end:
        value = end.value
        if value is None or isinstance(value, DeferredCompletion):
            return value
        return worker.slot.route.make_results(value, worker.work)
    except Exception as error:  # noqa: BLE001 - it is its message's failure
        return Failed(error)
    coroutine.close()
    raise ConfigurationError("a handler waits in a simulation, where no event loop runs; let it return at once")


__all__ = ["Instance", "State"]
