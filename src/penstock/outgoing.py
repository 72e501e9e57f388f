"""`Outgoing`: a message that is to be published, by a handler that returns it or in a transaction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Names and values in their order, or a mapping of them.
UserHeaders = Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]]


@dataclass(slots=True)
class Outgoing:
    """A message to publish.

    Attributes:
        topic: where it is published; the topic must exist.
        value: bytes, or text, which is written as UTF-8; None is a tombstone. A handler with an `encoder` may return
            anything that it takes.
        key: its key, bytes or text; or None. No encoder is asked about it.
        headers: its headers; names in a transaction must not begin with `penstock-`.
        partition: the partition to publish to; Kafka's partitioner chooses where it is None.
    """

    topic: str
    value: Any = field(repr=False)
    key: bytes | str | None = field(default=None, repr=False)
    headers: UserHeaders = field(default=(), repr=False)
    partition: int | None = None
