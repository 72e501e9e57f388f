"""The oldest message of each partition that is not done, found by reading that one record."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from confluent_kafka import KafkaError, Message, TopicPartition

from penstock import clients
from penstock.clients.kafka_errors import concerns_a_group, is_missing_right, is_transient, reason
from penstock.clients.rights import Operation, missing_right_text, principal_of, topic_right
from penstock.group_offsets.positions import Part, Position
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
    reading = _Reading([one for one in positions if one.left])
    if not reading.left:
        return OldestFound({})
    consumer = clients.consumer(
        bootstrap_servers,
        {
            "isolation.level": "read_committed",
            **config,
            # It is not joined: the client library wants a name, and this user may look at this group.
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            # One record of each is wanted.
            "queued.min.messages": 1,
            "fetch.message.max.bytes": 65_536,
            "fetch.wait.max.ms": 100,
        },
    )
    try:
        consumer.assign([TopicPartition(*part, offset) for part, offset in reading.left.items()])
        deadline = time.monotonic() + limit_s
        while reading.left and (rest := deadline - time.monotonic()) > 0:
            for message in consumer.consume(100, min(rest, _POLL_S)):
                part = (message.topic() or "", message.partition() or 0)
                again = reading.take(part, message, principal_of(config))
                if again is not None:
                    consumer.seek(TopicPartition(*part, again))
                elif part not in reading.left and part not in reading.paused:
                    # What else it holds would keep the others' records from coming.
                    reading.paused.add(part)
                    consumer.pause([TopicPartition(*part)])
    finally:
        consumer.close()
    late = ", ".join(f"{topic}[{partition}]" for topic, partition in sorted(reading.left))
    failures = [f"no record of {late} arrived within {limit_s:g} s, so its age is not known"] if late else []
    return OldestFound(reading.found, (*sorted(reading.failures), *failures))


class _Reading:
    """What is still looked for, and where."""

    def __init__(self, positions: Iterable[Position]) -> None:
        self._positions = {one.part: one for one in positions}
        #: The offset from which on a record is looked for, by partition.
        self.left = {part: _first(one) for part, one in self._positions.items()}
        self.paused: set[Part] = set()
        self.found: dict[Part, Oldest | None] = {}
        self.failures: set[str] = set()

    def take(self, part: Part, message: Message, principal: str) -> int | None:
        """Take a record, an end or an error; return where to look on, if that is elsewhere."""
        if part not in self.left:
            return None
        error = message.error()
        if error is None:
            return self._take_record(part, message)
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - a public code of the library
            self._end(part, None)
        elif is_missing_right(error) and not concerns_a_group(error):
            what = f"the age of messages of {part[0]} is not known"
            self.failures.add(missing_right_text(what, [topic_right(Operation.READ, part[0])], principal))
            del self.left[part]
        elif not is_transient(error) and not concerns_a_group(error):
            self.failures.add(f"{part[0]}[{part[1]}] cannot be read: {reason(error)}; so its age is not known")
            del self.left[part]
        return None

    def _take_record(self, part: Part, message: Message) -> int | None:
        offset = message.offset() or 0
        if offset < self.left[part]:
            return None  # fetched before the place was changed
        following = self._positions[part].next_not_done(offset)
        if following > offset:
            self.left[part] = following
            return following
        kind, milliseconds = message.timestamp()
        self._end(part, Oldest(offset, milliseconds if kind else None))
        return None

    def _end(self, part: Part, oldest: Oldest | None) -> None:
        self.found[part] = oldest
        del self.left[part]


def _first(position: Position) -> int:
    start = position.log.start if position.log is not None else 0
    return position.next_not_done(max(position.committed or 0, start))
