"""What a relay publishes, and what became of it: transactions with their messages, in an order that is kept. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.clients.transactional.faults import Fault
from penstock.transactions.wire.half import Line


class OutboundMessage(NamedTuple):
    """A message as it is published."""

    topic: str
    #: None: Kafka's partitioner chooses.
    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]

    def __repr__(self) -> str:
        """Name the topic, never the key or the value."""
        return f"<OutboundMessage for {self.topic}>"


class Publishable(NamedTuple):
    """A transaction to publish: all its messages or none."""

    #: Its name in the done log.
    transaction_id: str
    messages: Sequence[OutboundMessage]
    #: Of those that share it, a later one is not published before an earlier one. None: order does not matter.
    line: Line | None
    #: Where it was discarded: the name under which it would have been published.
    discards: str | None = None

    def __repr__(self) -> str:
        """Name the transaction, never a key or a value."""
        return f"<Publishable {self.transaction_id}>"

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics of its messages."""
        return tuple(dict.fromkeys(message.topic for message in self.messages))


def lanes_of(entry: Publishable) -> tuple[int, ...]:
    """Return what a transaction shares with those that it must not pass: a number for each key and topic, and line."""
    if entry.discards is not None:
        # The discarded topic has no order.
        return ()
    lanes = [hash((message.topic, message.key)) for message in entry.messages if message.key is not None]
    if entry.line is not None:
        lanes.append(hash(entry.line))
    return tuple(lanes)


@dataclass(slots=True)
class Outcome:
    """What became of transactions that were to be published. Each is in one of the first three."""

    #: Names of those that are committed, in their order. Of all others nothing is visible.
    published: list[str] = field(default_factory=list)
    #: Those that cannot be published now, by name, each with the reason.
    refused: dict[str, str] = field(default_factory=dict)
    #: Names of those that wait, for one that was refused or because the broker has trouble.
    held: list[str] = field(default_factory=list)
    #: Topics that are to blame; of those that were refused for none of them, the message itself is.
    faults: dict[str, Fault] = field(default_factory=dict)
    #: Nothing is in doubt, and it has to be opened again before the next publication.
    is_spent: bool = False


def divide(
    entries: Iterable[Publishable], refused: Mapping[str, str], faults: Mapping[str, Fault], outcome: Outcome
) -> list[Publishable]:
    """Set apart what is to blame and what must not pass it; return the others."""
    left: list[Publishable] = []
    stopped: set[int] = set()
    outcome.faults.update(faults)
    for entry in entries:
        why = refused.get(entry.transaction_id)
        why = why or next((faults[m.topic].why for m in entry.messages if m.topic in faults), None)
        if why is None and (not stopped or stopped.isdisjoint(lanes_of(entry))):
            left.append(entry)
            continue
        stopped.update(lanes_of(entry))
        if why is None:
            outcome.held.append(entry.transaction_id)
        else:
            outcome.refused[entry.transaction_id] = why
    return left
