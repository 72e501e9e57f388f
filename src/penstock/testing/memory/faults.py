"""Faults: what goes wrong on demand, planned for coming calls in order or drawn by a seed.

What struck is counted, because a test of a fault must show that its fault happened.
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

    #: Any commit of a consumer, or only one kind of them.
    COMMIT = "commit"
    COMMIT_SYNC = "commit_sync"
    COMMIT_ASYNC = "commit_async"
    #: Asking for the group's offsets.
    COMMITTED = "committed"
    #: A fetch: the error is handed over in a message.
    FETCH = "fetch"
    #: The delivery of a produced message.
    PRODUCE = "produce"
    #: The call of `produce` itself: it raises `BufferError`.
    QUEUE = "queue"
    #: Asking for the ends of a partition.
    WATERMARKS = "watermarks"


class Effect(Enum):
    """How a call goes wrong."""

    #: The broker refuses; nothing changes.
    REFUSED = "refused"
    #: The broker does it, the client hears an error.
    ANSWER_LOST = "answer lost"
    #: The broker does it at once, the client hears of it later.
    ANSWER_LATE = "answer late"
    #: The request reaches the broker later.
    ARRIVES_LATE = "arrives late"
    #: The broker does it, and does it again later: the client's own repetition of a request it thought lost.
    REPEATED = "repeated"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: how a call goes wrong, and what the client hears where it hears an error."""

    effect: Effect
    error: KafkaError
    #: How late, for what is late.
    seconds: float = 0.0


def as_error(error: KafkaError | int) -> KafkaError:
    """Return an error of a code, with Kafka's text."""
    return error if isinstance(error, KafkaError) else KafkaError(error)


#: What stands in a fault that lets the client hear no error.
NO_ERROR = KafkaError(codes.TRANSPORT)

#: The wider operation of which a plan is looked at too.
_WIDER = {Operation.COMMIT_SYNC: Operation.COMMIT, Operation.COMMIT_ASYNC: Operation.COMMIT}


class Faults:
    """The faults to come. The broker's lock guards it."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._planned: dict[Operation, deque[Fault]] = {}
        self._by_chance: dict[Operation, tuple[Fault, float]] = {}
        #: How often a fault struck each operation.
        self.happened: Counter[Operation] = Counter()

    def plan(self, operation: Operation | str, fault: Fault, times: int) -> None:
        """Let the next `times` calls go wrong."""
        self._planned.setdefault(Operation(operation), deque()).extend([fault] * times)

    def by_chance(self, operation: Operation | str, fault: Fault, probability: float) -> None:
        """Let each call go wrong with this probability; 0 ends it."""
        if probability > 0:
            self._by_chance[Operation(operation)] = (fault, probability)
        else:
            self._by_chance.pop(Operation(operation), None)

    def clear(self) -> None:
        """Forget all faults that have not happened yet."""
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
