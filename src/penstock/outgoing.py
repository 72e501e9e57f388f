"""`Outgoing`: a message that a handler returns to have it published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

#: Names and values, in their order; or a mapping of them.
OutgoingHeaders = Iterable[tuple[str, str | bytes | None]] | Mapping[str, str | bytes | None]


class Outgoing(NamedTuple):
    """A message that a handler returns; it is published, and only then the message it was returned for is done.

    Attributes:
        topic: where it goes.
        value: bytes, or text, which is written as UTF-8; None is a tombstone. Anything else needs an `encoder`.
        key: bytes or text; None for a message without a key.
        headers: names and values, or a mapping.
        partition: its partition; None leaves it to the client's partitioner, by the key.
    """

    topic: str
    value: object
    key: str | bytes | None = None
    headers: OutgoingHeaders = ()
    partition: int | None = None
