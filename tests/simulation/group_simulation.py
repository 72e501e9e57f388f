"""`Simulation`: a whole consumer group in one thread, every step of it chosen, every invariant checked at every step.

Instances of an app share a `TestBroker`. What they do is cut into steps (a poll, the beginning of a handler, its end),
and the driver of the simulation decides what comes next: `simulation.random_driver` by a seed, a property test by its
own choice. The same choices give the same run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.app import App
from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.ordering import Order
from penstock.consumer.handlers.results import DeferredCompletion
from penstock.consumer.settings import ConsumerSettings
from penstock.errors import BatchError
from penstock.message import Message
from penstock.testing.memory.broker import TestBroker
from penstock.testing.memory.log import TestTransaction
from simulation.balance_checker import check_bytes, check_counts
from simulation.instance import Instance, State
from simulation.invariant_checker import InvariantBroken, InvariantChecker
from support.stepped_workers import SteppedWorker

#: Seconds of the clock that a client call may take while something is wrong with the brokers, by the client's defaults.
_BROKERS_S = 60.0 + 10.0 + 10.0
#: Turns, and seconds of the clock at a time, in which everything must be done once the faults are over.
_LAST_TURNS = 3_000
_LAST_STRIDE_S = 5.0
#: How often a group is helped that a commit has left behind which arrived twice.
_CATCH_UPS = 100
#: The longest key and value that are written, and with them the headers of a message in a retry topic.
_MESSAGE_BYTES = 32
_RETRIED_BYTES = 700


class SimulatedFailure(Exception):  # noqa: N818 - a failure is what it stands for
    """The error of a handler that is made to fail."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One call of a handler in a simulation's history.

    Attributes:
        instance: name of the instance.
        message: the message.
        begun: the step in which it began.
        ended: the step in which it ended.
    """

    instance: str
    message: Message
    begun: int
    ended: int


class Simulation:
    """Several instances of an app on one broker in memory, in one thread.

    Its steps check I1 to I6 and raise `InvariantBroken`, an AssertionError, when one does not hold. The app's handlers
    are called when a call ends; they must not wait.

    Args:
        app: the app.
        seed: decides what is left to chance in the broker and while an instance waits.
        settings: the options of its consumers; the app's own when left out.
        partitions: of each topic.
    """

    def __init__(
        self, app: App, seed: int = 0, *, settings: ConsumerSettings | None = None, partitions: int = 3
    ) -> None:
        self.app = app
        self.seed = seed
        self.settings = settings or app._settings
        self.chance = random.Random(seed)  # noqa: S311 - a seed must give the same run again
        self.broker = TestBroker(seed, max_fetch=max(1, self.settings.fetch_size))
        self.clock = self.broker.clock
        for topic in app.handlers:
            self.broker.create_topic(topic, partitions)
        is_retried = any(one.retry_delays for one in app.handlers.values())
        self._message_bytes = _RETRIED_BYTES if is_retried else _MESSAGE_BYTES
        self.checker = InvariantChecker(app.name, app.handlers, self.broker)
        self.instances: list[Instance] = []
        #: What was done, for a report; and the step it is at.
        self.trace: list[str] = []
        self.step = 0
        #: Calls that ended well.
        self.history: list[Ended] = []
        #: Transactions that are open.
        self.open: list[TestTransaction] = []
        #: What else may be done while an instance waits for its handlers.
        self.meanwhile: Callable[[], None] = self._work_somewhere
        self._begun: dict[SteppedWorker, int] = {}
        self._names = 0
        self._values = 0
        self._troubled = self._repeated = False
        self._caught_up = 0
        self._brokers_s = _BROKERS_S
        self._most_bytes = self.settings.max_in_flight_bytes

    # What comes from outside

    def _note(self, what: str) -> None:
        self.step += 1
        self.trace.append(what)

    def produce(
        self,
        topic: str,
        key: bytes | None,
        *,
        partition: int | None = None,
        transaction: TestTransaction | None = None,
    ) -> None:
        """Write a message with a unique value."""
        self._note(f"produce {topic} {key!r}" + (" in a transaction" if transaction else ""))
        self._values += 1
        writer = self.broker if transaction is None else transaction
        writer.produce(topic, b"%d" % self._values, key=key, partition=partition)
        self.checker.read_logs()

    def begin_transaction(self) -> TestTransaction:
        """Begin a transaction of a producer."""
        self._note("begin a transaction")
        transaction = self.broker.transaction()
        self.open.append(transaction)
        return transaction

    def end_transaction(self, transaction: TestTransaction, *, commit: bool) -> None:
        """Commit or abort it."""
        self._note("commit a transaction" if commit else "abort a transaction")
        self.open.remove(transaction)
        if commit:
            transaction.commit()
        else:
            transaction.abort()
        self.checker.read_logs()

    def compact(self, topic: str, partition: int) -> None:
        """Compact a log."""
        self._note(f"compact {topic}[{partition}]")
        self.checker.read_logs()
        self.broker.compact(topic, partition)
        self.checker.removed((topic, partition))

    def delete_records(self, topic: str, partition: int, count: int) -> None:
        """Delete the first records of a log."""
        self._note(f"delete {count} of {topic}[{partition}]")
        self.checker.read_logs()
        self.broker.delete_records(topic, partition, self.broker.ends(topic, partition)[0] + count)
        self.checker.removed((topic, partition))

    def truncate(self, topic: str, partition: int, count: int) -> None:
        """Lose the last records of a log, while no transaction is open."""
        if self.open:
            return
        self._note(f"lose {count} of {topic}[{partition}]")
        self.checker.read_logs()
        start, _, end = self.broker.ends(topic, partition)
        self.broker.truncate(topic, partition, max(start, end - count))
        self.checker.cut((topic, partition), end)

    def trouble(self, what: str, do: Callable[[TestBroker], None], *, repeats: bool = False) -> None:
        """Let something go wrong with the brokers: `do` is called with the broker.

        Args:
            what: it in words.
            do: plans it.
            repeats: whether a commit may arrive again after later ones. It cannot be noticed, so the group may
                stay behind until its next commit.
        """
        self._note(what)
        self._troubled = True
        self._repeated = self._repeated or repeats
        do(self.broker)

    def advance(self, seconds: float) -> None:
        """Move the clock."""
        self._note(f"advance {seconds:g} s")
        self.broker.advance(seconds)

    def rebalance(self) -> None:
        """Let partitions move."""
        self._note("rebalance")
        self.broker.rebalance(self.app.name)

    # Instances

    def add(self) -> Instance:
        """Start an instance."""
        self._names += 1
        name, settings = f"i{self._names}", self.settings
        instance = Instance(name, self.app, settings, self.broker, self.checker, wait=self._wait, prepare=self._prepare)
        self._note(f"{instance.name} starts")
        self.instances.append(instance)
        self._watch_what_is_given_up(instance)
        return instance

    @staticmethod
    def _watch_what_is_given_up(instance: Instance) -> None:
        """Check that a message is given up only while its partition is here: else its next owner judges it."""
        parking: Any = instance.consumer.engine.processor._parking
        give_up = parking.give_up

        def check_and_give_up(parked: Any, *more: Any) -> None:
            assignment = parked.waiting[0][0].assignment
            is_owned = (assignment.topic, assignment.partition) in instance.owned
            if not (assignment.active and is_owned):
                raise InvariantBroken(f"{instance} gives up a message of {assignment}, which it gave back")
            give_up(parked, *more)

        parking.give_up = check_and_give_up

    def _prepare(self, instance: Instance) -> None:
        """Change the connections of an instance."""

    def stop(self, instance: Instance) -> None:
        """Ask an instance to stop; its polls drain it from now on."""
        self._note(f"{instance.name} is asked to stop")
        instance.stop()

    def kill(self, instance: Instance) -> None:
        """End an instance as a killed process ends."""
        self._note(f"{instance.name} is killed")
        instance.client.kill()
        instance.state = State.GONE
        self.instances.remove(instance)

    def hold(self, instance: Instance, state: State) -> None:
        """Freeze a running instance, or cut it off."""
        if instance.state is State.RUNNING:
            self._note(f"{instance.name} is {state.value}")
            self._troubled = True
            instance.client.cut_off()
            instance.state = state

    def heal(self, instance: Instance) -> None:
        """Continue a frozen instance, or reconnect one that was cut off."""
        if instance.state in (State.FROZEN, State.CUT_OFF):
            self._note(f"{instance.name} is well again")
            instance.client.heal()
            instance.state = State.RUNNING

    def change(
        self,
        instance: Instance,
        *,
        workers: int | None = None,
        max_in_flight: int | None = None,
        max_in_flight_bytes: int | None = None,
    ) -> None:
        """Change settings of a running instance; those left out stay."""
        self._note(f"{instance.name} changes: {workers=} {max_in_flight=} {max_in_flight_bytes=}")
        back_pressure, engine = instance.loop.back_pressure, instance.consumer.engine
        if workers is not None and engine.lane_plan.has_threads and not engine.settings.pinned:
            instance.consumer.resize(workers, Kind.THREAD)
        back_pressure.max_in_flight = max_in_flight or back_pressure.max_in_flight
        back_pressure.max_in_flight_bytes = max_in_flight_bytes or back_pressure.max_in_flight_bytes
        self._most_bytes = max(self._most_bytes, back_pressure.max_in_flight_bytes)

    def change_rates(self, instance: Instance, topic: str, rate: float | None, key_rate: float | None) -> None:
        """Change the rates of a topic's handler."""
        self._note(f"{instance.name} takes {rate}/s of {topic}, {key_rate}/s of a key")
        engine = instance.consumer.engine
        for name, route in engine.routes.items():
            if topic in (name, route.source):
                paced = key_rate if route.handler.order is Order.KEY else None
                route.change(retry=None, rate=rate, key_rate=paced)
        engine.processor.wake_all()

    # Steps of an instance

    def poll(self, instance: Instance) -> None:
        """Let the poll loop of an instance take a step (I6: it does not wait for handlers)."""
        self._note(f"{instance.name} polls")
        before = self.clock.monotonic()
        troubled = self._troubled
        instance.poll()
        took = self.clock.monotonic() - before
        allowed = instance.consumer.engine.settings.revoke_timeout * 2 + 1.0 + (self._brokers_s if troubled else 0.0)
        if took > allowed and not instance.polling:
            raise InvariantBroken(f"I6: a poll step of {instance} took {took:g} s")
        if instance.state is State.GONE and instance in self.instances:
            self.instances.remove(instance)
        self._check_counts(instance)
        check_bytes(
            instance.name,
            instance.consumer,
            limit_bytes=self._most_bytes,
            fetch_size=self.settings.fetch_size,
            message_bytes=self._message_bytes,
        )

    def take(self, instance: Instance, worker: SteppedWorker) -> bool:
        """Let a worker of an instance take a lane, and begin its first handler. Returns whether there was one."""
        if not instance.take(worker):
            return False
        self._note(f"{instance.name} takes a lane for {worker.slot.name}")
        self._check_others(instance, worker)
        self._check_counts(instance)
        return True

    def finish(self, instance: Instance, worker: SteppedWorker) -> None:
        """Let a handler end well, or return whose call was abandoned."""
        if worker.abandoned is not None:
            self._note(f"{instance.name} comes back from {_names(instance.calls[worker].messages)}")
            instance.come_back(worker)
            self._check_counts(instance)
            return
        messages = instance.calls[worker].messages
        self._note(f"{instance.name} is done with {_names(messages)}")
        begun = self._begun.pop(worker, self.step)
        instance.finish(worker)
        self.history += [Ended(instance.name, message, begun, self.step) for message in messages]
        self._check_others(instance, worker)
        self._check_counts(instance)

    def fail(self, instance: Instance, worker: SteppedWorker, failed: Sequence[int] = ()) -> None:
        """Let a handler fail; of a batch those at the places in `failed`, or all where that is empty."""
        messages = instance.calls[worker].messages
        self._note(f"{instance.name} fails {_names(messages)} {list(failed) or ''}")
        self._begun.pop(worker, None)
        if len(messages) > 1 and failed:
            held: set[object] = set()
            done = []
            for place, message in enumerate(messages):
                identity = self.checker.identity(message)
                if place in failed:
                    held.add(identity)
                elif identity not in held:
                    done.append(message)
            instance.fail(worker, BatchError({place: SimulatedFailure() for place in failed}), done)
        else:
            instance.fail(worker, SimulatedFailure())
        self._check_others(instance, worker)
        self._check_counts(instance)

    def put_off(self, instance: Instance, worker: SteppedWorker) -> None:
        """Let a handler put its completion off."""
        self._note(f"{instance.name} puts {_names(instance.calls[worker].messages)} off")
        self._begun.pop(worker, None)
        instance.put_off(worker, self.chance.choice((None, None, None, 3.0)))
        self._check_others(instance, worker)
        self._check_counts(instance)

    def settle_completion(self, instance: Instance, completion: DeferredCompletion, *, well: bool) -> None:
        """Let a completion come that was put off."""
        self._note(f"a completion of {instance.name} {'comes' if well else 'fails'}")
        instance.settle(completion, None if well else SimulatedFailure())
        self._check_counts(instance)

    def _check_counts(self, instance: Instance) -> None:
        """Check the counts of an instance (I4)."""
        if not instance.polling and instance.state is not State.GONE:
            check_counts(instance.name, instance.consumer)

    def _check_others(self, instance: Instance, worker: SteppedWorker) -> None:
        """Check that no other worker has the messages that a worker has just begun."""
        mine = instance.calls.get(worker)
        if mine is None:
            return
        self._begun[worker] = self.step
        places = {(one.topic, one.partition) for one in mine.messages}
        for other in self.instances:
            if other is instance or not other.calls or not other.is_member or not instance.is_member:
                continue
            for theirs in other.calls.values():
                owned = {(one.topic, one.partition) for one in theirs.assignments if one.active}
                if mine.identities & theirs.identities and places & owned:
                    raise InvariantBroken(f"I1: {instance} began {mine.messages} while {other} is at {theirs.messages}")

    def _wait(self, instance: Instance, seconds: float) -> None:
        """Serve an instance that waits for its handlers in a rebalance callback."""
        if instance.state is not State.GONE and self.chance.random() < 0.5:
            self.meanwhile()
        else:
            self.broker.advance(seconds * self.chance.randint(1, 20))

    def _work_somewhere(self) -> None:
        busy = [(one, worker) for one in self.instances if one.state is not State.FROZEN for worker in one.calls]
        if busy:
            self.finish(*self.chance.choice(busy))

    # The end

    def settle(self) -> None:
        """Let all that is wrong end, handlers do well, and everything be done; then check that nothing is lost.

        Raises:
            InvariantBroken: something is not done, or not committed, though nothing stands in its way.
        """
        self._note("everything is well from now on")
        self._mend()
        for transaction in list(self.open):
            self.end_transaction(transaction, commit=self.chance.random() < 0.5)
        for instance in self.instances:
            self.heal(instance)
            routes = instance.consumer.engine.routes
            # Only where there are limits: a change wakes every key, also one that nothing else would wake.
            for topic in sorted({route.source or name for name, route in routes.items() if route.gated}):
                self.change_rates(instance, topic, None, None)
        for _ in range(_LAST_TURNS):
            if not self.instances:
                self.add()
            if not self._turn():
                if self._is_over():
                    self._judge()
                    return
                self._catch_up()
                now = self.clock.monotonic()
                due = min([self._next_due(one) for one in self.instances] + [self.broker.next_due()])
                self.advance(min(max(due - now, 0.001), _LAST_STRIDE_S))
        explained = [str(one) for instance in self.instances for one in instance.consumer.explain()]
        raise InvariantBroken(
            f"not done: {self.checker.unfinished()}; committed: {self._committed()}; instances: {self.instances}; "
            f"they say: {explained}"
        )

    def _mend(self) -> None:
        """Let no call go wrong any more."""
        self.broker.faults.clear()

    def _judge(self) -> None:
        """Check at the end what could not be checked before."""

    def _next_due(self, instance: Instance) -> float:
        """Return when an instance next does something by the clock alone."""
        return instance.consumer.next_due()

    def _catch_up(self) -> None:
        """Let a group commit once more that was left behind by a commit which arrived twice."""
        if self._repeated and not self.checker.unfinished() and self._caught_up < _CATCH_UPS:
            self._caught_up += 1
            behind = self._committed()
            for topic, partition in list(self.checker.histories):
                if f"{topic}[{partition}]" in behind:
                    self.produce(topic, None, partition=partition)

    def _turn(self) -> bool:
        """Let all instances do what they can; return whether one did something."""
        worked = False
        for instance in list(self.instances):
            received = instance.consumer.engine.counts.received
            self.poll(instance)
            worked = worked or instance.consumer.engine.counts.received != received
            for completion in list(instance.deferred):
                self.settle_completion(instance, completion, well=True)
            for worker in list(instance.calls):
                self.finish(instance, worker)
            for worker in list(instance.consumer.workers):
                while instance.state is not State.GONE and (worker in instance.calls or self.take(instance, worker)):
                    worked = True
                    while worker in instance.calls:
                        self.finish(instance, worker)
        return worked

    def _committed(self) -> dict[str, tuple[int, int]]:
        offsets = self.broker.committed(self.app.name)
        found = {}
        for (topic, partition), history in sorted(self.checker.histories.items()):
            end = self.broker.ends(topic, partition)[2]
            offset = offsets.get((topic, partition))
            # Of a log without a message to read (a transaction may be aborted) the client has no position to commit.
            has_position = offset is not None or self.broker.records(topic, partition)
            if (
                has_position
                and self.broker.ends(topic, partition)[0] < end
                and (offset is None or offset.offset < end or (offset.offset > end and not history.excused))
            ):
                found[f"{topic}[{partition}]"] = (-1 if offset is None else offset.offset, end)
        return found

    def _is_over(self) -> bool:
        self.checker.read_logs()
        return not self.checker.unfinished() and not self._committed()


def _names(messages: Sequence[Message]) -> str:
    return " ".join(f"{one.topic}[{one.partition}]@{one.offset}" for one in messages)


__all__ = ["Ended", "SimulatedFailure", "Simulation"]
