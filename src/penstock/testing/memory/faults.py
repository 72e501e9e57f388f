"""Fault injection: faults planned for the next calls, in order, or drawn at random from a seed.

Faults that happened are counted, because a test of a fault must show that its fault happened.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum

from confluent_kafka import KafkaError

from penstock.testing.memory import codes


class Operation(Enum):
    """A call that can be made to fail."""

    #: Any commit of a consumer, and the two kinds of commits.
    COMMIT = "commit"
    COMMIT_SYNC = "commit_sync"
    COMMIT_ASYNC = "commit_async"
    #: A request for the group's offsets.
    COMMITTED = "committed"
    #: A fetch: the consumer gets the error in a message.
    FETCH = "fetch"
    #: The delivery of a produced message.
    PRODUCE = "produce"
    #: The call of `produce`: it raises `BufferError`.
    QUEUE = "queue"
    #: A request for the ends of a partition.
    WATERMARKS = "watermarks"


class Effect(Enum):
    """How a call goes wrong."""

    #: The broker refuses the request; nothing changes.
    REFUSED = "refused"
    #: The broker executes the request; the client gets an error.
    ANSWER_LOST = "answer lost"
    #: The broker executes the request at once; the client gets the answer later.
    ANSWER_LATE = "answer late"
    #: The request reaches the broker later.
    ARRIVES_LATE = "arrives late"
    #: The broker executes the request now and again later, as if the client repeated a request that it thought lost.
    REPEATED = "repeated"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: its effect on a call, and the error that the client gets, if it gets one."""

    effect: Effect
    error: KafkaError
    #: The delay, for effects that delay.
    seconds: float = 0.0


def as_error(error: KafkaError | int) -> KafkaError:
    """Return an error of a code, with Kafka's text."""
    return error if isinstance(error, KafkaError) else KafkaError(error)


#: A placeholder in faults that report no error of the caller's choice.
NO_ERROR = KafkaError(codes.TRANSPORT)

#: The wider operation, whose plan applies too.
_WIDER = {Operation.COMMIT_SYNC: Operation.COMMIT, Operation.COMMIT_ASYNC: Operation.COMMIT}


class Faults:
    """The planned faults. The broker's lock guards them."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._planned: dict[Operation, deque[Fault]] = {}
        self._by_chance: dict[Operation, tuple[Fault, float]] = {}
        #: Number of faults that happened, by operation.
        self.happened: Counter[Operation] = Counter()

    def plan(self, operation: Operation | str, fault: Fault, times: int) -> None:
        """Plan a fault for the next `times` calls."""
        self._planned.setdefault(Operation(operation), deque()).extend([fault] * times)

    def by_chance(self, operation: Operation | str, fault: Fault, probability: float) -> None:
        """Draw a fault for each call with this probability; 0 ends it."""
        if probability > 0:
            self._by_chance[Operation(operation)] = (fault, probability)
        else:
            self._by_chance.pop(Operation(operation), None)

    def clear(self) -> None:
        """Cancel all faults that have not happened yet."""
        self._planned.clear()
        self._by_chance.clear()

    def take(self, operation: Operation) -> Fault | None:
        """Return the fault of this call, if it has one."""
        if not self._planned and not self._by_chance:
            return None
        fault = self._next(operation)
        if fault is None and operation in _WIDER:
            fault = self._next(_WIDER[operation])
        if fault is not None:
            self.happened[operation] += 1
        return fault

    def _next(self, operation: Operation) -> Fault | None:
        planned = self._planned.get(operation)
        if planned:
            fault = planned.popleft()
            if not planned:
                del self._planned[operation]
            return fault
        drawn = self._by_chance.get(operation)
        return drawn[0] if drawn is not None and self._chance.random() < drawn[1] else None
