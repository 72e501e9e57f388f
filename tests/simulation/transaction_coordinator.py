"""Kafka's transaction coordinator in memory: epochs, open transactions, positions that wait for an end, time-outs.

What a simulation adds to the broker in memory: `penstock.testing` has no transactional producers. Transactions write
into the broker's own logs, so its readers see last stable offsets and aborted ranges as they do in Kafka.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from confluent_kafka import KafkaError, Message

from penstock.testing.memory import codes
from penstock.testing.memory.faults import Effect, Fault, as_error
from penstock.testing.memory.group.coordinator import CommitRequest
from penstock.testing.memory.log import Headers, Outcome, Place, TestTransaction
from penstock.testing.memory.state import BrokerState

#: A message as it is written: topic, value, key, headers and partition (-1: the partitioner's).
Written = tuple[str, bytes | None, bytes | None, Headers, int]

#: Seconds after which the broker aborts a transaction (`transaction.timeout.ms` of the publisher).
TIMEOUT_S = 10.0
#: Seconds between two looks of the broker for those.
LOOK_S = 10.0


@dataclass(slots=True, eq=False)
class OpenTransaction:
    """A transaction as its coordinator knows it."""

    logged: TestTransaction
    #: What was written in it, and the positions of groups that take effect with it.
    records: list[Message] = field(default_factory=list)
    positions: list[CommitRequest] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Id:
    epoch: int = 0
    open: OpenTransaction | None = None
    #: How the last one of this epoch ended: the same end is answered well again.
    last: Outcome = Outcome.OPEN


class TransactionCoordinator:
    """All transactional ids of a broker.

    Args:
        state: of the broker in memory.
    """

    def __init__(self, state: BrokerState) -> None:
        self.state = state
        self._ids: dict[str, _Id] = {}
        self._faults: dict[str, deque[Fault]] = {}
        #: How often which fault struck which call.
        self.happened: Counter[tuple[str, str]] = Counter()
        #: Called with a transaction that is about to take effect.
        self.on_commit: Callable[[OpenTransaction], None] = lambda _: None
        #: Called with a message that a topic refuses.
        self.on_refused: Callable[[bytes | None], None] = lambda _: None
        #: Whose messages may be refused.
        self.may_refuse: Callable[[str], bool] = lambda _: False
        #: Messages that no topic takes, by their value; and topics into which nothing may be written.
        self.refused_values: set[bytes] = set()
        self.closed_topics: set[str] = set()
        #: So many of the next messages are refused, and stay so.
        self.refuse_next = 0

    # Faults

    def plan(self, call: str, effect: Effect, error: KafkaError | int = codes.TRANSPORT, seconds: float = 0.0) -> None:
        """Let the next such call go wrong."""
        self._faults.setdefault(call, deque()).append(Fault(effect, as_error(error), seconds))

    def take(self, call: str) -> Fault | None:
        """Return the fault of this call, if it has one."""
        planned = self._faults.get(call)
        if not planned:
            return None
        fault = planned.popleft()
        self.happened[call, fault.effect.value] += 1
        return fault

    def clear(self) -> None:
        """Let nothing go wrong any more."""
        self._faults.clear()
        self.refused_values.clear()
        self.closed_topics.clear()
        self.refuse_next = 0

    # What clients ask for. Each answers with an error of the broker, or None.

    def initialise(self, name: str) -> int:
        """Abort the open transaction of an id, fence its producers, and return the new epoch."""
        mine = self._ids.setdefault(name, _Id())
        self._end(mine, Outcome.ABORTED)
        mine.epoch += 1
        mine.last = Outcome.OPEN
        return mine.epoch

    def append(self, name: str, epoch: int, written: Written) -> KafkaError | None:
        """Write a message, in the transaction that is open or begins with it."""
        mine = self._ids[name]
        topic, value, key, headers, partition = written
        if epoch != mine.epoch:
            return KafkaError(KafkaError.INVALID_PRODUCER_EPOCH)
        if topic in self.closed_topics:
            self.happened["produce", "forbidden"] += 1
            self.on_refused(value)
            return KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
        if value is not None and self.may_refuse(topic) and self._refuses(value):
            self.happened["produce", "too large"] += 1
            self.on_refused(value)
            return KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
        transaction = self._begun(mine)
        message = transaction.logged.produce(topic, value, key=key, headers=headers, partition=partition)
        transaction.records.append(message)
        return None

    def _refuses(self, value: bytes) -> bool:
        if self.refuse_next and value not in self.refused_values:
            self.refuse_next -= 1
            self.refused_values.add(value)
        return value in self.refused_values

    def add_positions(self, name: str, epoch: int, request: CommitRequest) -> KafkaError | None:
        """Add positions of a group, fenced by its generation. Without a member nothing is fenced (as in Kafka)."""
        mine = self._ids[name]
        if epoch != mine.epoch:
            return KafkaError(KafkaError.INVALID_PRODUCER_EPOCH)
        if request.member is not None:
            code = self.state.coordinator._refusal(request)
            if code is not None:
                return KafkaError(code, txn_requires_abort=True)
        self._begun(mine).positions.append(request)
        return None

    def end(self, name: str, epoch: int, outcome: Outcome) -> KafkaError | None:
        """Commit or abort an open transaction."""
        mine = self._ids[name]
        if epoch != mine.epoch:
            return KafkaError(KafkaError.INVALID_PRODUCER_EPOCH)
        if mine.open is None:
            return None if mine.last is outcome else KafkaError(KafkaError.INVALID_TXN_STATE)
        self._end(mine, outcome)
        return None

    def is_stable(self, group: str, places: Iterable[Place]) -> bool:
        """Return whether no open transaction moves an offset of these partitions."""
        wanted = set(places)
        return not any(
            (topic, partition) in wanted
            for mine in self._ids.values()
            if mine.open is not None
            for request in mine.open.positions
            if request.group == group
            for topic, partition, _, _ in request.points
        )

    def _begun(self, mine: _Id) -> OpenTransaction:
        if mine.open is None:
            begun = mine.open = OpenTransaction(self.state.transaction())
            mine.last = Outcome.OPEN
            after = TIMEOUT_S + self.state.chance.random() * LOOK_S
            self.state.coordinator.later(after, lambda: self._time_out(mine, begun))
        return mine.open

    def _time_out(self, mine: _Id, begun: OpenTransaction) -> None:
        if mine.open is begun:
            self.happened["transaction", "timed out"] += 1
            self._end(mine, Outcome.ABORTED)
            mine.epoch += 1

    def _end(self, mine: _Id, outcome: Outcome) -> None:
        transaction, mine.open = mine.open, None
        if transaction is None:
            return
        mine.last = outcome
        if outcome is Outcome.COMMITTED:
            self.on_commit(transaction)
        transaction.logged.end(outcome)
        if outcome is Outcome.COMMITTED:
            for request in transaction.positions:
                self.state.coordinator.store(request)


def positions_of(requests: Sequence[CommitRequest]) -> dict[Place, tuple[int, str]]:
    """Return the offset and the map that positions end up with."""
    return {
        (topic, partition): (offset, metadata or "")
        for request in requests
        for topic, partition, offset, metadata in request.points
    }


__all__ = ["LOOK_S", "TIMEOUT_S", "OpenTransaction", "TransactionCoordinator", "Written", "positions_of"]
