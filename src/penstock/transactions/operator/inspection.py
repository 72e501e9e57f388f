"""What lies in the topics that every store has in Kafka: discarded messages, read without changing anything."""

from __future__ import annotations

from dataclasses import dataclass

from confluent_kafka import Message

from penstock.errors import MessageFormatError
from penstock.transactions.operator.store_reader import StoreReader
from penstock.transactions.wire.discarded import decode_discarded
from penstock.transactions.wire.half import Half
from penstock.transactions.writing.acked_producer import wire_headers


@dataclass(frozen=True, slots=True)
class Discarded:
    """A record of the discarded topic."""

    partition: int
    offset: int
    half: Half
    reason: str
    check_count: int
    #: When it came there, in milliseconds since the epoch.
    at_ms: int
    #: Who brought it back since; empty: it waits here.
    resumed_by: str = ""


class Inspection(StoreReader):
    """Says what lies in a store. Used by one thread; raises as `StoreReader`."""

    def discarded(self) -> list[Discarded]:
        """Return what lies in the discarded topic, oldest first."""
        numbers = dict.fromkeys(range(self.partitions_of(self._topics.discarded)), 0)
        found = [_discarded(message) for message in self.read(self._topics.discarded, numbers)]
        return sorted((one for one in found if one is not None), key=lambda one: one.at_ms)


def _discarded(message: Message) -> Discarded | None:
    """Read a record of the discarded topic; None where it is none."""
    try:
        found = decode_discarded(message.key(), message.value(), wire_headers(message))
    except MessageFormatError:
        return None
    return Discarded(message.partition() or 0, message.offset() or 0, *found, message.timestamp()[1])
