"""The client library's transactional producer in memory, as far as `TransactionalWriter` calls it, and how it fails.

Its errors are those of librdkafka: some ask for an abort, some may be tried again, some are fatal; an end that was sent
twice shows in its log alone. What it waits for, others work at meanwhile: `Network.wait`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from penstock.clients.bounded_calls import Call, Disposable
from penstock.clients.cluster import DeliveryCallback
from penstock.clients.rights import transactional_right
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.clients.transactional.writer import TransactionalWriter
from penstock.testing.memory import codes
from penstock.testing.memory.faults import Effect
from penstock.testing.memory.group.coordinator import CommitRequest
from penstock.testing.memory.group.group import Member
from penstock.testing.memory.log import Outcome
from simulation.transaction_coordinator import TransactionCoordinator, Written

T = TypeVar("T")

#: Seconds for a message to be stored, by the settings of the publisher.
_DELIVERY_S = 5.0
#: Seconds after which a call that has not returned hangs: by then its owner abandons it.
_HANGS_AFTER_S = 12.0
#: Seconds of one wait for reports.
_LOOK_S = 0.25

#: The group's metadata: its name, the member if there is one, and the generation.
Metadata = tuple[str, Member | None, int]


class LeftBehind(BaseException):
    """A call of the client library is abandoned by its owner."""


class ProcessKilled(BaseException):
    """The process was killed in the middle of a call."""


class Network:
    """How one process reaches the brokers.

    Args:
        broker: where its requests go.
        is_cut_off: whether nothing of it reaches them.
        meanwhile: lets others work, for a moment; raises `ProcessKilled`.
        advance: lets at most so many seconds pass, or others work.
    """

    def __init__(
        self,
        broker: TransactionCoordinator,
        *,
        is_cut_off: Callable[[], bool],
        meanwhile: Callable[[], None],
        advance: Callable[[float], None],
    ) -> None:
        self.broker = broker
        self.is_cut_off = is_cut_off
        self.meanwhile = meanwhile
        self._advance = advance
        #: When the owner of the call under way leaves it behind.
        self.leave_at = float("inf")

    @property
    def now(self) -> float:
        """The time."""
        return self.broker.state.clock.monotonic()

    def wait(self, until: float) -> None:
        """Let others work or some time pass, not beyond `until`; raises `LeftBehind` at the owner's limit."""
        if self.now >= self.leave_at:
            raise LeftBehind
        self._advance(min(until, self.leave_at) - self.now)

    def ask(self, call: str, execute: Callable[[], KafkaError | None], limit_s: float) -> KafkaError | None:
        """Send a request and wait for its answer; an error that may be tried again where none comes in time."""
        self.meanwhile()
        coordinator = self.broker.state.coordinator
        answers: list[KafkaError | None] = []
        fault, until = self.broker.take(call), self.now + limit_s

        def blocked() -> bool:
            return self.is_cut_off() or coordinator.away

        if fault is None and blocked():
            coordinator.hold(blocked, lambda: answers.append(execute()))
        else:
            coordinator.deliver(fault, execute, answers.append)
        while not answers and self.now < until:
            self.wait(until)
        self.meanwhile()
        return answers[0] if answers else KafkaError(codes.TIMED_OUT, retriable=True)


