"""What one Kafka transaction settles of several partitions of a store, and what the store brings for that.

A store brings a `Backlog` for each partition that it owns. The engine takes batches from them, publishes those of all
partitions in one Kafka transaction, and says what became of it. What cannot be published with the others is set aside
in the backlog's queue, where trials take it from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from penstock.transactions.core.commit_batch import DecidedBatch
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.queue import Blocking, ReadyQueue
from penstock.transactions.core.set_aside import SetAside


class Backlog(ABC):
    """One partition of a store, as the engine sees it. Used by the engine's thread; a batch is one of its own.

    Attributes:
        queue: what is decided in it.
        done_end: an offset of the done log below which no record of a batch to come will stand.
    """

    queue: ReadyQueue
    done_end: int

    @property
    def set_aside(self) -> SetAside:
        """What cannot be published with the others now, in the order of its keys."""
        return self.queue.set_aside

    def release(self, topic: str, is_refused: Callable[[str], bool]) -> None:
        """Let what was set aside for a topic's sake go with the others, save what is refused, by its name."""
        self.queue.release(topic, is_refused)

    @abstractmethod
    def next_batch(self, limit: int, blocking: Blocking, room_bytes: int) -> DecidedBatch | None:
        """Choose what is published next, in order, and set aside what `blocking` names a topic for.

        It has `limit` transactions and `room_bytes` of messages at most; a single one may have more. None: there is
        nothing.
        """

    @abstractmethod
    def trial(self, waiting: Sequence[Pending], fits: Callable[[Pending], bool]) -> DecidedBatch | None:
        """Return the first of what is set aside whose messages are there, as far as each `fits`; None: not one."""

    @abstractmethod
    def began(self, batch: Any) -> None:
        """A Kafka transaction with this batch begins; until it has ended nothing of it may be decided otherwise."""

    @abstractmethod
    def settled(self, batch: Any, done_end: int | None) -> Iterable[str]:
        """It was committed; return the names of what is settled. `done_end`: where its record in the done log ended."""

    @abstractmethod
    def failed(self, batch: Any) -> None:
        """Nothing of it is visible: it is free to be published again, or tried again where it is set aside."""

    @abstractmethod
    def learned(self, batch: Any, found: Any) -> Sequence[str]:
        """Its end was in doubt, and the done log says `found`; return the names of what is settled."""


@dataclass(frozen=True, slots=True)
class GroupCommit:
    """What one Kafka transaction settles.

    Attributes:
        batches: by partition, with the objects they were taken from: by the time it ends a partition may be lost, or
            lost and taken again.
        done_from: where the done logs ended, or before, as it began: its records come behind.
        topic: for whose sake it is tried apart; empty for the common one.
    """

    batches: Mapping[int, tuple[Backlog, DecidedBatch]]
    done_from: Mapping[int, int]
    topic: str = ""

    @classmethod
    def of(cls, owned: Mapping[int, Backlog], batches: Mapping[int, DecidedBatch], topic: str = "") -> GroupCommit:
        """Return what these batches are together, marked as under way."""
        for number, batch in batches.items():
            owned[number].began(batch)
        return cls(
            {number: (owned[number], batch) for number, batch in batches.items()},
            {number: owned[number].done_end for number in batches},
            topic,
        )

    def count(self) -> int:
        """Return how many transactions it settles."""
        return sum(len(batch.decided) for _, batch in self.batches.values())

    def decided(self) -> Iterable[Pending]:
        """Yield the transactions that it settles."""
        return (entry for _, batch in self.batches.values() for entry in batch.decided)

    def names(self) -> list[str]:
        """Return their ids."""
        return [entry.transaction_id for entry in self.decided()]

    def topics(self) -> set[str]:
        """Return the targets of its messages."""
        return {topic for _, batch in self.batches.values() for topic in batch.topics()}

    def size_bytes(self) -> int:
        """Return how large the messages are that it publishes."""
        return sum(entry.payload_bytes for entry in self.decided())

    def failed(self) -> None:
        """Take in that it was aborted."""
        for backlog, batch in self.batches.values():
            backlog.failed(batch)

    def committed(self, done_ends: Mapping[int, int]) -> Iterable[str]:
        """Take in that it was committed; return the names of what it settled."""
        parts = [backlog.settled(batch, done_ends.get(number)) for number, (backlog, batch) in self.batches.items()]
        return chain.from_iterable(parts)

    def learn(self, found: Mapping[int, Any], owned: Mapping[int, Backlog]) -> list[str]:
        """Take in what the done logs say of it after its end was in doubt; return the names of what is settled.

        Records of others may be there that are under way, or have ended meanwhile: those take in their own.
        """
        settled: list[str] = []
        for number, (backlog, batch) in self.batches.items():
            if owned.get(number) is backlog:
                settled += backlog.learned(batch, found[number])
            else:
                backlog.failed(batch)
        return settled
