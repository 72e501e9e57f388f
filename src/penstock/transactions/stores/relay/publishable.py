"""What a relay publishes: transactions with their messages, in an order that is kept. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.transactions.wire.half import Line

#: What a message takes in memory besides its content, generously.
_MESSAGE_BYTES = 100


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
    def addressed(self) -> Sequence[OutboundMessage]:
        """The messages with their targets."""
        return self.messages

    @property
    def payload_bytes(self) -> int:
        """What its messages take in the client's buffer, about."""
        content = sum(_MESSAGE_BYTES + len(message.key or b"") + len(message.value or b"") for message in self.messages)
        return content + sum(
            len(name) + len(value or b"") for message in self.messages for name, value in message.headers
        )

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics of its messages."""
        return tuple(dict.fromkeys(message.topic for message in self.messages))

    @property
    def places(self) -> tuple[int, ...]:
        """What it shares with those that it must not pass: a number for each target and key, and for its line."""
        if self.discards is not None:
            # The discarded topic has no order.
            return ()
        places = {hash((message.topic, message.key)) for message in self.messages if message.key is not None}
        if self.line is not None:
            places.add(hash(self.line))
        return tuple(places)