class MemoryTransactionalProducer:
    """A transactional producer, as the client library has it. For one thread."""

    def __init__(self, name: str, network: Network, log: Any) -> None:
        self._name = name
        self._network = network
        self._broker = network.broker
        self._log = log
        self._epoch = -1
        # What was not sent yet, since when; and what was sent and is not reported.
        self._queue: deque[tuple[float, Written, DeliveryCallback]] = deque()
        self._out = 0
        self._waits = False
        self._reports: deque[tuple[DeliveryCallback, KafkaError | None, Message]] = deque()
        # Why the transaction can only be aborted, or the producer only be discarded.
        self._abortable: KafkaError | None = None
        self._fatal: KafkaError | None = None

    def _say(self, kind: str, text: str) -> None:
        self._log.log(logging.DEBUG, "%s %s %s", kind, "rdkafka#producer", text)

    def _require_well(self) -> None:
        error = self._fatal or self._abortable
        if error is not None:
            raise KafkaException(error)

    def _raise(self, error: KafkaError) -> None:
        if error.code() in (KafkaError.INVALID_PRODUCER_EPOCH, KafkaError._FENCED):
            error = KafkaError(KafkaError._FENCED, fatal=True)
        elif error.code() == KafkaError.INVALID_TXN_STATE:
            error = KafkaError(error.code(), fatal=True)
        if error.fatal():
            self._fatal = error
        elif error.txn_requires_abort():
            self._abortable = error
        raise KafkaException(error)

    def list_topics(self, topic: str, timeout: float) -> None:
        """Connect, which a simulated network always has."""

    def init_transactions(self, timeout: float) -> None:
        """Take the id over."""

        def initialise() -> None:
            self._epoch = self._broker.initialise(self._name)

        if (error := self._network.ask("init", initialise, timeout)) is not None:
            raise KafkaException(error)

    def begin_transaction(self) -> None:
        """Begin: the broker learns of it with the first message."""
        self._network.meanwhile()
        self._require_well()
        if (fault := self._broker.take("begin")) is not None:
            self._raise(fault.error)

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int,
        on_delivery: DeliveryCallback,
        *,
        headers: Sequence[tuple[str, str | bytes | None]] = (),
    ) -> None:
        """Queue a message."""
        self._require_well()
        if self._broker.take("queue") is not None:
            raise BufferError("Local: Queue full")
        self._queue.append((self._network.now, (topic, value, key, headers, partition), on_delivery))

    def __len__(self) -> int:
        """How many are not reported."""
        return len(self._queue) + self._out

    def poll(self, timeout: float = 0) -> int:
        """Send the queued messages, and report known results; wait for them, for a while."""
        self._send()
        served = self._serve()
        if not served and timeout and len(self):
            self._network.wait(self._network.now + _LOOK_S)
            self._send()
            served = self._serve()
        return served

    def flush(self, timeout: float) -> int:
        """As `poll`: nothing lingers here."""
        self.poll(timeout)
        return len(self)

    def _send(self) -> None:
        while self._queue and not self._waits:
            begun, written, on_delivery = self._queue[0]
            message = Message(topic=written[0], partition=0, key=written[2], value=written[1])
            report = partial(self._report, on_delivery, message)
            if self._network.is_cut_off():
                if self._network.now < begun + _DELIVERY_S:
                    return
                self._queue.popleft()
                self._out += 1
                report(KafkaError(KafkaError._MSG_TIMED_OUT))
                continue
            self._queue.popleft()
            self._out += 1
            execute = partial(self._broker.append, self._name, self._epoch, written)
            fault = self._broker.take("produce")
            # What comes behind it has a higher sequence number: no broker takes it before.
            self._waits = fault is not None and fault.effect is Effect.ARRIVES_LATE
            self._broker.state.coordinator.deliver(fault, execute, report)

    def _report(self, on_delivery: DeliveryCallback, message: Message, error: KafkaError | None) -> None:
        self._waits = False
        if not self._out:
            # Taken back before.
            return
        if error is not None:
            if error.code() == KafkaError.INVALID_PRODUCER_EPOCH:
                self._fatal = KafkaError(KafkaError._FENCED, fatal=True)
            elif error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                # The library only says so in its log; the messages are taken back.
                place = f'"{message.topic()}" [0]'
                self._say("ADDPARTS", f"AddPartitionsToTxn response: partition {place}: Topic authorization failed")
                error = KafkaError(codes.PURGE_QUEUE)
            self._abortable = self._abortable or KafkaError(error.code(), txn_requires_abort=True)
        self._reports.append((on_delivery, error, message))

    def _serve(self) -> int:
        served = len(self._reports)
        while self._reports:
            on_delivery, error, message = self._reports.popleft()
            self._out -= 1
            # The publisher wants to hear of failures alone.
            if error is not None:
                on_delivery(error, message)
        return served

    def send_offsets_to_transaction(
        self, positions: Sequence[TopicPartition], metadata: Metadata, _timeout: float
    ) -> None:
        """Add positions of a group. The time-out is ignored, as by the library (librdkafka#5456)."""
        self._require_well()
        group, member, generation = metadata
        points = [(position.topic, position.partition, position.offset, position.metadata) for position in positions]
        request = CommitRequest(group, member, generation, points)
        execute = partial(self._broker.add_positions, self._name, self._epoch, request)
        if (error := self._network.ask("positions", execute, float("inf"))) is not None:
            self._raise(error)

    def commit_transaction(self, timeout: float) -> None:
        """End it with a commit."""
        self._require_well()
        self._end("commit", Outcome.COMMITTED, timeout)

    def abort_transaction(self, timeout: float) -> None:
        """End it with an abort."""
        if self._fatal is not None:
            raise KafkaException(self._fatal)
        self._queue.clear()
        self._abortable = None
        self._end("abort", Outcome.ABORTED, timeout)

    def _end(self, call: str, outcome: Outcome, timeout: float) -> None:
        times = self._broker.happened[call, Effect.REPEATED.value]
        error = self._network.ask(call, lambda: self._broker.end(self._name, self._epoch, outcome), timeout)
        if self._broker.happened[call, Effect.REPEATED.value] > times:
            self._say("ENDTXN", "EndTxn returned _TIMED_OUT (retrying)")
        self._say("ENDTXN", f"EndTxn returned {'NO_ERROR' if error is None else error.name()} (fine)")
        if error is not None:
            self._raise(error)

    def purge(self) -> None:
        """Remove the messages that were not stored."""
        self._queue.clear()
        self._reports.clear()
        self._out = 0


