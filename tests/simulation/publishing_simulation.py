"""`PublishingSimulation`: a group whose handlers return results, at least once or exactly once.

At least once, the poll thread writes results; a producer's reports pass through here. Exactly once, the thread that
makes an instance's calls is stepped like the poll thread and the workers: others work while it waits for the brokers,
and it may be frozen, left behind or killed in the middle of a transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

import penstock
from penstock.app import App
from penstock.clients.cluster import DeliveryCallback
from penstock.clients.transactional.writer import State as WriterState
from penstock.consumer.assignments import OVERHEAD_BYTES, ConsumerLane
from penstock.consumer.outbox.outbox import RefusedResults
from penstock.consumer.outbox.transactional_outbox import TransactionalOutbox
from penstock.consumer.settings import ConsumerSettings
from penstock.testing.memory import codes
from penstock.testing.memory.log import Outcome
from simulation.group_simulation import Simulation
from simulation.instance import Instance, State
from simulation.result_checker import OUTPUT_PARTITIONS, OUTPUTS, ResultChecker, results_of
from simulation.transaction_coordinator import LOOK_S, TIMEOUT_S, TransactionCoordinator
from simulation.transactional_client import (
    MemoryTransactionalWriter,
    Metadata,
    Network,
    ProcessKilled,
    SteppedCalls,
)

#: Depth of nested waits in which others still work.
_DEEPEST = 2
#: Messages that are parked at a time, at most: as many as a run has.
_MOST_PARKED = 200
#: Characters of an offset map where it is to have no room.
_NO_MAP_CHARS = 0
#: Calls of an instance's transactional producer in one step: the end of one, the start of another, a transaction.
_CALLS = 3


def publish(message: penstock.Message) -> list[penstock.Outgoing]:
    """Return results for a message."""
    return _results(message)


async def publish_async(message: penstock.Message) -> list[penstock.Outgoing]:
    """Return results for a message, on the event loop."""
    return _results(message)


def publish_each(messages: list[penstock.Message]) -> list[Any]:
    """Return results for each message of a batch."""
    call, mine = _ending()
    found = [results_of((one,), f"{call}.{place}", mine.writer) for place, one in enumerate(mine.messages)]
    assert len(found) == len(messages)
    return [one or None for one in found]


def publish_whole(messages: list[penstock.Message]) -> list[penstock.Outgoing]:
    """Return results for a batch as a whole."""
    call, mine = _ending()
    assert len(mine.messages) == len(messages)
    return results_of(mine.messages, str(call), mine.writer)


def _results(_message: penstock.Message) -> list[penstock.Outgoing]:
    call, mine = _ending()
    return results_of(mine.messages, str(call), mine.writer)


def _ending() -> Any:
    assert Instance.ending is not None
    return Instance.ending


class ObservedProducer:
    """A producer in memory; it reports refused results to the checker."""

    def __init__(self, inner: Any, refuse: Callable[[bytes | None], None]) -> None:
        self._inner = inner
        self._refuse = refuse
        self.poll, self.flush, self.purge = inner.poll, inner.flush, inner.purge

    def produce(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        *,
        partition: int = -1,
        headers: Sequence[tuple[str, str | bytes | None]] = (),
        on_delivery: DeliveryCallback,
    ) -> None:
        """As the client's."""

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None and topic in OUTPUTS:
                self._refuse(value)
            on_delivery(error, message)

        self._inner.produce(topic, value, key, partition=partition, headers=headers, on_delivery=delivered)


