"""The oldest message of each partition that is not done, found by reading that one record."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from confluent_kafka import KafkaError, Message

from penstock.clients.kafka_errors import ErrorKind, reason
from penstock.clients.reading import PartitionReader
from penstock.clients.rights import Operation, missing_right_text, principal_of, topic_right
from penstock.group_offsets.positions import Part, Position
from penstock.message import Record, timestamp_of
from penstock.options import ClientConfig

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Oldest:
    """A message that is not done."""

    offset: int
    #: Its timestamp, milliseconds since 1970, by its producer's clock or the broker's; None where it has none.
    timestamp_ms: int | None

    def age_s(self, now_s: float) -> float | None:
        """Return its age in seconds at a time since 1970; None without a timestamp."""
        return None if self.timestamp_ms is None else max(0.0, now_s - self.timestamp_ms / 1000)


@dataclass(frozen=True, slots=True)
class OldestFound:
    """What was read."""

    #: By partition: the oldest message that is not done; None where there is none that is committed.
    messages: Mapping[Part, Oldest | None]
    #: Why others are not known: sentences.
    failures: tuple[str, ...] = ()


def oldest_not_done(
    bootstrap_servers: str, config: ClientConfig, group: str, positions: Iterable[Position], limit_s: float
) -> OldestFound:
    """Read, of each partition with messages left, the first record from its committed offset on that is not done.

    Markers of transactions and compaction leave offsets without a record, so it is the first at or after that offset
    which the offset map does not call done. It joins no group and commits nothing.

    All of it takes `limit_s` seconds at most; what has not arrived by then is a failure. `ConfigurationError`
    where the client library refused a setting.
    """
    reading = _Reading([position for position in positions if position.left], principal_of(config))
    if not reading.left:
        return OldestFound({})
    # The group is not joined: the client library wants a name, and this user may look at this group.
    with PartitionReader(
        bootstrap_servers,
        config,
        group,
        reading.take_error,
        isolation=config.get("isolation.level", "read_committed"),
        # One record of each is wanted.
        given={"queued.min.messages": 1, "fetch.message.max.bytes": 65_536},
    ) as reader:
        reader.start(reading.left)
        deadline = time.monotonic() + limit_s
        while reading.left and (rest := deadline - time.monotonic()) > 0:
            before = set(reading.left)
            for message in reader.poll(min(rest, _POLL_S), 100):
                part = (message.topic() or "", message.partition() or 0)
                again = reading.take(part, message)
                if again is not None:
                    reader.move(part, again)
            for part in reader.exhausted & reading.left.keys():
                reading.end(part, None)
            reader.pause(before - reading.left.keys())
    late = ", ".join(f"{topic}[{partition}]" for topic, partition in sorted(reading.left))
    failures = [f"no record of {late} arrived within {limit_s:g} s, so its age is not known"] if late else []
    return OldestFound(reading.found, (*sorted(reading.failures), *failures))


class _Reading:
    """What is still looked for, and where."""

    def __init__(self, positions: Iterable[Position], principal: str) -> None:
        self._principal = principal
        self._positions = {position.part: position for position in positions}
        #: The offset from which on a record is looked for, by partition.
        self.left = {part: _first(position) for part, position in self._positions.items()}
        self.found: dict[Part, Oldest | None] = {}
        self.failures: set[str] = set()

    def take_error(self, kind: ErrorKind, error: KafkaError, part: Part) -> None:
        """Give up a partition that cannot be read."""
        if kind is ErrorKind.MISSING_RIGHT:
            what = f"the age of messages of {part[0]} is not known"
            text = missing_right_text(what, [topic_right(Operation.READ, part[0])], self._principal)
        elif kind is ErrorKind.FATAL:
            text = f"{part[0]}[{part[1]}] cannot be read: {reason(error)}; so its age is not known"
        else:
            return
        if self.left.pop(part, None) is not None:
            self.failures.add(text)

    def take(self, part: Part, message: Message) -> int | None:
        """Take a record; return where to look on, if that is elsewhere."""
        offset = message.offset() or 0
        if part not in self.left or offset < self.left[part]:
            return None  # fetched before the place was changed
        following = self._positions[part].next_not_done(offset)
        if following > offset:
            self.left[part] = following
            return following
        self.end(part, Oldest(offset, timestamp_of(cast("Record", message))))
        return None

    def end(self, part: Part, oldest: Oldest | None) -> None:
        """Note what was found of a partition."""
        self.found[part] = oldest
        del self.left[part]


def _first(position: Position) -> int:
    start = position.log.start if position.log is not None else 0
    return position.next_not_done(max(position.committed or 0, start))