class MemoryTransactionalWriter(TransactionalWriter):
    """penstock's own writer, on a producer in memory."""

    def __init__(self, transactional_id: str, network: Network) -> None:
        self._network = network
        super().__init__(
            "memory:0",
            {},
            transactional_id,
            ids_right=transactional_right(transactional_id),
            rights=MissingRights({}),
            now=lambda: network.now,
        )

    def _make_producer(self, settings: dict[str, Any]) -> Producer:
        return cast("Producer", MemoryTransactionalProducer(self.transactional_id, self._network, settings["logger"]))


class SteppedCall(Call[T]):
    """A call that is made when the driver says so, by the simulation's clock."""

    def __init__(self, label: str, function: Callable[[], T], network: Network) -> None:
        super().__init__(label, function)
        self._network = network
        self.since = network.now
        self.function = function

    @property
    def age_s(self) -> float:
        """Seconds since it was handed over."""
        return self._network.now - self.since


class SteppedCalls(Disposable):
    """Makes calls one by one, when the driver says so; a slow call hangs until its owner abandons it.

    What was abandoned may go on in the background: `go_on`.
    """

    def __init__(self, network: Network, go_on: Callable[[], None]) -> None:
        self._network = network
        self._go_on = go_on
        self._waiting: deque[SteppedCall[Any]] = deque()
        # The one that is under way, or hangs.
        self._at: SteppedCall[Any] | None = None

    def start(self, label: str, function: Callable[[], T], then: Callable[[], object] = lambda: None) -> Call[T]:  # noqa: ARG002 - as the method it stands for
        """Have a call made at the next step."""
        call = SteppedCall(label, function, self._network)
        self._waiting.append(call)
        return call

    @property
    def is_called(self) -> bool:
        """Whether a call is to be made, or under way."""
        return self._at is not None or bool(self._waiting)

    def step(self) -> bool:
        """Make the next call; return whether there was one."""
        if self._at is not None or not self._waiting:
            return False
        call = self._at = self._waiting.popleft()
        self._network.leave_at = self._network.now + _HANGS_AFTER_S
        try:
            call.set_result(call.function())
        except LeftBehind:
            return True
        except Exception as error:  # noqa: BLE001 - its owner gets it
            call.set_exception(error)
        finally:
            self._network.leave_at = float("inf")
        self._at = None
        return True

    def abandon(self, cleanup: Callable[[], object]) -> None:
        """Let a running call finish its work while its owner goes on."""
        self._waiting.clear()
        if self._at is None:
            self.start("", cleanup)
        else:
            self._network.leave_at = float("-inf")
            self._go_on()

    def close(self) -> None:
        """Nothing is left."""


__all__ = ["MemoryTransactionalWriter", "Metadata", "Network", "ProcessKilled", "SteppedCalls"]
