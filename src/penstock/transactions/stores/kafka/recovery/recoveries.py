"""Recovery of partitions apart from the coordinator's loop.

It may have to wait for a predecessor's transaction to end, and the other partitions shall not wait for it. Each attempt
has a disposable thread and clients of its own. One that makes no step for long is left behind and another begins; one
that failed begins again after a moment. What an attempt found counts as long as its partitions were not revoked since,
also if they came back: then there is another attempt for them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from confluent_kafka import KafkaException

from penstock.clients.bounded_calls import Call, Disposable
from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.errors import StoppedError
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.recovery.recovered_partition import RecoveredPartition
from penstock.transactions.stores.kafka.recovery.recovery import Step

_log = logging.getLogger("penstock.transactions")

#: Seconds without a step after which an attempt is left behind: twice what any single call is given.
_SILENT_S = 30.0
_BACK_OFF_S = 0.2
#: The same where a right is missing.
_LACKING_S = 1.0

#: Finds out what partitions were left with.
Recover = Callable[[Iterable[int], Step], dict[int, RecoveredPartition]]


@dataclass(slots=True, eq=False)
class _Attempt:
    """One attempt. Its thread writes `doing` and `stepped_at`, single values that the coordinator's thread reads."""

    partitions: list[int]
    thread: Disposable
    doing: str = "recovering partitions"
    begun: float = field(default_factory=time.monotonic)
    stepped_at: float = field(default_factory=time.monotonic)
    #: Once it failed: when another one begins.
    again_at: float | None = None
    call: Call[dict[int, RecoveredPartition]] = field(init=False)

    def step(self, doing: str) -> None:
        """Note what it does now."""
        self.doing = doing
        self.stepped_at = time.monotonic()


class Recoveries:
    """The recoveries under way. Used by the coordinator's thread; waits for nothing."""

    def __init__(self, context: CoordinatorContext, recover: Recover) -> None:
        self._recover = recover
        self._name, self._left, self._ration = context.topics.prefix, context.left, context.ration
        # The attempt that counts for each partition.
        self._wanted: dict[int, _Attempt] = {}

    @property
    def partitions(self) -> list[int]:
        """The partitions on their way."""
        return list(self._wanted)

    def begin(self, partitions: Iterable[int]) -> None:
        """Begin to take partitions over."""
        numbers = list(partitions)
        if not numbers:
            return
        self._left.require_few()
        attempt = _Attempt(numbers, Disposable(f"penstock-takeover-{self._name}", self._left))
        attempt.call = attempt.thread.start(attempt.doing, lambda: self._recover(numbers, attempt.step))
        self._wanted.update(dict.fromkeys(numbers, attempt))

    def forget(self, partition: int) -> None:
        """A partition was taken away: what is found out about it counts no more."""
        self._wanted.pop(partition, None)

    def found(self, now: float) -> list[tuple[int, RecoveredPartition]]:
        """Return what was found out about partitions that are still wanted, once; begin again what failed."""
        found: list[tuple[int, RecoveredPartition]] = []
        for attempt in dict.fromkeys(self._wanted.values()):
            numbers = [number for number in attempt.partitions if self._wanted.get(number) is attempt]
            if attempt.again_at is not None:
                if now >= attempt.again_at:
                    self.begin(numbers)
            elif attempt.call.done():
                found += self._take_in(attempt, numbers, now)
            elif now - attempt.stepped_at >= _SILENT_S:
                _log.warning("%s has not returned for %.0f s: it is left behind", attempt.doing, _SILENT_S)
                # The call that hangs closes by itself.
                attempt.thread.leave(lambda: None)
                self.begin(numbers)
        return found

    def slow_call(self, now: float) -> tuple[str, float]:
        """Return what the oldest attempt does, and its age in seconds; an empty name where there is none."""
        oldest = min(self._wanted.values(), key=lambda recovery: recovery.begun, default=None)
        return ("", 0.0) if oldest is None else (oldest.doing, now - oldest.begun)

    def _take_in(self, attempt: _Attempt, numbers: list[int], now: float) -> list[tuple[int, RecoveredPartition]]:
        attempt.thread.close()
        try:
            recovered = attempt.call.result()
        except KafkaException as error:
            self._ration.warn("later", "partitions %s cannot be recovered yet: %s", numbers, reason(error))
            attempt.again_at = now + (_LACKING_S if is_missing_right(error) else _BACK_OFF_S)
            return []
        except StoppedError:
            attempt.again_at = float("inf")
            return []
        for number in numbers:
            del self._wanted[number]
        return [(number, recovered[number]) for number in numbers]
