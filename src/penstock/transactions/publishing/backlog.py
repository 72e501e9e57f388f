"""What the engine needs of a store: partitions that hold decided transactions, and batches of them.

A store brings a `Backlog` for each partition that it owns. The engine takes batches from them, publishes those of all
partitions in one Kafka transaction, and says what became of it. What cannot be published with the others is in the
backlog's `set_aside`, where trials take it from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from confluent_kafka import TopicPartition

from penstock.clients.transactional.writer import Written
from penstock.transactions.core.set_aside import SetAside

#: What names the topic for whose sake messages cannot be published with others now, or returns None.
Blocking = Callable[[Sequence["Addressed"]], str | None]


class Addressed(Protocol):
    """A message with its address."""

    @property
    def topic(self) -> str:
        """Its target."""

    @property
    def partition(self) -> int | None:
        """None: Kafka's partitioner chooses."""


class Decided(Protocol):
    """A decided transaction that the engine publishes."""

    @property
    def transaction_id(self) -> str:
        """Its name in the done log."""

    @property
    def payload_bytes(self) -> int:
        """What its messages take in the client's buffer, about."""

    @property
    def addressed(self) -> Sequence[Addressed]:
        """The messages that go to their targets; none where it was rolled back or discarded."""


class Batch(Protocol):
    """What one Kafka transaction settles of one partition."""

    @property
    def decided(self) -> Sequence[Decided]:
        """The transactions, in the order in which they are published."""

    @property
    def is_watched(self) -> bool:
        """Whether somebody waits until a committed reader can see one of them."""

    def topics(self) -> set[str]:
        """Return the topics that it publishes to."""

    def messages(self) -> Iterable[tuple[str, Sequence[Written]]]:
        """Yield what is published, by transaction. Called by the publishing thread."""

    def records(self) -> Iterable[bytes]:
        """Yield what is written into the done log. Called by the publishing thread."""


class Backlog(Protocol):
    """One partition of a store, as the engine sees it. Used by the engine's thread; a batch is one of its own."""

    @property
    def set_aside(self) -> SetAside:
        """What cannot be published with the others now, in the order of its keys."""

    @property
    def done_end(self) -> int:
        """An offset of the done log below which no record of a batch to come will stand."""

    def next_batch(self, limit: int, blocking: Blocking, room_bytes: int) -> Batch | None:
        """Choose what is published next, in order, and set aside what `blocking` names a topic for.

        It has `limit` transactions and `room_bytes` of messages at most; a single one may have more. None: there is
        nothing.
        """

    def trial(self, waiting: Sequence[Any], now: float, fits: Callable[[Any], bool]) -> Batch | None:
        """Return those of what is set aside whose messages are there, as far as each `fits`; None: not one."""

    def release(self, topic: str, is_refused: Callable[[str], bool]) -> None:
        """Let what was set aside for a topic's sake go with the others, before those that came later.

        What is refused, by its name, stays where it is.
        """

    def began(self, batch: Any) -> None:
        """A Kafka transaction with this batch begins; until it has ended nothing of it may be decided otherwise."""

    def settled(self, batch: Any, done_end: int | None) -> Iterable[str]:
        """It was committed; return the names of what is settled. `done_end`: where its record in the done log ended."""

    def failed(self, batch: Any) -> None:
        """Nothing of it is visible: it is free to be published again, or tried again where it is set aside."""

    def learned(self, batch: Any, found: Any) -> Sequence[str]:
        """Its end was in doubt, and the done log says `found`; return the names of what is settled."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Positions of a consumer group: with them, the broker refuses a Kafka transaction of who is no member any more."""

    group: str
    group_metadata: Any
    positions: list[TopicPartition]

    @property
    def logs(self) -> list[str]:
        """The topics in which positions are committed."""
        return list(dict.fromkeys(str(position.topic) for position in self.positions))
