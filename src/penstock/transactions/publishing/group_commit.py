"""The group commit: what one Kafka transaction settles of several partitions, and what a store implements for it.

A store brings a `Backlog` for each partition that it owns. The engine takes batches from the backlogs, publishes them
in one Kafka transaction, and reports the outcome to them. Transactions that cannot be published with the others are set
aside in the backlog's queue. Trials take them from there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

from penstock.transactions.core.commit_batch import DecidedBatch
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.queue import Blocking, ReadyQueue
from penstock.transactions.core.set_aside import SetAside

_PAYLOAD_BYTES = attrgetter("payload_bytes")


class Backlog(ABC):
    """One partition of a store, as the engine sees it. Used by the engine's thread. Batches are the backlog's own.

    Attributes:
        queue: its decided transactions.
        done_end: an offset of the done log at or below all records of future batches.
    """

    queue: ReadyQueue
    done_end: int

    @property
    def set_aside(self) -> SetAside:
        """Transactions that cannot be published with the others now, in the order of their keys."""
        return self.queue.set_aside

    def release(self, topic: str, is_refused: Callable[[str], bool]) -> None:
        """Publish what was set aside because of a topic with the others again, except refused transactions, by id."""
        self.queue.release(topic, is_refused)

    @abstractmethod
    def next_batch(self, limit: int, blocking: Blocking, room_bytes: int) -> DecidedBatch | None:
        """Return the next batch, in order, or None. Set aside transactions for which `blocking` returns a topic.

        A batch has at most `limit` transactions and `room_bytes` of messages. A single transaction may have more.
        """

    @abstractmethod
    def trial(self, waiting: Sequence[Pending], fits: Callable[[Pending], bool]) -> DecidedBatch | None:
        """Return the first set-aside transactions whose payloads are there, while each `fits`, or None."""

    @abstractmethod
    def began(self, batch: Any) -> None:
        """Note that a Kafka transaction with this batch begins. No decision may change the batch until it ends."""

    @abstractmethod
    def settled(self, batch: Any, done_end: int | None) -> Iterable[str]:
        """Settle a committed batch. Return the settled ids. `done_end`: the end of its record in the done log."""

    @abstractmethod
    def failed(self, batch: Any) -> None:
        """Take back a batch, of which nothing is visible. It can be published or tried again."""

    @abstractmethod
    def learned(self, batch: Any, found: Any) -> Sequence[str]:
        """Settle or take back a batch whose end was in doubt, given the done log. Return the settled ids."""


@dataclass(frozen=True, slots=True)
class GroupCommit:
    """What one Kafka transaction settles.

    Attributes:
        batches: by partition, with the backlogs that they came from. A partition may be lost, and even taken again, by
            the end of the Kafka transaction.
        done_from: offsets of the done logs at or below its records.
        topic: the topic of a trial; empty for a common transaction.
    """

    batches: Mapping[int, tuple[Backlog, DecidedBatch]]
    done_from: Mapping[int, int]
    topic: str = ""

    @classmethod
    def of(cls, owned: Mapping[int, Backlog], batches: Mapping[int, DecidedBatch], topic: str = "") -> GroupCommit:
        """Return the group of these batches, marked as under way."""
        for number, batch in batches.items():
            owned[number].began(batch)
        return cls(
            {number: (owned[number], batch) for number, batch in batches.items()},
            {number: owned[number].done_end for number in batches},
            topic,
        )

    def count(self) -> int:
        """Return the number of its transactions."""
        return sum(len(batch.decided) for _, batch in self.batches.values())

    def decided(self) -> Iterable[Pending]:
        """Yield its transactions."""
        return (entry for _, batch in self.batches.values() for entry in batch.decided)

    def names(self) -> list[str]:
        """Return the ids of its transactions."""
        return [entry.transaction_id for entry in self.decided()]

    def topics(self) -> set[str]:
        """Return the targets of its messages."""
        return {topic for _, batch in self.batches.values() for topic in batch.topics()}

    def size_bytes(self) -> int:
        """Return the bytes of its messages."""
        return sum(sum(map(_PAYLOAD_BYTES, batch.decided)) for _, batch in self.batches.values())

    def failed(self) -> None:
        """Give the batches back after an abort."""
        for backlog, batch in self.batches.values():
            backlog.failed(batch)

    def committed(self, done_ends: Mapping[int, int]) -> Iterable[str]:
        """Settle the batches after a commit. Return the settled ids."""
        parts = [backlog.settled(batch, done_ends.get(number)) for number, (backlog, batch) in self.batches.items()]
        return chain.from_iterable(parts)

    def learn(self, found: Mapping[int, Any], owned: Mapping[int, Backlog]) -> list[str]:
        """Settle or give back the batches after an end in doubt, given the done logs. Return the settled ids.

        The done logs may also hold records of other Kafka transactions. Those take their own outcomes.
        """
        settled: list[str] = []
        for number, (backlog, batch) in self.batches.items():
            if owned.get(number) is backlog:
                settled += backlog.learned(batch, found[number])
            else:
                backlog.failed(batch)
        return settled