class PublishingSimulation(Simulation):
    """A simulation of an app with the handlers of this module; arguments as `Simulation`."""

    def __init__(
        self, app: App, seed: int = 0, *, settings: ConsumerSettings | None = None, partitions: int = 3
    ) -> None:
        super().__init__(app, seed, settings=settings, partitions=partitions)
        for topic in OUTPUTS:
            self.broker.create_topic(topic, OUTPUT_PARTITIONS)
        self.transactions = TransactionCoordinator(self.broker)
        self.results = ResultChecker(
            app.name, self.checker, app.handlers, self.broker, exactly_once=self.settings.exactly_once
        )
        self.transactions.on_commit = self.results.takes_effect
        self.transactions.on_refused = self.results.refuse
        self.transactions.may_refuse = OUTPUTS.__contains__
        #: The step of the driver for others while a thread waits for the brokers.
        self.others: Callable[[], None] = lambda: None
        self._depth = 0
        self._publishing: set[Instance] = set()
        self._nested = 0
        self._calls: dict[Instance, list[SteppedCalls]] = {}
        self._writers: dict[Instance, MemoryTransactionalWriter] = {}
        # A partition's offsets are not returned before the transaction of its former owner has ended.
        self._brokers_s += 2 * (TIMEOUT_S + LOOK_S)
        #: Whether offset maps have no room. Messages of a batch would wait for those between them then.
        self.has_no_map = partitions == 1 and all(handler.batch == 1 for handler in app.handlers.values())
        self._parked = 0
        self._allow_parked(self.settings.max_in_flight)
        #: How often what happened that a run should meet.
        self.met: dict[str, int] = {}

    def meet(self, what: str) -> None:
        """Count what happened."""
        self.met[what] = self.met.get(what, 0) + 1

    # Instances

    def _allow_parked(self, count: int) -> None:
        """Allow for messages that were parked, are handled now, and wait for visible results (I5)."""
        more = max(0, min(count, _MOST_PARKED) - self._parked)
        self._parked += more
        self._most_bytes += more * (self._message_bytes + OVERHEAD_BYTES)

    def change(self, instance: Instance, **settings: int | None) -> None:
        """Change settings of a running instance."""
        self._most_bytes -= (taken := self._parked * (self._message_bytes + OVERHEAD_BYTES))
        super().change(instance, **settings)
        self._most_bytes += taken
        self._allow_parked(settings.get("max_in_flight") or 0)

    def _prepare(self, instance: Instance) -> None:
        consumer: Any = instance.consumer
        if not self.settings.exactly_once:
            make = consumer.producer
            consumer.producer = lambda config: ObservedProducer(make(config), self.results.refuse)
            return
        network = Network(
            self.transactions,
            is_cut_off=lambda: instance.client._cut_off,
            meanwhile=lambda: self._let_others(instance),
            advance=lambda seconds: self._wait_for_brokers(instance, seconds),
        )

        def make_writer(name: str, _config: Mapping[str, Any]) -> MemoryTransactionalWriter:
            self.meet("a writer")
            writer = self._writers[instance] = MemoryTransactionalWriter(name, network)
            return writer

        consumer.transactional_writer = make_writer

        def make_calls(_name: str, _left: object) -> SteppedCalls:
            calls = SteppedCalls(network, lambda: self._leave_behind(instance))
            self._calls.setdefault(instance, []).append(calls)
            return calls

        consumer.disposable = make_calls
        consumer.stable_offsets = lambda group, partitions: self._stable_offsets(network, group, partitions)

    def add(self) -> Instance:
        """Start an instance."""
        instance = super().add()
        if not self.settings.exactly_once:
            return instance
        client: Any = instance.client
        committed = client.committed

        def stable(partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
            self._await_stable(instance, partitions, timeout)
            return cast("list[TopicPartition]", committed(partitions, timeout))

        client.committed = stable
        client.consumer_group_metadata = lambda: self._metadata(instance)
        client.memberid = lambda: "" if (member := self._metadata(instance)[1]) is None else member.name
        engine = instance.consumer.engine
        self._watch(engine.outbox)
        wake = engine.results.wake

        def wake_meanwhile(lane: ConsumerLane, refused: RefusedResults) -> None:
            # A topic that is closed fails all that have a result for it, those not sent yet as well.
            if self.transactions.happened["produce", "forbidden"]:
                fetch, _, record = refused.item
                self.results.refuse_message((fetch.assignment.topic, fetch.assignment.partition), record.offset())
            wake(lane, refused)

        engine.results.wake = wake_meanwhile
        return instance

    def _watch(self, outbox: Any) -> None:
        """Let others work while a transaction is put together, and note what seldom happens to one."""
        if self.has_no_map:
            # What is done above the watermark must wait: no map tells of it.
            outbox._map_chars = _NO_MAP_CHARS
        changed, take, split = outbox.changed, outbox._take, outbox._split

        def changed_meanwhile(*done: Any) -> Any:
            if not done:
                # It is asked whether there is something to commit.
                return changed()
            self._work_meanwhile(chance=0.1)
            found = changed(*done)
            self._work_meanwhile(chance=0.5)
            return found

        def take_and_note(*what: Any) -> Any:
            found = take(*what)
            if outbox._silent and found[1]:
                self.meet("a silent topic")
            return found

        def split_and_note(inside: Any) -> None:
            split(inside)
            self.meet("a transaction is split")

        outbox.changed, outbox._take, outbox._split = changed_meanwhile, take_and_note, split_and_note

    def _metadata(self, instance: Instance) -> Metadata:
        """Return the client's membership; a removed member has no name any more."""
        member = instance.client._member
        if member is None or (member.gone is not None and not instance.client._cut_off):
            self.meet("no member")
            return self.app.name, None, -1
        return self.app.name, member, member.generation

    def _await_stable(self, instance: Instance, partitions: Sequence[TopicPartition], timeout: float) -> None:
        places = [(partition.topic, partition.partition) for partition in partitions]
        end = self.clock.monotonic() + timeout
        if instance.state is State.CUT_OFF:
            # It asks until it is answered.
            for _ in range(self.chance.randint(1, 5)):
                self._wait(instance, 2.0)
            self.heal(instance)
        while not self.transactions.is_stable(self.app.name, places):
            self.meet("unstable offsets")
            if self.clock.monotonic() >= end:
                raise KafkaException(KafkaError(codes.TIMED_OUT))
            self._wait(instance, min(0.5, end - self.clock.monotonic()))

    def _stable_offsets(self, network: Network, group: str, partitions: list[TopicPartition]) -> list[TopicPartition]:
        end = self.clock.monotonic() + 10.0
        places = [(partition.topic, partition.partition) for partition in partitions]
        if (error := network.ask("stable", lambda: None, 10.0)) is not None:
            raise KafkaException(error)
        while not self.transactions.is_stable(group, places):
            if self.clock.monotonic() >= end:
                raise KafkaException(KafkaError(codes.TIMED_OUT))
            network.wait(end)
        self.meet("a doubt is settled")
        return self.broker.stable_offsets(group, partitions)

    def _leave_behind(self, instance: Instance) -> None:
        """Let an abandoned call go on: to the end of its transaction, unless it is fenced."""
        self.meet("left behind")
        writer = self._writers[instance]
        name, producer = writer.transactional_id, cast("Any", writer._producer)
        epoch = -1 if producer is None else producer._epoch

        def commit() -> None:
            if writer._state is WriterState.GIVEN_UP:
                return  # it raises before the end
            mine = self.transactions._ids.get(name)
            if mine is not None and mine.epoch == epoch and mine.open is not None and mine.open.positions:
                self.meet("left behind, and committed")
                self.transactions.end(name, epoch, Outcome.COMMITTED)

        self.broker.coordinator.later(self.chance.choice((0.0, 0.3, 2.0)), commit)

    # The thread that makes the calls

    def publish(self, instance: Instance) -> bool:
        """Let an instance go on with its transactions, by some calls. Returns whether there was one."""
        has_called = False
        for _ in range(_CALLS):
            if instance in self._publishing or instance.state in (State.FROZEN, State.GONE):
                break
            calls = self._calls.get(instance, ())
            if not instance.polling and not any(call.is_called for call in calls):
                # The poll thread comes by far more often than such a call ends.
                self.poll(instance)
            has_called |= self._call(instance)
        return has_called

    def _call(self, instance: Instance) -> bool:
        """Let the next call of an instance's transactional producer be made."""
        self._note(f"{instance.name} publishes")
        self._nested += 1
        self._publishing.add(instance)
        try:
            return any(calls.step() for calls in self._calls.get(instance, ()))
        except ProcessKilled:
            self.meet("killed in a transaction")
            return True
        finally:
            self._publishing.discard(instance)

    def _let_others(self, instance: Instance) -> None:
        """Let others work while an instance's thread is between two calls."""
        self._work_meanwhile(chance=0.1)
        self._stay_frozen(instance)

    def _work_meanwhile(self, chance: float) -> None:
        if self._depth < _DEEPEST and self.chance.random() < chance:
            self._depth += 1
            try:
                for _ in range(self.chance.randint(1, 6)):
                    self.others()
            finally:
                self._depth -= 1

    def _stay_frozen(self, instance: Instance) -> None:
        if instance.state is State.FROZEN:
            self.meet("frozen in a transaction")
            self.advance(self.chance.choice((1.0, 8.0, 15.0)))
            self.others()
            self.advance(self.chance.choice((0.1, 15.0)))
            self.heal(instance)
        if instance.state is State.GONE:
            raise ProcessKilled

    def _wait_for_brokers(self, instance: Instance, seconds: float) -> None:
        """Let others work, or at most so many seconds pass."""
        if self._depth < _DEEPEST and self.chance.random() < 0.3:
            self._let_others(instance)
        due = self.broker.next_due() - self.clock.monotonic()
        self.broker.advance(max(0.0, min(seconds, max(due, 0.001), self.chance.choice((0.1, 1.0, 5.0)))))
        self._stay_frozen(instance)

    def _wait(self, instance: Instance, seconds: float) -> None:
        if self.settings.exactly_once and self.chance.random() < 0.5:
            self.publish(self.chance.choice([*self.instances, instance]))
        super()._wait(instance, seconds)

    def poll(self, instance: Instance) -> None:
        """Let the poll loop of an instance take a step."""
        begun, self._troubled = self._nested, self._troubled or self.settings.exactly_once
        outbox = instance.consumer.engine.outbox
        before = outbox.transactions if isinstance(outbox, TransactionalOutbox) else 0
        try:
            super().poll(instance)
            if isinstance(outbox, TransactionalOutbox):
                self.met["transactions"] = self.met.get("transactions", 0) + outbox.transactions - before
        except AssertionError as error:
            # Whose publisher waits for the brokers meanwhile takes the time of all others here.
            if not str(error).startswith("I6") or begun == self._nested:
                raise

    # The end

    def _mend(self) -> None:
        super()._mend()
        self.transactions.clear()
        self.others = lambda: None

    def _turn(self) -> bool:
        worked = super()._turn()
        self._depth += _DEEPEST
        try:
            for instance in list(self.instances):
                engine = instance.consumer.engine
                before = engine.results.handled, engine.outbox.waiting
                if self.publish(instance):
                    self.poll(instance)
                worked = worked or before != (engine.results.handled, engine.outbox.waiting)
        finally:
            self._depth -= _DEEPEST
        return worked

    def _next_due(self, instance: Instance) -> float:
        due = super()._next_due(instance)
        outbox = instance.consumer.engine.outbox
        if isinstance(outbox, TransactionalOutbox) and outbox.waiting:
            due = min(due, self.clock.monotonic() + outbox.due_in())
        return due

    def _judge(self) -> None:
        # What was killed in a transaction holds readers back until that times out.
        self.broker.advance(TIMEOUT_S + LOOK_S)
        self.results.check_all()


__all__ = ["PublishingSimulation", "publish", "publish_async", "publish_each", "publish_whole"]
